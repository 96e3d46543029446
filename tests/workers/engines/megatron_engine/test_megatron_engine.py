"""Real processes on gloo: what megatron-core computes and learns, against the torch engine.

Two groups of processes are started, once: two processes that take on tp 2, pp 2 and dp 2 in turn,
and four for tp 2 x pp 2. Each test looks at a part of what they found.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forked_ranks import is_night, night, run_groups
from megatron_models import (
    FAMILIES,
    Learnt,
    assert_as_torch,
    assert_frozen_stay,
    assert_learns_in_16_bits,
    assert_ruined_alike,
    assert_says_the_same,
    assert_torch_goes_on,
    load_batch,
    read_found,
    read_weights,
    resumable,
    saved_state,
    torch_learns,
    torch_policy,
    train_in_pieces,
    train_policy,
    under,
    write_models,
)
from penstock.workers.models.spec import ModelSpec
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANK = Path(__file__).parents[2] / "megatron_rank.py"
Layout = tuple[int, int, int]
TP2, PP2, DP2, BOTH = (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)
TRAINED = ("qwen2-tied", "llama", "qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where the processes left what they found."""
    made = tmp_path_factory.mktemp("megatron")
    write_models(made)
    policy = resumable(made)
    train_policy(policy, load_batch(made))
    policy.save_state(made / "state-torch")
    two = [
        "2,1,1:logits+tied+train+resume+half+written+disagree+refusals+frozen+ruin+recomputed+pieces",
        "1,1,2:logits+tied+train+resume+disagree+frozen+ruin+recomputed+pieces",
        "1,2,1:logits+tied+train+resume+disagree+frozen+ruin+pieces",
    ]
    four = ["2,1,2:tied+resume+written"]
    if is_night(request):
        four.append("2,1,2:logits+recomputed")
    run_groups(made, RANK, (2, two), (4, four))
    return made


def lead(folder: Path, layout: Layout, part: str) -> dict[str, Tensor]:
    """What the process that answers for rank 0 found."""
    tp, dp, pp = layout
    return read_found(folder, *layout, part)[tp * dp * (pp - 1)]


@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_rows_in_pieces_teach_what_the_whole_batch_teaches(folder: Path, layout: Layout):
    policy = resumable(folder)
    metrics = train_in_pieces(policy, load_batch(folder))
    assert_as_torch(lead(folder, layout, "pieces"), policy.export_weights(), metrics)


@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_frozen_parameters_stay_and_the_others_learn_as_in_the_torch_engine(
    folder: Path, layout: Layout
):
    assert_frozen_stay(folder, lead(folder, layout, "frozen"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [DP2, TP2, PP2, night(BOTH)])
def test_logits_and_log_probabilities_equal_hugging_faces(
    folder: Path, layout: Layout, family: str
):
    # Each of two data-parallel ranks computes with tp 1 and pp 1, and all rows here.
    tensor = layout[0]
    last = read_found(folder, *layout, "logits")[-tensor:]
    assert_says_the_same(folder, family, last, tensor)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [TP2, PP2, night(BOTH)])
def test_exported_weights_are_the_loaded_ones(folder: Path, layout: Layout, family: str):
    tp = layout[0]
    found = read_found(folder, *layout, "logits")
    weights = torch_policy(ModelSpec(folder=str(folder / family))).export_weights()
    for process, part in enumerate(found):
        export = under(part, f"{family}/export")
        answers = process == len(found) - tp
        assert export.keys() == (weights.keys() if answers else set())
        for name, weight in export.items():
            assert torch.equal(weight, weights[name]), name
        stored, described = part[f"{family}/stored"].tolist()
        assert stored == described
        assert stored < sum(weight.numel() for weight in weights.values())


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Learnt]:
    return torch_learns(folder, TRAINED)


@pytest.mark.parametrize(
    ("layout", "role"),
    [*itertools.product([TP2, PP2, DP2], [*TRAINED, "value", "reward"]), (BOTH, "qwen2-tied")],
)
def test_four_steps_learn_what_the_torch_engine_learns(
    folder: Path, expected: dict[str, Learnt], layout: Layout, role: str
):
    # Micro-batches are of 60 to 200 tokens here and of 4096 there; one of the policies trains with
    # sequence parallelism, and on two data-parallel ranks one shares no optimizer state.
    part = "tied" if role == "qwen2-tied" else "train"
    found = under(lead(folder, layout, part), role)
    if layout == DP2:
        other = under(read_found(folder, *layout, part)[1], role)
        for name in found.keys() - {"before"}:
            assert torch.equal(found[name], other[name]), name
        if "before" in found:
            found["before"] = torch.cat([found["before"], other["before"]])
    weights, metrics = expected[role]
    if role in TRAINED:
        initial = read_weights(folder / role)["model.layers.2.mlp.up_proj.weight"]
        learnt = weights["model.layers.2.mlp.up_proj.weight"]
        assert float((learnt - initial).abs().mean()) > 1e-3  # a hundred times the tolerance
    assert_as_torch(found, weights, metrics)


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        ("tp2dp1pp1", PP2),
        ("tp2dp1pp1", DP2),
        ("tp2dp1pp1", BOTH),
        ("tp1dp1pp2", DP2),
        ("tp1dp1pp2", BOTH),
        ("torch", TP2),
        ("torch", PP2),
        ("torch", DP2),
    ],
)
def test_a_state_goes_on_in_another_layout(folder: Path, saved: str, layout: Layout):
    tp, dp, pp = layout
    again = folder / f"again-{saved}-tp{tp}dp{dp}pp{pp}"
    for kind in ("weights", "optimizer"):
        before, after = saved_state(folder / f"state-{saved}", kind), saved_state(again, kind)
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]), name
    policy = resumable(folder)
    policy.load_state(folder / f"state-{saved}")
    metrics = train_policy(policy, load_batch(folder), range(2, 3))
    found = under(lead(folder, layout, "resume"), saved)
    assert_as_torch(found, policy.export_weights(), metrics)


