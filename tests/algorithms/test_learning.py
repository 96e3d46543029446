"""The algorithms learn: each step function, called directly, with complete but small roles.

The policy's next token depends on the last one; critic and reward model are tables over tokens.
Training goes through the losses in micro-batches, as an engine does it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.reward_modelling import RewardModelling, reward_modelling_step
from penstock.algorithms.roles import (
    Demonstrations,
    Feedback,
    Policy,
    PolicyOutput,
    Prompts,
    Reward,
    RewardModel,
    Rollout,
    Sampling,
    ScoreOutput,
    TrainMetrics,
    ValueModel,
    ValueOutput,
)
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.graph.role import Loss, Metric
from torch import Tensor

VOCABULARY = 5
EOS = 0


# --- small but complete roles ---------------------------------------------------------------------


class Trained:
    """Parameters with plain gradient descent over micro-batches of two groups or rows."""

    def __init__(self, parameter: Tensor, lr: float) -> None:
        self.parameter = parameter.double().requires_grad_()
        self.lr = lr

    def forward(self, batch: Any, loss: Loss[Any, Any]) -> Any:
        raise NotImplementedError

    def train(
        self,
        loss: Loss[Any, Any],
        batch: Any,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
        temperature: float = 1.0,
    ) -> TrainMetrics:
        self.temperature = temperature
        metrics: dict[str, Metric] = {}
        for _ in range(epochs * num_minibatches):
            totals = loss.totals(batch)
            gradient = torch.zeros_like(self.parameter)
            for rows in micro_batches(batch, loss.unit):
                result = loss(self.forward(rows, loss), rows, totals)
                gradient += torch.autograd.grad(result.total, self.parameter)[0]
                for name, (total, weight) in result.metrics.items():
                    metric = Metric.mean(total.item(), weight.item())
                    metrics[name] = metrics[name] + metric if name in metrics else metric
            with torch.no_grad():
                self.parameter -= self.lr * gradient
        return TrainMetrics(metrics)


def micro_batches(batch: Any, unit: str) -> list[Any]:
    columns = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    keys = columns["pair_id"] if unit == "group" else torch.arange(len(columns["tokens"])) // 2
    return [
        type(batch)(**{name: column[keys == key] for name, column in columns.items()})
        for key in keys.unique()
    ]


def previous(tokens: Tensor) -> Tensor:
    return torch.nn.functional.pad(tokens[:, :-1], (1, 0)).clamp(min=0)


class TablePolicy(Trained, Policy):
    """Next-token logits `[last token, next token]`."""

    def __init__(self, logits: Tensor | None = None, lr: float = 2.0) -> None:
        super().__init__(torch.zeros(VOCABULARY, VOCABULARY) if logits is None else logits, lr)
        self.generator = torch.Generator().manual_seed(0)

    def _logprobs(self, tokens: Tensor, temperature: float) -> Tensor:
        return torch.log_softmax(self.parameter[previous(tokens)] / temperature, dim=-1)

    def logprob(self, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
        chosen = self._logprobs(tokens, temperature).gather(2, tokens.clamp(min=0)[..., None])
        return torch.where(mask, chosen[..., 0], 0.0).detach()

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        rows: list[list[int]] = []
        lengths: list[int] = []
        for row in prompt.repeat_interleave(sampling.num_samples, 0).tolist():
            tokens = [token for token in row if token >= 0]
            lengths.append(len(tokens))
            for _ in range(sampling.max_new_tokens):
                p = torch.softmax(self.parameter[tokens[-1]].detach() / sampling.temperature, 0)
                tokens.append(int(torch.multinomial(p, 1, generator=self.generator)))
                if tokens[-1] == EOS:
                    break
            rows.append(tokens)
        width = max(map(len, rows))
        tokens = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        mask = (torch.arange(width) >= torch.tensor(lengths)[:, None]) & (tokens >= 0)
        return Rollout(
            prompt_id=prompt_id.repeat_interleave(sampling.num_samples),
            tokens=tokens,
            mask=mask,
            behavior_logprob=self.logprob(tokens, mask, temperature=sampling.temperature),
            finished=torch.tensor([row[-1] == EOS for row in rows]),
        )

    def forward(self, batch: Any, loss: Loss[Any, Any]) -> PolicyOutput:
        logprobs = self._logprobs(batch.tokens, self.temperature)
        logprob = logprobs.gather(2, batch.tokens.clamp(min=0)[..., None])[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1) if loss.needs_entropy else None
        return PolicyOutput(logprob=logprob, entropy=entropy)


class TableCritic(Trained, ValueModel):
    """One value per last token."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(VOCABULARY), 2.0)

    def value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, self.parameter[previous(tokens)], 0.0).detach()

    def forward(self, batch: Any, loss: Loss[Any, Any]) -> ValueOutput:
        return ValueOutput(value=self.parameter[previous(batch.tokens)])


