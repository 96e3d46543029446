"""Our planner on the cases of HybridFlow's figures 12 and 13: the same placements?

Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", 2024. Nodes of 8 A100-80GB, PPO
with four models, 1,024 prompts of 1,024 tokens, 1,024 tokens per response, 8 updates. Their space
keeps an actor's generation with its training, so ours does here too. For each case: our best plan
of all, the best of the published placement, and how much slower that is by our own model. Where the
two tie within `TIE`, the placement counts as reproduced.

The constants are the analytic defaults for GPUs; nothing is fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench import parser, report, table
from penstock.planner.cost.constants import GPU_DEFAULTS
from penstock.planner.cost.time_model import call_time
from penstock.planner.inputs.calls import Call
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.mesh import Mesh
from penstock.planner.inputs.workload import Lengths
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.pins import Pins
from penstock.planner.search.result import Assignment
from penstock.planner.search.search import search
from planner_case import shape

A100 = DeviceSpec(
    name="a100-80g",
    memory_bytes=80_000_000_000,
    flops_per_s={"float16": 312e12},
    memory_bytes_per_s=2.039e12,
    host_bytes_per_s=20e9,
    reserved_bytes=3_000_000_000,
)
TIE = 0.03
"""Placements within this share of each other are equally good."""
HYBRID = ("actor", "actor.generate")


@dataclass(frozen=True)
class Case:
    """One point of a figure.

    Attributes:
        figure: Where it is published.
        actor: Billions of parameters of actor and reference.
        critic: Billions of parameters of critic and reward model.
        gpus: Devices.
        groups: The published placement: roles and devices of each group; the actor's generation is
            with the actor.
    """

    figure: str
    actor: int
    critic: int
    gpus: int
    groups: tuple[tuple[tuple[str, ...], int], ...]


ALL = ("actor", "ref", "critic", "reward")


def _colocated(figure: str, actor: int, critic: int, gpus: int) -> Case:
    return Case(figure, actor, critic, gpus, ((ALL, gpus),))


def _halves(figure: str, actor: int, critic: int, gpus: int) -> Case:
    halves = ((("actor", "ref"), gpus // 2), (("critic", "reward"), gpus // 2))
    return Case(figure, actor, critic, gpus, halves)


CASES = (
    *(_colocated("12", size, size, n) for size, n in ((7, 16), (7, 64), (13, 16), (13, 64),
                                                      (34, 32), (34, 64), (70, 64))),
    _halves("12", 13, 13, 96),
    _halves("12", 34, 34, 96),
    _halves("12", 34, 34, 128),
    Case("12", 13, 13, 128, ((("actor",), 64), (("critic",), 32), (("ref",), 16),
                             (("reward",), 16))),
    _colocated("13", 13, 70, 32),
    _colocated("13", 13, 70, 64),
    _halves("13", 13, 70, 96),
    Case("13", 13, 70, 128, ((("actor", "ref", "reward"), 64), (("critic",), 64))),
)  # fmt: skip


def cluster(gpus: int) -> ClusterSpec:
    """Nodes of 8 A100; 200 Gb/s per node."""
    nodes = NodeGroup(
        num_nodes=gpus // 8,
        devices_per_node=8,
        device=A100,
        within=LinkSpec(bytes_per_s=300e9, latency_s=5e-6),
    )
    return ClusterSpec(
        name="a100", node_groups=(nodes,), between=LinkSpec(bytes_per_s=25e9 / 8, latency_s=2e-5)
    )


def calls(actor: int, critic: int) -> tuple[Call, ...]:
    """PPO's six calls."""

    def call(name: str, kind: Any, size: int, *after: str) -> Call:
        role = name.partition(".")[0]
        return Call(
            name=name,
            role=role,
            kind=kind,
            model=shape(size),
            head="vocabulary" if role in ("actor", "ref") else "scalar",
            trained=role in ("actor", "critic"),
            num_sequences=1024,
            prompt=Lengths.constant(1024),
            response=Lengths.constant(1024),
            updates=8 if kind == "train" else 1,
            after=after,
        )

    scored = ("reward.score", "ref.logprob", "critic.value")
    return (
        call("actor.generate", "generate", actor),
        call("reward.score", "forward", critic, "actor.generate"),
        call("ref.logprob", "forward", actor, "actor.generate"),
        call("critic.value", "forward", critic, "actor.generate"),
        call("actor.train", "train", actor, *scored),
        call("critic.train", "train", critic, *scored),
    )


