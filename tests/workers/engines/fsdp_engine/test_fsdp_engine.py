"""Real processes on gloo: what the FSDP engine computes and learns, against the torch engine.

Four processes are started, once: two of them are two shards, the others two tensor-parallel
processes, then two ranks, then two that share every row; afterwards they are two shards of two, and
two ranks of two. Each test looks at a part of what they found.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from forked_ranks import is_night, night, run_groups
from megatron_models import (
    DROPPED,
    FAMILIES,
    LORA,
    OPTIMIZER,
    PADDED,
    Learnt,
    assert_as_torch,
    assert_frozen_stay,
    assert_learns_in_16_bits,
    assert_metrics,
    assert_ruined_alike,
    assert_says_the_same,
    assert_torch_goes_on,
    load_batch,
    read_weights,
    resumable,
    saved_state,
    torch_learns,
    torch_policy,
    train_in_pieces,
    train_policy,
    train_value,
    under,
    write_models,
)
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.layout import Layout as PlannedLayout
from penstock.planner.inputs.model_shape import shape_of
from penstock.planner.resharding.sharding import shard
from penstock.workers.engines.divided_network import divided_sharding
from penstock.workers.engines.roles import last_masked
from penstock.workers.engines.torch_engine.specs import TorchValueSpec
from penstock.workers.models.spec import ModelSpec
from torch import Tensor
from torch_models import NEWEST, architecture, module_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANK = Path(__file__).parents[2] / "fsdp_rank.py"
SHARDS, TENSOR, RANKS, BOTH = "r1s2t1", "r1s1t2", "r2s1t1", "r1s2t2"
CONTEXT, CONTEXT_TENSOR, CONTEXT_SHARDS = "r1s2t1c2", "r1s2t2c2", "r1s4t1c2"
TRAINED = ("qwen2-tied", "coarse", "qwen3")
FAMILY = {"coarse": "qwen2-tied"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where the processes left what they found."""
    made = tmp_path_factory.mktemp("fsdp")
    write_models(made)
    policy = resumable(made)
    train_policy(policy, load_batch(made))
    policy.save_state(made / "state-torch")
    layouts = [
        "1,2,1:logits+train+roles+gpt2+newest+half+frozen+adapters+ways+padded",
        "~1,1,2:logits+train+roles+refusals+frozen",
        "~2,1,1:train",
        "~1,2,1,2:logits+train+roles+adapters",
        "1,2,2:train+resume+ruin",
        "2,2,1:resume+frozen+adapters+pieces",
    ]
    if is_night(request):
        layouts += ["~1,2,1,2:ways", "1,2,2:logits", "1,2,2,2:train"]
        layouts += ["1,4,1,2:train+roles+resume", "2,1,2:resume+ruin"]
    run_groups(made, RANK, (4, layouts))
    return made


def read_all(folder: Path, layout: str, part: str) -> list[dict[str, Tensor]]:
    """What each process of a layout found."""
    files = sorted(folder.glob(f"{part}-{layout}-*.safetensors"))
    return [safetensors.torch.load_file(file) for file in files]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [SHARDS, TENSOR, night(BOTH), CONTEXT])
def test_logits_and_log_probabilities_equal_hugging_faces(folder: Path, layout: str, family: str):
    found = read_all(folder, layout, "logits")
    assert_says_the_same(folder, family, found, tensor=int(layout[layout.index("t") + 1]))
    batch, policy = load_batch(folder), torch_policy(ModelSpec(folder=str(folder / family)))
    expected = policy.logprob(batch["tokens"][:1], last_masked(batch["mask"][:1]))
    for part in found:
        torch.testing.assert_close(part[f"{family}/last"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *itertools.product([SHARDS], ["plain", "kept", "again", "both", "away"]),
        *(night(CONTEXT, way) for way in ("plain", "kept", "again")),
    ],
)
def test_ways_to_keep_less_change_nothing(folder: Path, layout: str, way: str) -> None:
    """Gathered weights kept over a call, activations computed again, all in host memory between."""
    policy = resumable(folder)
    metrics = train_policy(policy, load_batch(folder), range(3))
    numbers = ("gathers", "saved")
    for process, found in enumerate(read_all(folder, layout, "ways")):
        got = {n: v for n, v in under(found, way).items() if n not in numbers}
        if process:
            got = {n: v for n, v in got.items() if n.startswith("metric/")}
            assert_metrics(under(got, "metric"), metrics)
        else:
            assert_as_torch(got, policy.export_weights(), metrics)


