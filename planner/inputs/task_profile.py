"""Costs of a task that no model of time knows, as `penstock profile` has measured them.

A step of an environment is measured alone, group by group, and how long it waits beside how long it
computes: environments that wait overlap on one core, environments that compute do not. All other
calls of the step are measured as they stand in the graph, on all rows of a step. Of a step with a
language model its verifiers are measured, response by response.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ...dataflow.errors import PlanError
from .model_shape import AtLeastOne, PlanData

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Inference = Literal["inline", "copied", "served", "served by the trainer"]
"""The copy of a policy that answers: in the group that trains and acts, in each acting process, in
processes that do nothing else, or in those that train."""


class ActingPins(PlanData):
    """Parts of where acting happens that are fixed; what is null is left to the search."""

    inference: Inference | None = None
    """Copy of the policy that answers: `inline`, `copied`, `served` or `served by the trainer`."""
    num_ranks: AtLeastOne | None = None
    """Processes that act."""
    num_groups: AtLeastOne | None = None
    """Groups that the environments or games of a step fall into."""
    num_overlapped: AtLeastOne | None = None
    """Groups that a process steps at the same time."""
    num_trainers: AtLeastOne | None = None
    """Processes that train and do not act."""
    num_servers: AtLeastOne | None = None
    """Processes that do nothing but answer, where actions are `served`."""

    def allows(self, layout: object) -> bool:
        fixed = self.model_dump(exclude_none=True)
        return all(getattr(layout, key) == value for key, value in fixed.items())

    def __str__(self) -> str:
        fixed = self.model_dump(exclude_none=True)
        return ", ".join(f"plan.pins.acting.{key}={value}" for key, value in fixed.items())


class LoopProfile(PlanData):
    """A group of environments or games that steps alone, its actor in the same process.

    Times are means of one turn: all environments of the group step once, and the actor is asked
    once.
    """

    rows: AtLeastOne
    """Environments or games of the group."""
    turns: AtLeastOne
    """Times that one rollout asks the actor."""
    step_s: Seconds
    """Elapsed seconds of a step."""
    step_cpu_s: Seconds
    """Seconds of them in which the thread that steps computes."""
    other_cpu_s: Seconds = 0.0
    """Seconds of cores that threads of the environment's own compute in a turn, as EnvPool's."""
    ask_s: Seconds
    """Elapsed seconds until the actor has answered."""
    ask_cpu_s: Seconds
    """Seconds of them in which the thread computes."""
    quantiles_s: Mapping[str, Seconds] = Field(default_factory=dict[str, float])
    """Quantile -> elapsed seconds of a step: {"0.5": ..., "0.99": ...}."""
    spread_s: Seconds = 0.0
    """Standard deviation of the elapsed seconds of a step."""


class CallProfile(PlanData):
    """A call that acts in nothing: an evaluation, a train call, an op."""

    one_rank_s: Seconds
    """On one rank, with all rows of a step."""
    two_ranks_s: Seconds | None = None
    """On two ranks, each with half of the rows, sums over both included; None if not measured."""

    def on(self, num_ranks: int) -> float:
        """Seconds on some ranks.

        Two measurements divide a call into what every rank spends and what ranks share; of one
        that is known on one rank alone, nothing is shared.
        """
        if num_ranks == 1 or self.two_ranks_s is None:
            return self.one_rank_s
        shared_s = min(self.one_rank_s, max(0.0, 2.0 * (self.one_rank_s - self.two_ranks_s)))
        own_s = self.two_ranks_s - shared_s / 2.0
        return max(0.0, own_s) + shared_s / num_ranks


class VerifierProfile(PlanData):
    """A call that scores responses without a model of its own: a verifier, a sandbox, a judge."""

    item_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Elapsed seconds of one response alone, of several that were sampled, the least first."""
    item_cpu_s: Seconds
    """Seconds of cores that a response takes, the mean."""
    at_once: AtLeastOne = 1
    """Responses that were scored at once ..."""
    crowded: Annotated[float, Field(ge=1, le=1e3)] = 1.0
    """... and how many times as long each took then."""
    most: AtLeastOne | None = None
    """Most processes of a rank; None if their number is not for the plan to choose."""
    num_processes: AtLeastOne | None = None
    """Processes of each rank, where a run says how many."""
    process_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory of each."""


class ExecutorProfile(PlanData):
    """Costs that an executor adds to the calls of this graph."""

    name: str
    """Executor that was measured."""
    call_s: Seconds
    """A call besides its work: dispatch, gathering its rows, handing on its results."""
    publish_s: Seconds | None = None
    """New weights on their way to copies in another group; None if one process was measured."""
    request_s: Seconds = 0.0
    """A request for actions to another process, besides the actor's own answer."""
    request_cpu_s: Seconds = 0.0
    """Seconds of cores that both sides of a request compute, besides the actor's own answer."""


