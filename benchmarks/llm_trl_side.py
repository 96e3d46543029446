"""One process of `llm_step.py` or `time_to_reward.py`: TRL's `GRPOTrainer` in its environment.

It writes a line per update. With `--save-every` it keeps a checkpoint beside them, and begins there
if it is started again.
"""
# TRL is not installed where this project is checked.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from llm_case import (
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    NUM_SAMPLES,
    ROWS,
    TEMPERATURE,
    Prompt,
    reached,
    read_case,
    read_curve,
    write_curve,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from trl_options import PLAIN_GRPO
from vs_trl_case import peak_rss_mib

WEIGHTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}, "bf16": False},
    "float32": {"model_init_kwargs": {"dtype": "float32"}, "bf16": False},
    "autocast": {"model_init_kwargs": {"dtype": "float32"}, "bf16": True},
}
"""Name of `--weights` -> fields of `GRPOConfig`; "autocast" computes in bfloat16 with weights,
gradients and moments in float32."""


class Rewards:
    """The reward of the task, which also notes what one update earned.

    Args:
        score: Of a prompt's text, a response and what it is checked against.
    """

    __name__ = "instructions"  # what the trainer calls it in its logs

    def __init__(self, score: Callable[[str, str, str], float]) -> None:
        self._score = score
        self.earned: list[float] = []
        self.lengths: list[int] = []

    def __call__(
        self,
        prompts: list[list[dict[str, str]]],
        completions: list[list[dict[str, str]]],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        """Called by the trainer with the rows that it has sampled."""
        rows = zip(prompts, completions, answer, strict=True)
        scores = [self._score(p[-1]["content"], c[-1]["content"], a) for p, c, a in rows]
        self.earned += scores
        self.lengths += [len(row) for row in completion_ids]
        return scores


class Curve(transformers.TrainerCallback):
    """Writes a line after each update, and ends training once the target is reached.

    Time is counted from an update's first row to its optimizer step; saving is not in it.
    """

    def __init__(self, file: Path, rewards: Rewards, target: float | None) -> None:
        self._file, self._rewards, self._target = file, rewards, target
        self._began_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called by the trainer before it samples."""
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after each update."""
        earned, lengths = self._rewards.earned, self._rewards.lengths
        if len(earned) != ROWS:
            raise RuntimeError(f"{len(earned)} responses in an update of {ROWS} rows")
        line = {
            "step": state.global_step - 1,
            "seconds": time.perf_counter() - self._began_s,
            "reward": statistics.fmean(earned),
            "length": statistics.fmean(lengths),
            "peak_rss_mib": peak_rss_mib(),
        }
        self._rewards.earned, self._rewards.lengths = [], []
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        if self._target is not None:
            curve = [update["reward"] for update in read_curve(self._file)]
            control.should_training_stop = reached(curve, self._target) is not None


def config(args: argparse.Namespace, num_updates: int) -> Any:
    """The trainer's options: the shared task, and whatever costs time and can be off is off."""
    parts = ROWS // args.rows_at_once
    saving = {"save_strategy": "steps", "save_steps": args.save_every, "save_total_limit": 1}
    options: dict[str, Any] = {
        "output_dir": str(args.out.with_suffix("")),
        "use_cpu": True,
        "seed": args.seed,
        "max_steps": num_updates,
        "per_device_train_batch_size": args.rows_at_once,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_generations": NUM_SAMPLES,
        "max_completion_length": MAX_NEW_TOKENS,
        **PLAIN_GRPO,
        "temperature": TEMPERATURE,
        "learning_rate": args.lr,
    }
    chosen = saving if args.save_every else {}
    return GRPOConfig(**(options | chosen | WEIGHTS[args.weights] | args.more))


def check_tokens(tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Require that the chat template makes as many tokens of each prompt as it does with us."""
    for prompt in prompts:
        said = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
        if len(ids["input_ids"]) != prompt.num_tokens:
            raise RuntimeError(f"{prompt} has {len(ids['input_ids'])} tokens with TRL")


def main() -> None:
    """Train for some updates."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", help="model and tokenizer")
    options.add_argument("case", type=Path)
    options.add_argument("out", type=Path, help="where to write a line per update")
    options.add_argument("package", help="the folder that holds Penstock's package, for its reward")
    options.add_argument("--weights", choices=list(WEIGHTS), default="bfloat16")
    options.add_argument("--rows-at-once", type=int, default=16)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--lr", type=float, default=LEARNING_RATE, help="learning rate")
    options.add_argument("--target", type=float, help="end once this mean reward is reached")
    options.add_argument("--save-every", type=int, help="updates between checkpoints")
    options.add_argument("--more", type=json.loads, default={}, help="other GRPOConfig fields")
    args = options.parse_args()
    sys.path.append(args.package)
    from penstock.workers.verifiers.instructions.instructions import instruction_score

    torch.set_num_threads(args.threads)
    updates = read_case(args.case)
    prompts = [prompt for update in updates for prompt in update]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    check_tokens(tokenizer, prompts)
    said = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    rewards = Rewards(partial(instruction_score, score="all"))
    trainer = GRPOTrainer(
        model=args.folder,
        reward_funcs=rewards,
        args=config(args, len(updates)),
        train_dataset=Dataset.from_dict({"prompt": said, "answer": [p.answer for p in prompts]}),
        processing_class=tokenizer,
        callbacks=[Curve(args.out, rewards, args.target)],
    )
    checkpoint = get_last_checkpoint(str(args.out.with_suffix(""))) if args.save_every else None
    taken = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    write_curve(args.out, read_curve(args.out)[:taken])
    trainer.train(resume_from_checkpoint=checkpoint)
    print(json.dumps({"trl": trl.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