class TableReward(Trained, RewardModel):
    """Sum of one weight per response token."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(VOCABULARY), 1.0)

    def forward(self, batch: Any, loss: Loss[Any, Any]) -> ScoreOutput:
        weight = torch.where(batch.mask, self.parameter[batch.tokens.clamp(min=0)], 0.0)
        return ScoreOutput(score=weight.sum(1))


class CountsToken3(Reward):
    """Share of a response's tokens that are 3."""

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        return ((tokens == 3) & mask).sum(1) / mask.sum(1).double()


PROMPTS = Prompts(prompt=torch.tensor([[1, 2], [4, -1]]), prompt_id=torch.tensor([17, 4]))


def frequency_of_3(policy: TablePolicy) -> float:
    roll = policy.generate(PROMPTS.prompt, PROMPTS.prompt_id, Sampling(num_samples=64))
    return CountsToken3().score(roll.tokens, roll.mask, roll.prompt_id).mean().item()


# --- learning -------------------------------------------------------------------------------------


def test_sft_learns_the_demonstrated_frequencies() -> None:
    """After token 1, tokens 2 and 0 follow 3 : 1; the prompt's own tokens are not imitated."""
    tokens = torch.tensor([[4, 1, 2], [4, 1, 2], [4, 1, 2], [1, 0, -1]])
    mask = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 1, 0]]).bool()
    actor = TablePolicy()
    demos = Demonstrations(tokens=tokens, mask=mask)
    for _ in range(60):
        sft_step(demos, actor, SFT())
    report = sft_step(demos, actor, SFT())
    learnt = torch.softmax(actor.parameter[1], 0).detach()
    assert learnt[2].item() == pytest.approx(0.75, abs=0.02)
    assert learnt[0].item() == pytest.approx(0.25, abs=0.02)
    assert not actor.parameter[4].any()
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert report.metrics["cross_entropy"].value == pytest.approx(entropy.item(), abs=0.05)


def test_reward_modelling_learns_the_preferred_token() -> None:
    pairs = Feedback(
        pair_id=torch.tensor([9, 3, 3, 9]),
        tokens=torch.tensor([[1, 3, 0], [1, 2, 0], [1, 3, 0], [1, 4, -1]]),
        mask=torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]).bool(),
        chosen=torch.tensor([True, False, True, False]),
    )
    reward = TableReward()
    first = reward_modelling_step(pairs, reward, RewardModelling())
    assert first.metrics["accuracy"].value == 0
    for _ in range(10):
        reward_modelling_step(pairs, reward, RewardModelling(epochs=2))
    report = reward_modelling_step(pairs, reward, RewardModelling())
    assert report.metrics["accuracy"].value == 1
    assert report.metrics["margin"].value > 1
    assert reward.parameter.argmax().item() == 3


def test_grpo_learns_the_rewarded_token() -> None:
    actor = TablePolicy()
    before = frequency_of_3(actor)
    cfg = GRPO(sampling=Sampling(num_samples=8, max_new_tokens=4))
    first = grpo_step(PROMPTS, actor, CountsToken3(), cfg)
    for _ in range(25):
        grpo_step(PROMPTS, actor, CountsToken3(), cfg)
    assert before < 0.4
    assert frequency_of_3(actor) > 0.8
    assert first.metrics["ratio_mean"].value == pytest.approx(1, abs=1e-12)
    assert first.metrics["approx_kl_k3"].value == pytest.approx(0, abs=1e-12)
    assert first.metrics["clip_fraction_low"].value == 0
    assert first.metrics["entropy"].value == pytest.approx(torch.tensor(5.0).log().item())


def test_grpo_with_a_strong_reference_stays_near_it() -> None:
    cfg = ReferenceGRPO(sampling=Sampling(num_samples=8, max_new_tokens=4))
    free, tied = TablePolicy(), TablePolicy()
    for actor, kl_coef in ((free, 1e-6), (tied, 1.0)):
        for _ in range(20):
            one = dataclasses.replace(cfg, kl_coef=kl_coef)
            report = reference_grpo_step(PROMPTS, actor, TablePolicy(), CountsToken3(), one)
            assert report.metrics["ref_kl_k3_per_token"].value >= 0
    assert frequency_of_3(free) > frequency_of_3(tied) + 0.2


@pytest.mark.slow
def test_ppo_learns_the_rewarded_token_and_its_value() -> None:
    actor, critic = TablePolicy(lr=1.0), TableCritic()
    cfg = PPO(sampling=Sampling(num_samples=16, max_new_tokens=3), no_eos="none", kl_coef=0.001)
    for _ in range(20):
        ppo_step(PROMPTS, actor, critic, TablePolicy(), CountsToken3(), cfg)
    actor_report, critic_report, kl = ppo_step(
        PROMPTS, actor, critic, TablePolicy(), CountsToken3(), cfg
    )
    assert frequency_of_3(actor) > 0.8
    assert "value_loss" in critic_report.metrics
    assert actor_report.metrics["ratio_mean"].value == pytest.approx(1, abs=0.3)
    assert critic.parameter[3].item() > 0.3
    assert kl is not None
    assert kl.shape == (len(PROMPTS.prompt) * 16,)
    assert kl.mean().item() > 0.1
