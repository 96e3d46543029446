"""Models as data: which architecture, which weights, which precision.

A `ModelSpec` is picklable and builds the same weights wherever it is built: initialization runs on
the CPU in float32 from the spec's own seed and is cast and moved afterwards. Nothing here reaches
for a network, and weights are read from safetensors only.

A `Head` says how the first weights on a backbone are made and how a folder in Hugging Face's layout
keeps them. A scalar head is one number with a bias; its folder is the backbone's own, with a file
beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from ...dataflow.errors import ConfigError
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..training.data_parallel import RankGroup
from ..training.flat_parameters import read_tensors, write_tensors
from ..training.weight_checks import refuse_faults, some, take_tensors, unusable
from .architecture import (
    attention_of,
    checked_config,
    empty_model,
    learn_padding,
    quiet_transformers,
)
from .model_folder import check_tensors, folder_config, load_faults, owner_words, saved_head
from .tokenizer import TokenizerSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A causal language model: a folder, or an architecture with seeded random weights.

    Example:
        >>> spec = ModelSpec(architecture={"model_type": "qwen2", "vocab_size": 32,
        ...     "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        ...     "num_attention_heads": 2, "num_key_value_heads": 1})
        >>> type(spec.causal_lm("cpu")).__name__
        'Qwen2ForCausalLM'
    """

    folder: str | None = None
    """A local folder in Hugging Face's layout (config.json and safetensors)."""
    architecture: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of a Hugging Face config with `model_type`, if no folder is given."""
    init_seed: int = 0
    """Seeds the random weights of an `architecture`; equal seeds give equal weights."""
    num_words: int | None = None
    """Words that texts have, if the vocabulary of the `architecture` is larger, as where tensor
    parallelism divides it. Random weights are those of a model of so many words; the rows of the
    others are added after."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations; log-probabilities are float32 in either case."""

    def __post_init__(self) -> None:
        if (self.folder is None) == (not self.architecture):
            raise ValueError("ModelSpec needs exactly one of folder= and architecture=")
        if self.architecture and "model_type" not in self.architecture:
            raise ValueError(
                "ModelSpec.architecture has no 'model_type'; add one, such as model_type='qwen2'"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"ModelSpec.dtype is {self.dtype!r}; expected one of {list(_DTYPES)}")

    @property
    def num_positions(self) -> int | None:
        """Longest sequence the model is made for, in tokens; None if its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def causal_lm(self, device: str) -> transformers.PreTrainedModel:
        """Build the whole language model on `device`, in evaluation mode (dropout off)."""
        model = self._initialized() if self.folder is None else self._loaded(scalar_head=False)
        return self._placed(model, device)

    def backbone(self, device: str) -> transformers.PreTrainedModel:
        """Build the model without its language-model head: token ids to hidden states."""
        if self.folder is None:
            model = self._initialized().base_model
        else:
            model = self._loaded(scalar_head=True)
        return self._placed(model, device)

    def _placed(self, model: Any, device: str) -> transformers.PreTrainedModel:
        learn_padding(model)
        # Before they move: a device may have no room for all weights in float32. Buffers stay as
        # they are made: in 16 bits a rotary frequency is off by up to 0.4 %, which after 1,000
        # positions is an angle of its own.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(_DTYPES[self.dtype])
        return model.to(device=device).eval()

    @property
    def config(self) -> Any:
        """The Hugging Face config; reads config.json, no weights."""
        if self.folder is not None:
            return folder_config(Path(self.folder))
        kinds = dict(self.architecture)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kinds.setdefault(token, None)  # the defaults name tokens of the original vocabulary
        return checked_config(kinds)

    @property
    def kind(self) -> str:
        """The `model_type`; "" where the config is wrong, as is said where models are looked at."""
        try:
            return self.config.model_type
        except ConfigError:
            return ""

    def check(self, *, scalar_head: bool) -> None:
        """Look at all that can be known of a model without its weights, in milliseconds.

        Raises `ConfigError` if the architecture cannot be computed, or the folder does not hold
        exactly the weights of its model: of the backbone alone, with a scalar head.
        """
        if self.folder is None:
            empty_model(self.config)
        else:
            check_tensors(Path(self.folder), scalar_head=scalar_head)

    def check_weights(self, weights: Mapping[str, Tensor], context: WorkerContext) -> None:
        """Require of a model's first weights, wherever they lie by now, that they are numbers.

        `weights` are all, or a process's part: all processes of its group must ask. Those of a view
        (`WorkerContext.places`) are looked at where they are trained.
        """
        if context.places:
            return
        device = next(iter(weights.values())).device
        everyone = RankGroup(context.process, context.num_processes, device)
        names = everyone.union(unusable(weights))
        if not names:
            return
        source = f"'{self.folder}'" if self.folder is not None else "'model.architecture'"
        raise ConfigError(
            f"the weights that '{context.role}' starts from ({source}) are not finite, or beyond "
            f"1e12: {some(names)}\n    give a model folder that was saved before its training "
            "diverged, or an ordinary initializer_range"
        )

    def _initialized(self) -> Any:
        config, size = self.config, 0
        if self.num_words is not None:
            size = config.vocab_size
            config.vocab_size = min(self.num_words, size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention_of(config)
            )
            if size and config.vocab_size < size:
                model.resize_token_embeddings(size, mean_resizing=False)
            return model

    def _loaded(self, *, scalar_head: bool) -> Any:
        folder = Path(str(self.folder))
        check_tensors(folder, scalar_head=scalar_head)
        config = self.config
        auto: Any = transformers.AutoModel if scalar_head else transformers.AutoModelForCausalLM
        try:
            with quiet_transformers():
                model, info = auto.from_pretrained(
                    folder,
                    config=config,  # so that the loader does not read the folder's
                    dtype=_DTYPES[self.dtype],
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=False,
                    attn_implementation=attention_of(config),
                    output_loading_info=True,
                )
        except RuntimeError as error:  # what it merges, as experts, is looked at here alone
            raise ConfigError(
                f"transformers cannot load the weights in '{folder}': {error}\n    save the whole "
                "model again with save_pretrained"
            ) from error
        faults = load_faults(info)
        if scalar_head:  # the language model's own head is left in the file
            del faults["unexpected"]
        refuse_faults(folder, owner_words(model.config), faults)
        return model


HeadName = Literal["lm_head", "value_head", "score"]
"""Name of the head in checkpoints."""

HEAD_FILE = "head.safetensors"
"""File of a value or reward model's head, beside the backbone's own files."""


class HeadedModel(nn.Module):
    """A backbone under a scalar head, named as in checkpoints: "model." and the head's name."""

    def __init__(self, backbone: nn.Module, name: str, head: nn.Linear) -> None:
        super().__init__()
        self.model = backbone
        self.add_module(name, head)


