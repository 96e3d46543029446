"""ArCHer: a critic of whole turns, learned by temporal differences, and a policy of their tokens.

Zhou et al., "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL", 2024, section
3. The critic learns Q(s, a) and V(s) of turns towards a slower copy of itself, which follows it;
the policy learns each token of a turn with the turn's advantage, Q(s, a) - V(s). One model says
both values, before and after a turn, as the authors' two heads share a backbone.

Departures: the critic learns from the conversations of its own step, `critic_rounds` times over,
and not from a buffer of earlier ones, as `Replay` keeps steps of environments and not texts. So the
turn in the target of V is one that the policy has just said. There is no second critic, of whose
values the lower counts. With `action_value="backup"`, which the shipped configuration sets, an
advantage takes the target of Q for Q. However a conversation ends, nothing comes after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.tracer import op
from ...dataflow.options import Fraction, PositiveFraction, PositiveInt, option_class
from ..losses.tokens import ClippedPolicyLoss, ClippedValueLoss
from ..ops.advantages import whiten
from ..ops.final_state import lengthened
from ..ops.groups import scored_tokens
from ..ops.macro_actions import sum_over_macros
from ..ops.reductions import check_token_columns, unknown, zero_where_masked_out
from ..options import PolicyUpdates, train_policy
from ..roles import Agent, Policy, Prompts, Sampling, TrainMetrics, ValueBatch, ValueModel
from ..roles.language import Conversations, TurnIndex
from ..roles.language_tables import PerToken, TokenMask

ActionValue = Literal["critic", "backup"]
"""Source of Q(s, a) in an advantage: the critic's value of the turn, or the target that it learns
this from, `r + discount * V(s')`, with what the environment answered."""


@dataclass(frozen=True, kw_only=True)
class Utterances(Conversations):
    """Conversations with one token more in every row, and where a critic is asked about turns.

    Example:
        Prompt `[5]`, a turn `[8, 2]`, the answer `[9]`, a turn `[7, 2]`:
        `tokens = [[5, 8, 2, 9, 7, 2, 2]]`, `turn = [[-1, 0, 0, -1, 1, 1, -1]]`,
        `states = [[F, T, F, T, T, F, T]]`: V at 1 and 4, Q at 3 and 6.
    """

    states: TokenMask
    """True on the first token of each turn and on the slot after its last one."""


@op(scope="row", makes_rows=True)
def utterances(held: Conversations) -> Utterances:
    """Lengthen every row by one token, a copy of its last one, and find where turns begin and end.

    A conversation without a score has neither tokens nor states to learn from.

    Args:
        held: Token columns [rows, T].

    Returns:
        Token columns [rows, T + 1].
    """
    longer = lengthened(held)
    states = _first(longer["turn"]) | _after(longer["turn"])
    longer["mask"] = scored_tokens(longer["mask"], held.score)
    return Utterances(**longer, states=scored_tokens(states, held.score))


@op(scope="row")
def bellman_targets(
    turn: TurnIndex, *, reward: PerToken, value: PerToken, discount: float
) -> PerToken:
    """Compute targets for a critic's values of turns from those of its slower copy.

    `Q(s, a) <- r + discount * V(s')` after a turn, `V(s) <- Q(s, a)` before it. After the last turn
    comes nothing. Where nothing was shown after a turn, its slot is the next turn's first token:
    there V is asked, and Q is `r + discount * V(s')` itself.

    Args:
        turn: i64[rows, T], of `Utterances`.
        reward: f32[rows, T].
        value: f32[rows, T], the slower copy's at `states`.
        discount: gamma, per turn.

    Returns:
        f32[rows, T]; 0 outside `states`.

    Raises:
        ValueError: If shapes differ.
    """
    _, q, backup = _of_turns(turn, reward, value, discount)
    first, after = _first(turn), _after(turn)
    toward_v, toward_q = _over_tokens(q, turn), _over_tokens(backup, turn).roll(1, dims=1)
    return torch.where(first, toward_v, zero_where_masked_out(toward_q, after))


@op(scope="row")
def utterance_advantage(
    turn: TurnIndex,
    *,
    reward: PerToken,
    value: PerToken,
    discount: float,
    action_value: ActionValue = "critic",
) -> PerToken:
    """`A(s, a) = Q(s, a) - V(s)` of each turn, for all of its tokens.

    Args:
        turn: i64[rows, T], of `Utterances`.
        reward: f32[rows, T]; "critic" reads it only where nothing was shown after a turn.
        value: f32[rows, T], the critic's at `states`.
        discount: gamma, per turn.
        action_value: What Q(s, a) is.

    Returns:
        f32[rows, T]; 0 outside turns.

    Raises:
        ValueError: If shapes differ or `action_value` is unknown.
    """
    if action_value not in ("critic", "backup"):
        raise unknown("action_value", action_value, ActionValue)
    v, q, backup = _of_turns(turn, reward, value, discount)
    return _over_tokens((q if action_value == "critic" else backup) - v, turn)


def _first(turn: Tensor) -> Tensor:
    """bool[rows, T]: the first token of each turn."""
    return (turn >= 0) & (turn != F.pad(turn, (1, 0), value=-1)[:, : turn.shape[1]])


def _after(turn: Tensor) -> Tensor:
    """bool[rows, T]: the slot after each turn's last token."""
    before = F.pad(turn, (1, 0), value=-1)[:, : turn.shape[1]]
    return (before >= 0) & (turn != before)


