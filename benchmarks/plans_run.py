"""Whether every plan runs: random cases planned, and their engines built as the plan says.

A case is an algorithm, models, engines, a cluster of one to four nodes, lengths and a lag, as one
gives them to `penstock plan`. If it is planned, the engine of every call is built in the call's
layout on the meta device, for the first and the last process (`plans_run_engines.py`). If an engine
is said not to run it, that engine's own constructor must refuse it too. What does not fit into
memory is neither: it is drawn again with more nodes or a smaller model.

Every call that evaluates is then given a layout of its own on its devices, drawn from all that
there are: the plan with it must be divided into groups of processes, or it must be refused by the
plan and by the engine alike.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

from bench import parser, report, table
from penstock.configs.references import option_file
from penstock.dataflow.errors import InfeasibleError, PlanError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.placement.place import divide_groups
from penstock.launch.placement.plan_request import (
    SECTIONS,
    LanguageRequest,
    PlanRequest,
    plan_request,
)
from penstock.planner.inputs.calls import Call, calls_of
from penstock.planner.inputs.layout import Layout, check_layout, pinned_layout
from penstock.planner.plan.plan import Plan
from penstock.workers.engines.engine import EngineKind
from penstock.workers.engines.registry import ENGINES
from penstock.workers.models.spec import Head, ModelSpec
from plans_run_engines import construct

ALGORITHMS = ("grpo", "ppo", "rloo", "sft", "dpo", "remax", "gspo", "reward_modelling")
SMALL = ("qwen2.5-0.5b", "qwen2.5-1.5b")
MODELS: Mapping[str, Sequence[str]] = {
    "torch": SMALL,
    "fsdp": (*SMALL, "qwen2.5-3b", "qwen2.5-7b", "llama-7b", "qwen2.5-14b", "llama-13b"),
    "megatron": (
        "qwen2.5-3b", "qwen2.5-7b", "llama-7b", "qwen2.5-14b", "llama-13b", "qwen2.5-32b",
        "mixtral-8x7b",
    ),
}  # fmt: skip
"""Engine that trains -> models that it is asked for, smallest first."""
WEIGHT_ERROR = 0.02
"""A call whose weights take so much more or less memory than planned is printed."""
GENERATES = ("sft", "dpo", "reward_modelling")
"""Algorithms that do not."""
PINS: Mapping[str, Sequence[str]] = {
    "torch": ("tp=2", "pp=2", "cp=2", "zero=1", "checkpointing=true"),
    "fsdp": ("tp=2", "pp=2", "zero=1", "zero=2", "cp=2", "checkpointing=true"),
    "megatron": ("tp=4", "tp=8", "pp=2", "zero=2", "zero=1", "cp=2", "ep=2", "checkpointing=true"),
    "vllm": ("tp=4", "pp=2", "cp=2"),
}
"""Engine -> parts of a layout that somebody may ask for; some of them it does not run."""


@dataclass(frozen=True)
class Case:
    """What is asked.

    Attributes:
        algorithm: Option of `algorithm=`.
        model: Option of `model=`.
        engine: What trains.
        rollout: What generates.
        num_nodes: Of H100s.
        per_node: Devices of each.
        lag: Steps that generation may be behind.
        sizes: Prompts, their tokens, and those of a response.
        others: A role with an engine of its own, or what is pinned; keys of the configuration.
        seed: Of layouts of calls that evaluate.
    """

    algorithm: str
    model: str
    engine: str
    rollout: str
    num_nodes: int
    per_node: int
    lag: int
    sizes: tuple[int, int, int]
    others: tuple[str, ...] = ()
    seed: int = 0

    @property
    def words(self) -> list[str]:
        """As `penstock plan` is given it."""
        prompts, prompt, response = self.sizes
        return [
            f"algorithm={self.algorithm}", f"model={self.model}", f"engine={self.engine}",
            f"rollout={self.rollout}", "cluster=h100", f"cluster.num_nodes={self.num_nodes}",
            f"cluster.devices_per_node={self.per_node}", f"schedule.max_lag={self.lag}",
            f"workload.num_prompts={prompts}", f"workload.prompt={prompt}",
            f"workload.response={response}", "plan.deadline_s=3", *self.others,
        ]  # fmt: skip


def drawn(random: Random) -> Case:
    """A case."""
    engine = random.choice(("torch", "fsdp", "fsdp", "megatron", "megatron"))
    rollout = random.choice(("same", "vllm", "torch") if engine == "torch" else ("vllm",))
    algorithm = random.choice(ALGORITHMS)
    num_nodes, per_node = random.randint(1, 4), random.choice((4, 8))
    model = random.choice(MODELS[engine])
    sizes = (random.choice((64, 128, 256)), random.choice((128, 512)), random.choice((128, 1024)))
    lag = random.choice((0, 0, 1)) if algorithm in ("grpo", "ppo", "gspo") else 0
    others: tuple[str, ...] = ()
    if random.random() < 0.3:
        node, kind = random.choice(_calls(algorithm))
        runs = rollout if kind == "generate" and rollout != "same" else engine
        pin = random.choice([pin for pin in PINS[runs] if _makes_sense(pin, kind, per_node)])
        others = (f"plan.pins.layouts.{node}.{pin}",)
    elif algorithm == "ppo" and random.random() < 0.5:
        others = (f"algorithm.roles.critic.engine={random.choice(('fsdp', 'megatron'))}",)
    given = (algorithm, model, engine, rollout, num_nodes, per_node, lag, sizes, others)
    return Case(*given, seed=random.randrange(1 << 30))


def _makes_sense(pin: str, kind: str, per_node: int) -> bool:
    """Whether the call has it at all, and a node enough devices for it."""
    if kind == "generate" and pin.startswith(("zero", "checkpointing")):
        return False
    return pin != "tp=8" or per_node == 8


def _calls(algorithm: str) -> list[tuple[str, str]]:
    """A call of the policy that trains, and one that generates if there is any."""
    if algorithm == "reward_modelling":
        return [("reward.train", "train")]
    calls = [("actor.train", "train")]
    return calls if algorithm in GENERATES else [*calls, ("actor.generate", "generate")]


def larger(case: Case) -> Case | None:
    """The case with more devices or a smaller model; None if there is nothing left to change."""
    if case.num_nodes < 4:
        return replace(case, num_nodes=case.num_nodes + 1)
    if case.per_node < 8:
        return replace(case, per_node=8)
    smaller = list(MODELS[case.engine])
    place = smaller.index(case.model)
    return replace(case, model=smaller[place - 1]) if place else None


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        case: As it was planned, after it was drawn again where memory was short.
        kind: "runnable", "refused" (by the engines as by the planner) or what went wrong.
        said: Why.
        redrawn: How often it did not fit.
        weights: Bytes of weights that were planned and that were built, of each call.
        apart: What became of layouts of their own: "built", or "refused".
    """

    case: Case
    kind: str
    said: str = ""
    redrawn: int = 0
    weights: tuple[tuple[int, int], ...] = ()
    apart: tuple[str, ...] = ()


