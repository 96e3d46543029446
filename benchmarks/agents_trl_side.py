"""One process of `agents.py`: TRL's `GRPOTrainer` with an `environment_factory`."""
# TRL is not installed where this project is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from agents_case import (
    LEARNING_RATE,
    MAX_TOTAL_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    NUM_TURNS,
    ROWS,
    WARM_UP,
    LookUps,
    question,
    write_side,
)
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from trl_options import PLAIN_GRPO


class Trainer(GRPOTrainer):
    """Notes how long conversations take, how much is said in them, and when an update has ended."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.steps: list[dict[str, float]] = []
        self.lengths: list[float] = []
        self.turns: list[float] = []

    def _generate(self, prompts: list[Any]) -> Any:
        began_s = time.perf_counter()
        made = super()._generate(prompts)
        self.steps.append({"rollout_s": time.perf_counter() - began_s})
        _, _, mask, said, *_ = made
        self.lengths.append(statistics.fmean(sum(row) for row in mask))
        self.turns.append(statistics.fmean(sum(m["role"] == "assistant" for m in s) for s in said))
        return made


class Clock(transformers.TrainerCallback):
    """Notes how long each update took, from its first row to its optimizer step."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._began_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called by the trainer before it samples."""
        self._began_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer after each update."""
        self.step_s.append(time.perf_counter() - self._began_s)


def config(updates: int, rows_at_once: int, out: Path, more: dict[str, Any]) -> Any:
    """The trainer's options: the shared task, and whatever costs time and can be off is off."""
    parts = ROWS // rows_at_once
    options: dict[str, Any] = {
        "output_dir": str(out.with_suffix("")),
        "use_cpu": True,
        "bf16": False,
        "max_steps": updates,
        "per_device_train_batch_size": rows_at_once,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_generations": NUM_SAMPLES,
        "max_completion_length": MAX_TOTAL_TOKENS - 256,
        "max_tool_calling_iterations": NUM_TURNS - 1,
        **PLAIN_GRPO,
        "model_init_kwargs": {"dtype": "float32"},
        "learning_rate": LEARNING_RATE,
    }
    return GRPOConfig(**(options | more))


def main() -> None:
    """Train for some updates and write the measurement."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", help="model and tokenizer")
    options.add_argument("out", type=Path)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--updates", type=int, required=True)
    options.add_argument("--rows-at-once", type=int, default=16)
    options.add_argument("--more", type=json.loads, default={}, help="other GRPOConfig fields")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(args.folder)
    tokenizer.response_template = qwen3_template  # calls are written as Qwen's are
    numbers = range(args.updates * NUM_PROMPTS)
    clock = Clock()
    trainer = Trainer(
        model=args.folder,
        args=config(args.updates, args.rows_at_once, args.out, args.more),
        train_dataset=Dataset.from_dict(
            {"prompt": [question(number) for number in numbers], "number": list(numbers)}
        ),
        processing_class=tokenizer,
        callbacks=[clock],
        environment_factory=LookUps,
    )
    trainer.train()
    steps = [{**a, "step_s": b} for a, b in zip(trainer.steps, clock.step_s, strict=True)]
    write_side(
        args.out,
        steps[WARM_UP:],
        statistics.fmean(trainer.lengths[WARM_UP:]),
        statistics.fmean(trainer.turns[WARM_UP:]),
        trl=trl.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
