"""What steps share that ask judges whether a response keeps all constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...dataflow.options import PositiveFloat, PositiveInt, option_class
from ..ops.advantages import paired_baseline
from ..ops.kl import response_kl
from ..ops.rewards import calibrated_score
from ..roles.language import PerSample, Policy, Prompts, Reward, Rollout, Sampling
from .policy_updates import check_groups


@option_class
class Constrained:
    """Options of such steps."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=1024)
    """How responses are sampled; the baseline's is the reference's likeliest one."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    kl_max: PositiveFloat = 10.0
    """KL to the reference, in nats per response, from which a response counts for nothing."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_groups(self)


@dataclass(frozen=True)
class Compared:
    """Responses compared with the reference's own, and the judges' verdicts on them."""

    roll: Rollout
    baseline: Rollout
    """The reference's likeliest response to each prompt."""
    score: PerSample
    """How likely a response is better than the baseline."""
    passed: PerSample
    """1 where all constraints hold, else 0."""
    kl: PerSample


def sample_and_judge(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: Constrained
) -> Compared:
    """Sample responses and the reference's own, score both, and ask the judges about the former."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    once = replace(cfg.sampling, num_samples=1, temperature=0.0)
    baseline = ref.generate(prompts.prompt, prompts.prompt_id, once)
    own = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    other = reward.score(baseline.tokens, baseline.mask, baseline.prompt_id)
    paired = paired_baseline(roll.prompt_id, baseline=other, baseline_prompt_id=baseline.prompt_id)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    return Compared(
        roll=roll,
        baseline=baseline,
        score=calibrated_score(own, baseline_score=paired),
        passed=judges.score(roll.tokens, roll.mask, roll.prompt_id),
        kl=response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob),
    )
