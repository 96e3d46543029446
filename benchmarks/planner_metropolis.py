"""The exact search against a random walk over the same plans, on the same option table.

ReaLHF (Mei et al., "ReaL: Efficient RLHF Training of Large Language Models with Parameter
Reallocation", 2025) searches by Metropolis and Hastings: move one call at random to other devices
and another layout, and keep the move with probability exp(-beta * (new cost - old cost)). Here a
move does one of these to a plan of ours:

- a call group goes to another group, or to a new one that takes a random share of some group's
  devices;
- two groups divide their devices anew, at random;
- a call group takes another option, at random.

The call groups of a group that changed take the fastest options that fit together, which helps
the walk; a move that leaves memory is not made. Costs are the same `StepTimer`'s, in units of the
first plan's. Every walk starts with everything on all devices, or, where that does not fit, with
every call group alone.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bench import parser, report, table
from penstock.planner.search.allocation import Index, Space
from penstock.planner.search.choices import Choice, Choices
from penstock.planner.search.options import Option
from penstock.planner.search.pins import Pins
from penstock.planner.search.search import search
from penstock.planner.search.step_time import StepTimer
from planner_scale import PROBLEMS, Problem


@dataclass(frozen=True)
class State:
    """Groups, their devices, and an option per call group."""

    groups: tuple[tuple[str, ...], ...]
    allocation: tuple[Index, ...]
    chosen: dict[str, Option]


class Walk:
    """A Metropolis walk.

    Args:
        choices: Options of all call groups.
        max_lag: The schedule.
        seed: Of all that is random.

    Attributes:
        num_evaluations: Plans looked at.
    """

    def __init__(self, choices: Choices, max_lag: int, seed: int) -> None:
        self._choices, self._max_lag = choices, max_lag
        self._space: Space = choices.space
        self._random = random.Random(seed)
        self._fastest: dict[tuple[tuple[str, ...], Index], Choice | None] = {}
        self._timers: dict[tuple[tuple[str, ...], ...], StepTimer] = {}
        self.num_evaluations = 0

    def best_s(self, beta: float, num_evaluations: int) -> float:
        """Seconds per step of the best plan met."""
        state = self._first()
        cost_s = best_s = first_s = self._cost_s(state)
        while self.num_evaluations < num_evaluations:
            self.num_evaluations += 1
            moved = self._moved(state)
            if moved is None:
                continue
            moved_s = self._cost_s(moved)
            if moved_s <= cost_s or self._random.random() < math.exp(
                -beta * (moved_s - cost_s) / first_s
            ):
                state, cost_s = moved, moved_s
                best_s = min(best_s, cost_s)
        return best_s

    def _first(self) -> State:
        call_groups = tuple(self._choices.calls_of)
        whole = tuple(size - 1 for size in self._space.shape)
        state = self._settled((call_groups,), (whole,), {})
        while state is None:
            groups = tuple((call_group,) for call_group in call_groups)
            state = self._settled(groups, self._random_allocation(len(groups)), {})
        return state

    def _random_allocation(self, num_groups: int) -> tuple[Index, ...]:
        """Whole nodes of one pool, cut at random places."""
        (pool,) = self._space.pools
        cuts = sorted(self._random.sample(range(1, len(pool.nodes)), num_groups - 1))
        ends = zip([0, *cuts], [*cuts, len(pool.nodes)], strict=True)
        return tuple((pool.node_size - 1 + end - begin,) for begin, end in ends)

    def _moved(self, state: State) -> State | None:
        move = self._random.choice((self._regroup, self._divide_anew, self._other_option))
        return move(state)

    def _regroup(self, state: State) -> State | None:
        call_group = self._random.choice(list(self._choices.calls_of))
        groups = [[u for u in group if u != call_group] for group in state.groups]
        allocation = list(state.allocation)
        left = next(k for k, group in enumerate(state.groups) if call_group in group)
        target = self._random.randrange(len(groups) + 1)
        if target == len(groups):
            sender = self._random.randrange(len(groups))
            if not groups[sender]:
                return None
            shares = self._random_division(self._devices(allocation[sender]))
            if shares is None:
                return None
            allocation[sender] = shares[0]
            groups.append([call_group])
            allocation.append(shares[1])
        else:
            groups[target].append(call_group)
        if not groups[left]:
            receiver = self._random.choice([k for k in range(len(groups)) if k != left])
            together = self._devices(allocation[left]) + self._devices(allocation[receiver])
            index = self._index(together)
            if index is None:
                return None
            allocation[receiver] = index
            del groups[left], allocation[left]
        order = {call_group: k for k, call_group in enumerate(self._choices.calls_of)}
        named = tuple(tuple(sorted(group, key=order.__getitem__)) for group in groups)
        return self._settled(named, tuple(allocation), state.chosen, state)

    def _divide_anew(self, state: State) -> State | None:
        if len(state.groups) < 2:
            return None
        one, other = self._random.sample(range(len(state.groups)), 2)
        allocation = list(state.allocation)
        shares = self._random_division(
            self._devices(allocation[one]) + self._devices(allocation[other])
        )
        if shares is None:
            return None
        allocation[one], allocation[other] = shares
        return self._settled(state.groups, tuple(allocation), state.chosen, state)

    def _other_option(self, state: State) -> State | None:
        k = self._random.randrange(len(state.groups))
        head = self._random.choice(self._choices.heads(state.groups[k]))
        options = self._choices.options(head, state.allocation[k])
        chosen = {**state.chosen, head[0]: self._random.choice(options).option}
        moved = replace(state, chosen=chosen)
        return moved if self._fits(moved) else None

    def _settled(
        self,
        groups: tuple[tuple[str, ...], ...],
        allocation: tuple[Index, ...],
        chosen: dict[str, Option],
        before: State | None = None,
    ) -> State | None:
        """The state with options for every call group whose place changed; None if it cannot be."""
        if not self._space.fits(allocation):
            return None
        known = dict(zip(before.groups, before.allocation, strict=True)) if before else {}
        settled = dict(chosen)
        for group, index in zip(groups, allocation, strict=True):
            if known.get(group) == index:
                continue
            if (group, index) not in self._fastest:
                found = self._choices.group(group).least_work(index, math.inf).choices
                self._fastest[group, index] = found[0] if found else None
            choice = self._fastest[group, index]
            if choice is None:
                return None
            heads = [call_group for call_group, _ in self._choices.heads(group)]
            settled.update(zip(heads, choice.options, strict=True))
        return State(groups, allocation, settled)

    def _fits(self, state: State) -> bool:
        return all(
            sum(state.chosen[name].resident_bytes for name, _ in self._choices.heads(group))
            + max(
                max(state.chosen[name].transient_bytes.values())
                for name, _ in self._choices.heads(group)
            )
            <= self._choices.memory_bytes[index]
            for group, index in zip(state.groups, state.allocation, strict=True)
        )

    def _cost_s(self, state: State) -> float:
        if state.groups not in self._timers:
            number = {call_group: k for k, group in enumerate(state.groups) for call_group in group}
            placed = [number[call.call_group] for call in self._choices.calls]
            timer = StepTimer(self._choices.calls, placed, self._max_lag)
            self._timers[state.groups] = timer
        heads = [name for group in state.groups for name, _ in self._choices.heads(group)]
        taken_s = {k: v for name in heads for k, v in state.chosen[name].durations_s.items()}
        durations_s = [taken_s[call.name] for call in self._choices.calls]
        return self._timers[state.groups].seconds(durations_s)

    def _devices(self, index: Index) -> int:
        return self._space.num_devices(index)

    def _index(self, num_devices: int) -> Index | None:
        (pool,) = self._space.pools
        return (pool.sizes.index(num_devices),) if num_devices in pool.sizes else None

    def _random_division(self, num_devices: int) -> tuple[Index, Index] | None:
        """Two legal sizes that make up a number of devices."""
        (pool,) = self._space.pools
        ways = [n for n in pool.sizes[1:] if num_devices - n in pool.sizes[1:]]
        if not ways:
            return None
        first = self._random.choice(ways)
        return (pool.sizes.index(first),), (pool.sizes.index(num_devices - first),)


def walks(
    problem: Problem, max_lag: int, betas: Iterable[float], seeds: int, num_evaluations: int
) -> list[dict[str, Any]]:
    """Every walk's best."""
    calls, asked, cluster = problem
    choices = Choices(calls, asked, Space(cluster), Pins())
    rows: list[dict[str, Any]] = []
    for beta in betas:
        for seed in range(seeds):
            began_s = time.perf_counter()
            walk = Walk(choices, max_lag, seed)
            best_s = walk.best_s(beta, num_evaluations)
            rows.append({"beta": beta, "seed": seed, "best_s": best_s,
                         "walk_time_s": round(time.perf_counter() - began_s, 1)})  # fmt: skip
    return rows


