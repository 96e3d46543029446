"""Responses that are cut into segments are those of one call, whatever calls they are dealt to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from dice_engine import DiceEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles import Rollout, Sampling, Unfinished
from penstock.dataflow.graph.role import Metric, Streamed
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext, drain_metrics
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.rollout.generate_calls import joined, new_groups, parted
from penstock.workers.rollout.generator_policy import GeneratorPolicy
from torch import Tensor
from torch_models import VOCAB, make_policy, make_prompts

SAMPLING = Sampling(num_samples=3, max_new_tokens=12)
CONTEXT = WorkerContext("actor", seed=7)
Calls = list[dict[str, Any]]


def dice_policy(seed: int = 0) -> GeneratorPolicy:
    return GeneratorPolicy(CONTEXT, DiceEngine(seed))


@cache
def torch_policy() -> PolicyWorker:
    return make_policy()


def prompts_of(step: int, num: int) -> tuple[Tensor, Tensor]:
    """Some prompts, with ids that no other step has."""
    prompt, prompt_id = make_prompts(num, seed=step)
    return prompt, 1000 * step + prompt_id


def dealt(step: int, nums: Sequence[int], sampling: Sampling) -> Calls:
    """A step's prompts as calls, each as wide as its longest."""
    prompt, prompt_id = prompts_of(step, sum(nums))
    calls: Calls = []
    for some, ids in zip(prompt.split(list(nums)), prompt_id.split(list(nums)), strict=True):
        width = int((some >= 0).sum(1).max()) if len(some) else 0
        calls.append({"prompt": some[:, :width], "prompt_id": ids, "sampling": sampling})
    return calls


@dataclass(frozen=True)
class Answer:
    """An answer, and what was reported with it."""

    step: int
    streamed: Streamed
    metrics: dict[str, Metric]

    @property
    def roll(self) -> Rollout:
        return self.streamed.returned

    @property
    def left(self) -> Unfinished:
        return self.streamed.unfinished


def segment(
    policy: Any, step: int, calls: Calls, begun: Sequence[Unfinished | None], length: int
) -> list[Answer]:
    """What the host gets in a step; version 10 + step of the weights, one too old."""
    steps = policy.stream_segment("generate", calls, begun, length)
    found: list[Answer] = []
    while True:
        with call_scope(step, 1, version=10 + step, lag=1):
            answer = next(steps, None)
        if answer is None:
            assert drain_metrics(policy) == {}
            return found
        found.append(Answer(step, answer, drain_metrics(policy)))


def run(
    policy: Any, nums: Sequence[Sequence[int]], sampling: Sampling, length: int
) -> list[Answer]:
    """Steps with so many prompts per call, and further ones until nothing is unfinished."""
    num_calls = len(nums[0])
    begun: list[Unfinished | None] = [None] * num_calls
    found: list[Answer] = []
    step = 0
    while step < len(nums) or any(one is not None and len(one.ended) for one in begun):
        own = nums[step] if step < len(nums) else [0] * num_calls
        answers = segment(policy, step, dealt(step, own, sampling), begun, length)
        assert sorted(answer.streamed.call for answer in answers) == list(range(num_calls))
        places = [(answer.streamed.size, answer.streamed.call) for answer in answers]
        assert places == sorted(places)
        for answer in answers:
            begun[answer.streamed.call] = answer.left
        found += answers
        step += 1
        assert step <= len(nums) + sampling.max_new_tokens, "something is never returned"
    return found


def groups_of(roll: Rollout) -> dict[int, Rollout]:
    """The rows of each group, which are adjacent."""
    ids = roll.prompt_id.tolist()
    parts: dict[int, Rollout] = {}
    for prompt_id in dict.fromkeys(ids):
        begin, end = ids.index(prompt_id), len(ids) - ids[::-1].index(prompt_id)
        columns = {name: column[begin:end] for name, column in vars(roll).items()}
        parts[prompt_id] = Rollout(**columns)
        assert parts[prompt_id].prompt_id.unique().tolist() == [prompt_id]
    return parts


def at_once(policy: Any, nums: Sequence[Sequence[int]], sampling: Sampling) -> dict[int, Rollout]:
    """Each group as one call makes it in the step in which it begins."""
    found: dict[int, Rollout] = {}
    for step, own in enumerate(nums):
        with call_scope(step, 1):
            prompt, prompt_id = prompts_of(step, sum(own))
            found |= groups_of(policy.generate(prompt, prompt_id, sampling))
    policy.metrics.clear()
    return found


