"""New weights for a running vLLM engine, through vLLM's own interface for them.

`WholeTensors` is a weight transfer engine of ours, registered under a name as vLLM's documentation
asks for; nothing of vLLM is changed. It is handed whole tensors by Hugging Face name and gives them
to the model's own loader, which fuses, slices for tensor parallelism and, on CPUs, packs them.

This module imports vLLM; only `engine.py` imports it, when an engine starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from ...models.file_weights import as_in_files

_NAME = "penstock"


@dataclass
class _Start(WeightTransferInitInfo):
    """Nothing: tensors are handed over in the process."""


@dataclass
class _Update(WeightTransferUpdateInfo):
    """Some parameters, whole, by Hugging Face name."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


class WholeTensors(WeightTransferEngine[_Start, _Update]):
    """Loads tensors that are already in this process.

    Loading is layer by layer: a layer's tensors are kept until all have come, then loaded into new
    storage, packed, and copied to where the running kernels look for them. Without that a CPU model
    cannot be loaded twice, because packing leaves its parameters empty.
    """

    init_info_cls = _Start
    update_info_cls = _Update

    def init_transfer_engine(self, init_info: _Start) -> None:
        """Nothing is to be connected."""

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            # A mixture's experts are packed where their kernel is made, and a kernel that is there
            # already is kept: it would read what was loaded as if that were packed.
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class asks, and a CPU build has no accelerator
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _Update) -> None:
        model: Any = self.model
        kind: str = self.model_config.hf_config.model_type
        model.load_weights(as_in_files(update_info.tensors, kind))

    def finish_weight_update(self) -> None:
        """Put the layers back in use; those that got nothing keep what they had."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A head that shares the embedding's tensor gets no weights of its own, so reloading
            # takes it for untouched and leaves it with a packed copy of the old embedding.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    method: Any = module.quant_method
                    method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing was opened."""


def weight_transfer_config() -> WeightTransferConfig:
    """The configuration that makes an engine use `WholeTensors`; registers it once per process."""
    if _NAME not in WeightTransferEngineFactory._registry:  # pyright: ignore[reportPrivateUsage] - it cannot be asked
        WeightTransferEngineFactory.register_engine(_NAME, WholeTensors)
    return WeightTransferConfig(backend=_NAME)


def load_whole_tensors(engine: Any, tensors: Mapping[str, Tensor]) -> None:
    """Replace all weights of an `LLMEngine`, and empty its prefix cache if no request runs.

    Requests that run keep their keys and values; others are told apart by a salt.
    """
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"tensors": tensors}})
    engine.collective_rpc("finish_weight_update")
    # Keys and values of the old weights must not be found again.
    if not engine.reset_prefix_cache() and not engine.has_unfinished_requests():
        raise RuntimeError("vLLM kept its prefix cache, though no request is running")
