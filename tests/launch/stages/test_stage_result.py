"""Which numbers a person sees first, above all where several roles report the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.record import Stage
from penstock.launch.inputs.run import resolved
from penstock.launch.run_dir.run_folder import list_runs
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.stage_result import CurveMetric, Headline

from ..cli.test_run import GRPO
from ..conftest import Penstock

BOTH = '''\
"""Two rewards, of which the policy learns from one; the other is only looked at."""

from penstock.algorithms.grpo import GRPO
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.roles import PerSample, Policy, Prompts, Reward, TrainMetrics
from penstock.algorithms.options import train_policy


def both_step(
    prompts: Prompts, actor: Policy, audit: Reward, task: Reward, cfg: GRPO
) -> tuple[TrainMetrics, PerSample]:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    watched = audit.score(roll.tokens, roll.mask, roll.prompt_id)
    score = task.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = broadcast_over_tokens(group_advantage(score, roll.prompt_id), roll.mask)
    return train_policy(actor, roll, advantage, cfg.loss, cfg), watched
'''


def stage(*words: str) -> Stage:
    composed = compose("run", list(words))
    composed.pop("resume")
    return build_stages(resolved(composed)).stages[-1]


@pytest.fixture(scope="module")
def safe() -> Headline:
    return Headline(stage("algorithm=safe_rlhf"))


def test_several_rewards_go_by_their_roles_names_in_the_step_s_order(safe: Headline) -> None:
    values = {"cost.score/reward/mean": -0.25, "reward.score/reward/mean": 0.5}
    assert list(safe.shown(values).items()) == [("reward", 0.5), ("cost", -0.25)]


def test_the_curve_is_that_of_the_first_reward_and_says_so(safe: Headline) -> None:
    names = ["actor.train/loss", "cost.score/reward/mean", "reward.score/reward/mean"]
    assert safe.curve(names) == CurveMetric("reward.score/reward/mean", "mean reward of 'reward'")


def test_a_role_other_than_the_policy_comes_after_it(safe: Headline) -> None:
    values = {"cost_critic.train/loss": 3.0, "critic.train/loss": 2.0, "actor.train/loss": 1.0}
    assert safe.shown(values) == {"loss": 1.0}
    assert safe.curve(values) == CurveMetric("actor.train/loss", "loss")


def test_one_reward_is_called_the_reward() -> None:
    alone = Headline(stage("algorithm=grpo", "algorithm.roles.actor.start=model"))
    values = {"reward.score/reward/mean": 0.5, "actor.train/loss": 1.0}
    assert alone.shown(values) == {"reward": 0.5, "loss": 1.0}
    assert alone.curve(values) == CurveMetric("reward.score/reward/mean", "mean reward")


COST = """\
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Policy, Prompts, Reward, TrainMetrics


def cheap_step(prompts: Prompts, actor: Policy, cost: Reward, cfg: GRPO) -> TrainMetrics:
    return grpo_step(prompts, actor, cost, cfg)
"""


def test_a_cost_is_not_called_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cheap.py").write_text(COST)
    monkeypatch.syspath_prepend(tmp_path)
    step = "algorithm.step=cheap:cheap_step"
    headline = Headline(stage(step, "algorithm.roles.cost.worker=rule"))
    values = {"cost.score/reward/mean": 0.5, "actor.train/loss": 1.0}
    assert headline.shown(values) == {"cost": 0.5, "loss": 1.0}
    assert headline.curve(values) == CurveMetric("cost.score/reward/mean", "mean reward of 'cost'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "values", "shown"),
    [
        # The score as it came, not less its KL: what is taken off is shown nowhere as a reward.
        (
            ["algorithm=ppo"],
            {"reward.score/reward/mean": 0.5, "response_kl/mean": 3.0, "actor.train/entropy": 1.0},
            {"reward": 0.5, "entropy": 1.0},
        ),
        (
            ["algorithm=dpo"],
            {"actor.train/accuracy": 0.75, "actor.train/margin": 0.1, "actor.train/loss": 0.5},
            {"accuracy": 0.75, "loss": 0.5},
        ),
        (
            ["algorithm=env_ppo", "task=cartpole", "model=mlp"],
            {"env.rollout/episode_return": 200.0, "env.rollout/reward_scale": 2.0},
            {"episode_return": 200.0},
        ),
        (["algorithm=cost_modelling"], {"cost.train/accuracy": 0.5}, {"accuracy": 0.5}),
    ],
)
def test_a_reward_has_its_right_name(
    words: list[str], values: dict[str, float], shown: dict[str, float]
) -> None:
    assert Headline(stage(*words)).shown(values) == shown


def test_trouble_comes_first_and_only_where_there_is_some(safe: Headline) -> None:
    values = {"a.b/reward/mean": 0.5, "a.b/cut_off": 0.0, "a.b/env_restarts": 2.0}
    assert list(safe.shown(values).items()) == [("env_restarts", 2.0), ("reward", 0.5)]


@pytest.mark.slow
def test_what_the_policy_learns_from_comes_before_what_is_only_looked_at(
    penstock: Penstock,
) -> None:
    Path("both.py").write_text(BOTH)
    rewards = ("algorithm.roles.task.worker=rule", "algorithm.roles.audit.worker=rule")
    scaled = ("algorithm.roles.audit.options.scale=-3",)
    said = penstock("run", *GRPO, *rewards, *scaled, "algorithm.step=both:both_step")
    assert said.code == 0, said.err
    (run,) = list_runs(Path("runs"))
    last = read_metrics(run.folder.metrics)[-1]
    task, audit = (last[f"{role}.score/reward/mean"] for role in ("task", "audit"))
    assert audit == pytest.approx(-3 * task, rel=1e-6)
    assert f"  task {task:.4g}  audit {audit:.4g}  " in said.err
    assert (
        ">mean reward of 'task'<".replace("'", "&#x27;")
        in (run.folder.path / "curve.svg").read_text()
    )