def test_the_token_that_pads_is_learned_where_it_is_a_word(folder: Path) -> None:
    """transformers leaves it out of the embedding's gradient."""
    batch = load_batch(folder)
    assert bool((batch["tokens"] == PADDED["pad_token_id"]).any())
    policy = torch_policy(ModelSpec(architecture=PADDED), optimizer=OPTIMIZER)
    metrics = train_policy(policy, batch)
    found = read_all(folder, SHARDS, "padded")[0]
    got = under(found, "weights") | {f"metric/{n}": v for n, v in under(found, "metric").items()}
    assert_as_torch(got, policy.export_weights(), metrics)


def test_ways_to_keep_less_keep_less(folder: Path) -> None:
    for found in read_all(folder, SHARDS, "ways"):
        saved = {way: int(found[f"{way}/saved"]) for way in ("plain", "kept", "again", "both")}
        gathers = {way: int(found[f"{way}/gathers"]) for way in saved}
        assert saved["again"] < saved["plain"] / 2
        assert saved["both"] < saved["kept"] / 2
        # Once for each update instead of twice for each of its micro-batches.
        assert gathers["kept"] == gathers["both"] <= gathers["plain"] / 3


@pytest.mark.nightly
def test_a_process_keeps_its_part_of_a_row(folder: Path) -> None:
    """Of two rows' halves as much as of one row, and the keys and values of the other halves."""
    for shared, alone in zip(
        read_all(folder, CONTEXT, "ways"), read_all(folder, SHARDS, "ways"), strict=True
    ):
        assert int(shared["plain/saved"]) < 1.25 * int(alone["plain/saved"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [SHARDS, TENSOR, night(BOTH), CONTEXT])
def test_weights_are_divided_and_exported_whole(folder: Path, layout: str, family: str):
    weights = torch_policy(ModelSpec(folder=str(folder / family))).export_weights()
    total = sum(weight.numel() for weight in weights.values())
    for process, part in enumerate(read_all(folder, layout, "logits")):
        export = under(part, f"{family}/export")
        assert export.keys() == (weights.keys() if process == 0 else set())
        for name, weight in export.items():
            assert torch.equal(weight, weights[name]), name
        stored = int(part[f"{family}/stored"])
        assert stored == int(part[f"{family}/described"])
        assert stored < 0.55 * total if layout != BOTH else stored < 0.3 * total


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Learnt]:
    learnt = torch_learns(folder, ("qwen2-tied", "qwen3"))
    return learnt | {"coarse": learnt["qwen2-tied"]}


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        *itertools.product([SHARDS, TENSOR, RANKS, BOTH, CONTEXT], TRAINED),
        *(night(*case) for case in itertools.product([CONTEXT_TENSOR, CONTEXT_SHARDS], TRAINED)),
        *itertools.product([SHARDS, TENSOR, CONTEXT], ["value", "reward"]),
        *(night(CONTEXT_SHARDS, role) for role in ("value", "reward")),
    ],
)
def test_four_steps_learn_what_the_torch_engine_learns(
    folder: Path, expected: dict[str, Learnt], layout: str, role: str
):
    # Micro-batches are of 60 to 200 tokens here (4096 in "coarse") and of 4096 there.
    found = under(read_all(folder, layout, "train" if role in TRAINED else "roles")[0], role)
    weights, metrics = expected[role]
    if role in TRAINED:
        name = "model.layers.2.mlp.up_proj.weight"
        initial = read_weights(folder / FAMILY.get(role, role))[name]
        assert float((weights[name] - initial).abs().mean()) > 1e-3  # a hundred times the tolerance
    assert_as_torch(found, weights, metrics)


