"""A process reward model: where steps end, and what it shares with reward models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from penstock.algorithms.ops.rewards import process_shaped_reward
from penstock.algorithms.roles import ProcessReward
from penstock.dataflow.runtime.worker_protocol import WorkerContext, drain_metrics
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec, pad_rows
from penstock.workers.rewards.process_reward import TorchProcessRewardSpec, step_ends
from torch_models import architecture

TOKENIZER = TokenizerSpec(alphabet="0123456789+=\n;")
MODEL = ModelSpec(architecture=architecture("qwen2-tied"))
CONTEXT = WorkerContext(role="prm", seed=3)


def rows(*texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = TOKENIZER.build()
    tokens = pad_rows([*tokenizer.encode("1="), *tokenizer.encode(text)] for text in texts)
    mask = tokens >= 0
    mask[:, :2] = False
    return tokens, mask


def places(ends: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in ends]


def test_steps_end_at_delimiters_and_at_the_response_s_end() -> None:
    tokens, mask = rows("1\n2\n", "12", "\n\n3", "")
    tokenizer = TOKENIZER.build()
    assert places(step_ends(tokens, mask, tokenizer, "\n", {})) == [[3, 5], [3], [2, 3, 4], []]
    assert places(step_ends(tokens, mask, tokenizer, ";", {})) == [[5], [3], [4], []]
    mask[0, 3] = False
    assert places(step_ends(tokens, mask, tokenizer, "\n", {}))[0] == [5]


@pytest.mark.slow
def test_the_last_step_s_score_is_the_reward_model_s(tmp_path: Path) -> None:
    model = TorchRewardModelSpec(model=MODEL).build(CONTEXT)
    model.save_pretrained(tmp_path)
    folder = ModelSpec(folder=str(tmp_path))
    spec = TorchProcessRewardSpec(model=folder, tokenizer=TOKENIZER, sigmoid=False)
    prm = spec.build(CONTEXT)
    assert isinstance(prm, ProcessReward)
    tokens, mask = rows("1\n2\n3", "12", "\n")
    found = prm.score_steps(tokens, mask, torch.zeros(len(tokens), dtype=torch.int64))
    assert places(found.step_end) == [[3, 5, 6], [3], [2]]
    assert not found.step_score[~found.step_end].any()
    whole = model.score(tokens, mask, torch.zeros(3, dtype=torch.int64))
    last = torch.stack(
        [row[end].flatten()[-1] for row, end in zip(found.step_score, found.step_end, strict=True)]
    )
    torch.testing.assert_close(last, whole)
    first, first_mask = rows("1\n")
    torch.testing.assert_close(
        found.step_score[0, 3], model.score(first, first_mask, torch.zeros(1, dtype=torch.int64))[0]
    )
    metrics = drain_metrics(prm)
    assert metrics["steps/mean"].value == pytest.approx(5 / 3)
    squashed = TorchProcessRewardSpec(model=folder, tokenizer=TOKENIZER).build(CONTEXT)
    between = squashed.score_steps(
        tokens, mask, torch.zeros(len(tokens), dtype=torch.int64)
    ).step_score
    ends = found.step_end
    torch.testing.assert_close(between[ends], found.step_score[ends].sigmoid())
    none = torch.zeros_like(between)
    assert (process_shaped_reward(none, mask, step_score=between, step_end=ends) <= 0.02).all()


def test_rows_without_a_response_have_no_steps() -> None:
    prm = TorchProcessRewardSpec(model=MODEL, tokenizer=TOKENIZER).build(CONTEXT)
    tokens, mask = rows("", "")
    found = prm.score_steps(tokens, mask, torch.zeros(len(tokens), dtype=torch.int64))
    assert not found.step_end.any()
    assert not found.step_score.any()


def test_an_empty_delimiter_is_refused() -> None:
    with pytest.raises(ValueError, match="delimiter is empty"):
        TorchProcessRewardSpec(model=MODEL, tokenizer=TOKENIZER, delimiter="")
