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

from ..dataflow.options import Fraction, PositiveFraction, PositiveInt, option_class
from .losses import ClippedPolicyLoss, ClippedValueLoss
from .ops.advantages import whiten
from .ops.rollout_correction import RolloutCorrection
from .ops.utterances import (
    ActionValue,
    Utterances,
    bellman_targets,
    utterance_advantage,
    utterances,
)
from .options.policy_updates import train_policy
from .roles import Agent, Policy, Prompts, Sampling, TrainMetrics, ValueBatch, ValueModel


@option_class
class ArCHer:
    """Options of ArCHer."""

    sampling: Sampling = Sampling(max_new_tokens=256, max_total_tokens=2048)
    """How turns are sampled; see `Policy.converse` for its lengths."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in a conversation."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's."""
    epochs: PositiveInt = 1
    """Passes of the policy over each step's conversations; one update is REINFORCE, more PPO."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass, of the policy and of the critic."""
    discount: Fraction = 0.9
    """gamma, per turn."""
    critic_rounds: PositiveInt = 4
    """How often in a step targets are computed, the critic is trained and the slower copy moves."""
    critic_epochs: PositiveInt = 1
    """Passes of the critic over the conversations in each round."""
    target_share: PositiveFraction = 0.5
    """How far the slower copy moves towards the critic in each round."""
    action_value: ActionValue = "critic"
    """What Q(s, a) is in advantages: the critic's, as in the paper, or the "backup" that it learns
    from, which needs a good V alone and takes in what the environment answered."""
    whiten_advantages: bool = True
    """Shift advantages to mean 0 and scale them to variance 1 over the batch."""
    policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The policy's loss, which clips the probability ratio."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None)
    """The critic's squared error; its mean is over values, two to a turn."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
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
