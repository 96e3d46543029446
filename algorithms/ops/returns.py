"""Advantages from rewards and a critic, step by step backwards: GAE, returns to go, V-trace.

Columns are `[rows, T]`: tokens of responses, or steps of environments, where a row may hold several
episodes one after another. `mask` is True on steps that count. Both estimators are one recursion,

    delta_t = w_t * (reward_t + discount * value_tp1 - value_t)
    error_t = delta_t + discount * lam * c_t * error_tp1

from right to left; GAE has `w = c = 1` and calls the error an advantage, V-trace has bounded
probability ratios there.

Where an episode ends inside a row, no error is carried back across the end. `terminated`: nothing
comes after, `value_tp1` is 0. `truncated`: it would have gone on, and `value_tp1` is the critic's
value of the state it was left in. That is `value` of the next column as it stands there, mask or no
mask: environments that reset one step later show it there. The last column's is `bootstrap_value`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerRow, PerStep, StepMask
from .reductions import check_token_columns, unknown, zero_where_masked_out

Masking = Literal["transparent", "zeroed"]
"""Effect of a masked-out position between sampled tokens on a backward recursion.

`transparent`: nothing, as if the position were deleted, so no discount is applied across it.
`zeroed`: it counts as a step with reward 0 and value 0.
"""


@dataclass(frozen=True, kw_only=True)
class GaeTargets:
    """Advantages and value targets, for the two losses."""

    advantage: PerStep
    """Advantages, not whitened."""
    value_target: PerStep
    """The critic's target: for GAE, advantage plus value."""


@op(scope="row")
def gae(
    mask: StepMask,
    *,
    reward: PerStep,
    value: PerStep,
    bootstrap_value: PerRow | None = None,
    terminated: StepMask | None = None,
    truncated: StepMask | None = None,
    discount: float = 1.0,
    lam: float = 0.95,
    masking: Masking = "transparent",
) -> GaeTargets:
    """Generalized advantage estimation over sampled tokens.

    `delta_t = reward_t + discount * value_tp1 - value_t` and
    `advantage_t = delta_t + discount * lam * advantage_tp1`, right to left; `value_target_t =
    advantage_t + value_t`. Schulman et al., "High-Dimensional Continuous Control Using Generalized
    Advantage Estimation", 2015, equations 11 to 16.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T].
        value: f32[rows, T], the critic at the state before each token.
        bootstrap_value: f32[rows], value of the state after a row's last sampled token: 0 where the
            response is finished, the critic's where it was cut off. Default: 0 everywhere.
        terminated: bool[rows, T], True on an episode's last step; none by default.
        truncated: bool[rows, T], True on the last step of an episode that was cut off; none by
            default. Where both flags are True the episode terminated.
        discount: gamma, applied per sampled token.
        lam: lambda; 0 trusts the critic fully, 1 not at all.
        masking: What positions between sampled tokens do; see `Masking`.

    Returns:
        Advantages and value targets, f32[rows, T] each.

    Raises:
        ValueError: If shapes differ, `masking` is unknown, or a truncated last column has no
            `bootstrap_value`.
    """
    steps = _Steps.of(mask, reward, value, bootstrap_value, terminated, truncated, masking)
    advantage = steps.backward(discount, lam, None, None)[0]
    return GaeTargets(
        advantage=zero_where_masked_out(advantage, mask).to(value),
        value_target=zero_where_masked_out(advantage + steps.value, mask).to(value),
    )


@op(scope="row")
def vtrace(
    mask: StepMask,
    *,
    reward: PerStep,
    value: PerStep,
    logprob: PerStep,
    behavior_logprob: PerStep,
    bootstrap_value: PerRow | None = None,
    terminated: StepMask | None = None,
    truncated: StepMask | None = None,
    discount: float = 1.0,
    lam: float = 1.0,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    policy_rho_bar: float | None = 1.0,
) -> GaeTargets:
    """V-trace: value targets and advantages of a policy, from steps that an older one took.

    With `ratio = exp(logprob - behavior_logprob)`, `rho = min(rho_bar, ratio)` and
    `c = lam * min(c_bar, ratio)`, right to left:
    `delta_t = rho_t * (reward_t + discount * value_tp1 - value_t)`,
    `target_t = value_t + delta_t + discount * c_t * (target_tp1 - value_tp1)`, and
    `advantage_t = min(policy_rho_bar, ratio_t) * (reward_t + discount * (lam * target_tp1 +
    (1 - lam) * value_tp1) - value_t)`. Espeholt et al., "IMPALA", 2018, equation 1 and section 4.2;
    lambda in the advantage as in rlax. With equal policies and `lam` 1 the targets are n-step
    returns.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T].
        value: f32[rows, T], the critic at the state before each step.
        logprob: f32[rows, T], of the policy to learn.
        behavior_logprob: f32[rows, T], of the policy that took the steps.
        bootstrap_value: f32[rows], value of the state after the last step; see `gae`.
        terminated: bool[rows, T]; see `gae`.
        truncated: bool[rows, T]; see `gae`.
        discount: gamma, per step.
        lam: lambda.
        rho_bar: Bound on the ratio of a step's own error; None for no bound.
        c_bar: Bound on the ratio by which later errors are carried back; None for no bound.
        policy_rho_bar: Bound on the ratio of the advantage; None for no bound.

    Returns:
        Advantages and value targets, f32[rows, T] each; no gradient passes. Steps that are masked
        out between others are passed over.

    Raises:
        ValueError: As `gae`.
    """
    check_token_columns(mask, logprob=logprob, behavior_logprob=behavior_logprob)
    steps = _Steps.of(mask, reward, value, bootstrap_value, terminated, truncated, "transparent")
    log_ratio = zero_where_masked_out(logprob - behavior_logprob, mask)
    ratio = log_ratio.detach().double().exp()
    error, value_tp1, error_tp1 = steps.backward(
        discount, lam, _bounded(ratio, rho_bar), _bounded(ratio, c_bar)
    )
    gain = steps.reward + discount * (value_tp1 + lam * error_tp1) - steps.value
    return GaeTargets(
        advantage=zero_where_masked_out(_bounded(ratio, policy_rho_bar) * gain, mask).to(value),
        value_target=zero_where_masked_out(error + steps.value, mask).to(value),
    )


