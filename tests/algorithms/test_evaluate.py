"""The evaluation graph."""

from __future__ import annotations

from penstock.algorithms.evaluate import Evaluation, evaluate_step
from penstock.dataflow.graph.tracer import build


def test_the_graph() -> None:
    assert str(build(evaluate_step, cfg=Evaluation())) == (
        "graph evaluate_step\n"
        "  source prompts: Prompts\n"
        "  role actor: Policy, frozen\n"
        "  role verifier: Reward, frozen\n"
        "  role observer: Observer, frozen\n"
        "\n"
        "actor.generate  [rollout, row]\n"
        "  prompt ~> prompts.prompt\n"
        "  prompt_id ~> prompts.prompt_id\n"
        "  sampling = Sampling(temperature=0.0)\n"
        "  -> prompt_id i64[sample]\n"
        "  -> tokens i64[sample, token~]\n"
        "  -> mask bool[sample, token~]\n"
        "  -> behavior_logprob f32[sample, token~]\n"
        "  -> finished bool[sample]\n"
        "  -> version i64[sample, token~]\n"
        "\n"
        "verifier.score  [forward, row]\n"
        "  tokens ~> actor.generate.tokens\n"
        "  mask ~> actor.generate.mask\n"
        "  prompt_id ~> actor.generate.prompt_id\n"
        "  -> out f32[sample]\n"
        "\n"
        "observer.observe  [forward, batch]\n"
        "  tokens <- actor.generate.tokens\n"
        "  mask <- actor.generate.mask\n"
        "  prompt_id <- actor.generate.prompt_id\n"
        "  score <- verifier.score.out\n"
        "  -> out f32[sample]\n"
        "\n"
        "returns observer.observe"
    )
