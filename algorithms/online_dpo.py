"""Online DPO: pairs are the best and the worst of the policy's own responses to a prompt.

Guo et al., "Direct Language Model Alignment from Online AI Feedback", 2024. Its loss does not read
the log-probabilities of the policy that sampled. Noukhovitch et al. ("Asynchronous RLHF", 2024)
found it to lose less with old rollouts than PPO.
"""

from __future__ import annotations

from ..dataflow.options import FiniteFloat, PositiveInt, option_class
from .losses.preference import DPOLoss
from .ops.kl import NoEos, finished_score
from .ops.pairs import Ties, best_and_worst
from .options import train_on
from .roles import PerSample, Policy, Prompts, ReferencePairBatch, Reward, Sampling, TrainMetrics


@option_class
class OnlineDPO:
    """Options of online DPO."""

    sampling: Sampling = Sampling(num_samples=2, temperature=0.7, max_new_tokens=53)
    """Sampling of the responses; of more than two the best and the worst make the pair."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    loss: DPOLoss = DPOLoss()
    """Function of the two log-ratios, and its beta."""
    ties: Ties = "drop"
    """Prompts whose responses all score the same: left out ("drop"), or the first one wins."""
    no_eos: NoEos = "replace"
    """Treatment of the score of a response that was cut off: "replace" it, "subtract" from it,
    set it to "zero", or "none"."""
    no_eos_score: FiniteFloat = -1.0
    """The score that "replace" gives such a response."""
    no_eos_penalty: FiniteFloat = 1.0
    """Amount that "subtract" takes from its score."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        if self.sampling.num_samples < 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but a pair needs two "
                "responses; set it to 2 or more"
            )


def online_dpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: OnlineDPO
) -> tuple[TrainMetrics, PerSample]:
    """Sample, pair the best response with the worst, and train on the pairs."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    ruled = finished_score(
        score,
        roll.finished,
        no_eos=cfg.no_eos,
        no_eos_score=cfg.no_eos_score,
        no_eos_penalty=cfg.no_eos_penalty,
    )
    pairs = best_and_worst(roll, ruled, ties=cfg.ties)
    batch = ReferencePairBatch(
        pair_id=pairs.pair_id,
        tokens=pairs.tokens,
        mask=pairs.mask,
        chosen=pairs.chosen,
        ref_logprob=ref.logprob(pairs.tokens, pairs.mask, temperature=cfg.sampling.temperature),
    )
    return train_on(actor, cfg.loss, batch, cfg), score
