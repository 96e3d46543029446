"""Responses as the rows that rewards are given."""

from __future__ import annotations

import math

import torch
from penstock.algorithms.roles import Reward
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.models.tokenizer import TokenizerSpec, pad_rows
from torch import Tensor

TOKENIZER = TokenizerSpec().build()
CONTEXT = WorkerContext(role="reward")


def rows(*responses: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a prompt "?" and a response with its end of sequence, all of problem 0."""
    prompt = TOKENIZER.encode("?")
    tokens = pad_rows([*prompt, *TOKENIZER.encode(r), TOKENIZER.eos_id] for r in responses)
    mask = tokens >= 0
    mask[:, :1] = False
    return tokens, mask, torch.zeros(len(responses), dtype=torch.int64)


def scores_of(reward: Reward, *responses: str) -> list[float | None]:
    """None where there is no score."""
    scores = reward.score(*rows(*responses)).tolist()
    return [None if math.isnan(score) else score for score in scores]
