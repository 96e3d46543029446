"""What every engine under a `GeneratorPolicy` must do: vLLM, our own, and one of these tests'.

Whoever adds a rollout engine adds it to `POLICIES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generation_engine import GenerationEngine
from penstock.workers.rollout.generator_policy import GeneratorPolicy
from slow_engine import SlowPolicySpec
from torch import Tensor
from torch_models import EOS, GPT2, TOKENIZER, VOCAB, make_prompts, to_batch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from vllm_models import (
    CONTEXT,
    by_sample,
    generate,
    hugging_face_logprob,
    model_spec,
    random_weights,
    set_weights,
    start,
)

SAMPLING = Sampling(num_samples=3, max_new_tokens=20)
VERSIONS = count(1001)


@dataclass
class Case:
    """An engine's policy, and the same model in Hugging Face's own code with the same weights."""

    policy: GeneratorPolicy
    module: Any

    def deliver(self, seed: int) -> int:
        """New weights for both; their version."""
        weights = random_weights(self.module, seed)
        version = next(VERSIONS)
        self.policy.receive(weights, version)
        set_weights(self.module, weights)
        return version

    def difference(self) -> float:
        """The largest difference of log-probabilities over some samples."""
        prompt, prompt_id = make_prompts(6)
        roll = generate(self.policy, prompt, prompt_id, SAMPLING)
        expected = hugging_face_logprob(self.module, roll)
        return float((roll.behavior_logprob - expected).abs().max())


TWO = "DEFGHIJLMNOPQRSTUVWXYZabcdefgh"
QWEN2 = model_spec("qwen2-tied")


def slow_policy() -> GeneratorPolicy:
    return SlowPolicySpec(model=QWEN2, end_ids=(EOS,), tokenizer=TOKENIZER).build(CONTEXT)


def torch_policy(model: ModelSpec) -> GeneratorPolicy:
    return TorchGeneratorSpec(model=model, end_ids=(EOS,), tokenizer=TOKENIZER).build(CONTEXT)


POLICIES: dict[str, tuple[ModelSpec, Callable[[], GeneratorPolicy]]] = {
    "slow": (QWEN2, slow_policy),
    "torch": (QWEN2, lambda: torch_policy(QWEN2)),
    "torch-gpt2": (
        ModelSpec(architecture=GPT2),
        lambda: torch_policy(ModelSpec(architecture=GPT2)),
    ),
    "vllm": (QWEN2, lambda: start("qwen2-tied", tokenizer=TOKENIZER)),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in ("slow", "vllm") else name
        for name in POLICIES
    ],
)
def case(request: pytest.FixtureRequest) -> Generator[Case]:
    """One engine for all tests: each starts from the weights it sets."""
    model, make = POLICIES[request.param]
    made = Case(make(), model.causal_lm("cpu"))
    made.deliver(1)
    yield made
    made.policy.close()


def test_it_is_what_runs_ask_for(case: Case):
    assert isinstance(case.policy.engine, GenerationEngine)
    assert case.policy.engine.vocab_size == VOCAB
    assert case.policy.engine.num_positions == 256


# --- drawing


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_hugging_faces_at_the_sampling_temperature(case: Case, temperature: float):
    prompt, prompt_id = make_prompts(8)
    sampling = Sampling(num_samples=3, max_new_tokens=20, temperature=temperature)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    expected = hugging_face_logprob(case.module, roll, temperature)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)
    assert bool((roll.behavior_logprob[roll.mask] < 0).all())


def test_the_rollout_is_laid_out_as_the_table_says(case: Case):
    prompt, prompt_id = make_prompts(8)
    roll = generate(case.policy, prompt, prompt_id, SAMPLING)
    assert roll.prompt_id.tolist() == prompt_id.repeat_interleave(3).tolist()
    for row in range(len(roll.tokens)):
        begin = int((prompt[row // 3] >= 0).sum())
        response = roll.tokens[row][roll.mask[row]].tolist()
        end = begin + len(response)
        assert roll.tokens[row, :begin].tolist() == prompt[row // 3, :begin].tolist()
        assert torch.nonzero(roll.mask[row])[:, 0].tolist() == list(range(begin, end))
        assert bool((roll.tokens[row, end:] == -1).all())
        assert bool((roll.behavior_logprob[row][~roll.mask[row]] == 0).all())
        assert EOS not in response[:-1]
        assert bool(roll.finished[row]) == (response[-1] == EOS)
        assert roll.finished[row] or len(response) == SAMPLING.max_new_tokens
    assert 0 < int(roll.finished.sum()) < len(roll.finished)


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_batch(case: Case):
    prompt, prompt_id = make_prompts(24)
    whole = by_sample(generate(case.policy, prompt, prompt_id, SAMPLING), 3)
    for rows in (torch.arange(23, -1, -1), torch.tensor([17]), torch.tensor([3, 20, 4])):
        part = by_sample(generate(case.policy, prompt[rows], prompt_id[rows], SAMPLING), 3)
        assert {key: tokens for key, (tokens, _) in part.items()} == {
            key: whole[key][0] for key in part
        }
        for key, (_, logprob) in part.items():
            assert logprob == pytest.approx(whole[key][1], abs=1e-5)


def test_more_samples_extend_fewer_and_a_longer_limit_a_shorter(case: Case):
    prompt, prompt_id = make_prompts(5)
    few = by_sample(generate(case.policy, prompt, prompt_id, SAMPLING), 3)
    more = Sampling(num_samples=6, max_new_tokens=40)
    many = by_sample(generate(case.policy, prompt, prompt_id, more), 6)
    for key, (tokens, _) in few.items():
        assert many[key][0][: len(tokens)] == tokens


def test_samples_of_a_prompt_differ_and_steps_sample_anew(case: Case):
    prompt, prompt_id = make_prompts(4)
    first = generate(case.policy, prompt, prompt_id, SAMPLING).tokens.tolist()
    assert generate(case.policy, prompt, prompt_id, SAMPLING, step=1).tokens.tolist() != first
    assert generate(case.policy, prompt, prompt_id, SAMPLING).tokens.tolist() == first
    assert first[0] != first[1]


def test_samples_follow_the_models_probabilities(case: Case):
    """Chi-squared of the first token of 4,000 samples against Hugging Face's distribution."""
    prompt, prompt_id = torch.tensor([[5, 9, 11]]), torch.tensor([3])
    roll = generate(case.policy, prompt, prompt_id, Sampling(num_samples=4000, max_new_tokens=1))
    with torch.no_grad():
        expected = case.module(input_ids=prompt).logits[0, -1].softmax(-1) * 4000
    counts = torch.bincount(roll.tokens[:, 3], minlength=VOCAB)
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy_takes_the_most_likely_token_of_hugging_face(case: Case):
    prompt, prompt_id = make_prompts(3)
    sampling = Sampling(max_new_tokens=10, temperature=0)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    for row in range(3):
        begin = int((prompt[row] >= 0).sum())
        tokens = roll.tokens[row][roll.tokens[row] >= 0]
        logits = case.module(input_ids=tokens[None]).logits[0]
        assert tokens[begin:].tolist() == logits[begin - 1 : -1].argmax(-1).tolist()
    assert not roll.behavior_logprob.any()


