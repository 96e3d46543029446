"""Models as data: which architecture, which weights, which precision.

A `ModelSpec` is picklable and builds the same weights wherever it is built: initialization runs on
the CPU in float32 from the spec's own seed and is cast and moved afterwards. Nothing here reaches
for a network, and weights are read from safetensors only.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

__all__ = [
    "ModelSpec",
    "quiet_transformers",
]

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
        """Longest sequence the model is made for, in tokens; None if its config does not say.

        Reads the config alone.
        """
        return getattr(self.config, "max_position_embeddings", None)

    def causal_lm(self, device: str) -> transformers.PreTrainedModel:
        """Build the whole language model on `device`, in evaluation mode (dropout off).

        Raises:
            FileNotFoundError: If `folder` is not a folder with a config.json.
        """
        if self.folder is None:
            model = self._initialized()
        else:
            auto: Any = transformers.AutoModelForCausalLM
            model = self._loaded(auto)
        return self._placed(model, device)

    def backbone(self, device: str) -> transformers.PreTrainedModel:
        """The same model without its language-model head: token ids to hidden states."""
        if self.folder is None:
            model = self._initialized().base_model
        else:
            model = self._loaded(transformers.AutoModel)
        return self._placed(model, device)

    def _placed(self, model: Any, device: str) -> transformers.PreTrainedModel:
        return model.to(device=device, dtype=_DTYPES[self.dtype]).eval()

    @property
    def config(self) -> Any:
        """The Hugging Face config; reads config.json, no weights."""
        if self.folder is not None:
            return transformers.AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        kinds = dict(self.architecture)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kinds.setdefault(token, None)  # the defaults name tokens of the original vocabulary
        return transformers.AutoConfig.for_model(kinds.pop("model_type"), **kinds)

    def _initialized(self) -> Any:
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.init_seed)
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )

    def _loaded(self, auto: Any) -> Any:
        folder = Path(str(self.folder))
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model folder '{folder}' has no config.json; give a local folder written by "
                "save_pretrained (models are never downloaded)"
            )
        with quiet_transformers():
            return auto.from_pretrained(
                folder,
                dtype=_DTYPES[self.dtype],
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="sdpa",
            )


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hide progress bars, and the load report that a backbone without its head always gives."""
    logging: Any = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
