"""Our planner on the cases of HybridFlow's figures 12 and 13: the same placements?

Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", 2024 (arXiv 2409.19256). Nodes
of 8 A100-80GB, PPO with four models, 1,024 prompts of 1,024 tokens, 1,024 tokens per response, 8
updates. For each case: the published placement, the best of the placements that the paper compares
(all together; actor and reference apart from critic and reward model; each model alone), and the
best of all, each with its best layouts by our own model. A placement counts as reproduced if it is
within `TIE` of the best of those that the paper compares; how far it is from the best of all is
printed beside it.

What is known of that system is given, and nothing is fitted:

- An actor generates where it is trained.
- Training has tensor parallelism over 8 devices and at most 1, 1, 4 and 8 pipeline stages for 7B,
  13B, 34B and 70B, on clusters of all sizes (figure 14, and section 8.3: more devices are more
  data-parallel ranks). Data-parallel ranks share the optimizer's states and sum gradients in
  float32, after the backward pass (section 8.1, and `get_model` in verl's
  `verl/utils/megatron_utils.py`). `--every-layout` searches all layouts instead.
- A node has 200 Gb/s. Links are taken at what NCCL measures on such nodes: an all-reduce reaches
  232 GB/s of 300 in a node of 8 A100s (github.com/NVIDIA/nccl-tests/issues/175), and 91 of 100 GB/s
  between two with half of these ports (issue 100).

The other constants are the analytic defaults for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from bench import parser, report, table
from penstock.dataflow.errors import InfeasibleError
from penstock.planner.cost.constants import GPU_DEFAULTS
from penstock.planner.cost.engine_model import ANY, EngineModel, RoleEngines
from penstock.planner.cost.time_model import call_time
from penstock.planner.inputs.calls import Call, CallKind
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.mesh import Mesh
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.inputs.workload import Lengths
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.pins import Pins
from penstock.planner.search.result import Assignment, SearchResult
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
ALL = ("actor", "ref", "critic", "reward")
STAGES = {f"llama-{size}b": most for size, most in ((7, 1), (13, 1), (34, 4), (70, 8))}
"""Model -> most pipeline stages in which it is trained."""

CONSTANTS = GPU_DEFAULTS.replaced(
    network_efficiency=1.0, source="analytic defaults for GPUs, with measured links"
)


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind != "train" or shape is None:
        return None
    if layout.tp != 8:
        return "its training has tp=8"
    most = STAGES[shape.name]
    return None if layout.pp <= most else f"its training of {shape.name} has at most pp={most}"


THEIRS = EngineModel(name="hybridflow", why_not=_why_not, zero_stages=(1,))
"""Layouts of the published system."""


Groups: TypeAlias = tuple[tuple[tuple[str, ...], int], ...]

COMPARED: tuple[Groups, ...] = (
    ((ALL, 0),),
    ((("actor", "ref"), 0), (("critic", "reward"), 0)),
    tuple(((role,), 0) for role in ALL),
)
"""What figures 12 and 13 compare besides the placement that they find best."""


@dataclass(frozen=True)
class Case:
    """One point of a figure.

    Attributes:
        figure: Where it is published.
        actor: Billions of parameters of actor and reference.
        critic: Billions of parameters of critic and reward model.
        gpus: Devices.
        groups: The published placement: roles of each group, and its devices, 0 if they are not
            said; the actor's generation is with the actor.
    """

    figure: str
    actor: int
    critic: int
    gpus: int
    groups: Groups


def _colocated(figure: str, actor: int, critic: int, gpus: int) -> Case:
    return Case(figure, actor, critic, gpus, ((ALL, gpus),))


def _halves(size: int, gpus: int) -> Case:
    halves = ((("actor", "ref"), gpus // 2), (("critic", "reward"), gpus // 2))
    return Case("12", size, size, gpus, halves)


CASES = (
    *(_colocated("12", size, size, n) for size, n in ((7, 16), (7, 64), (13, 16), (13, 64),
                                                      (34, 32), (34, 64), (70, 64))),
    _halves(13, 96),
    _halves(34, 96),
    _halves(34, 128),
    Case("12", 13, 13, 128, ((("actor",), 64), (("critic",), 32), (("ref",), 16),
                             (("reward",), 16))),
    _colocated("13", 13, 70, 32),
    _colocated("13", 13, 70, 64),
    # Halves are said of models of one size only.
    Case("13", 13, 70, 96, ((("actor", "ref"), 0), (("critic", "reward"), 0))),
    Case("13", 13, 70, 128, ((("actor", "ref", "reward"), 64), (("critic",), 64))),
)  # fmt: skip


def cluster(gpus: int) -> ClusterSpec:
    """Nodes of 8 A100, with their links as NCCL measures them."""
    nodes = NodeGroup(
        num_nodes=gpus // 8,
        devices_per_node=8,
        device=A100,
        within=LinkSpec(bytes_per_s=232e9, latency_s=5e-6),
    )
    between = LinkSpec(bytes_per_s=0.91 * 25e9 / 8, latency_s=2e-5)
    return ClusterSpec(name="a100", node_groups=(nodes,), between=between)


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


def _pins(groups: Groups) -> Pins:
    together = [(*roles, "actor.generate") if "actor" in roles else roles for roles, _ in groups]
    apart = tuple(roles[0] for roles, _ in groups)
    return Pins(
        together=tuple(together),
        apart=(apart,) if len(apart) > 1 else (),
        num_devices={roles[0]: count for roles, count in groups if count},
    )


def _shown(assignment: Assignment) -> str:
    return " | ".join(
        f"{','.join(u for u in g.call_groups if u != 'actor.generate')} {len(g.devices)}"
        for g in assignment.groups
    )


def _searched(case: Case, engine: EngineModel) -> tuple[SearchResult, SearchResult, SearchResult]:
    """The published placement, the best that the paper compares, and the best of all."""
    step = calls(case.actor, case.critic)
    model = ModelTable(step, CONSTANTS, engines=RoleEngines(engine))
    on = cluster(case.gpus)

    def found(pins: Pins) -> SearchResult:
        return search(call_nodes(step), model, on, max_lag=0, pins=pins)

    published = found(_pins(case.groups))
    compared = [published]
    for groups in COMPARED:
        try:
            compared.append(found(_pins(groups)))
        except InfeasibleError:
            continue  # does not fit on so few devices
    best = min(compared, key=lambda result: result.step_time_s)
    return published, best, found(Pins(together=(HYBRID,)))


def placements(engine: EngineModel) -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Every case: rows of the table, and the same as data."""
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for case in CASES:
        published, compared, best = _searched(case, engine)
        slower, behind = (
            published.step_time_s / other.step_time_s - 1 for other in (compared, best)
        )
        same = slower <= TIE
        found = [text for result in (published, compared, best)
                 for text in (_shown(result.best), f"{result.step_time_s:.1f}")]  # fmt: skip
        rows.append([case.figure, f"{case.actor}/{case.critic}", case.gpus, *found,
                     f"{slower:.1%}", f"{behind:.1%}", "yes" if same else "no"])  # fmt: skip
        print(*rows[-1], flush=True)
        data.append({
            "figure": case.figure, "actor_b": case.actor, "critic_b": case.critic,
            "gpus": case.gpus, "published": _shown(published.best),
            "published_predicted_s": published.step_time_s,
            "best_compared": _shown(compared.best), "best_compared_s": compared.step_time_s,
            "best_of_all": _shown(best.best), "best_of_all_s": best.step_time_s,
            "best_of_all_plan": str(best.best), "gap": best.gap,
            "slower_than_compared_by": slower, "slower_than_all_by": behind, "reproduced": same,
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
            times[tp] = call_time(call, layout, mesh, CONSTANTS, kv_bytes=room).total_s
        best = min(times, key=lambda tp: times[tp])
        saved = 1 - times[best] / times[8]
        rows.append([f"{size}B", *(f"{s:.1f}" for s in times.values()), best, published,
                     f"{100 * saved:.1f}%"])  # fmt: skip
        data.append({"actor_b": size, "seconds_by_tp": times, "best_tp": best,
                     "published_best_tp": published, "saved_against_tp8": saved})  # fmt: skip
    return rows, data


def main() -> None:
    """Print both tables."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--every-layout", action="store_true", help="not only the published ones")
    args = options.parse_args()
    times, by_tp = generation()
    print(table(["actor", "tp 1", "tp 2", "tp 4", "tp 8", "best", "published", "saved"], times))
    rows, data = placements(ANY if args.every_layout else THEIRS)
    head = ["figure", "actor/critic", "GPUs", "published", "s", "best compared", "s", "best of all",
            "s", "slower", "than all", "reproduced"]  # fmt: skip
    print(table(head, rows))
    agree = sum(one["reproduced"] for one in data)
    close = sum(one["slower_than_all_by"] <= TIE for one in data)
    print(f"{agree} of {len(data)} placements reproduced (within {TIE:.0%} of the best compared), "
          f"{close} within {TIE:.0%} of the best of all")  # fmt: skip
    report({"every_layout": args.every_layout, "placements": data, "reproduced": agree,
            "close_to_best_of_all": close, "generation": by_tp}, args.json)  # fmt: skip


if __name__ == "__main__":
    main()
