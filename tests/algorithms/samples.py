"""Rows with everything any loss reads, and every loss there is: what properties are tested on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from penstock.algorithms.losses import (
    BradleyTerryLoss,
    CappedWeightLoss,
    ClippedPolicyLoss,
    ClippedValueLoss,
    CrossEntropyLoss,
    DPOLoss,
    KTOLoss,
    RebelLoss,
    ReferenceKLPolicyLoss,
    ReinforceLoss,
)
from penstock.algorithms.losses.sequence import ComparedPairBatch
from penstock.algorithms.papers.a_lol import ALoLLoss
from penstock.algorithms.papers.kimi import MirrorDescentLoss
from penstock.algorithms.papers.ma_rlhf import MacroPolicyBatch, MacroPolicyLoss
from penstock.algorithms.papers.margin_modelling import MarginLoss
from penstock.algorithms.papers.p3o import P3OLoss
from penstock.algorithms.papers.safe_rlhf import CostModelLoss
from penstock.algorithms.roles import (
    Demonstrations,
    FeedbackBatch,
    PolicyBatch,
    PolicyOutput,
    PreferencePairs,
    ReferencePairBatch,
    ReferencePolicyBatch,
    ScoredPairs,
    ScoreOutput,
    ValueBatch,
    ValueOutput,
)
from penstock.dataflow.graph.role import Loss, LossSum
from torch import Tensor


def number_of(
    loss: Loss[Any, Any],
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    **more: Tensor,
) -> Tensor:
    """A policy loss of plain columns, as one number; an advantage may be one for each row."""
    if advantage.ndim == 1:
        advantage = advantage[:, None].expand(mask.shape)
    kind = ReferencePolicyBatch if more else PolicyBatch
    batch = kind(
        tokens=mask.long(),
        mask=mask,
        behavior_logprob=behavior_logprob,
        advantage=advantage,
        **more,
    )
    return loss(PolicyOutput(logprob=logprob), batch, loss.totals(batch)).total


SEEDS = st.integers(0, 2**31 - 1)
GARBAGE = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)


@dataclass(frozen=True)
class Data:
    """Columns of some rows, and what models say of them now."""

    logprob: Tensor
    columns: dict[str, Tensor]

    def take(self, rows: Tensor) -> Data:
        return Data(self.logprob[rows], {name: c[rows] for name, c in self.columns.items()})

    def said(self, output: type) -> Tensor:
        """What a model says: of each token, or of each row if it gives scores."""
        if output is PolicyOutput:
            return self.logprob
        return self.columns["value" if output is ValueOutput else "said_score"]

    def widened(self, width: int) -> Data:
        """More padding at the end of every row."""

        def wider(column: Tensor) -> Tensor:
            fill = (
                False if column.dtype == torch.bool else -1 if column.dtype == torch.long else 9.0
            )
            return torch.nn.functional.pad(column, (0, width), value=fill)

        columns = {n: wider(c) if c.ndim == 2 else c for n, c in self.columns.items()}
        return Data(wider(self.logprob), columns)


def sample(seed: int, spread: float = 0.3) -> Data:
    """Two responses to each of 2 to 4 prompts, shuffled."""
    random = torch.Generator().manual_seed(seed)
    num_prompts, width = 2 + seed % 3, 7
    rows = 2 * num_prompts
    start = torch.randint(1, 3, (rows, 1), generator=random)
    length = torch.randint(1, 5, (rows, 1), generator=random)
    place = torch.arange(width)
    mask = (place >= start) & (place < start + length)
    behavior = -torch.rand(rows, width, generator=random, dtype=torch.float64) - 0.5
    noise = torch.randn(rows, width, generator=random, dtype=torch.float64)
    reference = behavior + 0.1 * noise.flip(0)
    row_advantage = torch.randn(rows, 1, generator=random, dtype=torch.float64)
    ids = torch.arange(num_prompts).repeat(2)[torch.randperm(rows, generator=random)] + 40
    garbage = GARBAGE[torch.randint(0, 4, (rows, width), generator=random)]

    def spoilt(column: Tensor) -> Tensor:
        return torch.where(mask, column, garbage)

    numbers = torch.randn(4, rows, width, generator=random, dtype=torch.float64)
    chosen = (ids[:, None] == ids[None, :]).tril(-1).any(dim=1)
    return Data(
        spoilt(behavior + spread * noise),
        {
            "value": spoilt(numbers[0]),
            "old_value": spoilt(numbers[1]),
            "value_target": spoilt(numbers[2]),
            "said_score": numbers[3, :, 0],
            "pair_id": ids,
            "chosen": chosen,
            "desirable": chosen,
            "kl": numbers[3, :, :1].mean().clamp(min=0).expand(rows),
            "macro_id": torch.where(mask, (mask.cumsum(1) - 1) // 2, -1),
            "tokens": torch.where(place < start + length, place + 1, -1),
            "mask": mask,
            "behavior_logprob": spoilt(behavior),
            "advantage": spoilt(row_advantage.expand(rows, width)),
            "ref_logprob": spoilt(reference),
            "prompt_id": ids,
            "score": torch.randn(rows, generator=random, dtype=torch.float64),
        },
    )


LOSSES: dict[str, tuple[Loss[Any, Any], type]] = {
    "reinforce": (ReinforceLoss(aggregation="seq-mean-token-sum"), PolicyBatch),
    "ppo": (ClippedPolicyLoss(), PolicyBatch),
    "dual_clip": (ClippedPolicyLoss(dual_clip=3.0), PolicyBatch),
    "grpo": (ClippedPolicyLoss(aggregation="seq-mean-token-mean"), PolicyBatch),
    "dr_grpo": (ClippedPolicyLoss(aggregation="constant", aggregation_length=9), PolicyBatch),
    "dapo": (ClippedPolicyLoss(eps_high=0.28), PolicyBatch),
    "rloo": (
        ClippedPolicyLoss(ratio_level="sequence_product", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "gspo": (
        ClippedPolicyLoss(ratio_level="sequence_mean", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "gspo_token": (
        ClippedPolicyLoss(ratio_level="sequence_mean_token", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "cispo": (CappedWeightLoss(), PolicyBatch),
    "reference_grpo": (ReferenceKLPolicyLoss(kl_coef=0.1), ReferencePolicyBatch),
    "reinforce_pp_baseline": (
        ReferenceKLPolicyLoss(kl_coef=0.1, kl_estimator="k2"),
        ReferencePolicyBatch,
    ),
    "kimi": (MirrorDescentLoss(), PolicyBatch),
    "a_lol": (ALoLLoss(), PolicyBatch),
    "a_lol_token": (ALoLLoss(ratio="token"), PolicyBatch),
    "a_lol_kl": (ALoLLoss(ratio="none", kl_coef=0.1), PolicyBatch),
    "p3o": (P3OLoss(), ComparedPairBatch),
    "p3o_joint": (P3OLoss(clip="joint"), ComparedPairBatch),
    "rebel": (RebelLoss(), ComparedPairBatch),
    "macro": (MacroPolicyLoss(), MacroPolicyBatch),
    "critic": (ClippedValueLoss(), ValueBatch),
    "sft": (CrossEntropyLoss(), Demonstrations),
    "dpo": (DPOLoss(label_smoothing=0.1, sft_coef=0.5), ReferencePairBatch),
    "dpo_norm": (DPOLoss(loss_type="sigmoid_norm", beta=5.0), ReferencePairBatch),
    "ipo": (DPOLoss(loss_type="ipo"), ReferencePairBatch),
    "ipo_average": (DPOLoss(loss_type="ipo", ipo_length="average"), ReferencePairBatch),
    "hinge": (DPOLoss(loss_type="hinge"), ReferencePairBatch),
    "robust": (DPOLoss(loss_type="robust", label_smoothing=0.1), ReferencePairBatch),
    "kto": (KTOLoss(undesirable_weight=1.3), FeedbackBatch),
    "reward_modelling": (BradleyTerryLoss(margin=0.3, centering_coef=0.01), PreferencePairs),
    "margin_modelling": (MarginLoss(), ScoredPairs),
    "cost_modelling": (CostModelLoss(safe_from=0.0), ScoredPairs),
}

OUTPUTS: dict[type, type] = {
    ValueBatch: ValueOutput,
    PreferencePairs: ScoreOutput,
    ScoredPairs: ScoreOutput,
}
"""What a model gives a loss that reads such a batch; all others read a policy's output."""

SCORED = {kind for kind, output in OUTPUTS.items() if output is ScoreOutput}
"""Batches of which a loss counts rows and their scores, not tokens."""


def batch_of(kind: type, data: Data) -> Any:
    return kind(**{f.name: data.columns[f.name] for f in dataclasses.fields(kind)})


def value_and_slope(name: str, data: Data) -> tuple[Tensor, Tensor]:
    """A loss over all rows, and its gradient on what the model says."""
    loss, kind = LOSSES[name]
    batch, output = batch_of(kind, data), OUTPUTS.get(kind, PolicyOutput)
    said = data.said(output).clone().requires_grad_()
    total = loss(output(said), batch, loss.totals(batch)).total
    return total.detach(), torch.autograd.grad(total, said)[0]


def loss_of_part(name: str, data: Data, totals: Tensor) -> LossSum:
    """What these rows add to a loss whose whole minibatch has `totals`."""
    loss, kind = LOSSES[name]
    said = data.said(OUTPUTS.get(kind, PolicyOutput)).clone().requires_grad_()
    return loss(OUTPUTS.get(kind, PolicyOutput)(said), batch_of(kind, data), totals)
