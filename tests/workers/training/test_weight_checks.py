"""Weights, logits, losses and gradients that are no numbers are named where they arise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, PolicyOutput, Sampling
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.role import Loss, LossSum
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec, TorchValueSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from penstock.workers.training.weight_checks import take_tensors, unusable
from torch import Tensor
from torch_models import architecture, make_batch, make_policy, make_prompts

WILD = OptimizerSpec(lr=1e30)
ADVICE = (
    "\n    nothing of this step is published or saved; go on from the last checkpoint with a lower "
    "optimizer.lr, or correct what made the numbers"
)


def ruined(policy: PolicyWorker, value: float = torch.nan) -> PolicyWorker:
    """With one number in the last norm replaced."""
    policy.local_tensors()["model.norm.weight"][0] = value
    policy.weights_changed()
    return policy


def test_one_number_that_is_none_is_found_and_large_ones_are_not() -> None:
    weights = {"a": torch.full((3,), 1e11), "b": torch.ones(4, dtype=torch.bfloat16)}
    assert unusable(weights) == []
    assert unusable({}) == []
    many = {f"w{i}": torch.full((2,), 7e11) for i in range(9)}  # more than 1e12 only together
    assert unusable(many) == []
    for bad in (torch.nan, torch.inf, 1e13, 1e30):
        weights["b"][2] = bad
        assert unusable(weights) == ["b"], bad


@pytest.mark.parametrize("lr", [1e30, 1e13])
def test_a_step_that_ruins_the_weights_is_the_last(lr: float) -> None:
    policy = make_policy(optimizer=OptimizerSpec(lr=lr))
    with pytest.raises(WorkerError) as error, call_scope(7, 0):
        policy.train(ClippedPolicyLoss(), make_batch(policy))
    assert str(error.value) == (
        "step 7: 'actor' cannot be trained on: its weights or its loss have run away\n    not "
        "finite: weights model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, "
        f"model.layers.0.self_attn.q_proj.bias and 23 more{ADVICE}"
    )


def test_weights_that_run_away_within_a_call_are_blamed_for_the_gradient() -> None:
    policy = make_policy(optimizer=WILD)
    with pytest.raises(
        WorkerError, match="gradient norm is nan at optimizer step 2, which is not.*\n.*weigh"
    ):
        policy.train(ClippedPolicyLoss(), make_batch(policy), num_minibatches=2)


@dataclasses.dataclass(frozen=True)
class Priceless(Loss[PolicyBatch, PolicyOutput]):
    """Adds a constant that is no number to one micro-batch: the gradient does not know of it."""

    def totals(self, batch: PolicyBatch) -> Tensor:
        return batch.mask.sum()

    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        total = output.logprob.sum() / totals
        has_first = bool((batch.tokens[:, 0] == FIRST).any())
        return LossSum(total + torch.nan if has_first else total, {})


FIRST = int(make_prompts(6)[0][2, 0])


@pytest.mark.slow
def test_a_loss_that_is_no_number_in_one_micro_batch() -> None:
    policy = make_policy(optimizer=OptimizerSpec(lr=1e-3), micro_batch_tokens=1)
    with pytest.raises(WorkerError) as error:
        policy.train(Priceless(), make_batch(policy))
    assert str(error.value) == (
        "step 0: 'actor' cannot be trained on: its weights or its loss have run away\n    not "
        f"finite: the loss{ADVICE}"
    )


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt_neox"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_nothing_is_sampled_from_logits_that_are_no_numbers(name: str, temperature: float) -> None:
    policy = make_policy(name)
    norm = next(name for name in reversed(policy.local_tensors()) if "norm" in name)
    policy.local_tensors()[norm][0] = torch.nan
    prompt, prompt_id = make_prompts(3)
    sampling = Sampling(num_samples=2, max_new_tokens=4, temperature=temperature)
    with pytest.raises(WorkerError) as error, call_scope(5, 0):
        policy.generate(prompt, prompt_id, sampling)
    assert str(error.value) == (
        "step 5: the logits of 'actor' are not finite in 6 of 6 responses\n    its weights have "
        "run away: go on from the last checkpoint with a lower optimizer.lr, or in dtype float32"
    )


def test_what_models_say_is_looked_at() -> None:
    batch = make_batch(make_policy())
    policy = ruined(make_policy())
    with pytest.raises(WorkerError) as error, call_scope(2, 0):
        policy.logprob(batch.tokens, batch.mask)
    assert str(error.value) == (
        "step 2: log-probabilities of 'actor' are not finite in 24 of 24 rows; its weights are not "
        "finite: model.norm.weight\n    go on from the last checkpoint with a lower optimizer.lr, "
        "or in dtype float32"
    )
    model = ModelSpec(architecture=architecture("qwen2"))
    context = WorkerContext("critic")
    critic, reward = TorchValueSpec(model=model).build(context), TorchRewardModelSpec(model=model)
    critic.local_tensors()["value_head.bias"].fill_(torch.inf)
    with pytest.raises(WorkerError, match="step 0: values of 'critic' are not finite in 24 of 24"):
        critic.value(batch.tokens, batch.mask)
    scores = reward.build(context)
    scores.local_tensors()["score.weight"].fill_(torch.nan)
    with pytest.raises(WorkerError, match="step 0: scores of 'critic' are not finite in 24 of 24"):
        scores.score(batch.tokens, batch.mask, torch.arange(24))


def test_a_saved_state_of_numbers_that_are_none_is_refused(tmp_path: Path) -> None:
    ruined(make_policy()).save_state(tmp_path)
    with pytest.raises(ConfigError) as error:
        make_policy().load_state(tmp_path)
    assert str(error.value) == (
        f"the weights in '{tmp_path}' are not those of 'actor':\n    not finite: "
        "model.norm.weight\n    copy or save them again, all of them, with the configuration they "
        "were made by"
    )


def test_tensors_are_taken_all_or_none() -> None:
    wanted = {"a": torch.zeros(2), "b": torch.zeros(3)}
    saved = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf, 0.0]), "c": torch.ones(1)}
    with pytest.raises(ConfigError) as error:
        take_tensors(Path("f"), "a perceptron", saved, wanted)
    assert str(error.value) == (
        "the weights in 'f' are not those of a perceptron:\n    unexpected: c\n    not finite: b\n"
        "    copy or save them again, all of them, with the configuration they were made by"
    )
    assert not wanted["a"].any()
    take_tensors(Path("f"), "a perceptron", {"a": saved["a"].double(), "b": wanted["b"]}, wanted)
    assert wanted["a"].tolist() == [1, 1]
