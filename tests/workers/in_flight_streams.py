"""A policy's stream with new weights after so many tokens: what any engine must do of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from torch import Tensor


def streamed(
    policy: Any,
    prompts: tuple[Tensor, Tensor],
    sampling: Sampling,
    after: int | None,
    load: Callable[[], object],
) -> Rollout:
    """The answer to one call in flight; after so many pauses weights of version 8 come, not 7."""
    assert policy.takes_weights
    prompt, prompt_id = prompts
    call = {"prompt": prompt, "prompt_id": prompt_id, "sampling": sampling}
    steps: Any = policy.stream("generate", [call])
    num_paused, version = 0, 7
    while True:
        with call_scope(3, 0, version=version, lag=10 - version, in_flight=True):
            found = next(steps)
        if found is not None:
            break
        num_paused += 1
        if num_paused == after:
            load()
            version = 8
    assert num_paused > (after or 0)
    ages = policy.metrics["token_lag"], policy.metrics["token_lag_max"]
    roll: Rollout = found.returned
    of_tokens = 10 - roll.version[roll.mask]
    assert ages[0].value == torch.as_tensor(of_tokens, dtype=torch.float64).mean().item()
    assert ages[1].value == of_tokens.max()
    policy.metrics.clear()
    steps.close()
    return roll


def alone(policy: Any, prompts: tuple[Tensor, Tensor], sampling: Sampling) -> Rollout:
    """The same call, with the weights that there are."""
    with call_scope(3, 0, version=7):
        roll: Rollout = policy.generate(*prompts, sampling)
    policy.metrics.clear()
    return roll


def check_versions(roll: Rollout, num_old: Tensor) -> None:
    """So many tokens of each row, or all if it has fewer, are of version 7, and the rest of 8."""
    for row, mask in enumerate(roll.mask):
        found = roll.version[row][mask].tolist()
        old = min(int(num_old[row]), len(found))
        assert found == [7] * old + [8] * (len(found) - old)


def check_parted(roll: Rollout, before: Rollout) -> None:
    """What the first weights have sampled is what they sample alone; what follows is not."""
    old = roll.mask & (roll.version == 7)
    width = min(roll.tokens.shape[1], before.tokens.shape[1])
    assert torch.equal(roll.tokens[old], before.tokens[:, :width][old[:, :width]])
    torch.testing.assert_close(
        roll.behavior_logprob[old],
        before.behavior_logprob[:, :width][old[:, :width]],
        atol=2e-6,
        rtol=0,
    )
    new = (roll.version[:, :width] == 8) & roll.mask[:, :width]
    assert bool(new.any())
    differs = roll.tokens[:, :width] != before.tokens[:, :width]
    assert float(differs[new].double().mean()) > 0.1
