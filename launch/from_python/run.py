"""`penstock.run` and `penstock.plan`: what these commands do, in this process, as objects.

What Python says of a run becomes the words of a command line: values quoted, objects by name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.graph import Graph
from ...planner.formatting import seconds_text
from ...planner.plan.plan import Plan
from ...planner.plan.simulate import Simulation, simulate_plan
from ...planner.report.comparison import HEADS, PlanComparison, comparison_text, rows_of
from ...planner.report.explain import explain
from ...planner.report.html_report import to_html
from ..cli.carry_out import run_composed
from ..cli.hydra_app import given_overrides, hydra_app, literal
from ..cli.plan import OUTPUTS, found_plan
from ..run_dir.files import write_text
from ..run_dir.run_folder import RunFolder
from .handle import LiveCurve, RunHandle, in_notebook

if TYPE_CHECKING:
    from pandas import DataFrame


def run(*words: str, **keys: Any) -> RunHandle:
    """Train as an algorithm, a model and a task say, or go on with a run; comes back at its end.

    It composes and runs what `penstock run` would with the same words. With the default executor
    everything happens in this thread: `breakpoint()` works in a step, an op or a worker, and both
    may be defined in the notebook or the script that calls. In Jupyter the curve is shown while
    the run goes on. Interrupting the kernel stops the run in good order, with a checkpoint.

    Args:
        *words: As on the command line: "algorithm=ppo", "algorithm.num_steps=20".
        **keys: Keys whose values Python has: `seed=1`, `algorithm={"step": my_step}`.

    Returns:
        The run.

    Raises:
        ConfigError: If a key is wrong, or it is not called from the main thread.
        FlowError: If the step is no valid graph.
        PlanError: If it fits nowhere.
        WorkerError: If code of a step fails while it runs; the original error is its cause.
        KeyboardInterrupt: If it was interrupted, once its checkpoint is written.

    Example:
        >>> run = penstock.run("algorithm=grpo", "task=chain_sum", seed=1)
        >>> run.metrics["reward.score/reward/mean"].plot()
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "penstock.run was called in a thread of its own, and a run is interrupted by signals, "
            "which reach the main thread alone\n    call it there, or start `penstock run` as a "
            "process"
        )
    shown = LiveCurve() if in_notebook() else None

    def carried_out(composed: dict[str, Any]) -> RunFolder:
        return run_composed(composed, given_overrides(), shown)

    return RunHandle(hydra_app("run", as_words("run", words, keys), carried_out)[0])


_OPTIONS = ("--config-dir", "-cd")  # those of the command line that mean something here


# A name that is read as a text without quotes
_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_]\w*", re.ASCII | re.IGNORECASE)


