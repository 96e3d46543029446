"""The algorithms' step functions: what they record, and what they hand to training.

`Scripted*` roles answer with a printed example's numbers and keep the batch they are trained on, so
that a step's wiring is checked end to end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import ClippedPolicyLoss, ReferenceKLPolicyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.reinforce import Reinforce
from penstock.algorithms.reward_modelling import RewardModelling, reward_modelling_step
from penstock.algorithms.roles import (
    Demonstrations,
    Policy,
    PolicyOutput,
    Prompts,
    ReferencePolicyBatch,
    Reward,
    Rollout,
    Sampling,
    TrainMetrics,
    ValueBatch,
    ValueModel,
    ValueOutput,
)
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.graph import Graph, Ref
from penstock.dataflow.graph.role import Loss
from penstock.dataflow.graph.tracer import build
from torch import Tensor

PROMPTS = Prompts(prompt=torch.tensor([[1, 2], [4, -1]]), prompt_id=torch.tensor([17, 4]))


# --- wiring, against the printed numbers ----------------------------------------------------------

MASK = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
TOKENS = torch.where(MASK, 1, -1).index_fill(1, torch.tensor([0]), 2)


def with_prompt(rows: list[list[float]]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(rows, dtype=torch.float64), (1, 0))


class ScriptedPolicy(Policy):
    """Always rolls out the example's two rows; remembers what it was trained on."""

    def __init__(self, logprob: Tensor, finished: list[bool], prompt_id: list[int]) -> None:
        self.roll = Rollout(
            prompt_id=torch.tensor(prompt_id),
            tokens=TOKENS,
            mask=MASK,
            behavior_logprob=logprob,
            finished=torch.tensor(finished),
        )
        self.trained: dict[str, Any] = {}
        self.temperature = 0.0

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        return self.roll

    def logprob(self, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
        self.temperature = temperature
        return self.roll.behavior_logprob

    def train(self, loss: Loss[Any, PolicyOutput], batch: Any, **options: Any) -> TrainMetrics:
        self.trained = {"loss": loss, "batch": batch, **options}
        return TrainMetrics({})


class ScriptedCritic(ValueModel):
    """Always gives the example's values; remembers what it was trained on."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.trained: dict[str, Any] = {}

    def value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.values

    def train(self, loss: Loss[Any, ValueOutput], batch: Any, **options: Any) -> TrainMetrics:
        self.trained = {"loss": loss, "batch": batch, **options}
        return TrainMetrics({})


class ScriptedReward(Reward):
    """Always gives the example's scores."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = torch.tensor(scores, dtype=torch.float64)

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        return self.scores


LOG_RATIO = with_prompt([[0.1, -0.1, 0.2, 0, 0], [0.1, 0, 0, -0.1, 0.2]])
VALUES = with_prompt([[0.5, 0.6, 0.7, 0, 0], [0.1, 0.2, 0.3, 0.4, 0.5]])


def run_ppo(
    cfg: PPO, *more: Any, step: Any = ppo_step, first_finished: bool = True
) -> tuple[ScriptedPolicy, ScriptedCritic, ScriptedPolicy]:
    """PPO, or a step with some more roles after its own."""
    finished = [first_finished, True]
    actor = ScriptedPolicy(LOG_RATIO - 1, finished, [0, 1])
    ref = ScriptedPolicy(torch.full_like(LOG_RATIO, -1), finished, [0, 1])
    critic = ScriptedCritic(VALUES)
    step(PROMPTS, actor, critic, ref, ScriptedReward([2, -1]), *more, cfg)
    return actor, critic, ref


def test_ppo_trains_on_the_printed_advantages_and_returns() -> None:
    actor, critic, ref = run_ppo(PPO())
    advantage = with_prompt(
        [
            [1.303071, 1.279806, 1.246717, 0, 0],
            [-0.50956, -0.628226, -0.757438, -0.89345, -1.040921],
        ]
    )
    returns = with_prompt(
        [[1.858975, 1.9305, 1.99, 0, 0], [-0.75963, -0.804874, -0.863025, -0.9295, -1.01]]
    )
    policy_batch, value_batch = actor.trained["batch"], critic.trained["batch"]
    torch.testing.assert_close(policy_batch.advantage, advantage, atol=1e-6, rtol=0)
    torch.testing.assert_close(value_batch.value_target, returns, atol=1e-6, rtol=0)
    assert policy_batch.behavior_logprob is actor.roll.behavior_logprob
    assert value_batch.old_value is VALUES
    assert ref.temperature == actor.trained["temperature"] == 0.7
    assert actor.trained["epochs"] == critic.trained["epochs"] == 4
    assert actor.trained["num_minibatches"] == critic.trained["num_minibatches"] == 1


def test_ppo_replaces_the_score_of_a_response_that_was_cut_off() -> None:
    """Row 0 loses its score of 2 for -1: its last return falls by exactly 3."""
    _, whole, _ = run_ppo(PPO())
    _, cut, _ = run_ppo(PPO(), first_finished=False)
    change = cut.trained["batch"].value_target - whole.trained["batch"].value_target
    assert change[0, 3].item() == pytest.approx(-3)
    assert not change[1].any()


def test_ppo_refuses_to_expect_something_where_it_puts_the_score() -> None:
    with pytest.raises(ValueError, match="no_eos 'zero' .* choose one of them"):
        PPO(no_eos="zero", score_slot="after_last")


def test_ppo_can_whiten_rewards_keeping_their_mean() -> None:
    reward = with_prompt([[-0.005, 0.005, 1.99, 0, 0], [-0.005, 0, 0, 0.005, -1.01]])
    kept = reward[MASK]
    scaled = (kept - kept.mean()) / kept.std(correction=0) + kept.mean()
    _, critic, _ = run_ppo(PPO(whiten_rewards=True, gae_lambda=1.0))
    returns = critic.trained["batch"].value_target
    assert returns[0, 1].item() == pytest.approx(scaled[:3].sum().item(), abs=1e-6)
    assert returns[1, 1].item() == pytest.approx(scaled[3:].sum().item(), abs=1e-6)


@pytest.mark.parametrize(("divide_by_std", "expected"), [(True, 0.707106), (False, 0.5)])
def test_grpo_trains_on_the_group_advantage(divide_by_std: bool, expected: float) -> None:
    """Scores 1 and 0 in one group: centered +-.5, unbiased deviation sqrt(.5)."""
    actor = ScriptedPolicy(LOG_RATIO, [True, True], [8, 8])
    cfg = GRPO(divide_by_std=divide_by_std, num_minibatches=2)
    grpo_step(PROMPTS, actor, ScriptedReward([1, 0]), cfg)
    advantage = torch.where(MASK, torch.tensor([[expected], [-expected]]).double(), 0.0)
    torch.testing.assert_close(actor.trained["batch"].advantage, advantage, atol=1e-6, rtol=0)
    assert actor.trained["loss"] is cfg.loss
    assert actor.trained["loss"].aggregation == "seq-mean-token-mean"
    assert (actor.trained["epochs"], actor.trained["num_minibatches"]) == (1, 2)
    assert actor.trained["temperature"] == 1.0


def test_reference_grpo_adds_the_kl_term() -> None:
    actor = ScriptedPolicy(LOG_RATIO, [True, True], [8, 8])
    ref = ScriptedPolicy(VALUES, [True, True], [8, 8])
    sampling = Sampling(num_samples=2, temperature=0.6)
    cfg = ReferenceGRPO(sampling=sampling, kl_coef=0.3, kl_gradient="is_corrected")
    reference_grpo_step(PROMPTS, actor, ref, ScriptedReward([1, 0]), cfg)
    batch, loss = actor.trained["batch"], actor.trained["loss"]
    assert isinstance(batch, ReferencePolicyBatch)
    assert batch.ref_logprob is VALUES
    assert ref.temperature == 0.6
    assert loss == ReferenceKLPolicyLoss(policy=cfg.loss, kl_coef=0.3, kl_gradient="is_corrected")


@pytest.mark.parametrize("options", [PPO, GRPO, ReferenceGRPO])
def test_learning_needs_responses_that_differ(options: type) -> None:
    greedy = Sampling(num_samples=2, temperature=0)
    with pytest.raises(ValueError, match=r"^sampling.temperature is 0, which always gives"):
        options(sampling=greedy)


@pytest.mark.parametrize("options", [PPO, GRPO, ReferenceGRPO, SFT, RewardModelling])
@pytest.mark.parametrize("name", ["epochs", "num_minibatches"])
def test_every_algorithm_takes_at_least_one_optimizer_step(options: type, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; expected at least 1$"):
        options(**{name: 0})


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (Sampling, "num_samples", 0),
        (Sampling, "max_new_tokens", 0),
        (Sampling, "temperature", -0.1),
        (PPO, "discount", 1.01),
        (PPO, "gae_lambda", -0.1),
        (PPO, "kl_coef", -0.1),
        (PPO, "score_clip", 0),
        (GRPO, "std_eps", -1e-6),
        (ReferenceGRPO, "std_eps", -1e-6),
        (ReferenceGRPO, "kl_coef", 0.0),
    ],
)
def test_options_out_of_range(options: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} (is|must be positive, got) {value};"):
        options(**{name: value})


