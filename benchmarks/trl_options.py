"""Options of TRL's `GRPOTrainer` that its sides share: plain GRPO, and nothing that costs time."""

from __future__ import annotations

from typing import Any

__all__ = ["PLAIN_GRPO"]

PLAIN_GRPO: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "beta": 0.0,
    "num_iterations": 1,
    "loss_type": "grpo",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "shuffle_dataset": False,
    "gradient_checkpointing": False,
    "disable_dropout": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
}
"""Of the samples the probabilities are as they are, and the loss is that of the paper without the
KL term; checkpoints, reports and workers that load data are off."""