def test_a_process_alone_takes_part_in_no_collective(folder: Path) -> None:
    assert json.loads((folder / "alone.json").read_text()) == {"collectives": 0, "norm": True}


def test_a_family_without_a_plan_learns_the_same(folder: Path):
    policy = torch_policy(ModelSpec(architecture=architecture("gpt2")), optimizer=OPTIMIZER)
    metrics = train_policy(policy, load_batch(folder))
    found = read_all(folder, SHARDS, "gpt2")[0]
    torch.testing.assert_close(under(found, "weights"), policy.export_weights(), atol=1e-5, rtol=0)
    torch.testing.assert_close(under(found, "metric"), metrics, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("family", NEWEST)
def test_newest_families_learn_adapters_with_dropout_as_in_the_torch_engine(
    folder: Path, family: str
) -> None:
    batch, model = load_batch(folder), ModelSpec(architecture=architecture(family))
    policy = torch_policy(model, optimizer=OPTIMIZER, lora=DROPPED)
    before = policy.logprob(batch["tokens"], batch["mask"])
    found = under(read_all(folder, SHARDS, "newest")[0], family)
    torch.testing.assert_close(found.pop("before"), before, atol=1e-5, rtol=0)
    metrics = train_policy(policy, batch)
    assert_as_torch(found, policy.export_weights(), metrics)
    saved = torch_policy(ModelSpec(folder=str(folder / f"newest-{family}")))
    torch.testing.assert_close(
        saved.logprob(batch["tokens"], batch["mask"]),
        policy.logprob(batch["tokens"], batch["mask"]),
        atol=2e-5,
        rtol=0,
    )


def test_rows_in_pieces_teach_what_the_whole_batch_teaches(folder: Path):
    policy = resumable(folder)
    metrics = train_in_pieces(policy, load_batch(folder))
    for found in read_all(folder, "r2s2t1", "pieces"):
        said = {name: value for name, value in found.items() if name.startswith("metric/")}
        assert_metrics(under(said, "metric"), metrics)
    assert_as_torch(read_all(folder, "r2s2t1", "pieces")[0], policy.export_weights(), metrics)


@pytest.mark.parametrize("layout", [SHARDS, TENSOR, "r2s2t1"])
def test_frozen_parameters_stay_and_the_others_learn_as_in_the_torch_engine(
    folder: Path, layout: str
):
    assert_frozen_stay(folder, read_all(folder, layout, "frozen")[0])


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        *itertools.product(["torch", SHARDS, TENSOR], [BOTH, "r2s2t1"]),
        *(night(saved, "r2s1t2") for saved in ("torch", SHARDS, TENSOR)),
        *(night(saved, CONTEXT_SHARDS) for saved in ("torch", SHARDS, TENSOR)),
    ],
)
def test_a_state_goes_on_in_another_layout(folder: Path, saved: str, layout: str):
    policy = resumable(folder)
    policy.load_state(folder / f"state-{saved}")
    metrics = train_policy(policy, load_batch(folder), range(2, 3))
    found = under(read_all(folder, layout, "resume")[0], saved)
    assert_as_torch(found, policy.export_weights(), metrics)


@pytest.mark.parametrize("layout", [SHARDS, TENSOR, RANKS, BOTH, CONTEXT, night(CONTEXT_TENSOR)])
def test_the_torch_engine_goes_on_with_a_saved_state(folder: Path, layout: str):
    assert_torch_goes_on(folder, f"state-{layout}")


