"""DAPO: GRPO with a higher upper clip, dynamic sampling, a mean over tokens, and overlong shaping.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025. A step trains on
the first `per_step.prompts / filling.max_rounds` groups that are neither all right nor all wrong.
The filter looks at correctness, the advantage at the shaped reward.

A group whose responses are all right, or all wrong, has no advantage. A step drops such groups and
asks for more prompts: the graph has one set of nodes per round, and a round that is not needed asks
for no prompts, which costs next to nothing. So the number of rounds is bounded, the graph is
recorded like any other, and what depends on data is how many rows pass through it. A step reads
`max_rounds` times as many prompts as it trains on; each round has a share of them, and what it
leaves is not asked in this step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from ..dataflow.graph.tracer import op
from ..dataflow.options import FiniteFloat, Int, PositiveInt, option_class
from .grpo import GRPO
from .losses.tokens import ClippedPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.groups import Groups, floating, stacked
from .ops.rewards import is_correct, overlong_penalty, response_length, signed_score, weighted_score
from .options import train_policy
from .roles import TrainMetrics
from .roles.language import Policy, Reward
from .roles.language_tables import PerSample, PromptId, Prompts, Rollout, Sampling

WhenShort = Literal["train", "error"]
"""With too few groups after the last round: train on those there are, or end the run."""


@option_class
class DynamicSampling:
    """Rules of keeping groups, and limits of sampling more."""

    max_rounds: PositiveInt = 3
    """Most times that a step samples; it reads this many times the prompts it trains on."""
    oversample: Annotated[FiniteFloat, Ge(1)] = 2.0
    """Prompts that a later round asks for, per group that is missing."""
    metric: Literal["accuracy", "score"] = "accuracy"
    """The metric that must differ within a group: correctness of responses, or verifier scores."""
    correct_score: FiniteFloat = 1.0
    """From which score on a response counts as correct."""
    when_short: WhenShort = "train"
    """With too few groups after the last round: train on those there are, or end the run."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollout(Rollout):
    """A rollout with what its responses score."""

    score: PerSample


def scored_part(roll: Rollout, score: PerSample, rows: Tensor) -> ScoredRollout:
    """Some rows of a rollout, by numbers or flags, with their scores."""
    columns = {**vars(roll), "score": score}
    return ScoredRollout(**{name: column[rows] for name, column in columns.items()})


def sample_until_full(
    prompts: Prompts,
    actor: Policy,
    reward: Reward,
    sampling: Sampling,
    cfg: DynamicSampling,
) -> tuple[ScoredRollout, PerSample]:
    """Sample and score, round after round, until there are enough groups that teach something.

    Returns:
        As many groups as one of `cfg.max_rounds` shares of the prompts has, or fewer (see
        `WhenShort`); and of the first round 1 for each row of a group that was kept, 0 for others.
    """
    correct_score = cfg.correct_score if cfg.metric == "accuracy" else None
    kept: ScoredRollout | None = None
    first_mixed: PerSample | None = None
    for index in range(cfg.max_rounds):
        ask = prompts_to_ask(
            prompts, kept, round_index=index, max_rounds=cfg.max_rounds, oversample=cfg.oversample
        )
        roll = actor.generate(ask.prompt, ask.prompt_id, sampling)
        score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
        mixed = is_mixed(score, roll.prompt_id, correct_score=correct_score)
        new = kept_groups(roll, score=score, mixed=mixed)
        first_mixed = mixed if first_mixed is None else first_mixed
        kept = new if kept is None else joined(kept, new)
    assert kept is not None, "there is at least one round"
    assert first_mixed is not None, "there is at least one round"
    full = filled_batch(kept, prompts, max_rounds=cfg.max_rounds, when_short=cfg.when_short)
    return full, first_mixed


@op(scope="group")
def is_mixed(
    score: PerSample, prompt_id: PromptId, *, correct_score: float | None = None
) -> PerSample:
    """1 for every row of a group whose responses differ, 0 for others: f32[rows].

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row, in any order.
        correct_score: Only whether a score is at least this counts; None: scores themselves do.
    """
    score = floating(score)
    metric = score if correct_score is None else is_correct(score, threshold=correct_score)
    groups = Groups(metric, prompt_id)
    # Without any score the highest is -inf and the lowest inf.
    return groups.per_group_row((groups.highest() > groups.lowest()).double()).to(score)


@op(scope="row", makes_rows=True)
def kept_groups(roll: Rollout, *, score: PerSample, mixed: PerSample) -> ScoredRollout:
    """The rows of `roll` where `mixed` is not 0, with their scores."""
    return scored_part(roll, score, mixed != 0)


