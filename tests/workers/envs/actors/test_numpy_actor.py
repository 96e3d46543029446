"""Groups that are asked for together get what they get alone, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles.environment import ActionSpace
from penstock.workers.envs.actors.numpy_actor import NumpyActor, NumpyRecurrent
from penstock.workers.envs.actors.perceptron import ActorCriticNetwork, PerceptronSpec

SPACES = {
    "choices": ActionSpace("discrete", sizes=(5,)),
    "several": ActionSpace("discrete", sizes=(3, 2, 7)),
    "masked": ActionSpace("discrete", sizes=(4, 3), masked=True),
    "numbers": ActionSpace("continuous", low=(-1.0,) * 3, high=(1.0,) * 3),
}


def actor(actions: ActionSpace, num_features: int, width: int, units: int = 0) -> NumpyActor:
    spec = PerceptronSpec(hidden_sizes=(width, width), init_seed=3, recurrent_units=units)
    network = ActorCriticNetwork(spec, num_features, actions)
    with torch.no_grad():
        network.actor[-1].weight.mul_(100.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    held = None if network.memory is None else NumpyRecurrent(network.memory)
    return NumpyActor(network.actor, actions, network.log_std, held)


def call(
    random: Any, actions: ActionSpace, num_envs: int, num_features: int, units: int = 0
) -> Any:
    width = actions.num_components
    obs = random.standard_normal((num_envs, num_features)).astype(np.float32)
    noise = random.random((num_envs, width))
    if actions.kind == "continuous":
        noise = random.standard_normal((num_envs, width))
    held = None
    if units and random.random() < 0.7:
        held = random.standard_normal((num_envs, units)).astype(np.float32)
    if not actions.masked:
        return obs, noise, None, held
    mask = random.random((num_envs, actions.num_choices)) < 0.7
    mask[:, [0, 4]] = True
    return obs, noise, mask, held


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SPACES)),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 17]), min_size=1, max_size=12),
    st.sampled_from([1, 4, 33]),
    st.sampled_from([8, 64, 100]),
    st.sampled_from([0, 1, 16, 33]),
    st.integers(0, 1000),
)
def test_company_changes_no_bit(
    kind: str, groups: list[int], num_features: int, width: int, units: int, seed: int
) -> None:
    actions, random = SPACES[kind], np.random.default_rng(seed)
    one = actor(actions, num_features, width, units)
    calls = [call(random, actions, num_envs, num_features, units) for num_envs in groups]
    for ours, arguments in zip(one.act_all(calls), calls, strict=True):
        alone = one.act(*arguments)
        assert ours.action.tobytes() == alone.action.tobytes()
        assert ours.logprob.tobytes() == alone.logprob.tobytes()
        assert (ours.recurrent_state is None) == (alone.recurrent_state is None) == (units == 0)
        if ours.recurrent_state is not None and alone.recurrent_state is not None:
            assert ours.recurrent_state.tobytes() == alone.recurrent_state.tobytes()
        assert ours.action.shape == (len(arguments[0]), actions.num_components)


def test_nobody_is_answered_nothing() -> None:
    assert actor(SPACES["choices"], 4, 8).act_all([]) == []