def _bounded(ratio: Tensor, bound: float | None) -> Tensor:
    return ratio if bound is None else ratio.clamp(max=bound)


@op(scope="row")
def return_to_go(reward: PerStep, mask: StepMask, *, discount: float = 1.0) -> PerStep:
    """Discounted sum of the rewards from each sampled token to the end of its row.

    Args:
        reward: f32[rows, T].
        mask: bool[rows, T].
        discount: gamma, applied per step; what is masked out between others is passed over.

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If shapes differ.
    """
    nothing = torch.zeros_like(reward)
    return gae(mask, reward=reward, value=nothing, discount=discount, lam=1.0).advantage


@dataclass(frozen=True)
class _Steps:
    """Columns of the recursion in double precision, without gradients, 0 where masked out."""

    live: Tensor
    """bool[rows, T]: the positions that are steps."""
    reward: Tensor
    value: Tensor
    last_value: Tensor
    """f64[rows]: of the state after the last step."""
    ends: Tensor | None
    """bool[rows, T]: steps that nothing is carried back across."""
    end_value: Tensor
    """f64[rows, T]: of the state after a step that ends an episode."""

    @classmethod
    def of(
        cls,
        mask: Tensor,
        reward: Tensor,
        value: Tensor,
        bootstrap_value: Tensor | None,
        terminated: Tensor | None,
        truncated: Tensor | None,
        masking: Masking,
    ) -> _Steps:
        check_token_columns(mask, reward=reward, value=value)
        if bootstrap_value is not None and bootstrap_value.shape != mask.shape[:1]:
            raise ValueError(
                f"bootstrap_value must have one entry per row of the mask, [{len(mask)}], "
                f"got {list(bootstrap_value.shape)}"
            )
        live = mask
        if masking == "zeroed":
            # Everything up to the last sampled token; the padding after it is no step either way.
            live = mask.flip(1).cumsum(dim=1).flip(1) > 0
        elif masking != "transparent":
            raise unknown("masking", masking, Masking)
        ends, end_value = _endings(mask, value.detach(), bootstrap_value, terminated, truncated)
        last = value.new_zeros(len(value)) if bootstrap_value is None else bootstrap_value
        return cls(
            live=live,
            reward=zero_where_masked_out(reward, mask).detach().double(),
            value=zero_where_masked_out(value, mask).detach().double(),
            last_value=last.detach().double(),
            ends=ends,
            end_value=end_value,
        )

    def backward(
        self, discount: float, lam: float, weight: Tensor | None, carried: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """f64[rows, T] each: the error of every step, and value and error of the step after it.

        A position that is not live leaves the running numbers untouched. `weight` multiplies a
        step's own error and `carried` what comes from later ones; None is 1.
        """
        error, values, errors = (torch.zeros_like(self.reward) for _ in range(3))
        live_columns = self.live.any(dim=0).nonzero().flatten().tolist()
        error_tp1, value_tp1 = torch.zeros_like(self.last_value), self.last_value
        for t in reversed(live_columns):
            live_t, value_t = self.live[:, t], self.value[:, t]
            if self.ends is not None:
                ends_t = self.ends[:, t]
                value_tp1 = torch.where(ends_t, self.end_value[:, t], value_tp1)
                error_tp1 = torch.where(ends_t, 0.0, error_tp1)
            values[:, t], errors[:, t] = value_tp1, error_tp1
            delta_t = self.reward[:, t] + discount * value_tp1 - value_t
            kept = discount * lam * error_tp1
            if weight is not None and carried is not None:
                delta_t, kept = weight[:, t] * delta_t, carried[:, t] * kept
            error_tp1 = torch.where(live_t, delta_t + kept, error_tp1)
            value_tp1 = torch.where(live_t, value_t, value_tp1)
            error[:, t] = error_tp1
        return error, values, errors


def _endings(
    mask: Tensor,
    value: Tensor,
    bootstrap_value: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
) -> tuple[Tensor | None, Tensor]:
    """Ends of episodes, and the value of the state after: 0 where they terminated."""
    nothing = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags is not None and (flags.dtype != torch.bool or flags.shape != mask.shape):
            raise ValueError(f"{name} must be bool{list(mask.shape)} like the mask")
    done = torch.zeros_like(mask) if terminated is None else terminated & mask
    if truncated is None:
        return (None if terminated is None else done), nothing
    cut = truncated & mask & ~done
    if bootstrap_value is None and mask.shape[1] and bool(cut[:, -1].any()):
        raise ValueError(
            "the last column has a truncated step, and nothing says what would have come "
            "after it; pass bootstrap_value, the critic's value of the state it was left in"
        )
    last = value.new_zeros(len(value)) if bootstrap_value is None else bootstrap_value.detach()
    next_value = torch.cat([value, last[:, None]], dim=1)[:, 1:]
    return done | cut, torch.where(cut, next_value.double(), nothing)
