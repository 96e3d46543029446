"""Hostile configurations: keys of every command with values that nobody would give.

The keys are those of a whole configuration with every default spelled out, so they follow the
schema, the algorithms' own configs, the tasks' and the workers' options by themselves. What may
stand for a value is a Hypothesis strategy, chosen by the type of what stands there by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import penstock.configs
from fuzz_case import Case
from hypothesis import strategies as st
from penstock.configs.schema import PlanOptions, ProfileConfig, RoleConfig, WorkloadConfig
from penstock.configs.validate import fields_of
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import dumped, resolve, run_config
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec, TorchValueSpec
from penstock.workers.rewards.rule_reward import CodeRewardSpec, RuleRewardSpec

_CONFIGS = Path(str(penstock.configs.__file__)).parent
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in _CONFIGS.iterdir()
    if folder.is_dir() and any(folder.glob("*.yaml"))
}
"""Group -> its options."""
_STARTED = {"ray", "ray_split"}
"""Options that are left out, as each use of them starts a cluster of processes."""

_TASKS = {
    **dict.fromkeys(("a2c", "dqn", "env_ppo", "impala", "population"), "cartpole"),
    "mappo": "cover",
    "self_play": "tic_tac_toe",
}
"""Algorithms whose task is an environment, and which one."""

_ROWS = {"mappo": 6, "dapo": 24}
"""Rows of a step, where eight are no whole teams or too few to choose from."""

_LANGUAGE = (
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=16",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "task.num_train=64",
    "task.num_held_out=4",
)
_OPTIONS = (TorchPolicySpec, TorchValueSpec, RuleRewardSpec, CodeRewardSpec)
"""Specs whose fields are tried as options of workers."""

_FREE = ("executor.groups", "before", "task.config", "options", "start_mean", "served")
"""Where a name is the user's own, or is looked at only by what reads it."""


@dataclasses.dataclass(frozen=True)
class _Base:
    """A command that is accepted, and its keys with their values."""

    words: tuple[str, ...]
    keys: Mapping[str, Any]


def _flat(data: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, sections included."""
    for key, value in data.items():
        path = f"{at}.{key}" if at else str(key)
        yield path, value
        if isinstance(value, Mapping):
            yield from _flat(value, path)


def _small(section: Mapping[str, Any], at: str, rows: int) -> Iterator[str]:
    yield f"{at}.num_steps=1"
    yield from (f"{at}.per_step.{table}={rows}" for table in section["per_step"])
    if "warmup_calls" in section.get("optimizer", {}):
        yield f"{at}.optimizer.warmup_calls=0"
    if "sampling" in section.get("cfg", {}):
        yield f"{at}.cfg.sampling.num_samples=2"
    for name, before in section.get("before", {}).items():
        yield from _small(before, f"{at}.before.{name}", rows)


def small_words(algorithm: str) -> tuple[str, ...]:
    """Words that make an algorithm's run take a second."""
    task = _TASKS.get(algorithm)
    words = [f"algorithm={algorithm}"]
    words += [f"task={task}", "model=mlp"] if task else _LANGUAGE
    rows = _ROWS.get(algorithm, 8)
    small = _small(compose("run", words)["algorithm"], "algorithm", rows)
    return (*words, *small, "evaluation.num_prompts=0", "evaluation.num_episodes=0", "tracker=none")


@cache
def run_base(algorithm: str) -> _Base:
    """A small run with an algorithm."""
    words = small_words(algorithm)
    composed = compose("run", [*words])
    composed.pop("resume")
    config = run_config(composed)
    run = resolve(config)
    keys = dict(_flat(dumped(run)))
    role_keys = RoleConfig().model_dump(mode="json")
    options = {name: None for spec in _OPTIONS for name in fields_of(spec) or ()}
    for role in run.main.graph.roles:
        section = {**role_keys, "optimizer": keys["algorithm.optimizer"]}
        keys |= dict(_flat(section, f"algorithm.roles.{role}"))
        keys |= dict(_flat(options, f"algorithm.roles.{role}.options"))
    keys |= dict(_flat(options, "engine.options"))
    return _Base(("run", *words), {**keys, "resume": None})


@cache
def plan_base() -> _Base:
    """A plan of which the search is short."""
    composed = compose("plan", [])
    sections = {
        "cluster": composed["cluster"],
        "workload": WorkloadConfig().model_dump(mode="json"),
        "plan": PlanOptions().model_dump(mode="json"),
    }
    own = dict.fromkeys(("json", "html", "trace", "output"))
    words = ("plan", "model=qwen2.5-0.5b", "plan.deadline_s=2", "cluster.devices_per_node=4")
    return _Base(words, {**dict(_flat(sections)), **own})


@cache
def profile_base() -> _Base:
    """A measurement that is only composed: a real one takes half a minute."""
    return _Base(("profile", "--cfg", "job"), ProfileConfig().model_dump(mode="json"))


_INTEGERS = st.sampled_from(
    [0, -1, 1, 2, 3, 7, 1000, 2**31, 2**53 + 1, 2**63, 10**12, 10**18, 10**40, -(10**20)]
)
_FLOATS = st.sampled_from(
    [math.nan, math.inf, -math.inf, -0.0, 0.5, 1.5, 1e-45, 1e-300, 1e38, 1e300, -1e300, 2.0]
) | st.floats(allow_nan=False, width=32)
ODD_TEXTS = [
    "", " ", ".", "..", "/", "~", "a/b", "../x", "/proc", "/dev/null", "/dev/full", "os:system",
    "json:dumps", "os.path:join", "penstock.algorithms.sft:sft_step", ":", "a:", ":b", "null",
    "1", "nan", "true", "{", "{question}", "{question:>99}", "%s", "%", "${seed}", "${nope}",
    "${oc.env:HOME}", "???", "!!python", "\n", "\t", "\x1b[31m", "\u202eabc", "\x07",
    "\udcff", "\u00e9", "e\u0301", "\U0001f600", "x" * 300, "x" * 5000, "[1]", "a.b", "a,b", "-1",
    "cuda", "cpu", "float16", "policy", "actor", "reward", "model", "rule", "same", "auto",
]  # fmt: skip
_TEXTS = st.sampled_from(ODD_TEXTS) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
)
_SCALARS: st.SearchStrategy[Any] = st.one_of(_INTEGERS, _FLOATS, _TEXTS, st.booleans(), st.none())
_NAMES = st.sampled_from(
    ["a", "actor", "policy", "model", "tp", "x", "model_type", "kind", "tokens", "weights", "lr"]
)
_NESTED = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=2)
)


