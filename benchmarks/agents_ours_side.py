"""One process of `agents.py`: GRPO on conversations through the engine, in-process."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from agents_case import (
    LEARNING_RATE,
    MAX_TOTAL_TOKENS,
    MAX_TURN_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    NUM_TURNS,
    ROWS,
    WARM_UP,
    write_side,
)
from agents_task import LookUpSpec, NumberedQuestions
from penstock.algorithms.agent_grpo import AgentGRPO, agent_grpo_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerSpec
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.training.optimizer import OptimizerSpec

CONVERSE = "actor.converse"


def main() -> None:
    """Train for some updates and write the measurement."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", help="model and tokenizer")
    options.add_argument("out", type=Path)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--updates", type=int, required=True)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    task = LookUpSpec(num_train=args.updates * NUM_PROMPTS, num_turns=NUM_TURNS)
    spec = TokenizerSpec(kind="folder", folder=args.folder)
    tokenizer = spec.build()
    sampling = Sampling(
        num_samples=NUM_SAMPLES, max_new_tokens=MAX_TURN_TOKENS, max_total_tokens=MAX_TOTAL_TOKENS
    )
    graph = build(agent_grpo_step, cfg=AgentGRPO(sampling=sampling, max_turns=NUM_TURNS))
    workers: dict[str, WorkerSpec] = {
        "actor": TorchPolicySpec(
            model=ModelSpec(folder=args.folder),
            end_ids=tokenizer.end.ids,
            optimizer=OptimizerSpec(lr=LEARNING_RATE),
        ),
        "agent": AgentSpec(task=task, tokenizer=spec),
    }
    source = NumberedQuestions(task.build(), tokenizer, NUM_PROMPTS)
    steps: list[dict[str, float]] = []
    tokens, turns, last_s = 0.0, 0.0, time.perf_counter()
    with Engine(graph, one_group(graph), workers=workers, executor=InProcess()) as engine:
        for step in engine.run({"prompts": source}, args.updates):
            now_s = time.perf_counter()
            (span,) = [span for span in step.spans if span.node == CONVERSE]
            steps.append({"step_s": now_s - last_s, "rollout_s": span.end_s - span.start_s})
            last_s = now_s
            metrics: Any = step.metrics
            if step.step >= WARM_UP:
                tokens += metrics[f"{CONVERSE}/new_tokens"] / ROWS
                turns += metrics[f"{CONVERSE}/turns"]
    timed = len(steps) - WARM_UP
    write_side(args.out, steps[WARM_UP:], tokens / timed, turns / timed, torch=torch.__version__)


if __name__ == "__main__":
    main()
