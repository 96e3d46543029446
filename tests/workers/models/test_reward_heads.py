"""Reward models that other libraries saved: the head is found, and scores are theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.algorithms.losses import BradleyTerryLoss
from penstock.algorithms.roles import Feedback
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec, TorchValueSpec
from penstock.workers.models.model_folder import saved_head
from penstock.workers.models.spec import Head, ModelSpec
from penstock.workers.models.tokenizer import pad_rows
from penstock.workers.training.optimizer import OptimizerSpec
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_models import BASE, EOS, architecture, make_policy

PAD = 1
GEMMA = {**BASE, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}
LENGTHS = (9, 14, 5, 1)


def trained_classifier(fields: dict[str, Any], pad: int, steps: int = 3) -> Any:
    """A classifier of one label that transformers has trained on pairs for a few steps."""
    kinds = {**fields, "pad_token_id": pad, "eos_token_id": EOS, "num_labels": 1}
    config = transformers.AutoConfig.for_model(str(kinds.pop("model_type")), **kinds)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        auto: Any = transformers.AutoModelForSequenceClassification
        model = auto.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            scores = model(torch.randint(3, 61, (4, 7))).logits[:, 0]
            loss = -torch.nn.functional.logsigmoid(scores[:2] - scores[2:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def padded(rows: list[list[int]], pad: int, side: str) -> dict[str, Tensor]:
    """Rows of one width; positions count from each row's first token, wherever that stands."""
    width = max(map(len, rows))
    left = [width - len(row) if side == "left" else 0 for row in rows]
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(ids.shape, dtype=torch.long)
    for place, (row, before) in enumerate(zip(rows, left, strict=True)):
        ids[place, before : before + len(row)] = torch.tensor(row)
        mask[place, before : before + len(row)] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


CLASSIFIERS = {
    **{name: architecture(name) for name in ("llama", "qwen2-tied", "qwen3", "mistral-window")},
    "gpt2": architecture("gpt2"),
    "gemma3_text": GEMMA,
}


@pytest.mark.slow
@pytest.mark.parametrize("pad", [PAD, EOS], ids=["own-padding", "ends-pad"])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_classifier_trained_with_transformers_scores_here_as_there(
    family: str, pad: int, tmp_path: Path
) -> None:
    """In all paddings; where the token that pads ends responses, the score stands before it."""
    model = trained_classifier(CLASSIFIERS[family], pad)
    model.save_pretrained(tmp_path / "m")
    seeded = torch.Generator().manual_seed(1)
    rows = [[*torch.randint(3, 61, (n,), generator=seeded).tolist(), EOS] for n in LENGTHS]
    spec = TorchRewardModelSpec(model=ModelSpec(folder=str(tmp_path / "m")))
    tokens = pad_rows(rows)
    mask = (tokens >= 0) & (torch.arange(tokens.shape[1]) >= 1)
    worker = spec.build(WorkerContext("reward"))
    found = worker.score(tokens, mask, torch.arange(len(rows)))
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])
        sides = [model(**padded(rows, pad, side)).logits[:, 0] for side in ("left", "right")]
    for scores in (alone, *sides):
        torch.testing.assert_close(found, scores, atol=1e-5, rtol=0)
    assert found.std() > 1e-3  # far from the tolerance
    worker.save_pretrained(tmp_path / "again")  # a folder of ours, which reads it where it did
    again = TorchRewardModelSpec(model=ModelSpec(folder=str(tmp_path / "again")))
    read = again.build(WorkerContext("reward")).score(tokens, mask, torch.arange(len(rows)))
    assert torch.equal(read, found)


