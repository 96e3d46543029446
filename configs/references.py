"""References in a configuration: an option of a group, an entry of a registry, or `module:name`.

An option of a group is a YAML file of this package. For `module:name` of the user's own the working
directory is on the search path, so a module need not be installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.resources import files
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ..dataflow.errors import ConfigError, PenstockError, line_of, nearest, one_process
from ..dataflow.files import check_regular, read_bytes
from ..dataflow.registry import Registry

_IMPORT_DEADLINE_S = 40.0  # torch and a model library take ten seconds at worst

CONFIGS = "penstock.configs"  # the package that has the options

# Recipe that had a file of its own -> the paper whose file it is in now.
_MERGED = {"codpo": "cgpo", "crraft": "cgpo", "cost_modelling": "safe_rlhf"}

# Module that users imported -> where its name is now.
_IN_ONE = {
    "controllers": ("kl_controller", "multiplier"),
    "losses": ("base", "cross_entropy", "policy", "token_formulas", "value"),
    "options": ("env_updates", "pair_updates", "policy_updates", "reference_kl"),
    "roles": ("agents", "games", "replay", "teams"),
}
_MOVED = {
    "penstock.workers.agents.tasks.conversation_task": "Task of penstock.workers.data.task",
    "penstock.algorithms.ops.dynamic_sampling": "penstock.algorithms.dapo",
    "penstock.algorithms.ops.reward_shaping": "penstock.algorithms.ops.rewards",
} | {
    f"penstock.algorithms.{now}.{name}": f"penstock.algorithms.{now}"
    for now, names in _IN_ONE.items()
    for name in names
}


def entry_or_own(
    name: str, registry: Registry[Any], at: str, what: str, kind: type | None = None
) -> Any:
    """Return the entry of a registry that is called `name`, or what `module:name` names.

    `at` is the key under which `name` was configured, `what` the word for an entry, such as
    "tracker", and `kind` their class, if they are instances of one.
    """
    path = registry.paths.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"'{at}': there is no {what} '{name}'{nearest(name, registry)}\n"
            f"    {what}s are: {', '.join(registry)}, or module:name for your own"
        )
    found = load_object(path, at)
    if kind is None or isinstance(found, kind):
        return found
    raise ConfigError(
        f"'{at}': '{name}' is a {type(found).__name__}\n"
        f"    give an {kind.__name__} ({kind.__module__})"
    )


def load_object(reference: str, at: str) -> Any:
    """Return what `module:name` names; `at` is the key under which that was configured."""
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"'{at}': expected 'module:name', got '{reference}'\n"
            "    such as penstock.algorithms.grpo:grpo_step"
        )
    module = _import(_moved(module_name), at)
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise ConfigError(
            f"'{at}': module '{module_name}' has no '{name}'{nearest(name, public)}\n"
            f"    it is {getattr(module, '__file__', 'what this process runs')}"
        )
    return getattr(module, name)


def _moved(module: str) -> str:
    """Return where a recipe is now that lay beside the others when a run was saved."""
    package, _, name = module.rpartition(".")
    paper = f"{package}.papers.{_MERGED.get(name, name)}"
    if package != "penstock.algorithms" or find_spec(module) or not find_spec(paper):
        return module
    return paper


def see_working_directory() -> None:
    """Put the working directory on the path of modules, where users name their own."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _import(name: str, at: str) -> Any:
    # Imported here: it brings torch, which a run without a module of the user's does without.
    from ..dataflow.runtime.call_context import DeadlineExceeded, deadline

    see_working_directory()
    try:
        with one_process(), deadline(_IMPORT_DEADLINE_S):
            return importlib.import_module(name)
    except PenstockError:
        raise
    except (Exception, SystemExit, DeadlineExceeded) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"'{at}': there is no module '{name}'\n    it is looked for in the working "
                f"directory ({os.getcwd()}) and among installed packages"
            ) from error
        where = line_of(error)
        place = f"{where.file}:{where.line}\n    {where.source}"
        if isinstance(error, DeadlineExceeded):
            raise ConfigError(
                f"'{at}': importing module '{name}' takes longer than {_IMPORT_DEADLINE_S:g} s\n"
                f"{place}"
            ) from error
        moved = f"; it is {_MOVED[missing]} now" if missing in _MOVED else ""
        raise ConfigError(
            f"'{at}': module '{name}' cannot be imported\n{place}\n"
            f"    {type(error).__name__}: {error}{moved}"
        ) from error


def groups() -> list[str]:
    return sorted(
        entry.name
        for entry in files(CONFIGS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_")
    )


def options_of(group: str) -> list[str]:
    names = (entry.name for entry in files(CONFIGS).joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def option_file(group: str, option: str) -> dict[str, Any]:
    """The keys of an option as its file has them, nothing resolved."""
    text = files(CONFIGS).joinpath(group, f"{option}.yaml").read_text()
    data: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return data


_MOST_BYTES = 250_000
_MOST_VALUES = 100_000  # in a file, aliases expanded: a short text can stand for billions
_PLAIN = ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value")


def yaml_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a YAML file that is safe to load: of bounded size, and plain data."""
    check_regular(path)
    if path.stat().st_size > most_bytes:
        raise ConfigError(
            f"'{path}' has {path.stat().st_size:,} bytes; a configuration has at most "
            f"{most_bytes:,}\n    leave data to the task: task.path=FILE"
        )
    text = read_bytes(path).decode()
    stream: Any = StringIO(text)
    stream.name = str(path)  # PyYAML's messages name it
    root = yaml.compose(stream, Loader=yaml.SafeLoader)
    if root is not None and _num_values(root, {}, path) > _MOST_VALUES:
        raise ConfigError(
            f"'{path}' has more than {_MOST_VALUES:,} values, each alias counted as the values it "
            "stands for\n    write the values that are meant without aliases"
        )
    return text


def load_yaml(path: Path, most_bytes: int = _MOST_BYTES) -> Any:
    return yaml.safe_load(yaml_text(path, most_bytes))


def _num_values(node: Any, known: dict[int, int], path: Path) -> int:
    """Count the values below a node, itself included; a node that occurs twice counts twice."""
    if id(node) in known:
        if not known[id(node)]:  # it is being counted
            raise ConfigError(f"'{path}': a value contains itself; write it out")
        return known[id(node)]
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in _PLAIN:
        raise ConfigError(
            f"'{path}', line {node.start_mark.line + 1}: a value of the kind {kind}; expected "
            "texts, numbers, lists and mappings"
        )
    known[id(node)] = 0
    inner: list[Any] = node.value if isinstance(node.value, list) else []
    flat = [one for pair in inner for one in pair] if kind == "map" else inner
    known[id(node)] = 1 + sum(_num_values(one, known, path) for one in flat)
    return known[id(node)]