# --- sampling options


FILTERS: dict[str, Sampling] = {
    "top_p": Sampling(top_p=0.7),
    "top_k": Sampling(top_k=5),
    "min_p": Sampling(min_p=0.9),
    "repetition_penalty": Sampling(repetition_penalty=1.5),
    "min_new_tokens": Sampling(min_new_tokens=8),
    "all": Sampling(
        temperature=1.3, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.2, min_new_tokens=3
    ),
}


def filtered_logprob(module: Any, roll: Rollout, sampling: Sampling) -> Tensor:
    """f32[rows, T] by transformers' processors of logits, in the order of vLLM."""
    after: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.min_p > 0:
        after.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        after.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        after.append(TopPLogitsWarper(sampling.top_p))
    found = torch.zeros(roll.tokens.shape)
    for row, (tokens, mask) in enumerate(zip(roll.tokens, roll.mask, strict=True)):
        places = torch.nonzero(mask)[:, 0].tolist()
        begin = places[0]
        before: list[Any] = [
            MinNewTokensLengthLogitsProcessor(begin, sampling.min_new_tokens, [EOS]),
            RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        ]
        with torch.no_grad():
            logits = module(input_ids=tokens[None, : places[-1]]).logits[0]
        for place in places:
            scores = logits[None, place - 1]
            for processor in (*before, *after):
                scores = processor(tokens[None, :place], scores)
            found[row, place] = torch.log_softmax(scores, -1)[0, tokens[place]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_logprobs_are_of_the_distribution_that_was_sampled_from(case: Case, name: str):
    sampling = replace(FILTERS[name], num_samples=3, max_new_tokens=12)
    prompt, prompt_id = make_prompts(6)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    expected = filtered_logprob(case.module, roll, sampling)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=2e-5, rtol=0)
    unfiltered = hugging_face_logprob(case.module, roll, sampling.temperature)
    assert float((roll.behavior_logprob - unfiltered).abs().max()) > 1e-3
    # and they do not depend on who else is in the batch
    whole = by_sample(roll, 3)
    part = by_sample(generate(case.policy, prompt[4:5], prompt_id[4:5], sampling), 3)
    assert {key: tokens for key, (tokens, _) in part.items()} == {
        key: whole[key][0] for key in part
    }


