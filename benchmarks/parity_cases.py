"""The comparisons of `parity.py`; runs in the environment of the packages compared with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from penstock.algorithms import advantages as ours
from penstock.algorithms import kl, loss_terms, reductions
from torch import Tensor

logging.disable(logging.WARNING)

PACKAGES = ("verl", "openrlhf", "trl", "rlax", "torchrl")


def without_init(package: str, *subpackages: str) -> None:
    """Make a package's modules importable without its `__init__` files, which want GPUs."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed here; run benchmarks/parity.py")
    folder = Path(spec.submodule_search_locations[0])
    for name in ("", *subpackages):
        empty = types.ModuleType(f"{package}.{name}".rstrip("."))
        empty.__path__ = [str(folder / name)]
        sys.modules[empty.__name__] = empty


without_init("openrlhf", "models")
verl: Any = importlib.import_module("verl.trainer.ppo.core_algos")
verl_torch: Any = importlib.import_module("verl.utils.torch_functional")
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
openrlhf_loss: Any = importlib.import_module("openrlhf.models.loss")
openrlhf_kl: Any = importlib.import_module("openrlhf.models.utils")
del sys.modules["deepspeed"]  # transformers looks for the real one


ACTOR: Any = importlib.import_module("verl.workers.config").ActorConfig(
    strategy="fsdp",
    rollout_n=3,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio=0.2,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
)


class Draw:
    """Random columns of six rows in groups of three."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.rows, self.width = 6, 9
        lengths = torch.randint(2, self.width + 1, (self.rows,), generator=self._random)
        self.mask = torch.arange(self.width) < lengths[:, None]
        self.group = torch.tensor([0, 1, 0, 1, 1, 0])
        self.score = self.normal(self.rows)
        behavior = -self.normal(self.rows, self.width).abs()
        self.behavior_logprob = behavior * self.mask
        self.logprob = (behavior + 0.3 * self.normal(self.rows, self.width)) * self.mask
        self.ref_logprob = (behavior + 0.3 * self.normal(self.rows, self.width)) * self.mask
        self.advantage = self.normal(self.rows, self.width) * self.mask
        self.value = self.normal(self.rows, self.width) * self.mask
        self.old_value = self.normal(self.rows, self.width) * self.mask
        self.value_target = self.normal(self.rows, self.width) * self.mask

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, in double precision."""
        return torch.randn(*shape, generator=self._random, dtype=torch.float64)

    @property
    def floats(self) -> Tensor:
        """The mask as numbers."""
        return self.mask.double()

    @property
    def paid_last(self) -> Tensor:
        """The score on each row's last token."""
        last = self.mask.sum(1) - 1
        return torch.zeros(self.mask.shape, dtype=torch.float64).scatter(
            1, last[:, None], self.score[:, None]
        )


Compare = Callable[[Draw], tuple[Any, Any]]


class Case(NamedTuple):
    """One comparison; `compare` returns ours and theirs."""

    what: str
    theirs: str
    ours: str
    compare: Compare


CASES: list[Case] = []


def case(what: str, theirs: str, our_name: str) -> Callable[[Compare], Compare]:
    """Add a comparison to the list."""

    def add(compare: Compare) -> Compare:
        CASES.append(Case(what, theirs, our_name, compare))
        return compare

    return add


def with_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """A loss and its gradient in one tensor."""
    at = at.clone().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value, at)
    return torch.cat([value.detach().reshape(1), gradient.flatten()])


def on_masked(column: Tensor, draw: Draw) -> Tensor:
    """Zero elsewhere: what stands on padding differs between packages and means nothing."""
    return torch.where(draw.mask, column, 0)


@dataclass
class Difference:
    """The largest seen."""

    value: float = 0.0

    def see(self, mine: Any, other: Any) -> None:
        """Compare two results element by element."""
        a = torch.as_tensor(np.asarray(mine), dtype=torch.float64)
        b = torch.as_tensor(np.asarray(other), dtype=torch.float64)
        if a.shape != b.shape:
            raise SystemExit(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
        scale = max(1.0, float(b.abs().max()))
        self.value = max(self.value, float((a - b).abs().max()) / scale)


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


@case("GAE, whitened", "verl compute_gae_advantage_return", "advantages.gae, whiten")
def _(d: Draw) -> tuple[Any, Any]:
    advantage, target = verl.compute_gae_advantage_return(
        d.paid_last, d.value, d.floats, 0.99, 0.95
    )
    mine = ours.gae(d.mask, reward=d.paid_last, value=d.value, discount=0.99, lam=0.95)
    both = torch.stack([ours.whiten(mine.advantage, d.mask), mine.value_target])
    return both, torch.stack([on_masked(advantage, d), on_masked(target, d)])


@case("GAE", "torchrl generalized_advantage_estimate", "advantages.gae")
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
    mine = ours.gae(whole, reward=reward, value=value, discount=0.99, lam=0.95)
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


# Losses, with gradients


@case("clipped policy loss", "verl compute_policy_loss_vanilla", "losses.clipped_policy_loss")
def _(d: Draw) -> tuple[Any, Any]:
    def theirs(logprob: Tensor) -> Tensor:
        return verl.compute_policy_loss_vanilla(
            d.behavior_logprob, logprob, d.advantage, d.floats, config=ACTOR
        )[0]

    def mine(logprob: Tensor) -> Tensor:
        per_token = loss_terms.clipped_policy_loss(
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
        per_token = loss_terms.clipped_policy_loss(
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
    per_token = loss_terms.clipped_value_loss(
        value=value, old_value=d.old_value, value_target=d.value_target
    )
    return reductions.aggregate(per_token, d.mask)


@case("reward model, with margin", "openrlhf PairWiseLoss", "losses.bradley_terry_loss")
def _(d: Draw) -> tuple[Any, Any]:
    margin, rejected = d.normal(d.rows).abs(), d.normal(d.rows)

    def mine(score: Tensor) -> Tensor:
        return loss_terms.bradley_terry_loss(
            chosen_score=score, rejected_score=rejected, margin=margin
        ).mean()

    def theirs(score: Tensor) -> Tensor:
        return openrlhf_loss.PairWiseLoss()(score, rejected, margin)

    return with_gradient(mine, d.score), with_gradient(theirs, d.score)


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
