"""Our planner on the cases of HybridFlow's figures 12 and 13: the same placements?

Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", 2024 (arXiv 2409.19256). Nodes
of 8 A100-80GB, PPO with four models, 1,024 prompts of 1,024 tokens, 1,024 tokens per response, 8
updates. For each case: the published placement, the best of the placements that the paper compares
(all together; actor and reference apart from critic and reward model; each model alone), and the
best of all, each with its best layouts by our own model. A placement counts as reproduced if it is
within `TIE` of the best of those that the paper compares; how far it is from the best of all is
printed beside it.

What is known of that system, its devices and its libraries is given, and nothing is fitted to these
figures:

- An actor generates where it is trained.
- Training has tensor parallelism over 8 devices and at most 1, 1, 4 and 8 pipeline stages for 7B,
  13B, 34B and 70B, on clusters of all sizes (figure 14, and section 8.3: more devices are more
  data-parallel ranks). Data-parallel ranks share the optimizer's states and sum gradients in
  float32, after the backward pass (section 8.1, and `get_model` in verl's
  `verl/utils/megatron_utils.py`). `--every-layout` searches all layouts instead.
- Products reach what published iterations of Megatron-LM on A100s reach at each model's width
  (`planner_vs_megatron.py`).
- A node has 200 Gb/s. In a node of 8 A100s NCCL's all-reduce reaches 232 GB/s of 300
  (github.com/NVIDIA/nccl-tests/issues/175). Between nodes that share one such port among 8 GPUs it
  reached 15.3 GB/s on 12 of them, where NCCL's maintainer expects 16 if the port hangs on the
  processor and 24 if it is next to a GPU (github.com/NVIDIA/nccl/issues/412). The paper's hand-over
  of a 70B actor takes 9.6 s (section 8.4: 78.2 s less are 89.1 %), in which 122 GB come into each
  node if it generates with tp 8: 12.8 GB/s, reloading from the host included. The analytic
  default of 0.7, 17.5 GB/s, lies between these and is kept; `--node-gb-s` takes another.
- It decodes with vLLM 0.3.1 (section 8.1) without CUDA graphs, which its cache, taken away after
  each generation, rules out (`vLLMRollout` in the first release of verl). Llama-2-7B then takes
  12 ms per token for its 32 layers and its head (github.com/vllm-project/vllm/pull/1440). Between
  two steps the devices wait for the host, which schedules, prepares and takes in every row: 20 ms
  for 200 rows (github.com/vllm-project/vllm/issues/6801; 5 to 13 ms of serving in issue 6854).

The other constants are the analytic defaults for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from bench import parser, report, table
from penstock.dataflow.errors import InfeasibleError, PlanError
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.engine_model import ANY, EngineModel, RoleEngines
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.cost.time_parts import CallTime
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import Assignment, SearchResult
from penstock.planner.search.pins import Pins
from penstock.planner.search.search import search
from planner_case import shape
from planner_vs_megatron import A100, share_of_width

TIE = 0.03
"""Placements within this share of each other are equally good."""
HYBRID = ("actor", "actor.generate")
ALL = ("actor", "ref", "critic", "reward")
STAGES = {f"llama-{size}b": most for size, most in ((7, 1), (13, 1), (34, 4), (70, 8))}
"""Model -> most pipeline stages in which it is trained."""

_DECODE_LAYERS = 32 + 1
CONSTANTS = GPU_DEFAULTS.replaced(
    launch_s=12e-3 / _DECODE_LAYERS, source="published measurements of A100s, NCCL and vLLM 0.3"
)
NODE_BYTES_PER_S = CONSTANTS.network_efficiency * 25e9
"""What all devices of a node together reach of its network."""
HOST_S = 20e-3 / 200
"""What the host does for a row between two decode steps."""


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind != "train" or shape is None:
        return None
    if layout.tp != 8:
        return "its training has tp=8"
    most = STAGES[shape.name]
    return None if layout.pp <= most else f"its training of {shape.name} has at most pp={most}"


THEIRS = EngineModel(name="hybridflow", why_not=_why_not, zero_stages=(1,))
"""Layouts of the published system."""


class Times(TimeModel):
    """Seconds of its calls: every model at the share of the peak of its width, and vLLM's host."""

    def __init__(self) -> None:
        super().__init__(CONSTANTS)
        self._of_width: dict[int, TimeModel] = {}

    def call_time(
        self, call: Call, layout: Layout, mesh: Mesh, *, kv_bytes: float | None = None
    ) -> CallTime:
        """See `TimeModel.call_time`."""
        width = call.model.hidden_size
        if width not in self._of_width:
            share = share_of_width(width)
            self._of_width[width] = TimeModel(CONSTANTS.replaced(matmul_efficiency=share))
        time = self._of_width[width].call_time(call, layout, mesh, kv_bytes=kv_bytes)
        if call.kind != "generate":
            return time
        # In however many waves rows run, each is handled once per token.
        rows = -(-call.num_sequences // layout.dp)
        return time._replace(launch_s=time.launch_s + rows * call.response.mean * HOST_S)


class Table(ModelTable):
    """Its calls in its layouts, or those of another engine, with its times."""

    def __init__(self, calls: Sequence[Call], engine: EngineModel) -> None:
        super().__init__(calls, CONSTANTS, engines=RoleEngines(engine))
        self._times = {engine: Times()}


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


def cluster(gpus: int, node_bytes_per_s: float = NODE_BYTES_PER_S) -> ClusterSpec:
    """Nodes of 8 A100, with what NCCL reaches of their links."""
    reached = CONSTANTS.network_efficiency
    nodes = NodeGroup(
        num_nodes=gpus // 8,
        devices_per_node=8,
        device=A100,
        within=LinkSpec(bytes_per_s=232e9 / reached, latency_s=5e-6),
    )
    between = LinkSpec(bytes_per_s=node_bytes_per_s / reached / 8, latency_s=2e-5)
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


def _searched(
    case: Case, engine: EngineModel, node_bytes_per_s: float
) -> tuple[SearchResult, SearchResult, SearchResult]:
    """The published placement, the best that the paper compares, and the best of all."""
    step = calls(case.actor, case.critic)
    model = Table(step, engine)
    on = cluster(case.gpus, node_bytes_per_s)

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


def placements(
    engine: EngineModel, node_bytes_per_s: float
) -> tuple[list[list[object]], list[dict[str, Any]]]:
    """Every case: rows of the table, and the same as data."""
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for case in CASES:
        published, compared, best = _searched(case, engine, node_bytes_per_s)
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
    """Seconds of generation on 16 GPUs by tensor-parallel size, waves of rows included.

    All models share the devices, trained over 8 tensor-parallel and 2 data-parallel ranks (figure
    15): whole weights and float32 gradients of a slice, half of the optimizer's states.
    """
    mesh = Mesh(cluster(16), (16,))
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for size, published, published_saved in ((7, 2, 0.603), (13, 4, 0.364)):
        call = calls(size, size)[0]
        params = call.model.num_params()
        held = params / 8 * (2 * (2 + 4 + 12 / 2) + 2 * 2)
        times: dict[int, float] = {}
        for tp in (1, 2, 4, 8):
            layout = Layout(tp=tp, dp=16 // tp)
            room = mesh.memory_bytes - held - params * 2 / tp - 4e9
            with suppress(PlanError):  # no room for a single row
                times[tp] = Times().call_time(call, layout, mesh, kv_bytes=room).total_s
        best = min(times, key=lambda tp: times[tp])
        saved = 1 - times[published] / times[8]
        shown = [f"{times[tp]:.1f}" if tp in times else "-" for tp in (1, 2, 4, 8)]
        rows.append([f"{size}B", *shown, best, published, f"{saved:.1%}", f"{published_saved:.1%}"])
        data.append({"actor_b": size, "seconds_by_tp": times, "best_tp": best,
                     "published_best_tp": published, "saved_against_tp8": saved,
                     "published_saved_against_tp8": published_saved})  # fmt: skip
    return rows, data


def main() -> None:
    """Print both tables."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--every-layout", action="store_true", help="not only the published ones")
    options.add_argument(
        "--node-gb-s",
        type=float,
        default=NODE_BYTES_PER_S / 1e9,
        help="what a node reaches of its network",
    )
    args = options.parse_args()
    times, by_tp = generation()
    head = ["actor", "tp 1", "tp 2", "tp 4", "tp 8", "best", "published", "saved", "published"]
    print(table(head, times))
    rows, data = placements(ANY if args.every_layout else THEIRS, args.node_gb_s * 1e9)
    head = ["figure", "actor/critic", "GPUs", "published", "s", "best compared", "s", "best of all",
            "s", "slower", "than all", "reproduced"]  # fmt: skip
    print(table(head, rows))
    agree = sum(one["reproduced"] for one in data)
    close = sum(one["slower_than_all_by"] <= TIE for one in data)
    print(f"{agree} of {len(data)} placements reproduced (within {TIE:.0%} of the best compared), "
          f"{close} within {TIE:.0%} of the best of all")  # fmt: skip
    found: dict[str, Any] = {
        "every_layout": args.every_layout, "node_gb_s": args.node_gb_s, "placements": data,
        "reproduced": agree, "close_to_best_of_all": close, "generation": by_tp,
    }  # fmt: skip
    report(found, args.json)


if __name__ == "__main__":
    main()