def _pins(groups: tuple[tuple[tuple[str, ...], int], ...]) -> Pins:
    together = [(*roles, "actor.generate") if "actor" in roles else roles for roles, _ in groups]
    apart = tuple(roles[0] for roles, _ in groups)
    return Pins(
        together=tuple(together),
        apart=(apart,) if len(apart) > 1 else (),
        num_devices={roles[0]: count for roles, count in groups},
    )


def _shown(assignment: Assignment) -> str:
    return " | ".join(
        f"{','.join(u for u in g.call_groups if u != 'actor.generate')} {len(g.devices)}"
        for g in assignment.groups
    )


def placements() -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Every case: rows of the table, and the same as data."""
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for case in CASES:
        step = calls(case.actor, case.critic)
        model = ModelTable(step, GPU_DEFAULTS)
        on = cluster(case.gpus)
        best = search(call_nodes(step), model, on, max_lag=0, pins=Pins(together=(HYBRID,)))
        theirs = search(call_nodes(step), model, on, max_lag=0, pins=_pins(case.groups))
        slower = theirs.step_time_s / best.step_time_s - 1
        published = " | ".join(f"{','.join(roles)} {count}" for roles, count in case.groups)
        same = slower <= TIE
        rows.append([case.figure, f"{case.actor}/{case.critic}", case.gpus, published,
                     f"{theirs.step_time_s:.1f}", _shown(best.best), f"{best.step_time_s:.1f}",
                     f"{100 * slower:.1f}%", "yes" if same else "no"])  # fmt: skip
        print(*rows[-1], flush=True)
        data.append({
            "figure": case.figure, "actor_b": case.actor, "critic_b": case.critic,
            "gpus": case.gpus, "published": published, "published_predicted_s": theirs.step_time_s,
            "ours": str(best.best), "ours_predicted_s": best.step_time_s, "gap": best.gap,
            "published_is_slower_by": slower, "reproduced": same,
        })  # fmt: skip
    return rows, data


def generation() -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Seconds of generation on 16 GPUs by tensor-parallel size, waves of rows included."""
    on = cluster(16)
    mesh = Mesh(on, (16,))
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for size, published in ((7, 2), (13, 4)):
        call = calls(size, size)[0]
        # Weights, gradients and moments of actor and critic, spread over all 16.
        held = 2 * call.model.num_params() * 18 / 16
        times: dict[int, float] = {}
        for tp in (1, 2, 4, 8):
            layout = Layout(tp=tp, dp=16 // tp)
            weights = call.model.num_params() * 2 / tp
            room = mesh.memory_bytes - held - weights - 4e9
            times[tp] = call_time(call, layout, mesh, GPU_DEFAULTS, kv_bytes=room).total_s
        best = min(times, key=lambda tp: times[tp])
        saved = 1 - times[best] / times[8]
        rows.append([f"{size}B", *(f"{s:.1f}" for s in times.values()), best, published,
                     f"{100 * saved:.1f}%"])  # fmt: skip
        data.append({"actor_b": size, "seconds_by_tp": times, "best_tp": best,
                     "published_best_tp": published, "saved_against_tp8": saved})  # fmt: skip
    return rows, data


def main() -> None:
    """Print both tables."""
    args = parser((__doc__ or "").splitlines()[0]).parse_args()
    times, by_tp = generation()
    print(table(["actor", "tp 1", "tp 2", "tp 4", "tp 8", "best", "published", "saved"], times))
    rows, data = placements()
    head = ["figure", "actor/critic", "GPUs", "published", "s", "ours", "s", "slower", "reproduced"]
    print(table(head, rows))
    agree = sum(one["reproduced"] for one in data)
    print(f"{agree} of {len(data)} placements reproduced (ties within {TIE:.0%})")
    report({"placements": data, "reproduced": agree, "generation": by_tp}, args.json)


if __name__ == "__main__":
    main()