@pytest.mark.parametrize("name", ["epochs", "num_minibatches"])
def test_reinforce_has_no_ratio_for_a_second_update(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} (is )?2.*but the loss has no ratio"):
        Reinforce(**{name: 2})  # pyright: ignore[reportArgumentType]


def test_grpo_refuses_groups_of_one_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="sampling.num_samples is 1, but GRPO compares samples"):
        GRPO(sampling=Sampling(num_samples=1))


# --- what is recorded -----------------------------------------------------------------------------


def edges(graph: Graph) -> list[str]:
    """`op(score.out, ...)` per node, train batches included, in program order."""
    return [
        f"{node.name}({', '.join(str(ref) for _, ref in node.inputs)})"
        for node in graph.nodes
        if node.kind.value != "source"
    ]


ROLL = "actor.generate.tokens, actor.generate.mask"


def test_grpo_graph() -> None:
    graph = build(grpo_step, cfg=GRPO())
    assert list(graph.roles) == ["actor", "reward"]
    assert edges(graph) == [
        "actor.generate(prompts.prompt, prompts.prompt_id)",
        f"reward.score({ROLL}, actor.generate.prompt_id)",
        "group_advantage(reward.score.out, actor.generate.prompt_id)",
        "broadcast_over_tokens(group_advantage.out, actor.generate.mask)",
        f"actor.train({ROLL}, actor.generate.behavior_logprob, broadcast_over_tokens.out)",
    ]
    assert graph["group_advantage"].scope == "group"
    assert graph["broadcast_over_tokens"].scope == "row"