def _ascending(loops: tuple[LoopProfile, ...]) -> tuple[LoopProfile, ...]:
    sizes = [loop.rows for loop in loops]
    if not loops or sizes != sorted({*sizes}):
        raise ValueError(f"groups have {sizes} rows; expected one size or more, each larger")
    return loops


class TaskProfile(PlanData):
    """One algorithm in one task on one machine."""

    setting: Mapping[str, str]
    """Everything that the times depend on, as keys of a configuration and their values."""
    rows: Mapping[str, AtLeastOne]
    """Call that acts -> environments or games of a step."""
    team: AtLeastOne = 1
    """Rows that a group holds together: the agents of an environment."""
    least_groups: AtLeastOne = 1
    """Groups that the algorithm needs at least."""
    loops: Mapping[str, Annotated[tuple[LoopProfile, ...], AfterValidator(_ascending)]]
    """Call that acts -> groups of different sizes, the smallest first."""
    calls: Mapping[str, CallProfile]
    """Every other call and op."""
    verifiers: Mapping[str, VerifierProfile] = Field(default_factory=dict[str, VerifierProfile])
    """Calls of a step with a language model that score its responses without one."""
    overlaps: bool = True
    """Whether a process can step several groups at the same time; of games it cannot."""
    corrections: Mapping[str, Annotated[float, Field(gt=0, le=1e3)]] = Field(
        default_factory=dict[str, float]
    )
    """Call that acts -> what a rollout took in a run, over the turns of its groups."""
    executor: ExecutorProfile
    """Costs of calls besides their work."""
    process_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory of one process."""
    cores: AtLeastOne
    """Cores of the machine."""
    machine: str
    """Machine that it was measured on, for people."""
    date: str
    """Date of the measurement, as YYYY-MM-DD."""
    learned_from: str = ""
    """The run that corrected it; none if empty."""

    @property
    def source(self) -> str:
        learned = f", corrected by {self.learned_from}" if self.learned_from else ""
        return f"profile of the task, {self.machine}, {self.date}{learned}"

    def learned(
        self, run: str, expected_s: Mapping[str, float], measured_s: Mapping[str, float]
    ) -> TaskProfile:
        """The profile corrected by what each call took in a run.

        Args:
            run: The run's name.
            expected_s: Call -> seconds of its own work by a plan of this profile.
            measured_s: Call -> seconds that its busiest rank worked on it.
        """
        both = expected_s.keys() & measured_s.keys()
        found = {name: measured_s[name] / expected_s[name] for name in both if expected_s[name] > 0}
        calls = {
            name: CallProfile(
                one_rank_s=found.get(name, 1.0) * call.one_rank_s,
                two_ranks_s=call.two_ranks_s and found.get(name, 1.0) * call.two_ranks_s,
            )
            for name, call in self.calls.items()
        }
        corrections = {
            name: self.corrections.get(name, 1.0) * found.get(name, 1.0) for name in self.loops
        }
        verifiers = {
            name: one.model_copy(
                update={
                    "item_s": tuple(found.get(name, 1.0) * seconds for seconds in one.item_s),
                    "item_cpu_s": found.get(name, 1.0) * one.item_cpu_s,
                }
            )
            for name, one in self.verifiers.items()
        }
        changes = {"calls": calls, "corrections": corrections, "verifiers": verifiers}
        return self.model_copy(update={**changes, "learned_from": run})

    def check(self, setting: Mapping[str, str], file: str, measure: str) -> None:
        """Refuse a profile of something else.

        Args:
            setting: What is to be planned.
            file: The file that the profile was read from.
            measure: The command that measures what is to be planned.
        """
        for key in sorted({*self.setting, *setting}):
            was, now = self.setting.get(key, "nothing"), setting.get(key, "nothing")
            if was != now:
                raise PlanError(
                    f"task profile {file} is of another task: '{key}' was {was:.200} where it was "
                    f"measured, and is {now:.200} here\n    measure this one: {measure}"
                )

    def loop(self, call: str, rows: int) -> LoopProfile:
        """A turn of a group of any size, between and beyond the sizes that were measured."""
        known = self.loops[call]
        exact = next((loop for loop in known if loop.rows == rows), None)
        if exact is not None or len(known) == 1:
            return exact or known[0]
        pairs = list(pairwise(known))
        low, high = next((pair for pair in pairs if rows <= pair[1].rows), pairs[-1])
        way = (rows - low.rows) / (high.rows - low.rows)
        times = {
            name: max(0.0, (1 - way) * getattr(low, name) + way * getattr(high, name))
            for name in _TIMES
        }
        turns = round((1 - way) * low.turns + way * high.turns)
        return high.model_copy(
            update={"rows": rows, "turns": max(1, turns), "quantiles_s": {}, **times}
        )


_TIMES = ("step_s", "step_cpu_s", "other_cpu_s", "ask_s", "ask_cpu_s", "spread_s")