def test_a_penalty_moves_the_likeliest_token(case: Case):
    prompt, prompt_id = make_prompts(4)
    sampling = Sampling(max_new_tokens=12, temperature=0, repetition_penalty=1e4, top_p=0.1)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    for tokens in roll.tokens.tolist():
        said = [token for token in tokens if token >= 0][-12:]
        assert len(set(said)) == len(said)
    assert not roll.behavior_logprob.any()


def test_a_response_ends_where_it_first_says_a_stop_string(case: Case):
    tokenizer, stop = TOKENIZER.build(), ("C", *("K" + second for second in TWO))
    prompt, prompt_id = make_prompts(12)
    plain = Sampling(num_samples=4, max_new_tokens=20)
    roll = generate(case.policy, prompt, prompt_id, replace(plain, stop=stop))
    unstopped = by_sample(generate(case.policy, prompt, prompt_id, plain), 4)
    sampled = by_sample(roll, 4)
    assert all(unstopped[key][0][: len(tokens)] == tokens for key, (tokens, _) in sampled.items())
    found: Counter[str] = Counter()
    for row in range(len(roll.tokens)):
        response = roll.tokens[row][roll.mask[row]].tolist()
        text, before = tokenizer.decode(response), tokenizer.decode(response[:-1])
        assert not any(string in before for string in stop)
        ended = [string for string in stop if text.endswith(string)]
        found.update(ended)
        assert bool(roll.finished[row]) == (bool(ended) or response[-1] == EOS)
    assert found["C"] > 0
    assert len(found) > 1


def test_a_response_ends_with_a_stop_token(case: Case):
    prompt, prompt_id = make_prompts(12)
    sampling = Sampling(num_samples=3, max_new_tokens=20, stop_token_ids=(9, 30), min_new_tokens=2)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    ended: set[int] = set()
    for row in range(len(roll.tokens)):
        *before, last = roll.tokens[row][roll.mask[row]].tolist()
        assert not {EOS, 9, 30} & set(before)
        assert bool(roll.finished[row]) == (last in (EOS, 9, 30))
        assert len(before) >= 2
        ended.add(last)
    assert {EOS, 9, 30} <= ended


