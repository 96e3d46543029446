"""How long each algorithm is, and how far from its nearest relative: for docs/algorithms/index.md.

Lines of code are lines with code on them: no blank lines, comments, docstrings or imports. A
difference is counted as `diff` does, lines added and lines taken away, after the names of the two
algorithms themselves have been made the same. A step that ends by calling a function of one of the
two files, as `ppo_step` calls `learn`, counts with that function's lines in place of the call.

    python benchmarks/algorithm_sizes.py
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock.configs
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.kinds import NodeKind
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.record import load_step, recorded
from penstock.launch.inputs.run import run_config

__all__ = ["NAMES", "RELATIVES", "Algorithm", "Difference", "algorithm", "difference"]

CONFIGS = Path(str(penstock.configs.__file__)).parent / "algorithm"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "own")
"""The shipped algorithms, by the names of their YAML files."""

RELATIVES = {
    "reinforce": "grpo",
    "rloo": "grpo",
    "remax": "ppo",
    "reinforce_pp": "ppo",
    "reinforce_pp_baseline": "reference_grpo",
    "reference_grpo": "grpo",
    "dr_grpo": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "lite_ppo": "grpo",
    "kimi": "grpo",
    "p3o": "rloo",
    "rebel": "p3o",
    "safe_rlhf": "ppo",
    "ma_rlhf": "ppo",
    "pf_ppo": "ppo",
    "decoupled_ppo": "ppo",
    "vtrace_ppo": "ppo",
    "salsa": "ppo",
    "ensemble_ppo": "ppo",
    "process_ppo": "ppo",
    "a2c": "env_ppo",
    "impala": "env_ppo",
    "mappo": "env_ppo",
    "self_play": "env_ppo",
    "population": "env_ppo",
    "cgpo": "remax",
    "codpo": "online_dpo",
    "crraft": "cgpo",
    "online_dpo": "dpo",
    "ipo": "dpo",
    "dpo_norm": "dpo",
    "kto": "dpo",
    "margin_modelling": "reward_modelling",
    "cost_modelling": "margin_modelling",
    "gkd": "distillation",
    "sampled_distillation": "distillation",
}
"""Algorithm -> the one it is compared with."""


@dataclass(frozen=True)
class Algorithm:
    """A shipped algorithm.

    Attributes:
        name: Of its YAML file.
        about: The comment at the YAML's top.
        step: Its step function.
        cfg: Its options, as the YAML file sets them.
        graph: The step, recorded with the YAML's options.
        before: The stages that run first, by name.
    """

    name: str
    about: str
    step: Callable[..., Any]
    cfg: Any
    graph: Graph
    before: tuple[str, ...]

    @property
    def calls(self) -> list[str]:
        """What is asked of roles, in order: "actor.generate"; a repeated call is counted."""
        counts: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.role is not None and node.kind is not NodeKind.SOURCE:
                name = f"{node.role}.{node.method}"
                counts[name] = counts.get(name, 0) + 1
        return [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]

    @property
    def num_lines(self) -> int | None:
        """Lines of code of its file; None if it is only a YAML file."""
        return len(code_lines(self.file.read_text())) if self.own_file else None

    @property
    def file(self) -> Path:
        """Where the step function is written."""
        return Path(inspect.getsourcefile(self.step) or "")

    @property
    def own_file(self) -> bool:
        """Whether this YAML's step is not another one's."""
        return self.step.__name__ == f"{self.name}_step"


def algorithm(name: str) -> Algorithm:
    """One of `NAMES`."""
    data = compose("run", [f"algorithm={name}"])
    data.pop("resume")
    config = run_config(data).algorithm
    stage = recorded(config, seed=0)[-1]
    comment = [
        line.removeprefix("#").strip()
        for line in (CONFIGS / f"{name}.yaml").read_text().splitlines()
        if line.startswith("#")
    ]
    return Algorithm(
        name=name,
        about=" ".join(comment),
        step=load_step(config.step, "algorithm.step"),
        cfg=stage.cfg,
        graph=stage.graph,
        before=tuple(config.before),
    )


def code_lines(source: str) -> list[str]:
    """A source text's lines of code; a statement over several lines is as many."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and _says_nothing(node):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [
        line.rstrip()
        for number, line in enumerate(source.splitlines(), start=1)
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    ]


def _says_nothing(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, an import or `__all__`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return any(isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom)


@dataclass(frozen=True)
class Difference:
    """Lines that are new, and lines that are gone."""

    added: int
    removed: int

    def __str__(self) -> str:
        return f"+{self.added} -{self.removed}"


def difference(one: Algorithm, other: Algorithm) -> tuple[Difference, Difference]:
    """From `one` to `other`: of the step functions, and of steps and options together.

    An algorithm that is only a YAML file differs by that file's own keys.
    """
    if one.step is other.step:
        keys = [
            line
            for line in (CONFIGS / f"{other.name}.yaml")
            .read_text()
            .split("cfg:", 1)[-1]
            .splitlines()
            if line.strip() and not line.startswith("#")
        ]
        return Difference(0, 0), Difference(len(keys), 0)
    first, second = _step(one, other), _step(other, one)
    if isinstance(other.cfg, type(one.cfg)):
        step = _between(first, second)
        return step, Difference(step.added + len(_options(other)), step.removed)
    return _between(first, second), _between([*_options(one), *first], [*_options(other), *second])


def _step(algorithm: Algorithm, relative: Algorithm) -> list[str]:
    own = {algorithm.step.__module__, relative.step.__module__}
    return _neutral(algorithm, _written_out(algorithm.step, own))


def _written_out(function: Callable[..., Any], own: set[str]) -> list[str]:
    """A function's lines, with those of the function it ends by calling in place of the call."""
    lines = code_lines(inspect.getsource(function))
    called = re.fullmatch(r"    return (\w+)\(.*\)", lines[-1])
    last = function.__globals__.get(called[1]) if called else None
    if last is None or last.__module__ not in own:
        return lines
    body = _written_out(last, own)
    head = next(number for number, line in enumerate(body) if line.endswith(":"))
    return [*lines[:-1], *body[head + 1 :]]


def _options(algorithm: Algorithm) -> list[str]:
    return _neutral(algorithm, code_lines(inspect.getsource(type(algorithm.cfg))))


def _neutral(algorithm: Algorithm, lines: list[str]) -> list[str]:
    cfg = type(algorithm.cfg).__name__
    return [line.replace(algorithm.step.__name__, "step").replace(cfg, "Options") for line in lines]


def _between(one: list[str], other: list[str]) -> Difference:
    changes = [line[0] for line in difflib.ndiff(one, other)]
    return Difference(changes.count("+"), changes.count("-"))


if __name__ == "__main__":
    every = {name: algorithm(name) for name in NAMES}
    for name in NAMES:
        made, near = every[name], RELATIVES.get(name)
        shown = " ".join(map(str, difference(every[near], made))) if near else ""
        print(f"{name:24} {made.num_lines or 0:4}  {near or '':16} {shown}")