def check_same(cut: Rollout, once: Rollout, *, tolerance: float = 0) -> None:
    """Equal in everything but the padding and the versions; tokens up to who sampled them."""
    width = int(once.mask.sum(1).max()) + int((once.tokens[0] >= 0).sum() - once.mask[0].sum())
    assert cut.finished.tolist() == once.finished.tolist()
    assert (cut.tokens[:, :width] % VOCAB).tolist() == (once.tokens[:, :width] % VOCAB).tolist()
    assert cut.mask[:, :width].tolist() == once.mask[:, :width].tolist()
    assert not cut.mask[:, width:].any()
    torch.testing.assert_close(
        cut.behavior_logprob[:, :width], once.behavior_logprob[:, :width], atol=tolerance, rtol=0
    )


def check_groups(
    answers: list[Answer], expected: dict[int, Rollout], length: int, *, tolerance: float = 0
) -> None:
    """Each group once, in the step in which its last response ends, as one call makes it."""
    returned = [(a.step, *one) for a in answers for one in groups_of(a.roll).items()]
    assert sorted(prompt_id for _, prompt_id, _ in returned) == sorted(expected)
    for step, prompt_id, roll in returned:
        once = expected[prompt_id]
        began = prompt_id // 1000
        num_segments = -(-int(once.mask.sum(1).max()) // length)
        assert step == began + num_segments - 1
        check_same(roll, once, tolerance=tolerance)
        for row, mask in enumerate(roll.mask):
            versions = [10 + began + t // length for t in range(int(mask.sum()))]
            assert roll.version[row][mask].tolist() == versions
        assert bool((roll.version[~roll.mask] == 0).logical_or(roll.tokens[~roll.mask] < 0).all())
        assert ((roll.version >= 0) == (roll.tokens >= 0)).all()


NUMS = st.integers(1, 4).flatmap(
    lambda num_calls: st.lists(
        st.lists(st.integers(0, 3), min_size=num_calls, max_size=num_calls), min_size=1, max_size=4
    )
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(NUMS, st.integers(1, 14), st.sampled_from([0, 24]), st.integers(0, 100))
def test_each_group_is_returned_once_when_its_last_response_ends(
    nums: list[list[int]], length: int, total: int, seed: int
):
    sampling = replace(SAMPLING, max_total_tokens=total)
    expected = at_once(dice_policy(), nums, sampling)
    answers = run(dice_policy(seed), nums, sampling, length)
    check_groups(answers, expected, length)
    # And every step samples and reports what its segments add.
    added: dict[tuple[int, int], list[int]] = {}
    for place, answer in enumerate(answers):
        before = next(
            (
                earlier.left
                for earlier in answers[:place][::-1]
                if earlier.streamed.call == answer.streamed.call
            ),
            None,
        )
        rows = 0 if before is None else int((before.response >= 0).sum())
        now = int(answer.roll.mask.sum() + (answer.left.response >= 0).sum())
        added[answer.step, answer.streamed.call] = [now - rows]
        assert answer.metrics["unfinished_rows"].value == len(answer.left.ended)
        assert ("new_tokens" in answer.metrics) == (now > rows)
        if now > rows:
            assert answer.metrics["new_tokens"].value == now - rows
        assert answer.left.began.tolist() == sorted(answer.left.began.tolist())
        if len(answer.left.ended):
            # Nothing waits for a response that has ended in all of its group.
            assert not answer.left.ended.view(-1, sampling.num_samples).all(1).any()
            assert not (answer.left.finished & ~answer.left.ended).any()


@pytest.mark.parametrize("length", [3, 5])
def test_however_groups_are_dealt_they_return_in_the_same_step(length: int):
    rolls: list[dict[int, tuple[int, Rollout]]] = []
    for nums in ([[6], [4]], [[1, 2, 3], [3, 0, 1]], [[0, 6], [4, 0]]):
        answers = run(dice_policy(len(nums[0])), nums, SAMPLING, length)
        rolls.append({i: (a.step, g) for a in answers for i, g in groups_of(a.roll).items()})
    for other in rolls[1:]:
        assert {i: step for i, (step, _) in other.items()} == {
            i: step for i, (step, _) in rolls[0].items()
        }
        for prompt_id, (_, roll) in other.items():
            check_same(roll, rolls[0][prompt_id][1])
    assert len({step for step, _ in rolls[0].values()}) > 2


def test_a_size_is_what_the_segment_adds_to_the_longest_row():
    answers = run(dice_policy(), [[3, 1], [1, 2]], SAMPLING, 5)
    before: dict[int, Unfinished] = {}
    sizes: set[int] = set()
    for answer in answers:
        old = before.get(answer.streamed.call)
        had = {} if old is None else rows_of(old)
        rows = rows_of(answer.left) | {
            (prompt_id, sample): int(mask.sum())
            for prompt_id, group in groups_of(answer.roll).items()
            for sample, mask in enumerate(group.mask)
        }
        most = max((num - had.get(row, 0) for row, num in rows.items()), default=0)
        assert answer.streamed.size == most
        sizes.add(most)
        before[answer.streamed.call] = answer.left
    assert 5 in sizes
    assert len(sizes) > 1


def rows_of(left: Unfinished) -> dict[tuple[int, int], int]:
    """Tokens so far by prompt and sample."""
    num = SAMPLING.num_samples
    lengths = (left.response >= 0).sum(1).tolist()
    return {(left.prompt_id.tolist()[r // num], r % num): n for r, n in enumerate(lengths)}


def test_tokens_carry_the_version_that_sampled_them_and_say_how_old_it_is():
    policy = dice_policy()
    begun: list[Unfinished | None] = [None]
    found: dict[int, Rollout] = {}
    for step in range(4):
        answers = segment(policy, step, dealt(step, [4 if step == 0 else 0], SAMPLING), begun, 3)
        begun = [answers[0].left]
        roll, metrics = answers[0].roll, answers[0].metrics
        found |= groups_of(roll)
        if len(roll.mask):
            age = (10 + step + 1) - roll.version[roll.mask]
            assert metrics["token_lag"].value == pytest.approx(float(age.float().mean()))
            assert metrics["token_lag_max"].value == float(age.max())
        policy.receive({"dice": torch.zeros(1)}, step + 1)
    assert len(found) == 4
    for roll in found.values():
        # Dice say how often weights had been loaded when a token was sampled.
        assert (roll.version[roll.mask] - 10).tolist() == (roll.tokens[roll.mask] // VOCAB).tolist()
    every = torch.cat([roll.version[roll.mask] for roll in found.values()])
    assert every.unique().tolist() == [10, 11, 12, 13]


def test_a_plain_call_has_the_version_and_lag_of_the_call():
    policy = dice_policy()
    prompt, prompt_id = make_prompts(3)
    with call_scope(6, 0, version=5, lag=2):
        roll = policy.generate(prompt, prompt_id, SAMPLING)
    assert (roll.version[roll.mask] == 5).all()
    assert ((roll.version >= 0) == (roll.tokens >= 0)).all()
    num_tokens = float(roll.mask.sum())
    assert policy.metrics["token_lag"] == Metric.mean(2.0 * num_tokens, num_tokens)
    assert policy.metrics["token_lag_max"] == Metric(2.0, 1.0, "max")


# --- a model


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 5])
def test_a_model_goes_on_as_if_it_had_not_stopped(length: int):
    """Up to rounding: what goes on is read in one forward, and not token by token."""
    policy = torch_policy()
    nums = [[2, 0, 1], [1, 2, 0]]
    expected = at_once(policy, nums, SAMPLING)
    check_groups(run(policy, nums, SAMPLING, length), expected, length, tolerance=1e-5)


def test_other_weights_go_on_from_the_tokens_that_there_are():
    policy = make_policy()
    (first,) = segment(policy, 0, dealt(0, [3], SAMPLING), [None], 4)
    weights = {name: 1.5 * tensor for name, tensor in policy.export_weights().items()}
    policy.load_weights(weights)
    (second,) = segment(policy, 1, dealt(1, [0], SAMPLING), [first.left], 12)
    assert not len(second.left.ended)
    num_old = 0
    for prompt_id, roll in groups_of(second.roll).items():
        at = first.left.prompt_id.tolist().index(prompt_id)
        for sample, mask in enumerate(roll.mask):
            old = first.left.response[3 * at + sample]
            old = old[old >= 0]
            said, versions = roll.tokens[sample][mask], roll.version[sample][mask]
            assert said[: len(old)].tolist() == old.tolist()
            assert versions.tolist() == [10] * len(old) + [11] * (len(said) - len(old))
            num_old += len(old)
        # Each token's log-probability is that of the weights that sampled it.
        new = roll.version == 11
        logprob = policy.logprob(roll.tokens, roll.mask)
        torch.testing.assert_close(roll.behavior_logprob[new], logprob[new], atol=1e-4, rtol=0)
    assert 0 < num_old < int(second.roll.mask.sum())


# --- edges


def test_a_step_without_prompts_and_without_anything_unfinished():
    policy = dice_policy()
    none = parted(new_groups(*prompts_of(0, 0), step=0, num_samples=3))[1]
    assert segment(policy, 3, [], [], 4) == []
    answers = segment(policy, 3, dealt(3, [0, 0], SAMPLING), [None, none], 4)
    assert [(a.streamed.call, a.streamed.size, len(a.roll.mask)) for a in answers] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    assert all(len(answer.left.ended) == 0 for answer in answers)


def test_a_call_whose_responses_add_nothing_does_not_wait():
    """Nothing is left to sample in call 1: its group goes out before any token of call 0."""
    left = new_groups(*prompts_of(0, 1), step=0, num_samples=3)
    over = replace(left, ended=torch.ones(3, dtype=torch.bool))
    answers = segment(dice_policy(2), 1, dealt(1, [4, 0], SAMPLING), [None, over], 4)
    assert [(a.streamed.call, a.streamed.size) for a in answers] == [(1, 0), (0, 4)]
    assert len(answers[0].roll.mask) == 3


def test_groups_are_joined_in_order_and_padded():
    parts = [segment(dice_policy(), s, dealt(s, [2], SAMPLING), [None], n)[0].left
             for s, n in ((0, 2), (1, 4))]  # fmt: skip
    both = joined(parts)
    assert both.began.tolist() == [0, 0, 1, 1]
    for field in fields(Unfinished):
        first, second = (getattr(part, field.name) for part in parts)
        column = getattr(both, field.name)
        assert len(column) == len(first) + len(second)
        if column.dim() == 2:
            empty = 0 if column.is_floating_point() else -1
            assert (column[: len(first), first.shape[1] :] == empty).all()
            column = column[:, : first.shape[1]]
        assert column[: len(first)].tolist() == first.tolist()
    assert parted(both)[1].response.tolist() == both.response.tolist()


def test_groups_that_were_begun_otherwise_are_refused():
    left = segment(dice_policy(), 0, dealt(0, [2], SAMPLING), [None], 9)[0].left
    assert len(left.response) == 6
    for other in (replace(SAMPLING, num_samples=2), replace(SAMPLING, max_new_tokens=4)):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
            segment(dice_policy(), 1, dealt(1, [0], other), [left], 9)
        assert str(error.value) == (
            "2 groups go on with 6 responses of up to 9 tokens, and are to be sampled with "
            f"num_samples={other.num_samples} and max_new_tokens={other.max_new_tokens}; let a run "
            "end its groups as it began them"
        )


def test_only_generate_is_cut_into_segments():
    with pytest.raises(
        ValueError, match="asked to stream its 'train', and only 'generate' streams"
    ):
        list(dice_policy().stream_segment("train", [{}], [None], 4))


def test_who_stops_early_ends_the_engines_stream():
    policy = dice_policy()
    steps = policy.stream_segment("generate", dealt(0, [2, 2], SAMPLING), [None, None], 4)
    next(steps)
    engine: Any = policy.engine
    assert not engine.closed
    steps.close()  # pyright: ignore[reportAttributeAccessIssue] - it is a generator
    assert engine.closed


def test_random_orders_of_ends_change_nothing():
    """The dice end responses in other orders; answers and their order stay."""
    seeds = random.Random(1).sample(range(1000), 4)
    runs = [run(dice_policy(seed), [[2, 1, 3], [1, 1, 0]], SAMPLING, 4) for seed in seeds]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert (one.step, one.streamed.call, one.streamed.size) == (
                two.step,
                two.streamed.call,
                two.streamed.size,
            )
            for left, right in ((one.roll, two.roll), (one.left, two.left)):
                for name, column in vars(left).items():
                    assert torch.equal(column, getattr(right, name)), name
            assert one.metrics == two.metrics