def test_a_long_prompt_leaves_less_room(case: Case):
    prompt, prompt_id = make_prompts(12)
    sampling = Sampling(num_samples=2, max_new_tokens=9, max_total_tokens=20)
    roll = generate(case.policy, prompt, prompt_id, sampling)
    whole = by_sample(generate(case.policy, prompt, prompt_id, replace(SAMPLING, num_samples=2)), 2)
    limits: set[int] = set()
    for row, (key, (tokens, _)) in enumerate(by_sample(roll, 2).items()):
        limit = min(9, 20 - int((prompt[row // 2] >= 0).sum()))
        assert tokens == whole[key][0][:limit]
        assert bool(roll.finished[row]) == (tokens[-1] == EOS)
        limits.add(limit)
    assert min(limits) < 9 == max(limits)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        case.policy.generate(prompt, prompt_id, replace(sampling, max_total_tokens=15))
    longest = int((prompt >= 0).sum(1).argmax())
    assert str(error.value) == (
        f"prompt row {longest} has {int((prompt[longest] >= 0).sum())} tokens, so with "
        "max_total_tokens=15 none are left for a response. Drop long prompts or raise "
        "max_total_tokens"
    )


def test_sampling_that_the_model_cannot_do_is_refused(case: Case):
    prompt, prompt_id = make_prompts(1)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        case.policy.generate(prompt, prompt_id, Sampling(stop_token_ids=(5, VOCAB)))
    assert str(error.value) == (
        "stop_token_ids has 61, but the model's vocabulary has 61; give ids of the model's own "
        "tokens"
    )


def test_lengths_are_reported(case: Case):
    case.policy.metrics.clear()
    prompt, prompt_id = make_prompts(6)
    roll = generate(case.policy, prompt, prompt_id, SAMPLING)
    lengths = roll.mask.sum(1)
    assert {name: metric.value for name, metric in case.policy.metrics.items()} == {
        "response_length": pytest.approx(float(lengths.float().mean())),
        "response_length_min": float(lengths.min()),
        "response_length_max": float(lengths.max()),
        "truncated": pytest.approx(1 - float(roll.finished.float().mean())),
        "new_tokens": float(lengths.sum()),
        "token_lag": 0.0,
        "token_lag_max": 0.0,
    }


def test_no_prompts_make_no_rows(case: Case):
    empty = torch.zeros(0, 5, dtype=torch.int64)
    roll = case.policy.generate(empty, torch.zeros(0, dtype=torch.int64), SAMPLING)
    assert roll.tokens.shape == (0, 0)
    assert roll.finished.shape == (0,)


def test_responses_go_on_under_newer_weights(case: Case):
    """A token's log-probability is that of the weights which sampled it."""
    prompt, prompt_id = make_prompts(5)
    call: dict[str, Any] = {"prompt": prompt, "prompt_id": prompt_id, "sampling": SAMPLING}
    rolls: list[Rollout] = []
    weights: list[dict[str, Tensor]] = []
    left: Any = None
    for step, length in enumerate((3, 4, 20)):
        case.deliver(40 + step)
        weights.append({name: tensor.clone() for name, tensor in case.module.state_dict().items()})
        with call_scope(step, 0, version=step):
            (answer,) = case.policy.stream_segment("generate", [call], [left], length)
        assert answer is not None, "it pauses in flight alone"
        rolls.append(answer.returned)
        left = answer.unfinished
        call |= {"prompt": prompt[:0], "prompt_id": prompt_id[:0]}
    assert not len(left.ended)
    returned = Counter(i for roll in rolls for i in roll.prompt_id.tolist())
    assert returned == {i: SAMPLING.num_samples for i in prompt_id.tolist()}
    assert rolls[-1].version[rolls[-1].mask].unique().tolist() == [0, 1, 2]
    for version, theirs in enumerate(weights):
        case.module.load_state_dict(theirs)
        for roll in filter(lambda roll: len(roll.mask), rolls):
            own = roll.mask & (roll.version == version)
            expected = hugging_face_logprob(case.module, roll)[own]
            torch.testing.assert_close(roll.behavior_logprob[own], expected, atol=1e-5, rtol=0)


# --- weights


def test_weights_of_another_model_change_nothing(case: Case):
    case.deliver(80)
    other = random_weights(case.module, 81)
    name = max(other)
    with pytest.raises(ValueError, match=rf"missing \['{name}'\], unknown \['head'\]"):
        case.policy.load_weights({("head" if n == name else n): t for n, t in other.items()})
    with pytest.raises(ValueError, match=rf"weight '{name}': expected shape"):
        case.policy.load_weights({**other, name: torch.zeros(2, 2, 2)})
    assert case.difference() < 1e-5


def test_the_layout_is_every_parameter_whole(case: Case):
    layout = case.policy.weights_layout()
    assert {p.name: p.shape for p in layout.params} == {
        name: tuple(tensor.shape) for name, tensor in case.module.named_parameters()
    }
    assert layout.bytes_on == {0: 4 * sum(t.numel() for t in case.module.parameters())}
    assert plan_transfer(layout.on([3]), layout).sent_bytes == layout.bytes_on[0]


def test_one_that_slept_samples_what_it_sampled(case: Case):
    prompt, prompt_id = make_prompts(8)
    before = generate(case.policy, prompt, prompt_id, SAMPLING)
    for change in (case.policy.sleep, case.policy.wake):
        change()
        change()
    after = generate(case.policy, prompt, prompt_id, SAMPLING)
    assert torch.equal(after.tokens, before.tokens)
    torch.testing.assert_close(after.behavior_logprob, before.behavior_logprob, atol=1e-5, rtol=0)


# --- refusals


def test_prompts_that_cannot_be_answered_are_refused(case: Case):
    prompt, prompt_id = make_prompts(3)
    prompt[1] = -1
    with pytest.raises(ValueError, match=r"prompt row 1 is empty"):
        case.policy.generate(prompt, prompt_id, SAMPLING)
    prompt, prompt_id = make_prompts(3)
    with pytest.raises(ValueError, match=r"exceeds the model's 256 positions"):
        case.policy.generate(prompt, prompt_id, Sampling(max_new_tokens=250))
    prompt[2, 0] = VOCAB
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        case.policy.generate(prompt, prompt_id, SAMPLING)
    assert str(error.value) == (
        "prompt row 2 has token 61, but the model's vocabulary has 61; prompts and model need the "
        "same tokenizer"
    )


def test_what_is_a_training_engines_work_is_refused(case: Case, tmp_path: Path):
    policy, name = case.policy, case.policy.engine.name
    roll = generate(policy, *make_prompts(1), SAMPLING)
    begin = f"'actor' runs in {name} here, which generates and cannot "
    for call, what, node in (
        (lambda: policy.logprob(roll.tokens, roll.mask), "evaluate log-probabilities", "logprob"),
        (lambda: policy.train(ClippedPolicyLoss(), to_batch(roll)), "train", "train"),
        (policy.export_weights, "give its weights back", "train"),
        (lambda: policy.save_state(tmp_path), "save a state", "train"),
        (lambda: policy.load_state(tmp_path), "restore a state", "train"),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == (
            f"{begin}{what}; place 'actor.{node}' on a group with a training engine"
        )