def tried(case: Case) -> Outcome:
    """Plan a case and build its engines."""
    redrawn = 0
    while True:
        composed = compose("plan", case.words)
        for key in ("resume", "json", "html", "trace", "output"):
            composed.pop(key, None)
        request: PlanRequest | None = None
        try:
            request = plan_request(composed, case.model)
            plan = request.plan()
        except InfeasibleError as error:
            changed, redrawn = larger(case), redrawn + 1
            if changed is None:
                return Outcome(case, "never fits", str(error).splitlines()[0], redrawn)
            case = changed
        except PlanError as error:
            return replace(_confirmed(case, composed, str(error)), redrawn=redrawn)
        else:
            return replace(_built(case, composed, request, plan), redrawn=redrawn)


def _engines(composed: Mapping[str, Any]) -> Any:
    run = {key: value for key, value in composed.items() if key not in SECTIONS}
    return resolved(run).engines


def _modeled_calls(request: PlanRequest) -> Sequence[Call]:
    assert isinstance(request, LanguageRequest)  # every step here has a language model
    return calls_of(request.graph, request.workload, request.models)


def _built(case: Case, composed: Mapping[str, Any], request: PlanRequest, plan: Plan) -> Outcome:
    """Build the engine of every call as planned."""
    engines = _engines(composed)
    weights: list[tuple[int, int]] = []
    for call in _modeled_calls(request):
        engine: EngineKind = engines.runs(request.graph, request.graph[call.name])
        layout = plan.layouts[call.name]
        parts: list[int] = []
        for process in dict.fromkeys((0, layout.num_devices - 1)):
            try:
                longest, trained = call.tokens_longest, call.kind == "train"
                built = construct(
                    engine, layout, _model(case), _head(call), process, longest, trained=trained
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, the plan does not run
                said = f"{call.name} in {layout} on {engine.name}: {_line(error)}"
                return Outcome(case, "planned but not built", said)
            parts += [] if built is None else [built]
        if parts:  # of the stage that has most: the first or the last
            planned = engine.planned.memory.resident(call, layout)
            weights.append((planned.weights, max(parts)))
    apart = _evaluated_apart(case, engines, request, plan)
    if isinstance(apart, str):
        return Outcome(case, "not as its plan says", apart)
    return Outcome(case, "runnable", weights=tuple(weights), apart=apart)


def _evaluated_apart(
    case: Case, engines: Any, request: PlanRequest, plan: Plan
) -> tuple[str, ...] | str:
    """Give calls that evaluate layouts of their own; what went wrong as text."""
    random, found = Random(case.seed), list[str]()
    for call in _modeled_calls(request):
        if call.kind != "forward":
            continue
        layout = _any_layout(random, plan.layouts[call.name].num_devices)
        engine: EngineKind = engines.runs(request.graph, request.graph[call.name])
        where = f"{call.name} in {layout} on {engine.name}"
        why = _refusal(layout, engine, call, case.per_node)
        # An engine without any notion of these has no such option.
        extras: list[dict[str, Any]] = [{}]
        extras += [{"cp": layout.cp}, {"zero": layout.zero}] if why else []
        raised: Exception | None = None
        for extra in extras:
            try:
                for process in dict.fromkeys((0, layout.num_devices - 1)):
                    longest = call.tokens_longest
                    construct(
                        engine,
                        layout,
                        _model(case),
                        _head(call),
                        process,
                        longest,
                        extra,
                        trained=False,
                    )
            except Exception as error:  # noqa: BLE001 - it is compared with what the plan says
                raised = error
        if (why is None) != (raised is None):
            return f"{where}: {why or 'planned'}, but {_line(raised) if raised else 'built'}"
        found.append("refused" if why else "built")
        if why is None:
            layouts = {**plan.layouts, call.name: layout}
            changed = plan.model_copy(update={"layouts": layouts})
            divided = divide_groups(changed, request.graph, engines, views=case.lag == 0)
            group = divided.group(divided.group_of(request.graph[call.name]))
            sizes = (group.tensor_parallel, group.pipeline_parallel)
            if sizes != engine.division(layout):
                return f"{where}: its group is divided {sizes}"
            divided.placement(request.graph)
    return tuple(found)


def _any_layout(random: Random, num_devices: int) -> Layout:
    sizes = dict.fromkeys(("tp", "pp", "dp", "cp"), 1)
    while prod(sizes.values()) < num_devices:
        left = num_devices // prod(sizes.values())
        divisors = [n for n in range(2, left + 1) if left % n == 0]
        sizes[random.choice(list(sizes))] *= random.choice(divisors)
    return Layout(**sizes, zero=random.choice((0, 2, 3)) if sizes["dp"] > 1 else 0)


def _refusal(layout: Layout, engine: EngineKind, call: Call, per_node: int) -> str | None:
    """Why a plan cannot have a call in a layout."""
    try:
        check_layout(layout, call.model, node_size=per_node)
    except PlanError as error:
        return str(error).splitlines()[0]
    return engine.why_not(layout, call.kind, call.model)


def _confirmed(case: Case, composed: Mapping[str, Any], said: str) -> Outcome:
    """Have the engine of the refused call refuse it itself."""
    first = said.splitlines()[0]
    pin = next((word for word in case.others if word.startswith("plan.pins.layouts.")), None)
    node = pin.removeprefix("plan.pins.layouts.").split("=")[0].rpartition(".")[0] if pin else ""
    if node and node in first:
        name, value = (pin or "").removeprefix(f"plan.pins.layouts.{node}.").split("=")
        layout = pinned_layout({name: json.loads(value)})
        generates = node.endswith(".generate") and case.rollout != "same"
        engine = ENGINES[case.rollout if generates else case.engine]
    elif "cannot be planned" in first:
        name, engine, layout = "", ENGINES[case.engine], Layout()
    else:
        return Outcome(case, "refused for another reason", first)
    head = Head("score" if node.startswith("reward") else "lm_head")
    # An engine without any notion of these has no such option.
    extra = {name: getattr(layout, name)} if name in ("cp", "zero") else {}
    try:
        construct(engine, layout, _model(case), head, 0, sum(case.sizes[1:]), extra)
    except Exception as error:  # noqa: BLE001 - that it raises is what is wanted
        return Outcome(case, "refused", f"{first} | {_line(error)}")
    return Outcome(case, "refused but built", f"{first} ({engine.name} in {layout})")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _model(case: Case) -> ModelSpec:
    return ModelSpec(
        architecture=option_file("model", case.model)["architecture"], dtype="bfloat16"
    )


def _head(call: Call) -> Head:
    if call.head == "vocabulary":
        return Head("lm_head")
    return Head("value_head" if "critic" in call.role else "score")


def main() -> None:
    """Draw cases, and say what became of them."""
    options = parser(__doc__ or "")
    options.add_argument("--cases", type=int, default=300, help="how many (300)")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    options.add_argument("--quiet", action="store_true", help="no line per case")
    args = options.parse_args()
    random = Random(args.seed)
    outcomes: list[Outcome] = []
    for number in range(args.cases):
        outcome = tried(drawn(random))
        outcomes.append(outcome)
        if not args.quiet or outcome.kind not in ("runnable", "refused"):
            print(number, outcome.kind, " ".join(outcome.case.words), outcome.said, flush=True)
        off = max((abs(planned / built - 1) for planned, built in outcome.weights), default=0.0)
        if off > WEIGHT_ERROR:
            print(number, "weights off by", off, *outcome.case.words, outcome.weights, flush=True)
    kinds = Counter(outcome.kind for outcome in outcomes)
    pairs = [pair for outcome in outcomes for pair in outcome.weights]
    off = [abs(planned / built - 1) for planned, built in pairs]
    print(table(["outcome", "cases"], sorted(kinds.items())))
    report(
        {
            "tried": len(outcomes),
            "runnable": kinds["runnable"],
            "refused": kinds["refused"],
            "other": {k: n for k, n in kinds.items() if k not in ("runnable", "refused")},
            "redrawn": sum(outcome.redrawn > 0 for outcome in outcomes),
            "calls_built": len(pairs),
            "calls_apart": Counter(one for outcome in outcomes for one in outcome.apart),
            "largest_weight_error": max(off, default=0.0),
            "mean_weight_error": sum(off) / max(len(off), 1),
            "engines": Counter(outcome.case.engine for outcome in outcomes),
            "refusals": sorted({o.said for o in outcomes if o.kind == "refused"}),
            "seed": args.seed,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