def test_only_reference_grpo_has_a_reference() -> None:
    graph = build(reference_grpo_step, cfg=ReferenceGRPO())
    assert list(graph.roles) == ["actor", "ref", "reward"]
    assert f"ref.logprob({ROLL})" in edges(graph)
    assert graph.trains_per_step == {"actor": 1}


def test_ppo_graph() -> None:
    graph = build(ppo_step, cfg=PPO())
    assert graph.trains_per_step == {"actor": 1, "critic": 1}
    assert edges(graph) == [
        "actor.generate(prompts.prompt, prompts.prompt_id)",
        f"reward.score({ROLL}, actor.generate.prompt_id)",
        f"critic.value({ROLL})",
        f"ref.logprob({ROLL})",
        "kl_shaped_reward(reward.score.out, actor.generate.mask, actor.generate.behavior_logprob, "
        "ref.logprob.out, actor.generate.finished)",
        "scored_tokens(actor.generate.mask, reward.score.out)",
        "gae(scored_tokens.out, kl_shaped_reward.out, critic.value.out)",
        "whiten(gae.advantage, scored_tokens.out)",
        "actor.train(actor.generate.tokens, scored_tokens.out, actor.generate.behavior_logprob, "
        "whiten.out)",
        "critic.train(actor.generate.tokens, scored_tokens.out, critic.value.out, "
        "gae.value_target)",
        "response_kl(actor.generate.mask, actor.generate.behavior_logprob, ref.logprob.out)",
    ]
    scopes = {node.name: node.scope for node in graph.nodes}
    assert (scopes["kl_shaped_reward"], scopes["gae"], scopes["whiten"]) == ("row", "row", "batch")
    assert graph.results == ("actor.train", "critic.train", "response_kl")
    assert graph.reported == (Ref("response_kl", "out"),)


def test_sft_and_reward_modelling_graphs() -> None:
    assert edges(build(sft_step, cfg=SFT())) == ["actor.train(demos.tokens, demos.mask)"]
    assert edges(build(reward_modelling_step, cfg=RewardModelling())) == [
        "reward.train(pairs.pair_id, pairs.tokens, pairs.mask, pairs.chosen)"
    ]


def test_every_shipped_step_may_lag() -> None:
    for graph in (
        build(sft_step, cfg=SFT()),
        build(reward_modelling_step, cfg=RewardModelling()),
        build(grpo_step, cfg=GRPO()),
        build(reference_grpo_step, cfg=ReferenceGRPO()),
        build(ppo_step, cfg=PPO()),
    ):
        check_lag(graph, 2)


def test_a_loss_with_another_loss_s_batch_is_refused_while_recording() -> None:
    def confused_step(demos: Demonstrations, actor: Policy) -> TrainMetrics:
        batch: Any = ValueBatch(
            tokens=demos.tokens, mask=demos.mask, old_value=demos.mask, value_target=demos.mask
        )
        return actor.train(ClippedPolicyLoss(), batch)

    with pytest.raises(FlowError, match="ClippedPolicyLoss reads a PolicyBatch, got a ValueBatch"):
        build(confused_step)