@dataclass(frozen=True)
class Head:
    """A kind of head."""

    name: HeadName  # What checkpoints call it
    # Start with 0 everywhere, unless the model's folder has a head of this name
    zero_init: bool = False
    # Most labels of a score's saved head: of two, the second less the first is read
    labels: int = 1
    # Words for right and for wrong: the score is the logit of the first less that of the second
    words: tuple[str, ...] = ()

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
                # So that scores start with variance near 1: Stiennon et al. 2020, "Learning to
                # summarize from human feedback", appendix.
                nn.init.normal_(linear.weight, std=(linear.in_features + 1) ** -0.5)
                nn.init.zeros_(linear.bias)
        if self.zero_init:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        if model.folder is not None:
            wanted = {f"{self.name}.{part}": p for part, p in linear.named_parameters()}
            saved = self._saved(folder := Path(model.folder))
            if not saved.keys().isdisjoint(wanted):  # else another kind of head is there
                file = folder / HEAD_FILE
                take_tensors(file if file.exists() else folder, f"a {self.name}", saved, wanted)
        return linear

    def is_saved(self, folder: str | None) -> bool:
        return folder is not None and f"{self.name}.weight" in self._saved(Path(folder))

    def _saved(self, folder: Path) -> Mapping[str, Tensor]:
        """Return the head that a folder has, in a file of its own or among its model's weights."""
        if (folder / HEAD_FILE).is_file():
            return read_tensors(folder / HEAD_FILE)
        if self.name != "score":
            return {}
        tokenizer = TokenizerSpec(kind="folder", folder=str(folder)).build() if self.words else None
        # The last token: some tokenizers begin a text with a blank of its own.
        words = [tokenizer.encode(word)[-1] for word in self.words[::-1]] if tokenizer else []
        parts = saved_head(folder, words)
        labels = len(parts["weight"]) if parts else 1
        if labels > self.labels:
            raise ConfigError(
                f"model folder '{folder}' has a head of {labels} labels, and a score is one number"
                f"\n    give a model that was trained with num_labels={self.labels}"
            )
        if labels == 2:
            parts = {part: tensor[1:] - tensor[:1] for part, tensor in parts.items()}
        return {f"{self.name}.{part}": tensor for part, tensor in parts.items()}

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
