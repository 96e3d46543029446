"""One process of `vs_trl.py`: TRL's `GRPOTrainer`, in its own virtual environment."""
# TRL is not installed where this project is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_options import PLAIN_GRPO
from vs_trl_case import (
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    UPDATES,
    WARM_UP,
    prompts,
    score,
    write_side,
)

LENGTHS: list[int] = []
"""Response lengths of all updates so far."""


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """`score` of each response's text."""
    LENGTHS.extend(len(row) for row in completion_ids)
    return [score(text) for text in completions]


class Clock(transformers.TrainerCallback):
    """Notes when each optimizer update ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer after each update."""
        self.ends.append(time.perf_counter())


def config(case: str, updates: int, rows_at_once: int, more: dict[str, Any]) -> Any:
    """The trainer's options: the shared task, and whatever costs time and can be off is off."""
    parts = NUM_PROMPTS * NUM_SAMPLES // rows_at_once
    options: dict[str, Any] = {
        "output_dir": "runs/vs_trl",
        "use_cpu": True,
        "bf16": False,
        "max_steps": updates,
        "per_device_train_batch_size": rows_at_once,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_generations": NUM_SAMPLES,
        "max_completion_length": MAX_NEW_TOKENS[case],
        **PLAIN_GRPO,
        "model_init_kwargs": {"dtype": "float32"},
        "learning_rate": LEARNING_RATE,
    }
    return GRPOConfig(**(options | more))


def main() -> None:
    """Train for some updates and write the measurement."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", help="model and tokenizer")
    options.add_argument("case", choices=list(UPDATES))
    options.add_argument("out", type=Path)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rows-at-once", type=int, default=64)
    options.add_argument("--updates", type=int)
    options.add_argument("--more", type=json.loads, default={}, help="other GRPOConfig fields")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    updates = args.updates or UPDATES[args.case]
    clock = Clock()
    trainer = GRPOTrainer(
        model=args.folder,
        reward_funcs=reward,
        args=config(args.case, updates, args.rows_at_once, args.more),
        train_dataset=Dataset.from_dict({"prompt": prompts(updates)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(args.folder),
        callbacks=[clock],
    )
    trainer.train()
    skipped = WARM_UP * NUM_PROMPTS * NUM_SAMPLES
    write_side(
        args.out,
        clock.ends[WARM_UP - 1 :],
        LENGTHS[skipped:],
        torch=torch.__version__,
        trl=trl.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
