"""REFUEL: regress the difference of two futures on the log-ratios of the turn in which they part.

Gao et al., "Regressing the Relative Future: Efficient Policy Optimization for Multi-turn RLHF",
2024, algorithm 1. Two conversations are the same up to a turn that is chosen at random, and go on
from there to their ends, each by itself: what either earns from there on is an unbiased sample of
the turn's value, and nothing is compared that was said after different histories. The loss is
`rebel`'s over the tokens of that turn alone. A pair that ended before its turn came teaches
nothing.
"""

from __future__ import annotations

from ...dataflow.graph.tracer import op
from ...dataflow.options import PositiveInt, option_class
from ..losses.sequence import ComparedPairBatch, RebelLoss
from ..options import train_on
from ..roles import Agent, Policy, Prompts, Sampling, TrainMetrics
from ..roles.language import TurnIndex, TurnNumber
from ..roles.language_tables import TokenMask


@op(scope="row")
def branch_turn(mask: TokenMask, turn: TurnIndex, branch: TurnNumber) -> TokenMask:
    """The tokens of the turn in which a conversation parts from its partner: bool[rows, T].

    Args:
        mask: bool[rows, T].
        turn: i64[rows, T].
        branch: i64[rows], of `Conversations`.
    """
    return mask & (turn == branch[:, None])


@option_class
class Refuel:
    """Options of REFUEL."""

    sampling: Sampling = Sampling(num_samples=2, max_new_tokens=256, max_total_tokens=2048)
    """Sampling of turns; two conversations make a pair."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a conversation; the one in which a pair parts is below it."""
    loss: RebelLoss = RebelLoss(report_entropy=True)
    """The regression and its step size."""
    epochs: PositiveInt = 4
    """Passes over each step's pairs; with one update nothing but its gradient is regressed."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        if self.sampling.num_samples != 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but Refuel compares exactly "
                "two conversations about a prompt; set it to 2"
            )


def refuel_step(prompts: Prompts, actor: Policy, agent: Agent, cfg: Refuel) -> TrainMetrics:
    """Hold pairs of conversations that part in one turn, and regress the difference."""
    held = actor.converse(
        prompts.prompt,
        prompts.prompt_id,
        agent,
        cfg.sampling,
        max_turns=cfg.max_turns,
        branch=True,
    )
    batch = ComparedPairBatch(
        prompt_id=held.prompt_id,
        tokens=held.tokens,
        mask=branch_turn(held.mask, held.turn, held.branch),
        behavior_logprob=held.behavior_logprob,
        score=held.score,
    )
    return train_on(actor, cfg.loss, batch, cfg)