def with_head(folder: Path, **heads: Tensor) -> Path:
    """A policy's folder with further tensors beside the model's own."""
    make_policy("qwen2").save_pretrained(folder)
    file = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in heads.items()}
    save_file({**load_file(file), **named}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["score", "v_head.summary", "classifier", "value_head", "regression_head"]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_head_is_found_by_its_shape(name: str, bias: bool, tmp_path: Path) -> None:
    weight, offset = torch.randn(1, 48), torch.randn(1)
    tensors = {f"{name}.weight": weight, **({f"{name}.bias": offset} if bias else {})}
    folder = with_head(tmp_path / "m", **tensors)
    spec = ModelSpec(folder=str(folder))
    Head("score").check(spec)
    assert Head("score").is_saved(str(folder))
    read = Head("score").first_weights(spec, WorkerContext("reward"))
    assert torch.equal(read.weight, weight)
    assert torch.equal(read.bias, offset if bias else torch.zeros(1))
    critic = TorchValueSpec(model=spec).build(WorkerContext("critic"))
    assert not critic.export_weights()["value_head.weight"].any()  # a score is no value
    with pytest.raises(ConfigError, match=f"unexpected: {name}"):
        Head("lm_head").check(spec)


@pytest.mark.slow
def test_a_classifier_goes_on_learning_from_labels(tmp_path: Path) -> None:
    """Single responses that are good or bad; micro-batches of one row change nothing."""
    trained_classifier(architecture("qwen2-tied"), PAD).save_pretrained(tmp_path)
    tokens = torch.tensor([[5, 9, 9, EOS], [6, 30, 31, EOS], [7, 9, 11, EOS], [8, 31, 33, EOS]])
    mask = torch.arange(4)[None] >= torch.ones(4, 1)
    good = torch.tensor([True, False, True, False])
    rows = Feedback(pair_id=torch.arange(4) + 7, tokens=tokens, mask=mask, chosen=good)
    spec = TorchRewardModelSpec(
        model=ModelSpec(folder=str(tmp_path)), optimizer=OptimizerSpec(lr=3e-3)
    )
    whole, apart = (
        replace(spec, micro_batch_tokens=size).build(WorkerContext("reward")) for size in (64, 4)
    )
    first, other = (worker.train(BradleyTerryLoss(), rows).metrics for worker in (whole, apart))
    assert first["score_mean"].value == pytest.approx(other["score_mean"].value)
    torch.testing.assert_close(apart.export_weights(), whole.export_weights(), atol=1e-5, rtol=1e-4)
    for _ in range(20):
        metrics = whole.train(BradleyTerryLoss(), rows).metrics
        if metrics["accuracy"].value == 1:
            break
    assert ((whole.score(tokens, mask, rows.pair_id) > 0) == good).all()


@pytest.mark.slow
def test_heads_that_cannot_score_are_refused(tmp_path: Path) -> None:
    def refusal(**heads: Tensor) -> str:
        folder = with_head(tmp_path / "m", **heads)
        with pytest.raises(ConfigError) as error:
            Head("score").check(ModelSpec(folder=str(folder)))
        return str(error.value).replace(str(folder), "M")

    assert refusal(score__weight=torch.zeros(3, 48)) == (
        "model folder 'M' has a head of 3 labels, and a score is one number\n"
        "    give a model that was trained with num_labels=1"
    )
    assert refusal(a__weight=torch.zeros(1, 48), b__weight=torch.zeros(1, 48)) == (
        "model folder 'M' has 2 layers beside the language model, and which of them scores is not "
        "known: a.weight [1, 48]; b.weight [1, 48]\n    give a model with one linear head, or a "
        "copy of the folder with that one alone"
    )
    assert "unexpected: score.0.bias" in refusal(
        score__0__bias=torch.zeros(7), score__2__weight=torch.zeros(1, 48)
    )
    assert saved_head(with_head(tmp_path / "none")) == {}


def test_a_mixture_s_router_is_no_head(tmp_path: Path) -> None:
    make_policy("mixtral").save_pretrained(tmp_path)
    assert "architectures" in json.loads((tmp_path / "config.json").read_text())
    assert saved_head(tmp_path) == {}
