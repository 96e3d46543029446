"""On-policy distillation by policy gradient: the teacher rates each token that the student sampled.

Lu and Thinking Machines Lab, "On-Policy Distillation", 2025: the advantage of a token is how much
likelier the teacher finds it than the student did, an estimate of -KL(student || teacher) there.
One number per token is asked of the teacher, so any engine that evaluates will do; `distillation`
learns more from each response, by what else the teacher might have said.
"""

from __future__ import annotations

from ...dataflow.options import option_class
from ..losses.tokens import ClippedPolicyLoss
from ..ops.kl import kl_estimate, response_kl
from ..options import PolicyUpdates, train_policy
from ..roles import PerSample, Policy, Prompts, Sampling, TrainMetrics


@option_class
class SampledDistillation(PolicyUpdates):
    """Options of distillation by policy gradient."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=1024)
    """Sampling of the student's responses."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """Clipping of the probability ratio, and how tokens and rows are weighed."""


def sampled_distillation_step(
    prompts: Prompts, actor: Policy, teacher: Policy, cfg: SampledDistillation
) -> tuple[TrainMetrics, PerSample]:
    """Sample from the student, and make likelier what the teacher finds likelier than it did."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    own = roll.behavior_logprob
    told = teacher.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    advantage = kl_estimate(roll.mask, logprob=told, ref_logprob=own, log_ratio_clamp=None)
    metrics = train_policy(actor, roll, advantage, cfg.loss, cfg)
    return metrics, response_kl(roll.mask, logprob=own, ref_logprob=told)