def as_words(command: str, words: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say the same."""
    for word in words:
        if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
            raise ConfigError(
                f"penstock.{command}: expected words such as 'algorithm=ppo', got {word!r:.80}\n"
                "    give other values by their keys: seed=1"
            )
        if word.startswith("-") and word.partition("=")[0] not in _OPTIONS:
            use = f"use it in a terminal: penstock {command} {word}"
            if word in ("-m", "--multirun"):
                loop = "for seed in range(3): ..."
                use = f"call penstock.{command} once for each combination: {loop}"
            elif word == "--dry-run":
                there = f"penstock {command} {word} WORDS"
                use = f"use it in a terminal, with the words of the run: {there}"
            raise ConfigError(
                f"penstock.{command}: '{word}' is an option of the terminal's\n    {use}"
            )
    said = list(words)
    for key, value in keys.items():
        try:
            said += _said(key, value)
        except RecursionError:
            raise ConfigError(f"'{key}' is nested too deeply, or contains itself") from None
    return said


def _said(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in cast("Mapping[Any, Any]", value).items():
            yield from _said(f"{key}.{name}", inner)
    else:
        yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return repr(value)
        except ValueError:  # Python writes no more than 4300 digits
            raise ConfigError(f"'{key}': a number has too many digits") from None
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, Mapping):
        inner = cast("Mapping[Any, Any]", value)
        for name in inner:
            if not (isinstance(name, str) and _PLAIN.fullmatch(name)):
                raise ConfigError(
                    f"'{key}': expected names of letters, digits and '_' in a mapping inside a "
                    f"list, got {name!r:.80}"
                )
        return f"{{{','.join(f'{name}:{_text(key, one)}' for name, one in inner.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(key, one) for one in cast('Sequence[Any]', value))}]"
    if callable(value):
        return literal(_name(key, value))
    if hasattr(value, "__fspath__"):
        return literal(value.__fspath__())
    raise ConfigError(
        f"'{key}': expected a number, a text, a list, a mapping, a function or a class, got a "
        f"{type(value).__name__}"
    )


def _name(key: str, value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}:{name}"
    raise ConfigError(
        f"'{key}': {name or repr(value)} cannot be found by its name\n    define it at the top of "
        "a module or of the notebook, and give what stands there under its name"
    )


_HEIGHT = 760  # pixels of the page in a notebook


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan with all that is needed to show it."""

    graph: Graph  # the step that it is for
    plan: Plan  # where each call runs, and how long it is expected to take
    # the tables that were asked for: of other pins, other numbers of nodes, better hardware
    comparisons: tuple[PlanComparison, ...]
    notes: tuple[str, ...]  # what the planner had to leave out or to assume

    @cached_property
    def simulation(self) -> Simulation:
        """The plan played through."""
        return simulate_plan(self.graph, self.plan)

    def table(self, key: str) -> DataFrame:
        """A comparison as a table, a row for each plan.

        Args:
            key: Of `plan.`, that asked for it: "compare", "target_s" or "sensitivity".

        Raises:
            ConfigError: If it was not asked for.
        """
        # Imported here: it takes most of a second.
        from pandas import DataFrame

        found = {one.key: one for one in self.comparisons}
        if key not in found:
            asked = ", ".join(found) or "none"
            raise ConfigError(
                f"there is no table '{key}' in this plan{nearest(key, found)}\n    its tables are "
                f"those that were asked for ({asked}): penstock.plan('plan.sensitivity=true', ...)"
            )
        rows: Sequence[Sequence[str]] = rows_of(self.graph, found[key])
        return DataFrame(rows, columns=[*HEADS]).set_index(HEADS[0])

    def write(self, file: str | Path) -> Path:
        """Write the plan as JSON, for `placement=FILE` of a run."""
        path = Path(file)
        write_text(path, self.plan.model_dump_json(indent=2, exclude_defaults=True) + "\n")
        return path

    def __repr__(self) -> str:
        found = self.plan.prediction
        step = f": {seconds_text(found.step_time_s)} per step" if found else ""
        return f"<plan of {self.graph.name}{step}>"

    def __str__(self) -> str:
        """The text that `penstock plan` prints."""
        tables = (comparison_text(self.graph, one) for one in self.comparisons)
        return "\n\n".join([explain(self.graph, self.plan, self.simulation), *tables])

    def _repr_html_(self) -> str:
        """The page of `penstock plan html=FILE`, for Jupyter."""
        page = to_html(self.graph, self.plan, self.simulation, self.comparisons)
        # A frame, so that the page's style and script do not reach beyond it.
        return (
            f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" width="100%" '
            f'height="{_HEIGHT}" style="border: 0" loading="lazy"></iframe>'
        )


def plan(*words: str, **keys: Any) -> Planned:
    """Plan where each call of a step should run, in which layout, and how long a step takes.

    It answers what `penstock plan` would with the same words; no model is built, and none of the
    devices need be here.

    Args:
        *words: As on the command line: "algorithm=ppo", "model=llama-7b", "cluster=h100".
        **keys: Keys whose values Python has: `cluster={"num_nodes": 16}`.

    Returns:
        The plan.

    Raises:
        ConfigError: If a key is wrong, or one names a file to write: `Planned.write` does.
        InfeasibleError: If no plan fits; says what is in the way.
        PlanError: If a model, a cluster or a pin is none that can be planned for.

    Example:
        >>> planned = penstock.plan("algorithm=ppo", "model=llama-7b", cluster={"num_nodes": 16})
        >>> planned.plan.prediction.step_time_s
    """

    def answered(composed: dict[str, Any]) -> Planned:
        for key in OUTPUTS:
            if composed.pop(key, None) is not None:
                raise ConfigError(
                    f"penstock.plan: '{key}' names a file, and what comes out is an object\n"
                    "    leave it out; Planned.write writes the plan"
                )
        request, found, comparisons = found_plan(composed)
        notes = [f"{name} was not considered: {why}" for name, why in request.refused.items()]
        said = (*request.notes, *notes)
        return Planned(request.graph, request.kept(found), comparisons, said)

    return hydra_app("plan", as_words("plan", words, keys), answered)[0]
