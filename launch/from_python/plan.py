"""`penstock.plan`: what the command `plan` answers, as objects that draw themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.graph import Graph
from ...planner.formatting import seconds_text
from ...planner.plan.plan import Plan
from ...planner.plan.simulate import Simulation, simulate_plan
from ...planner.report.comparison import HEADS, PlanComparison, comparison_text, rows_of
from ...planner.report.explain import explain
from ...planner.report.html_report import to_html
from ..cli.hydra_app import hydra_app
from ..cli.plan import OUTPUTS, found_plan
from ..run_dir.files import write_text
from .run import as_words

if TYPE_CHECKING:
    from pandas import DataFrame

_HEIGHT = 760
"""Pixels of the page in a notebook."""


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan with all that is needed to show it.

    Attributes:
        graph: The step that it is for.
        plan: Where each call runs, and how long it is expected to take.
        comparisons: The tables that were asked for: of other pins, other numbers of nodes, better
            hardware.
        notes: What the planner had to leave out or to assume.
    """

    graph: Graph
    plan: Plan
    comparisons: tuple[PlanComparison, ...]
    notes: tuple[str, ...]

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
    made: list[Planned] = []

    def answered(composed: dict[str, Any]) -> None:
        for key in OUTPUTS:
            if composed.pop(key, None) is not None:
                raise ConfigError(
                    f"penstock.plan: '{key}' names a file, and what comes out is an object\n"
                    "    leave it out; Planned.write writes the plan"
                )
        request, found, comparisons = found_plan(composed)
        notes = [f"{name} was not considered: {why}" for name, why in request.refused.items()]
        said = (*request.notes, *notes)
        made.append(Planned(request.graph, request.kept(found), comparisons, said))

    hydra_app("plan", as_words("plan", words, keys), answered)
    return made[0]