def main() -> None:
    """Both searches at every size under every schedule."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--table", choices=PROBLEMS, default="model")
    options.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 128])
    options.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    options.add_argument("--betas", type=float, nargs="+", default=[1.0, 10.0, 100.0, 1000.0])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--evaluations", type=int, default=20_000, help="plans every walk tries")
    args = options.parse_args()
    results: list[dict[str, Any]] = []
    for max_lag in args.lags:
        for num_nodes in args.nodes:
            problem = PROBLEMS[args.table](num_nodes, 0.0)
            exact = search(*problem, max_lag=max_lag)
            rows = walks(problem, max_lag, args.betas, args.seeds, args.evaluations)
            best_s = min(row["best_s"] for row in rows)
            worst_s = max(row["best_s"] for row in rows)
            results.append({
                "num_devices": 8 * num_nodes,
                "max_lag": max_lag,
                "exact_s": exact.step_time_s,
                "exact_gap": exact.gap,
                "exact_search_time_s": round(exact.search_time_s, 2),
                "best_walk_s": best_s,
                "worst_walk_s": worst_s,
                "walk_ever_better": best_s < exact.step_time_s * (1 - 1e-12),
                "walks": rows,
            })  # fmt: skip
    head = ["num_devices", "max_lag", "exact_s", "best_walk_s", "worst_walk_s", "walk_ever_better"]
    print(table(head, [[row[key] for key in head] for row in results]))
    report({"table": args.table, "evaluations": args.evaluations, "problems": results}, args.json)


if __name__ == "__main__":
    main()
