"""Calls that are served together get the answers they would get one by one, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from dice_engine import DiceEngine
from penstock.algorithms.roles import Policy, Rollout, Sampling
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.role import Metric
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext, drain_metrics
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generator_policy import GeneratorPolicy
from torch_models import EOS, architecture, make_prompts

SAMPLING = Sampling(num_samples=3, max_new_tokens=12)
CONTEXT = WorkerContext("actor", seed=7)


@dataclass(frozen=True, kw_only=True)
class DiceSpec(TorchPolicySpec):
    """A policy that the torch engine trains and dice sample from; or nothing does."""

    engine: DiceEngine | None = None

    def make_generator(self, network: Any) -> Any:
        return self.engine


def trained_policy(engine: DiceEngine | None) -> PolicyWorker:
    model = ModelSpec(architecture=architecture("llama"))
    return DiceSpec(model=model, end_ids=(EOS,), engine=engine).build(CONTEXT)


def chunks(*nums: int) -> list[dict[str, Any]]:
    """Calls with so many prompts, each as wide as its longest."""
    prompt, prompt_id = make_prompts(sum(nums))
    calls: list[dict[str, Any]] = []
    for some, ids in zip(prompt.split(list(nums)), prompt_id.split(list(nums)), strict=True):
        width = int((some >= 0).sum(1).max()) if len(some) else 0
        calls.append({"prompt": some[:, :width], "prompt_id": ids, "sampling": SAMPLING})
    return calls


Answered = list[tuple[int, int, Rollout, dict[str, Metric]]]
"""Call, size, what was returned, and what was reported with it."""


def streamed(policy: Any, calls: list[dict[str, Any]]) -> Answered:
    """What the host gets: it is in the call's scope only while it waits for an answer."""
    steps = policy.stream("generate", calls)
    found: Answered = []
    while True:
        with call_scope(4, 1):
            answer = next(steps, None)
        if answer is None:
            assert drain_metrics(policy) == {}
            return found
        found.append((answer.call, answer.size, answer.returned, drain_metrics(policy)))


def assert_same(one: Rollout, other: Rollout) -> None:
    for name, column in vars(one).items():
        assert torch.equal(column, getattr(other, name)), name
        assert column.dtype == getattr(other, name).dtype


def generating_policy(engine: DiceEngine) -> GeneratorPolicy:
    return GeneratorPolicy(CONTEXT, engine)


@pytest.mark.parametrize("make", [generating_policy, trained_policy])
def test_answers_are_those_of_calls_made_one_by_one(make: Callable[[DiceEngine], Policy]):
    calls = chunks(2, 5, 0, 1, 1, 3, 1)
    policy = make(DiceEngine())
    expected: Answered = []
    for place, call in enumerate(calls):
        with call_scope(4, 1):
            roll = policy.generate(**call)
        size = int(roll.mask.sum(1).max()) if len(roll.mask) else 0
        expected.append((place, size, roll, drain_metrics(policy)))
    expected.sort(key=lambda answer: (answer[1], answer[0]))
    assert [answer[0] for answer in expected] != list(range(7))
    for seed in range(5):
        found = streamed(make(DiceEngine(seed)), calls)
        assert [answer[:2] for answer in found] == [answer[:2] for answer in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine[2], theirs[2])
            assert mine[3] == theirs[3]


def test_an_answer_does_not_hold_on_to_the_others():
    policy = generating_policy(DiceEngine())
    for _, _, roll, _ in streamed(policy, chunks(40, 1, 1)):
        for column in vars(roll).values():
            assert column.untyped_storage().nbytes() == column.numel() * column.element_size()


def test_no_calls_and_no_prompts():
    policy = generating_policy(DiceEngine())
    assert streamed(policy, []) == []
    assert [answer[:2] for answer in streamed(policy, chunks(0, 0))] == [(0, 0), (1, 0)]


def test_who_stops_early_ends_the_engines_stream():
    engine = DiceEngine()
    steps = generating_policy(engine).stream("generate", chunks(2, 2))
    next(steps)
    assert not engine.closed
    steps.close()  # pyright: ignore[reportAttributeAccessIssue] - it is a generator
    assert engine.closed


# --- refusals


def test_only_generate_streams():
    policy = generating_policy(DiceEngine())
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        list(policy.stream("train", [{}]))
    assert str(error.value) == (
        "'actor' was asked to stream its 'train', and only 'generate' streams; make those calls "
        "one after another"
    )


def test_an_engine_that_shares_no_turns_converses_in_one_process():
    policy = GeneratorPolicy(WorkerContext("actor", tensor_parallel=2), DiceEngine())
    agent: Any = None
    with pytest.raises(ConfigError) as error:
        policy.converse(*make_prompts(1), agent, Sampling(max_total_tokens=20))
    assert str(error.value) == (
        "'actor.converse': 2 processes share the model, and the dice engine holds conversations in "
        "one\n    set tensor_parallel=1 for its group, or rollout=torch"
    )


def test_calls_that_are_sampled_differently_are_refused():
    first, second = chunks(1, 1)
    second["sampling"] = replace(SAMPLING, temperature=0.5)
    policy = generating_policy(DiceEngine())
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        list(policy.stream("generate", [first, first, second]))
    assert str(error.value) == (
        f"calls 0 and 2 to 'actor.generate' are to be sampled differently, {SAMPLING} and "
        f"{second['sampling']}; stream calls of one node together"
    )


def test_what_generate_refuses_is_refused():
    policy = generating_policy(DiceEngine())
    calls = chunks(1, 2)
    with pytest.raises(ValueError, match="dice know no top_k"):
        list(policy.stream("generate", [{**calls[0], "sampling": Sampling(top_k=2)}]))
    calls[1]["prompt"][1] = -1
    with pytest.raises(ValueError, match="prompt row 2 is empty; drop it before generating"):
        list(policy.stream("generate", calls))
    with pytest.raises(ConfigError) as error:
        trained_policy(None).stream("generate", chunks(1))
    assert str(error.value) == (
        "'actor' is trained by the torch engine, which does not generate; give it a rollout engine "
        "(rollout=)"
    )


def test_an_engine_that_keeps_responses_is_found_out():
    policy = generating_policy(DiceEngine(broken="stops"))
    with pytest.raises(RuntimeError) as error:
        list(policy.stream("generate", chunks(2, 1)))
    assert str(error.value) == (
        "the dice engine stopped with 1 of 9 responses not given; its `stream` must give every one"
    )


def test_logits_that_are_not_finite_are_named_and_the_engine_is_stopped():
    engine = DiceEngine(broken="not finite")
    with pytest.raises(WorkerError) as error:  # which holds on to the frames that it came from
        streamed(generating_policy(engine), chunks(2, 1))
    assert engine.closed
    assert "the logits of 'actor' are not finite in 1 of 3 responses" in str(error.value)
