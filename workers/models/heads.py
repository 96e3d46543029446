"""Heads on a backbone: a language model's own, a value per token, a score per sequence.

A head says how its first weights are made and how a folder in Hugging Face's layout keeps it. A
scalar head is one number with a bias; its folder is the backbone's own, with a file beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...dataflow.runtime.worker_protocol import WorkerContext
from ..training.flat_parameters import read_tensors, write_tensors
from ..training.weight_checks import take_tensors
from .architecture import quiet_transformers
from .spec import ModelSpec

HeadName = Literal["lm_head", "value_head", "score"]
"""Name of the head in checkpoints."""

HEAD_FILE = "head.safetensors"
"""Where a value or reward model keeps its head, beside the backbone's own files."""


class HeadedModel(nn.Module):
    """A backbone under a scalar head, named as in checkpoints: "model." and the head's name.

    Args:
        backbone: Token ids to hidden states.
        name: The head's.
        head: Hidden states to one number each.
    """

    def __init__(self, backbone: nn.Module, name: str, head: nn.Linear) -> None:
        super().__init__()
        self.model = backbone
        self.add_module(name, head)


@dataclass(frozen=True)
class Head:
    """A kind of head.

    Attributes:
        name: What checkpoints call it.
        zero_init: Start with 0 everywhere, unless the model's folder has a head of this name.
    """

    name: HeadName
    zero_init: bool = False

    @property
    def is_scalar(self) -> bool:
        """Return whether it says one number per token, not logits."""
        return self.name != "lm_head"

    def first_weights(self, model: ModelSpec, context: WorkerContext) -> nn.Linear:
        """A scalar head on the CPU, in float32: its folder's, or random.

        A random one is sampled from the run's seed and the role, leaving torch's own random state
        alone, so that it is the same whichever engine computes it.
        """
        text = f"{context.seed}\x1f{context.role}\x1fhead"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            linear = nn.Linear(model.config.hidden_size, 1)
            if self.name == "score":
                _init_score(linear)
        if self.zero_init:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self._take_saved(linear, model.folder)
        return linear

    def is_saved(self, folder: str | None) -> bool:
        """Return whether a model folder has a head of this name."""
        path = None if folder is None else Path(folder) / HEAD_FILE
        return path is not None and path.is_file() and f"{self.name}.weight" in read_tensors(path)

    def _take_saved(self, linear: nn.Linear, folder: str | None) -> None:
        """Raises `ConfigError` if the folder's head does not fit; another kind of head may be."""
        path = None if folder is None else Path(folder) / HEAD_FILE
        if path is None or not path.is_file():
            return
        names = {part: f"{self.name}.{part}" for part in ("weight", "bias")}
        saved = read_tensors(path)
        if saved.keys().isdisjoint(names.values()):
            return
        wanted = {name: linear.get_parameter(part) for part, name in names.items()}
        take_tensors(path, f"a {self.name}", saved, wanted)

    def check(self, model: ModelSpec) -> None:
        """Look at all that can be known of a model under this head, without its weights."""
        model.check(scalar_head=self.is_scalar)
        if self.is_scalar:
            self.first_weights(model, WorkerContext(self.name))

    def whole_model(self, model: ModelSpec, context: WorkerContext, device: str) -> nn.Module:
        """The model under this head with its first weights, in one process."""
        if not self.is_scalar:
            return model.causal_lm(device)
        backbone = model.backbone(device)
        like = next(backbone.parameters())
        linear = self.first_weights(model, context).to(like.device, like.dtype)
        return HeadedModel(backbone, self.name, linear)

    def save(self, folder: Path, module: nn.Module) -> None:
        """Write a whole model; `ModelSpec(folder=...)` under such a head reads it back."""
        whole: Any = module
        with quiet_transformers():
            (whole.model if self.is_scalar else whole).save_pretrained(folder)
        if self.is_scalar:
            linear: nn.Linear = whole.get_submodule(self.name)
            named = {f"{self.name}.weight": linear.weight, f"{self.name}.bias": linear.bias}
            write_tensors(folder / HEAD_FILE, named)


def _init_score(head: nn.Linear) -> None:
    """Weights from N(0, 1/(d+1)), bias 0, so that scores start with variance near 1.

    Stiennon et al. 2020, "Learning to summarize from human feedback", appendix.
    """
    nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    nn.init.zeros_(head.bias)
