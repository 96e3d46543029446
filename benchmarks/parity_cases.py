"""The comparisons of `parity.py`; runs in the environment of the packages compared with."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from parity_draws import (
    ACTOR,
    CASES,
    PACKAGES,
    Difference,
    Draw,
    case,
    on_masked,
    openrlhf_kl,
    openrlhf_loss,
    verl,
    verl_torch,
    with_gradient,
)
from penstock.algorithms import losses
from penstock.algorithms.losses import tokens
from penstock.algorithms.losses.tokens import TokenPolicyLoss
from penstock.algorithms.ops import advantages as ours
from penstock.algorithms.ops import kl, reductions, returns, rewards, rollout_correction
from penstock.algorithms.roles import PolicyBatch, PolicyOutput
from torch import Tensor

# Building blocks


@case("whitening", "verl masked_whiten", "advantages.whiten")
def _(d: Draw) -> tuple[Any, Any]:
    theirs = verl_torch.masked_whiten(d.advantage, d.floats)
    return ours.whiten(d.advantage, d.mask), on_masked(theirs, d)


@case("KL estimators k1, k2, k3", "verl kl_penalty", "kl.kl_estimate")
def _(d: Draw) -> tuple[Any, Any]:
    pairs = [
        (
            kl.kl_estimate(
                d.mask, logprob=d.logprob, ref_logprob=d.ref_logprob, estimator=name, value_clamp=10
            ),
            verl.kl_penalty(d.logprob, d.ref_logprob, name),
        )
        for name in ("k1", "k2", "k3")
    ]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


@case("KL estimators k1, k2, k3", "openrlhf compute_approx_kl", "kl.kl_estimate")
def _(d: Draw) -> tuple[Any, Any]:
    # They compute in single precision.
    pairs = [
        (
            kl.kl_estimate(d.mask, logprob=d.logprob, ref_logprob=d.ref_logprob, estimator=name),
            openrlhf_kl.compute_approx_kl(d.logprob, d.ref_logprob, kl_estimator=name),
        )
        for name in ("k1", "k2", "k3")
    ]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


@case("KL-shaped reward", "openrlhf compute_reward", "kl.kl_shaped_reward")
def _(d: Draw) -> tuple[Any, Any]:
    estimate = (d.logprob - d.ref_logprob) * d.mask
    theirs = openrlhf_kl.compute_reward(d.score, 0.05, estimate, d.mask, (-1.0, 1.0))
    mine = kl.kl_shaped_reward(
        d.score, d.mask, logprob=d.logprob, ref_logprob=d.ref_logprob, kl_coef=0.05, score_clip=1.0
    )
    return mine, theirs


@case("adaptive KL coefficient", "verl AdaptiveKLController", "kl.adaptive_kl_coef")
def _(d: Draw) -> tuple[Any, Any]:
    controller = verl.AdaptiveKLController(0.1, 6.0, 10_000)
    observed = float(d.score.abs().sum()) * 2
    controller.update(observed, 64)
    return kl.adaptive_kl_coef(0.1, observed_kl=observed, num_sequences=64), controller.value


@case("loss aggregation, three modes", "verl agg_loss", "reductions.aggregate")
def _(d: Draw) -> tuple[Any, Any]:
    modes: tuple[Any, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    mine = [reductions.aggregate(d.advantage, d.mask, mode=mode) for mode in modes]
    return torch.stack(mine), torch.stack([verl.agg_loss(d.advantage, d.floats, m) for m in modes])


# Advantages


@case("GAE, whitened", "verl compute_gae_advantage_return", "returns.gae, whiten")
def _(d: Draw) -> tuple[Any, Any]:
    advantage, target = verl.compute_gae_advantage_return(
        d.paid_last, d.value, d.floats, 0.99, 0.95
    )
    mine = returns.gae(d.mask, reward=d.paid_last, value=d.value, discount=0.99, lam=0.95)
    both = torch.stack([ours.whiten(mine.advantage, d.mask), mine.value_target])
    return both, torch.stack([on_masked(advantage, d), on_masked(target, d)])


@case("GAE", "torchrl generalized_advantage_estimate", "returns.gae")
def _(d: Draw) -> tuple[Any, Any]:
    functional: Any = importlib.import_module("torchrl.objectives.value.functional")
    whole = torch.ones_like(d.mask)
    reward, value = d.normal(*whole.shape), d.normal(*whole.shape)
    next_value = torch.cat([value[:, 1:], torch.zeros(len(value), 1).double()], 1)
    done = torch.zeros(*whole.shape, 1, dtype=torch.bool)
    done[:, -1] = True
    advantage, target = functional.generalized_advantage_estimate(
        0.99, 0.95, value[..., None], next_value[..., None], reward[..., None], done, done
    )
    mine = returns.gae(whole, reward=reward, value=value, discount=0.99, lam=0.95)
    return torch.stack([mine.advantage, mine.value_target]), torch.stack(
        [advantage.squeeze(-1), target.squeeze(-1)]
    )


@case("GRPO advantage", "verl compute_grpo_outcome_advantage", "advantages.group_advantage")
def _(d: Draw) -> tuple[Any, Any]:
    theirs, _ = verl.compute_grpo_outcome_advantage(d.paid_last, d.floats, d.group.numpy())
    mine = ours.group_advantage(d.score, d.group)
    return ours.broadcast_over_tokens(mine, d.mask), theirs


@case("Dr. GRPO advantage", "verl compute_grpo_outcome_advantage", "advantages.group_advantage")
def _(d: Draw) -> tuple[Any, Any]:
    theirs, _ = verl.compute_grpo_outcome_advantage(
        d.paid_last, d.floats, d.group.numpy(), norm_adv_by_std_in_grpo=False
    )
    mine = ours.group_advantage(d.score, d.group, divide_by_std=False)
    return ours.broadcast_over_tokens(mine, d.mask), theirs


@case("RLOO advantage", "verl compute_rloo_outcome_advantage", "advantages.leave_one_out")
def _(d: Draw) -> tuple[Any, Any]:
    theirs, _ = verl.compute_rloo_outcome_advantage(d.paid_last, d.floats, d.group.numpy())
    return ours.broadcast_over_tokens(ours.leave_one_out(d.score, d.group), d.mask), theirs


@case("ReMax advantage", "verl compute_remax_outcome_advantage", "advantages.remax_advantage")
def _(d: Draw) -> tuple[Any, Any]:
    greedy, estimate = d.normal(d.rows), (d.logprob - d.ref_logprob) * d.mask
    theirs, _ = verl.compute_remax_outcome_advantage(
        d.paid_last - 0.05 * estimate, greedy, d.floats
    )
    mine = ours.remax_advantage(
        d.score,
        d.mask,
        greedy_score=greedy,
        kl=estimate,
        kl_coef=0.05,
        kl_placement="return_to_go",
    )
    return mine, theirs


@case(
    "REINFORCE++ advantage",
    "verl compute_reinforce_plus_plus_outcome_advantage",
    "returns.return_to_go, whiten",
)
def _(d: Draw) -> tuple[Any, Any]:
    reward = d.paid_last - 0.05 * (d.logprob - d.ref_logprob) * d.mask
    config = SimpleNamespace(gamma=0.97)
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(reward, d.floats, config)
    return ours.whiten(returns.return_to_go(reward, d.mask, discount=0.97), d.mask), theirs


@case(
    "REINFORCE++ advantage with a baseline",
    "verl compute_reinforce_plus_plus_baseline_outcome_advantage",
    "advantages.group_advantage, whiten",
)
def _(d: Draw) -> tuple[Any, Any]:
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        d.paid_last, d.floats, d.group.numpy()
    )
    centered = ours.group_advantage(d.score, d.group, divide_by_std=False)
    return ours.whiten(ours.broadcast_over_tokens(centered, d.mask), d.mask), theirs


@case("V-trace", "rlax vtrace_td_error_and_advantage", "returns.vtrace")
def _(d: Draw) -> tuple[Any, Any]:
    jax: Any = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    rlax: Any = importlib.import_module("rlax")
    bootstrap, reward = d.normal(d.rows), d.normal(d.rows, d.width)
    value, ratio = d.normal(d.rows, d.width), d.normal(d.rows, d.width).mul(0.5).exp()
    next_value = torch.cat([value[:, 1:], bootstrap[:, None]], 1)
    vtrace = functools.partial(rlax.vtrace_td_error_and_advantage, lambda_=0.9)
    error, advantage, _ = jax.vmap(vtrace)(
        value.numpy(),
        next_value.numpy(),
        reward.numpy(),
        np.full(value.shape, 0.97),
        ratio.numpy(),
    )
    mine = returns.vtrace(
        torch.ones_like(d.mask),
        reward=reward,
        value=value,
        logprob=ratio.log(),
        behavior_logprob=torch.zeros_like(ratio),
        bootstrap_value=bootstrap,
        discount=0.97,
        lam=0.9,
    )
    theirs = np.stack([np.asarray(advantage), np.asarray(error) + value.numpy()])
    return torch.stack([mine.advantage, mine.value_target]), theirs


# Rewards


@case("overlong penalty", "trl get_soft_overlong_punishment", "rewards.overlong_penalty")
def _(d: Draw) -> tuple[Any, Any]:
    trl_rewards: Any = importlib.import_module("trl.rewards.other_rewards")
    lengths = d.mask.sum(1)
    theirs = trl_rewards.get_soft_overlong_punishment(7, 4)(
        completion_ids=[[1] * int(length) for length in lengths]
    )
    return rewards.overlong_penalty(lengths.double(), max_length=7, cache=4), theirs


# Losses, with gradients


@case("clipped policy loss", "verl compute_policy_loss_vanilla", "losses.clipped_policy_loss")
def _(d: Draw) -> tuple[Any, Any]:
    def theirs(logprob: Tensor) -> Tensor:
        return verl.compute_policy_loss_vanilla(
            d.behavior_logprob, logprob, d.advantage, d.floats, config=ACTOR
        )[0]

    def mine(logprob: Tensor) -> Tensor:
        per_token = tokens.clipped_policy_loss(
            logprob=logprob,
            behavior_logprob=d.behavior_logprob,
            advantage=d.advantage,
            eps_low=0.2,
            eps_high=0.28,
            dual_clip=3.0,
        )
        return reductions.aggregate(per_token, d.mask)

    return with_gradient(mine, d.logprob), with_gradient(theirs, d.logprob)


@case("clipped policy loss", "openrlhf PolicyLoss", "losses.clipped_policy_loss")
def _(d: Draw) -> tuple[Any, Any]:
    module = openrlhf_loss.PolicyLoss(dual_clip=3.0)

    def mine(logprob: Tensor) -> Tensor:
        per_token = tokens.clipped_policy_loss(
            logprob=logprob,
            behavior_logprob=d.behavior_logprob,
            advantage=d.advantage,
            dual_clip=3.0,
        )
        return reductions.aggregate(per_token, d.mask)

    def theirs(logprob: Tensor) -> Tensor:
        return module(logprob, d.behavior_logprob, d.advantage, d.floats)[0]

    return with_gradient(mine, d.logprob), with_gradient(theirs, d.logprob)


@case("clipped value loss", "verl compute_value_loss", "losses.clipped_value_loss")
def _(d: Draw) -> tuple[Any, Any]:
    def theirs(value: Tensor) -> Tensor:
        return verl.compute_value_loss(value, d.value_target, d.old_value, d.floats, 0.2)[0]

    return with_gradient(lambda value: _value_loss(value, d), d.value), with_gradient(
        theirs, d.value
    )


@case("clipped value loss", "openrlhf ValueLoss", "losses.clipped_value_loss")
def _(d: Draw) -> tuple[Any, Any]:
    module = openrlhf_loss.ValueLoss(0.2)

    def theirs(value: Tensor) -> Tensor:
        return module(value, d.old_value, d.value_target, d.floats)

    return with_gradient(lambda value: _value_loss(value, d), d.value), with_gradient(
        theirs, d.value
    )


def _value_loss(value: Tensor, d: Draw) -> Tensor:
    per_token = tokens.clipped_value_loss(
        value=value, old_value=d.old_value, value_target=d.value_target
    )
    return reductions.aggregate(per_token, d.mask)


@case("reward model, with margin", "openrlhf PairWiseLoss", "losses.bradley_terry_loss")
def _(d: Draw) -> tuple[Any, Any]:
    margin, rejected = d.normal(d.rows).abs(), d.normal(d.rows)

    def mine(score: Tensor) -> Tensor:
        return tokens.bradley_terry_loss(
            chosen_score=score, rejected_score=rejected, margin=margin
        ).mean()

    def theirs(score: Tensor) -> Tensor:
        return openrlhf_loss.PairWiseLoss()(score, rejected, margin)

    return with_gradient(mine, d.score), with_gradient(theirs, d.score)


def _loss_of(loss: TokenPolicyLoss, d: Draw, logprob: Tensor, weight: Tensor | float = 1) -> Tensor:
    advantage = d.advantage * weight
    batch = PolicyBatch(
        tokens=d.mask.long(),
        mask=d.mask,
        behavior_logprob=d.behavior_logprob,
        advantage=advantage,
    )
    return loss(PolicyOutput(logprob=logprob), batch, loss.totals(batch)).total


def _policy_case(theirs: Callable[..., Any], d: Draw, loss: TokenPolicyLoss) -> tuple[Any, Any]:
    """A policy loss of verl against ours."""

    def other(logprob: Tensor) -> Tensor:
        return theirs(d.behavior_logprob, logprob, d.advantage, d.floats, config=ACTOR)[0]

    mine = partial(_loss_of, loss, d)
    return with_gradient(mine, d.logprob), with_gradient(other, d.logprob)


@case("GSPO loss", "verl compute_policy_loss_gspo", "losses.ClippedPolicyLoss")
def _(d: Draw) -> tuple[Any, Any]:
    loss = losses.ClippedPolicyLoss(
        ratio_level="sequence_mean_token", eps_high=0.28, aggregation="seq-mean-token-mean"
    )
    return _policy_case(verl.compute_policy_loss_gspo, d, loss)


@case("GSPO loss", "openrlhf PolicyLoss", "losses.ClippedPolicyLoss")
def _(d: Draw) -> tuple[Any, Any]:
    module = openrlhf_loss.PolicyLoss(policy_loss_type="gspo")

    def theirs(old: Tensor, new: Tensor, advantage: Tensor, mask: Tensor, *, config: Any) -> Any:
        del config
        return module(new, old, advantage, mask)

    loss = losses.ClippedPolicyLoss(ratio_level="sequence_mean", aggregation="seq-mean-token-mean")
    return _policy_case(theirs, d, loss)


@case("CISPO loss", "verl compute_policy_loss_cispo", "losses.CappedWeightLoss")
def _(d: Draw) -> tuple[Any, Any]:
    loss = losses.CappedWeightLoss(weight_floor=0.8, weight_cap=1.28)
    return _policy_case(verl.compute_policy_loss_cispo, d, loss)


@case(
    "policy loss with token weights",
    "openrlhf PolicyLoss(is_correction_level='token')",
    "rollout_correction.rollout_weight",
)
def _(d: Draw) -> tuple[Any, Any]:
    rollout_logprob = (d.behavior_logprob + 0.3 * d.normal(d.rows, d.width)) * d.mask
    module = openrlhf_loss.PolicyLoss(
        is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1)
    )
    weight = rollout_correction.rollout_weight(
        d.mask,
        logprob=d.behavior_logprob,
        behavior_logprob=rollout_logprob,
        correction=rollout_correction.RolloutCorrection(cap=1.1),
    )

    def mine(logprob: Tensor) -> Tensor:
        return _loss_of(losses.ClippedPolicyLoss(), d, logprob, weight)

    def theirs(logprob: Tensor) -> Tensor:
        return module(logprob, d.behavior_logprob, d.advantage, d.floats, rollout_logprob)[0]

    return with_gradient(mine, d.logprob), with_gradient(theirs, d.logprob)


@case("DPO, plain, smoothed, and IPO", "openrlhf DPOLoss", "losses.dpo_loss")
def _(d: Draw) -> tuple[Any, Any]:
    rejected, ref_chosen, ref_rejected = (d.normal(d.rows) for _ in range(3))
    forms: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {}),
        ({"label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        ({"loss_type": "ipo"}, {"ipo": True}),
    )
    mine = [
        with_gradient(
            lambda chosen, options=options: losses.dpo_loss(
                chosen, rejected, ref_chosen, ref_rejected, beta=0.3, **options
            ).mean(),
            d.score,
        )
        for options, _ in forms
    ]
    theirs = [
        with_gradient(
            lambda chosen, options=options: openrlhf_loss.DPOLoss(0.3, **options)(
                chosen, rejected, ref_chosen, ref_rejected
            )[0],
            d.score,
        )
        for _, options in forms
    ]
    return torch.stack(mine), torch.stack(theirs)


def main() -> None:
    """Run all cases; the result is the last line, as JSON."""
    draws = int(sys.argv[1])
    found: list[dict[str, Any]] = []
    for one in CASES:
        difference = Difference()
        for seed in range(draws):
            difference.see(*one.compare(Draw(seed)))
        found.append(
            {
                "what": one.what,
                "theirs": one.theirs,
                "ours": one.ours,
                "difference": difference.value,
            }
        )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps({"draws": draws, "versions": versions, "cases": found}))


if __name__ == "__main__":
    main()