@op(scope="batch", makes_rows=True)
def prompts_to_ask(
    prompts: Prompts,
    kept: ScoredRollout | None = None,
    *,
    round_index: int,
    max_rounds: int,
    oversample: float = 2.0,
) -> Prompts:
    """The prompts of one round: the first share of the step's prompts, or what is missing still.

    Args:
        prompts: All prompts of the step, `max_rounds` shares.
        kept: The groups there are after the rounds before; None in the first round.
        round_index: Counted from 0.
        max_rounds: How many rounds there are.
        oversample: How many prompts a later round asks for each group that is missing.

    Returns:
        Up to a share of the prompts; none if nothing is missing.
    """
    share = _share(prompts, max_rounds)
    count = share
    if kept is not None:
        missing = share - _num_groups(kept.prompt_id)
        count = min(share, math.ceil(max(missing, 0) * oversample))
    rows = slice(round_index * share, round_index * share + count)
    return Prompts(prompt=prompts.prompt[rows], prompt_id=prompts.prompt_id[rows])


@op(scope="batch", makes_rows=True)
def joined(first: ScoredRollout, second: ScoredRollout) -> ScoredRollout:
    """The rows of both, one after another."""
    return ScoredRollout(
        prompt_id=torch.cat([first.prompt_id, second.prompt_id]),
        tokens=stacked(first.tokens, second.tokens, -1),
        mask=stacked(first.mask, second.mask, False),
        behavior_logprob=stacked(first.behavior_logprob, second.behavior_logprob, 0.0),
        finished=torch.cat([first.finished, second.finished]),
        version=stacked(first.version, second.version, -1),
        score=torch.cat([first.score, second.score]),
    )


@op(scope="batch", makes_rows=True)
def filled_batch(
    kept: ScoredRollout,
    prompts: Prompts,
    *,
    max_rounds: int,
    when_short: WhenShort = "train",
) -> ScoredRollout:
    """The first groups that were kept, as many as a step trains on.

    Args:
        kept: The groups of all rounds.
        prompts: All prompts of the step, `max_rounds` shares.
        max_rounds: How many rounds there were.
        when_short: See `WhenShort`.

    Raises:
        ValueError: If there is no group at all, or too few and `when_short` is "error".
    """
    wanted, found = _share(prompts, max_rounds), _num_groups(kept.prompt_id)
    if found == 0 or (found < wanted and when_short == "error"):
        raise ValueError(
            f"after {max_rounds} rounds {found} of {wanted} groups have responses that differ, "
            "and the others teach nothing: the task is too hard or too easy for this policy; "
            "choose other prompts, raise sampling.num_samples, or raise max_rounds and with it the "
            "prompts per step"
        )
    first = list(dict.fromkeys(kept.prompt_id.tolist()))[:wanted]
    rows = torch.isin(kept.prompt_id, kept.prompt_id.new_tensor(first))
    return ScoredRollout(**{name: column[rows] for name, column in vars(kept).items()})


def _num_groups(prompt_id: Tensor) -> int:
    return len(torch.unique(prompt_id))


def _share(prompts: Prompts, max_rounds: int) -> int:
    """Groups that a step trains on.

    Raises:
        ValueError: If the step's prompts cannot be shared out evenly.
    """
    share, rest = divmod(len(prompts.prompt_id), max_rounds)
    if rest or not share:
        raise ValueError(
            f"a step reads {len(prompts.prompt_id)} prompts, which {max_rounds} rounds do not "
            "share evenly; make the prompts per step a multiple of max_rounds"
        )
    return share


@option_class
class DAPO(GRPO):
    """Options of DAPO."""

    sampling: Sampling = Sampling(num_samples=16, max_new_tokens=20480)
    """Sampling of the responses; `num_samples` is the size of a group."""
    filling: DynamicSampling = DynamicSampling()
    """Rules of keeping groups, and limits of sampling more."""
    signed: bool = True
    """Reward a correct response with 1 and another with -1, in place of the verifier's score."""
    overlong: Literal["piecewise", "linear", "none"] = "piecewise"
    """Penalty for a response in its last `overlong_cache` tokens, capped at 1 or not. To leave
    responses that were cut off out of the loss, use "none" and `finished_only`."""
    overlong_cache: Int = 4096
    """Tokens over which the penalty grows."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(eps_high=0.28, report_entropy=True)
    """Clipping, wider upwards; the mean is over tokens."""
    num_minibatches: PositiveInt = 16
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.overlong_cache <= self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong_cache is {self.overlong_cache}; expected at least 1 and at most "
                f"{self.sampling.max_new_tokens:g}"
            )


def dapo_step(
    prompts: Prompts, actor: Policy, reward: Reward, cfg: DAPO
) -> tuple[TrainMetrics, PerSample]:
    """Sample until enough groups are mixed, and train on them; reports the first round's share."""
    roll, mixed = sample_until_full(prompts, actor, reward, cfg.sampling, cfg.filling)
    score = shaped_score(roll.score, roll, cfg)
    advantage = group_advantage(
        score,
        roll.prompt_id,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg), mixed


def shaped_score(score: PerSample, roll: Rollout, cfg: DAPO) -> PerSample:
    """A verifier's score as plus or minus 1, less the penalty for a response that is too long."""
    if cfg.signed:
        score = signed_score(is_correct(score, threshold=cfg.filling.correct_score))
    if cfg.overlong == "none":
        return score
    penalty = overlong_penalty(
        response_length(roll.mask),
        max_length=cfg.sampling.max_new_tokens,
        cache=cfg.overlong_cache,
        form=cfg.overlong,
    )
    return weighted_score(score, other=penalty)