def _of_turns(
    turn: Tensor, reward: Tensor, value: Tensor, discount: float
) -> tuple[Tensor, Tensor, Tensor]:
    """f32[rows, K] each: V and Q of turns, and `r + discount * V` of the turn that comes next."""
    check_token_columns(turn >= 0, reward=reward, value=value)
    first, after = _first(turn), _after(turn)
    v = sum_over_macros(zero_where_masked_out(value, first), turn)
    next_v = F.pad(v, (0, 1))[:, 1:]
    backup = sum_over_macros(reward, turn) + discount * next_v
    asked = zero_where_masked_out(value, after & ~first).roll(-1, dims=1)
    shown = (after & ~first).to(value).roll(-1, dims=1)
    q = torch.where(sum_over_macros(shown, turn) > 0, sum_over_macros(asked, turn), backup)
    return v, q, backup


def _over_tokens(of_turns: Tensor, turn: Tensor) -> Tensor:
    """f32[rows, T]: each turn's number on all of its tokens, 0 outside turns."""
    if not of_turns.shape[1]:
        return torch.zeros_like(turn, dtype=of_turns.dtype)
    return zero_where_masked_out(of_turns.gather(1, turn.clamp(min=0)), turn >= 0)


@option_class
class ArCHer(PolicyUpdates):
    """Options of ArCHer."""

    sampling: Sampling = Sampling(max_new_tokens=256, max_total_tokens=2048)
    """Sampling of turns; see `Policy.converse` for its lengths."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a conversation."""
    epochs: PositiveInt = 1
    """Passes of the policy over each step's conversations; one update is REINFORCE, more PPO."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass, of the policy and of the critic."""
    discount: Fraction = 0.9
    """gamma, per turn."""
    critic_rounds: PositiveInt = 4
    """Rounds of a step: targets are computed, the critic is trained and the slower copy moves."""
    critic_epochs: PositiveInt = 1
    """Passes of the critic over the conversations in each round."""
    target_share: PositiveFraction = 0.5
    """Step of the slower copy towards the critic in each round."""
    action_value: ActionValue = "critic"
    """Source of Q(s, a) in advantages: the critic, as in the paper, or the "backup" that it learns
    from, which needs a good V alone and takes in what the environment answered."""
    whiten_advantages: bool = True
    """Shift advantages to mean 0 and scale them to variance 1 over the batch."""
    policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The policy's loss, which clips the probability ratio."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None)
    """The critic's squared error; its mean is over values, two to a turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_loss.eps is not None:
            raise ValueError(
                f"value_loss.eps is {self.value_loss.eps}, which bounds how far values move in a "
                "step, but ArCHer's slower copy does that by target_share; leave eps null"
            )


def archer_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    target: ValueModel,
    agent: Agent,
    cfg: ArCHer,
) -> tuple[TrainMetrics, TrainMetrics, TrainMetrics]:
    """Hold conversations, train the critic of turns and its slower copy, and then the policy."""
    held = utterances(
        actor.converse(
            prompts.prompt, prompts.prompt_id, agent, cfg.sampling, max_turns=cfg.max_turns
        )
    )
    learned, followed = train_turn_critic(critic, target, held, cfg)
    for _ in range(cfg.critic_rounds - 1):
        learned, followed = train_turn_critic(critic, target, held, cfg)
    value = critic.value(held.tokens, held.states)
    advantage = utterance_advantage(
        held.turn,
        reward=held.reward,
        value=value,
        discount=cfg.discount,
        action_value=cfg.action_value,
    )
    if cfg.whiten_advantages:
        advantage = whiten(advantage, held.mask, variance="biased")
    return train_policy(actor, held, advantage, cfg.policy_loss, cfg), learned, followed


def train_turn_critic(
    critic: ValueModel, target: ValueModel, held: Utterances, cfg: ArCHer
) -> tuple[TrainMetrics, TrainMetrics]:
    """One round: targets by the slower copy, the critic towards them, the copy after the critic."""
    value = target.value(held.tokens, held.states)
    batch = ValueBatch(
        tokens=held.tokens,
        mask=held.states,
        old_value=value,
        value_target=bellman_targets(
            held.turn, reward=held.reward, value=value, discount=cfg.discount
        ),
    )
    learned = critic.train(
        cfg.value_loss, batch, epochs=cfg.critic_epochs, num_minibatches=cfg.num_minibatches
    )
    return learned, target.follow(critic, share=cfg.target_share)
