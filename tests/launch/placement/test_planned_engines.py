"""Whatever is planned for two engines is what they run, on any cluster, and can be started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Policy, PolicyBatch, Prompts, Sampling, TrainMetrics
from penstock.configs.schema import SAME
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.launch.inputs.run import Run
from penstock.launch.placement.place import check_layouts, choose, divide_groups, planned_options
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import check_options, worker_spec
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.calls import CALL_KINDS, Lengths, Workload, calls_of
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.planner.plan.planner import plan_step
from penstock.planner.search.pins import Pins
from penstock.workers.engines.registry import ENGINES, rollouts, trainers
from penstock.workers.engines.roles import RecipeByGroup

from .test_place import calibration, config_of

PAIRS = [
    (engine, rollout)
    for engine, rollout in product(trainers(), [SAME, *rollouts()])
    if rollout != SAME or ENGINES[engine].generates
]
"""Every engine that trains, with everything that can generate for it."""


@dataclass(frozen=True)
class Distilled:
    sampling: Sampling = Sampling(max_new_tokens=32)
    loss: ClippedPolicyLoss = ClippedPolicyLoss()


@cache
def config(engine: str, rollout: str, *words: str) -> Run:
    return config_of(
        "algorithm=ppo",
        "algorithm.roles.reward.worker=rule",
        "executor=ray",
        f"engine={engine}",
        f"rollout={rollout}",
        "task.num_train=64",
        "task.num_held_out=8",
        "algorithm.per_step.prompts=8",
        *words,
    )


def distilled(prompts: Prompts, teacher: Policy, actor: Policy, cfg: Distilled) -> TrainMetrics:
    """A frozen policy that one engine may sample from and another evaluates."""
    roll = teacher.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    return actor.train(
        cfg.loss,
        PolicyBatch(
            tokens=roll.tokens,
            mask=roll.mask,
            behavior_logprob=roll.behavior_logprob,
            advantage=teacher.logprob(roll.tokens, roll.mask),
        ),
    )


STEPS = (build(ppo_step, cfg=PPO()), build(distilled, cfg=Distilled()))


def models_of(step: Graph, model: ModelShape) -> dict[str, ModelShape | None]:
    """The same model in every role but the reward, which is a rule."""
    return {role: None if role == "reward" else model for role in step.roles}


def cluster(num_nodes: int, per_node: int, memory_mib: int) -> ClusterSpec:
    device = DeviceSpec(
        name="small",
        memory_bytes=memory_mib * 2**20,
        flops_per_s={"bfloat16": 1e12},
        memory_bytes_per_s=1e11,
        host_bytes_per_s=1e10,
    )
    nodes = NodeGroup(
        num_nodes=num_nodes,
        devices_per_node=per_node,
        device=device,
        within=LinkSpec(bytes_per_s=1e10, latency_s=1e-5),
    )
    between = LinkSpec(bytes_per_s=1e9, latency_s=1e-5)
    return ClusterSpec(name="small", node_groups=(nodes,), between=between)


def shape(family: str, key_heads: int, layers: int) -> ModelShape:
    fields = {
        "model_type": family,
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": key_heads,
        "intermediate_size": 512,
        "vocab_size": 1024,
    }
    return shape_of(fields, name=family)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    num_nodes=st.sampled_from([1, 2]),
    per_node=st.sampled_from([1, 2, 3, 4]),
    memory_mib=st.sampled_from([24, 48, 96, 1024]),
    family=st.sampled_from(["qwen2", "llama", "mistral"]),
    key_heads=st.sampled_from([1, 2, 8]),
    layers=st.sampled_from([2, 6]),
    step=st.sampled_from(STEPS),
    max_cp=st.sampled_from([1, 2]),
)
def test_a_plan_is_one_that_its_engines_run(
    pair: tuple[str, str],
    num_nodes: int,
    per_node: int,
    memory_mib: int,
    family: str,
    key_heads: int,
    layers: int,
    step: Graph,
    max_cp: int,
) -> None:
    run = config(*pair)
    model = shape(family, key_heads, layers)
    engines, others = run.engines.planned(run.executor.transport)
    workload = Workload(num_prompts=8, prompt=Lengths.constant(32), response=Lengths.constant(32))
    try:
        plan = plan_step(
            step,
            models_of(step, model),
            cluster(num_nodes, per_node, memory_mib),
            workload,
            max_lag=0,
            constants=GPU_DEFAULTS,
            engines=engines,
            others=others,
            max_cp=max_cp,
            deadline_s=2.0,
        )
    except PlanError:
        assume(False)
        raise
    for name, layout in plan.layouts.items():
        node = step[name]
        runner = run.engines.runs(step, node)
        assert runner.why_not(layout, CALL_KINDS[node.kind], model) is None
    check_layouts(plan, step, run.engines, "the plan")
    groups = divide_groups(plan, step, run.engines)
    placement = groups.placement(step)
    planned_options(plan, replace(run.main, graph=step), run.engines, placement)
    for name, layout in plan.layouts.items():
        group = placement.group(placement.nodes[name])
        processes = group.num_ranks * group.tensor_parallel * group.pipeline_parallel
        assert processes == layout.num_devices
        sizes = run.engines.runs(step, step[name]).division(layout)
        assert (group.tensor_parallel, group.pipeline_parallel) == sizes


def test_the_planner_divides_models_for_fsdp() -> None:
    """What FSDP shares follows from the layout, and reaches workers."""
    run = config("fsdp", "torch")
    model = shape("qwen2", 8, 6)
    step = STEPS[0]
    engines, others = run.engines.planned(run.executor.transport)
    plan = plan_step(
        step,
        models_of(step, model),
        cluster(1, 4, 96),
        Workload(num_prompts=8, prompt=Lengths.constant(32), response=Lengths.constant(32)),
        max_lag=0,
        constants=GPU_DEFAULTS,
        engines=engines,
        others=others,
        pins=Pins(layouts={"actor.train": {"dp": 4, "zero": 3}}),
    )
    layout = plan.layouts["actor.train"]
    assert (layout.zero, layout.tp, layout.dp) == (3, 1, 4)
    placement = divide_groups(plan, step, run.engines).placement(step)
    options = planned_options(plan, replace(run.main, graph=step), run.engines, placement)
    assert options["actor"][placement.nodes["actor.train"]]["shards"] == layout.dp
    groups = {name: placement.group(group) for name, group in placement.nodes.items()}
    assert (groups["actor.train"].num_ranks, groups["actor.train"].tensor_parallel) == (1, 4)
    assert groups["actor.train"].name == groups["ref.logprob"].name
    assert groups["actor.generate"].tensor_parallel == 1


def test_micro_batches_fill_what_a_gpu_has_beside_its_models() -> None:
    """And the ledger of the plan is of those that it says."""
    engine, models = ENGINES["torch"].planned, models_of(STEPS[0], shape("qwen2", 8, 6))
    workload = Workload(num_prompts=256, prompt=Lengths.constant(32), response=Lengths.constant(32))
    calls = {call.name: call for call in calls_of(STEPS[0], workload, models)}
    found: list[int] = []
    for memory_mib in (330, 600, 900):
        plan = plan_step(
            STEPS[0],
            models,
            cluster(1, 1, memory_mib),
            workload,
            max_lag=0,
            constants=GPU_DEFAULTS,
            engines=RoleEngines(train=engine),
        )
        assert plan.prediction is not None
        memory = plan.prediction.memory["all"]
        assert memory.peak_bytes <= memory.capacity_bytes
        for name in ("actor.train", "critic.train", "critic.value", "ref.logprob"):
            packed = engine.memory.packed(
                calls[name], plan.layouts[name], plan.micro_batch_tokens[name]
            )
            assert sum(memory.transient_bytes[name].values()) == packed.total
        assert plan.micro_batch_tokens["critic.train"] == plan.micro_batch_tokens["critic.value"]
        found.append(plan.micro_batch_tokens["actor.train"])
    assert found == [4096, 8192, 16_384]


def test_rows_are_shared_where_that_is_asked_for() -> None:
    """A pin is enough; `max_cp` says what is tried without one."""
    run = config("fsdp", "torch")
    step = STEPS[0]
    engines, others = run.engines.planned(run.executor.transport)
    plan = plan_step(
        step,
        models_of(step, shape("qwen2", 8, 6)),
        cluster(1, 4, 96),
        Workload(num_prompts=8, prompt=Lengths.constant(32), response=Lengths.constant(32)),
        max_lag=0,
        constants=GPU_DEFAULTS,
        engines=engines,
        others=others,
        pins=Pins(layouts={"actor.train": {"cp": 2, "dp": 2, "micro_batch": 2}}),
    )
    layout = plan.layouts["actor.train"]
    assert (layout.tp, layout.dp, layout.cp) == (1, 2, 2)
    assert layout.zero in ENGINES["fsdp"].planned.zero_stages
    placement = divide_groups(plan, step, run.engines).placement(step)
    home = placement.nodes["actor.train"]
    options = planned_options(plan, replace(run.main, graph=step), run.engines, placement)["actor"]
    assert (options[home]["shards"], options[home]["context_parallel"]) == (4, 2)
    # Two rows of 64 tokens, of which a process computes half.
    assert plan.micro_batch_tokens["actor.train"] == 64
    group = placement.group(home)
    assert (group.num_ranks, group.tensor_parallel) == (1, 4)
    with pytest.raises(PlanError) as caught:
        check_layouts(
            Plan(groups=plan.groups, layouts={"critic.train": Layout(cp=2)}),
            step,
            config("torch", "torch").engines,
            "the plan",
        )
    assert "the torch engine runs data-parallel only" in str(caught.value)


def test_placement_auto_places_fsdp(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(calibration(num_devices=2).model_dump_json())
    run = config("fsdp", "torch", f"calibration={file}")
    plan = choose(run).placed
    assert plan.prediction is not None
    main = build_stages(run, plan).stages[-1]
    for name, layout in plan.layouts.items():
        assert run.engines.runs(main.graph, main.graph[name]).why_not(
            layout, "forward"
        ) is None or (name == "actor.generate")


def written(tmp_path: Path, **layouts: Layout) -> str:
    named = {name.replace("_", "."): layout for name, layout in layouts.items()}
    plan = Plan(groups=(GroupPlan(name="all", devices=(0, 1)),), layouts=named)
    (tmp_path / "plan.json").write_text(plan.model_dump_json(exclude_defaults=True))
    return f"placement={tmp_path / 'plan.json'}"


def test_a_layout_reaches_the_workers(tmp_path: Path) -> None:
    own = written(tmp_path, actor_train=Layout(cp=2), critic_train=Layout(dp=2, zero=3))
    main = build_stages(config("fsdp", "torch", own)).stages[-1]
    assert main.planned_options["actor"] == {"all": {"shards": 2, "context_parallel": 2}}
    assert main.planned_options["critic"] == {"all": {"shards": 2, "context_parallel": 1}}


def test_calls_of_a_role_that_need_different_workers_have_them(tmp_path: Path) -> None:
    own = written(tmp_path, critic_value=Layout(tp=2), critic_train=Layout(dp=2, zero=3))
    run = build_stages(config("fsdp", "torch", own))
    main = run.stages[-1]
    groups = {call: main.placement.nodes[f"critic.{call}"] for call in ("train", "value")}
    assert groups == {"train": "all-tp2pp1", "value": "all-critic-tp2"}
    assert main.placement.group("all-critic-tp2").within == "all-tp2pp1"
    spec = worker_spec(main, "critic", run, {})
    assert isinstance(spec, RecipeByGroup)
    assert getattr(spec.trained, "shards", 0) == 2
    assert {group: getattr(own, "shards", 0) for group, own in spec.evaluated.items()} == {
        "all-critic-tp2": 1
    }


@pytest.mark.parametrize("at", ["engine.options", "algorithm.roles.actor.options"])
def test_an_option_that_contradicts_the_layout_is_refused(tmp_path: Path, at: str) -> None:
    own = written(tmp_path, actor_train=Layout(dp=2, zero=3))
    with pytest.raises(ConfigError) as caught:
        build_stages(config("fsdp", "torch", own, f"{at}={{shards: 1}}"))
    assert str(caught.value) == (
        f"'{at}.shards' is 1, but layout dp2 zero3 of 'actor.train' makes it 2\n"
        "    leave it out, or place the run by hand: executor.groups"
    )


# --- refusals


def test_an_engine_that_does_not_generate_needs_one_that_does() -> None:
    run = config("fsdp", SAME, "executor.groups.all=1")
    with pytest.raises(ConfigError) as caught:
        check_options(build_stages(run).stages[-1], run)
    assert str(caught.value) == (
        "engine=fsdp does not generate, and 'actor.generate' must\n"
        "    add rollout=torch or rollout=vllm"
    )


@pytest.mark.parametrize(
    ("engine", "key", "message"),
    [
        (
            "torch",
            "tensor_parallel",
            "the torch engine runs data-parallel only\n    set engine=fsdp or engine=megatron, "
            "or 1",
        ),
        ("fsdp", "pipeline_parallel", "FSDP has no pipeline stages\n    set engine=megatron, or 1"),
    ],
)
def test_a_division_that_no_engine_of_the_run_has_is_refused(
    engine: str, key: str, message: str
) -> None:
    run = config(engine, "torch", "executor.groups.all=1", f"executor.{key}.all=2")
    with pytest.raises(ConfigError) as caught:
        build_stages(run)
    assert str(caught.value) == f"'executor.{key}.all' is 2, but {message}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "engine.kind=megatorn",
            "'engine.kind': 'megatorn' is no engine that trains; did you mean 'megatron'?\n"
            "    there are: torch, fsdp, megatron, or module:ENGINE for one of your own",
        ),
        (
            "engine.kind=vllm",
            "'engine.kind': 'vllm' is no engine that trains\n"
            "    there are: torch, fsdp, megatron, or module:ENGINE for one of your own",
        ),
        (
            "rollout.kind=vlm",
            "'rollout.kind': 'vlm' is no engine that generates; did you mean 'vllm'?\n"
            "    there are: same, torch, vllm, or module:ENGINE for one of your own",
        ),
    ],
)
def test_an_engine_that_is_not_there_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "engine.kind=json:loads",
            "'engine.kind': 'json:loads' is a function\n"
            "    give an EngineKind (penstock.workers.engines.engine)",
        ),
        (
            "engine.kind=penstock.workers.engines.vllm_engine.declaration:VLLM",
            "'engine.kind': engine 'vllm' declares no workers that train",
        ),
        (
            "rollout.kind=penstock.workers.engines.fsdp_engine.declaration:FSDP",
            "'rollout.kind': engine 'fsdp' declares no rollout worker",
        ),
    ],
)
def test_an_engine_of_ones_own_must_be_one(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert str(caught.value) == message


def test_a_model_that_an_engine_does_not_compute_is_not_planned_for() -> None:
    run = config("megatron", "vllm")
    engines, others = run.engines.planned(run.executor.transport)
    step = STEPS[0]
    model = shape("mistral", 8, 2).model_copy(update={"family": "gemma"})
    with pytest.raises(PlanError) as caught:
        plan_step(
            step,
            models_of(step, model),
            cluster(1, 2, 1024),
            Workload(num_prompts=8, prompt=Lengths.constant(32), response=Lengths.constant(32)),
            max_lag=0,
            constants=GPU_DEFAULTS,
            engines=engines,
            others=others,
        )
    assert str(caught.value) == (
        "'critic.value' of model 'mistral' cannot be planned: Megatron computes llama, "
        "mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe here, not 'gemma'\n"
        "    choose another engine, or another model"
    )