@pytest.mark.parametrize("layout", [CONTEXT, night(CONTEXT_TENSOR), night(CONTEXT_SHARDS)])
def test_gradients_are_those_of_whole_rows(folder: Path, layout: str):
    """Adam's first moment is a mean of the gradients of four steps."""
    found, expected = (
        saved_state(folder / name, "optimizer") for name in (f"state-{layout}", "state-torch")
    )
    moments = {name: value for name, value in expected.items() if name.startswith("first/")}
    assert moments
    for name, moment in moments.items():
        assert float((found[name] - moment).norm()) <= 1e-5 * float(moment.norm()), name


def test_bfloat16_weights_learn_through_a_float32_copy(folder: Path):
    found = read_all(folder, SHARDS, "half")[0]
    norm = assert_learns_in_16_bits(folder, found, f"half-{SHARDS}")
    # In float32 this norm is 1.3725, after three steps. In bfloat16 it depends on the processor's
    # kernels: 1.3728 and 1.4317 were seen on two, and 1.4511 under FSDP.
    assert norm == pytest.approx(1.3725, rel=0.08)
    assert float(found["metric/grad_norm"]) == pytest.approx(1.3725, rel=0.08)


@pytest.mark.parametrize("layout", [SHARDS, "r2s2t1", CONTEXT])
def test_adapters_learn_what_they_learn_in_the_torch_engine(folder: Path, layout: str):
    batch, model = load_batch(folder), ModelSpec(folder=str(folder / "qwen2-tied"))
    found = read_all(folder, layout, "adapters")
    policy = torch_policy(model, optimizer=OPTIMIZER, lora=LORA)
    start = policy.export_weights()
    before = policy.logprob(batch["tokens"], batch["mask"])
    metrics = train_policy(policy, batch)
    weights = policy.export_weights()
    assert_as_torch(under(found[0], "policy"), weights, metrics)
    name = "model.layers.2.mlp.up_proj.lora_A.weight"
    assert float((weights[name] - start[name]).abs().mean()) > 5e-4
    after = policy.logprob(batch["tokens"], batch["mask"])
    assert float((after - before).abs().max()) > 1e-2
    for at, expected in (("before", before), ("after", after)):
        rows = [found[process][at] for process in range(0, len(found), 2)]
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-5, rtol=0)
    critic = TorchValueSpec(zero_init_head=False, model=model, optimizer=OPTIMIZER, lora=LORA)
    values = critic.build(WorkerContext("critic", seed=7))
    metrics = train_value(values, batch)
    assert_as_torch(under(found[0], "value"), values.export_weights(), metrics)
    # Where weights are in bfloat16, 1.3 % were measured.
    norm = float(found[0]["policy/metric/grad_norm"])
    assert float(found[0]["half/metric/grad_norm"]) == pytest.approx(norm, rel=0.1)


def test_adapters_are_saved_merged_beside_them_and_as_a_state(folder: Path):
    batch, model = load_batch(folder), ModelSpec(folder=str(folder / "qwen2-tied"))
    after = read_all(folder, SHARDS, "adapters")[0]["after"]
    made = folder / f"adapted-{SHARDS}"
    again = torch_policy(model, optimizer=OPTIMIZER, lora=LORA)
    again.load_state(folder / f"state-adapters-{SHARDS}")
    for policy in (
        again,
        torch_policy(ModelSpec(folder=str(made))),
        torch_policy(model, lora=dataclasses.replace(LORA, folder=str(made / "adapter"))),
    ):
        found = policy.logprob(batch["tokens"], batch["mask"])
        torch.testing.assert_close(found, after, atol=1e-5, rtol=0)