@st.composite
def _values(draw: st.DrawFn, present: Any) -> Any:
    """Something that might stand for a value: more often of its own kind than of another."""
    if draw(st.integers(0, 2)) == 0:
        return draw(_NESTED)
    if isinstance(present, bool) or present is None:
        return draw(_SCALARS)
    if isinstance(present, int | float):
        return draw(_INTEGERS | _FLOATS)
    if isinstance(present, str):
        return draw(_TEXTS)
    if isinstance(present, list):
        return draw(st.lists(_SCALARS, max_size=3))
    names = _NAMES | st.sampled_from([*present] or ["a"])
    return draw(st.dictionaries(names, _SCALARS, max_size=2))


def written(value: Any) -> str:
    """A value as Hydra's grammar takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        inner = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{inner}\\'" if inner.endswith("\\") else f"'{inner}'"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(item)}' for key, item in value.items())}}}"
    return str(value)


def _plain(value: Any) -> bool:
    """Whether a value says what it is: no reference to another, no text that is read twice."""
    if isinstance(value, str):
        return not any(mark in value for mark in ("${", "???", "\\", "'"))
    if isinstance(value, list | Mapping):
        return all(map(_plain, value.values() if isinstance(value, Mapping) else value))
    return True


def _misspelt(key: str, draw: st.DrawFn) -> str:
    """The key with a letter of its last name gone, doubled, or changed places with the next."""
    head, dot, name = key.rpartition(".")
    at = draw(st.integers(0, max(0, len(name) - 2)))
    first, second = name[at : at + 1], name[at + 1 : at + 2]
    changed = draw(st.sampled_from([second, first * 2 + second, second + first]))
    return f"{head}{dot}{name[:at]}{changed}{name[at + 2 :]}"


@st.composite
def _word(draw: st.DrawFn, base: _Base, stands: dict[str, Any]) -> str:
    key = draw(st.sampled_from(sorted(base.keys)))
    present = base.keys[key]
    action = draw(st.integers(0, 19))
    if action == 0:
        return f"~{key}"
    if action == 1:  # one level too deep, or one too high
        other = draw(st.sampled_from(sorted(base.keys)))
        return f"{key}.{other.rpartition('.')[2]}={draw(st.integers(0, 3))}"
    if action == 2:
        group = draw(st.sampled_from(sorted(GROUPS)))
        options = [name for name in GROUPS[group] if name not in _STARTED]
        return f"{group}={draw(st.sampled_from([*options, 'nope', 'null', '', '[a]']))}"
    value = draw(_values(present))
    stands[key] = value
    return f"{key}={written(value)}"


@st.composite
def _misspelt_case(draw: st.DrawFn, base: _Base) -> Case | None:
    """A key that is misspelt and given the value that the right one has."""
    key = draw(st.sampled_from(sorted(base.keys)))
    wrong = _misspelt(key, draw)
    section, _, name = wrong.rpartition(".")
    if wrong in base.keys or not name or not name[0].isalpha():
        return None
    if any(f".{free}." in f".{section}." for free in _FREE) or _is_known(section, name, base):
        return None
    word = f"{wrong}={written(base.keys[key])}"
    return Case((*base.words, word), num_hostile=1, must_refuse=True)


def _is_known(section: str, name: str, base: _Base) -> bool:
    """Whether what was misspelt into is a key as well, such as one of the same section."""
    return f"{section}.{name}" in base.keys


@st.composite
def _hostile_case(draw: st.DrawFn, base: _Base) -> Case:
    stands: dict[str, Any] = {}
    number = draw(st.sampled_from([1, 1, 1, 2, 2, 3]))
    words = [draw(_word(base, stands)) for _ in range(number)]
    if base.words[0] == "run" and draw(st.integers(0, 3)) == 0:
        return Case(("graph", *base.words[1:], *words), num_hostile=number)
    kept = stands if number == len(stands) and all(map(_plain, stands.values())) else {}
    return Case((*base.words, *words), num_hostile=number, stands=_own(kept))


def _own(stands: Mapping[str, Any]) -> dict[str, Any]:
    """Those of which no other key that was given is a part."""
    return {
        key: value
        for key, value in stands.items()
        if not any(other != key and f"{other}.".startswith(f"{key}.") for other in stands)
        and not any(other != key and f"{key}.".startswith(f"{other}.") for other in stands)
    }


@st.composite
def key_cases(draw: st.DrawFn, algorithms: tuple[str, ...]) -> Case | None:
    """A command with one to three hostile keys; None where none came about."""
    command = draw(st.integers(0, 9))
    if command == 0:
        base = profile_base()
    elif command <= 2:
        base = plan_base()
    else:
        base = run_base(draw(st.sampled_from(algorithms)))
    if draw(st.integers(0, 7)) == 0:
        return draw(_misspelt_case(base))
    return draw(_hostile_case(base))