@pytest.mark.parametrize("layout", [TP2, PP2, night(BOTH)])
def test_activations_computed_again_change_nothing(folder: Path, layout: Layout):
    # With sequence parallelism wherever tensor parallelism is 2.
    for part in read_found(folder, *layout, "recomputed"):
        kept, again = under(part, "kept"), under(part, "again")
        saved = int(kept.pop("saved")), int(again.pop("saved"))
        assert kept.keys() == again.keys()
        for name in kept:
            torch.testing.assert_close(
                again[name], kept[name], atol=1e-5, rtol=1e-5, equal_nan=True, msg=name
            )
        # The last stage computes its outputs here: two or four layers and a head.
        assert saved[1] < saved[0] / 3 if any(saved) else layout[2] == 2, saved


@pytest.mark.parametrize("layout", ["tp2dp1pp1", "tp1dp1pp2", "tp1dp2pp1", "tp2dp1pp2"])
def test_the_torch_engine_goes_on_with_a_megatron_state(folder: Path, layout: str):
    assert_torch_goes_on(folder, f"state-{layout}")


def test_bfloat16_weights_learn_through_a_float32_copy(folder: Path):
    found = lead(folder, TP2, "half")
    norm = assert_learns_in_16_bits(folder, found, "half-tp2dp1pp1")
    assert float(found["metric/grad_norm"]) == pytest.approx(norm, rel=0.05)
    saved = resumable(folder)
    saved.load_state(folder / "state-torch")
    for name, weight in saved.export_weights().items():
        assert torch.equal(found[f"loaded/{name}"], weight.bfloat16()), name


@pytest.mark.parametrize("layout", [TP2, BOTH])
def test_folders_are_hugging_faces(folder: Path, layout: Layout):
    tp, dp, pp = layout
    found = lead(folder, layout, "written")
    auto: Any = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(folder / f"policy-tp{tp}dp{dp}pp{pp}", local_files_only=True)
    initial = read_weights(folder / "qwen3")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, initial[name] + 1), name
    zeroed = under(found, "zeroed")
    assert zeroed.keys() == initial.keys()
    assert not any(bool(weight.any()) for weight in zeroed.values())
    critic, again = under(found, "critic"), under(found, "again")
    assert critic.keys() == again.keys()
    assert bool(critic["value_head.weight"].any())
    for name, weight in critic.items():
        assert torch.equal(again[name], weight), name


@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_what_another_model_sampled_changes_no_process(folder: Path, layout: Layout):
    tp, dp, pp = layout
    for process, found in enumerate(read_found(folder, *layout, "disagree")):
        said = (folder / f"disagree-tp{tp}dp{dp}pp{pp}-{process}.txt").read_text()
        assert said.startswith("step 0: 'actor' and what sampled for it disagree by ")
        before, after = under(found, "before"), under(found, "after")
        assert before.keys() == after.keys()
        for name, weight in before.items():
            assert torch.equal(weight, after[name]), name
    # Nothing is left of the refused call: the next ones learn what they always do.
    again = under(lead(folder, layout, "disagree"), "metric")
    expected = under(lead(folder, layout, "tied"), "qwen2-tied/metric")
    assert again.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(again[name], expected[name], atol=2e-6, rtol=1e-4, msg=name)


REFUSALS = {
    "generate": "ConfigError: 'actor' is trained by the Megatron engine, which does not generate; "
    "give it a rollout engine (rollout=)",
    "train": "RuntimeError: 'actor' is frozen and cannot train; give its spec an optimizer= "
    "(OptimizerSpec)",
    "names": "ValueError: weights do not fit: missing none, unknown ['extra']; they must come from "
    "a model of the same architecture",
    "shape": "ValueError: weight 'model.norm.weight': expected shape [48], got [5]",
    "gpt2": "ConfigError: the Megatron engine has no model_type 'gpt2'; it has llama, mistral, "
    "mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe. Train this model with engine=torch",
    "window": "ConfigError: the Megatron engine cannot compute a mistral model with "
    "sliding_window=8; train it with engine=torch",
    "biased": "ConfigError: the Megatron engine cannot compute a llama model with mlp_bias=True; "
    "train it with engine=torch",
    "yarn": "ConfigError: the Megatron engine cannot compute rotary positions of type 'yarn'; it "
    "has default, linear and llama3. Train this model with engine=torch",
    "odd": "PlanError: layout: tp=2 does not divide the vocabulary of 61 (model 'qwen2')",
    "one_key": "PlanError: tp=2 does not divide 1 key heads, as the Megatron engine needs (model "
    "'qwen2'); take a tp that does",
}


@pytest.mark.parametrize("process", [0, 1])
def test_what_it_says_of_what_it_cannot_do(folder: Path, process: int):
    assert json.loads((folder / f"refusals-{process}.json").read_text()) == REFUSALS


@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_all_processes_stop_alike_at_numbers_that_are_none(folder: Path, layout: Layout):
    tp, dp, pp = layout
    assert_ruined_alike(folder, f"tp{tp}dp{dp}pp{pp}", 2)