def test_float32_adapters_are_merged_into_bfloat16_weights_as_in_the_torch_engine(folder: Path):
    half = ModelSpec(folder=str(folder / "qwen2-tied"), dtype="bfloat16")
    policy = torch_policy(half, lora=LORA)
    found = under(read_all(folder, SHARDS, "adapters")[0], "half")
    policy.load_weights({n: value for n, value in found.items() if "metric/" not in n})
    policy.save_pretrained(folder / "torch-half")
    saved, expected = (
        read_weights(folder / name) for name in (f"adapted-half-{SHARDS}", "torch-half")
    )
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def test_frozen_weights_below_adapters_are_checked_on_all_processes(folder: Path):
    first, second = ((folder / f"ruined-{SHARDS}-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert first.startswith(f"the weights that 'actor' starts from ('{folder / 'ruined'}') are ")


@pytest.mark.parametrize("layout", [SHARDS, TENSOR])
def test_folders_are_hugging_faces(folder: Path, layout: str):
    auto: Any = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(folder / f"policy-{layout}", local_files_only=True)
    initial = read_weights(folder / "qwen3")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, initial[name] + 1), name
    critic = under(read_all(folder, layout, "roles")[0], "value")
    saved = ModelSpec(folder=str(folder / f"critic-{layout}"))
    again = TorchValueSpec(model=saved).build(WorkerContext("x")).export_weights()
    assert bool(again["value_head.weight"].any())
    for name, weight in again.items():
        assert torch.equal(critic[name], weight), name


@pytest.mark.parametrize(
    ("shards", "tensor", "context"),
    [(2, 1, 1), (1, 2, 1), (2, 2, 1), (5, 2, 1), (2, 1, 2), (6, 2, 3)],
)
def test_the_planner_describes_it_the_same(shards: int, tensor: int, context: int):
    policy = torch_policy(ModelSpec(architecture=architecture("qwen3") | {"vocab_size": 64}))
    config = module_of(policy).config
    shape = shape_of(config.to_dict(), name="tiny", dtype="float32")
    weights = policy.export_weights()
    ours = divided_sharding(
        {name: tuple(weight.shape) for name, weight in weights.items()},
        shards=shards,
        tensor=tensor,
        dtype="float32",
    )
    layout = PlannedLayout(tp=tensor, dp=shards // context, cp=context, zero=3)
    planned = shard(shape, layout, range(shards * tensor))
    boxes = {p.name: set(planned.patterns[p.pattern]) for p in planned.params}
    assert {p.name: set(ours.patterns[p.pattern]) for p in ours.params} == boxes


REFUSALS = {
    "generate": "ConfigError: 'actor' is trained by the FSDP engine, which does not generate; "
    "give it a rollout engine (rollout=)",
    "train": "RuntimeError: 'actor' is frozen and cannot train; give its spec an optimizer= "
    "(OptimizerSpec)",
    "odd": "PlanError: tensor parallelism 2 does not divide the 61 words of this 'qwen2'; "
    "take more shards",
    "gpt2": "ConfigError: engine=fsdp has tensor parallelism for llama, qwen2 and qwen3, not for "
    "'gpt2'; leave engine.options.shards out, so that all processes that share the model divide "
    "it by rows",
    "adapters": "ConfigError: engine=fsdp does not divide the matrix products of adapters "
    "(model.lora.rank=1)\n    leave engine.options.shards out, so that all processes that share "
    "the model divide it by rows",
    "shards": "ConfigError: 'actor' has shards=3, which does not divide the 2 processes that "
    "share its model\n    set executor.tensor_parallel to a multiple of shards",
    "gpt2 context": "ConfigError: engine=fsdp has context parallelism for llama, qwen2, qwen3, "
    "where every layer attends to whole rows, not for this 'gpt2'\n    leave "
    "engine.options.context_parallel out",
}


@pytest.mark.parametrize("process", [0, 1])
def test_what_it_says_of_what_it_cannot_do(folder: Path, process: int):
    assert json.loads((folder / f"fsdp-refusals-{process}.json").read_text()) == REFUSALS


@pytest.mark.parametrize("layout", [BOTH, night("r2s1t2")])
def test_all_processes_stop_alike_at_numbers_that_are_none(folder: Path, layout: str):
    assert_ruined_alike(folder, layout, 4)
