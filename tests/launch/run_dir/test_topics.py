"""Topics of an overview and titles of metrics, of the names that runs log."""

from __future__ import annotations

import pytest
from penstock.launch.run_dir.topics import by_topic, titles, with_unit

# Lines of real logs, one for each kind of run, without what no topic has.
LOGS = {
    "grpo": (
        "actor.generate/response_length actor.generate/truncated actor.train/approx_kl_k3"
        " actor.train/entropy actor.train/grad_norm actor.train/loss actor.train/rollout_k3"
        " reward.score/reward/correct reward.score/reward/mean run/samples_per_s"
        " reward.score/reward/format/mean evaluation/accuracy evaluation/long/accuracy",
        {
            "Reward": ["", "format"],
            "Accuracy": ["held out", "held out, long", "right responses"],
            "KL between versions": ["policy", "rollout engine and trainer"],
            "Entropy": [""],
            "Response length": [""],
            "Share cut off": [""],
            "Throughput": ["samples"],
            "Loss": [""],
            "Gradient norm": [""],
        },
    ),
    "ppo": (
        "response_kl/mean critic.train/loss actor.train/loss critic.train/grad_norm"
        " actor.train/grad_norm reward.score/reward/mean ref.logprob/tokens",
        {
            "Reward": [""],
            "KL to the reference": [""],
            "Loss": ["", "critic"],
            "Gradient norm": ["", "critic"],
        },
    ),
    "dpo": (
        "actor.train/accuracy actor.train/loss actor.train/margin evaluation/loss"
        " evaluation/loss/accuracy",
        {"Accuracy": ["held out, of pairs", "right pairs"], "Loss": ["", "held out"]},
    ),
    "environment": (
        "env.rollout/episode_return env.rollout/episode_length run/env_steps_per_s"
        " run/samples_per_s evaluation/actor/return",
        {
            "Return": ["", "held out, actor"],
            "Episode length": [""],
            "Throughput": ["samples", "environment steps"],
        },
    ),
    "two calls of a role": (
        "actor.generate/response_length actor.generate#2/response_length",
        {"Response length": ["actor.generate", "actor.generate#2"]},
    ),
}


@pytest.mark.parametrize("kind", LOGS)
def test_an_overview_has_the_topics_of_a_log_in_order(kind: str) -> None:
    names, topics = LOGS[kind]
    found = by_topic(names.split())
    assert {title: [*lines.values()] for title, lines in found.items()} == topics
    assert [*found] == [*topics]


def test_every_metric_has_a_title_in_words() -> None:
    assert titles(
        [
            "critic.train/loss", "reward.score/reward/format/mean",
            "actor.train/clip_fraction_high", "run/step_time_s", "run/controller_bytes",
            "is_mixed/mean", "actor.train/lr", "loss",
        ]
    ) == {
        "critic.train/loss": "Loss: critic",
        "reward.score/reward/format/mean": "Reward: format",
        "actor.train/clip_fraction_high": "Clip fraction high, actor.train",
        "run/step_time_s": "Step time, seconds",
        "run/controller_bytes": "Controller, bytes",
        "is_mixed/mean": "Is mixed",
        "actor.train/lr": "Learning rate, actor.train",
        "loss": "Loss",
    }  # fmt: skip
    assert with_unit("Entropy: critic") == "Entropy: critic (nats)"
    assert with_unit("Step time") == "Step time"
