"""Engines built as a plan says: their parts of real models, on the meta device, in one process.

torch's fake process group stands for the other processes: it has as many as the layout, and moves
nothing. What is built is what a run builds before it reads weights, so whatever an engine's own
constructor refuses is refused here.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.layout import Layout
from penstock.workers.engines.engine import EngineKind
from penstock.workers.models.spec import Head, ModelSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

__all__ = ["construct"]

Built = int | None
"""Bytes of the weights of the process that was built; None if the engine does not say."""


def construct(
    engine: EngineKind,
    layout: Layout,
    model: ModelSpec,
    head: Head,
    process: int,
    max_tokens: int,
    extra: Mapping[str, Any] | None = None,
    *,
    trained: bool = True,
) -> Built:
    """Build one process's part of a model.

    Args:
        engine: What computes it.
        layout: How.
        model: Architecture and precision.
        head: What it ends in.
        process: Which of the layout's processes.
        max_tokens: The longest sequence.
        extra: Options for what is asked and the engine has no option of its own for.
        trained: Whether it is trained as it lies there.

    Raises:
        Exception: Whatever the engine's constructor raises.
    """
    options = {**engine.options(layout), **(extra or {})}
    spec = engine.spec("policy") if engine.trains else engine.rollout_spec
    spec(model=model, end_ids=(0,), **options)
    tensor, stages = engine.division(layout)
    ranks = layout.num_devices // (tensor * stages)
    beside, tensor_rank = divmod(process, tensor)
    stage, rank = divmod(beside, ranks)
    context = WorkerContext("role", 0, rank, ranks, "cpu", tensor, tensor_rank, stages, stage)
    _pretend(layout.num_devices, process)
    if engine.name == "torch" and tensor > 1 and not trained:
        return _torch_part(model, head, context)
    return _BUILDERS[engine.name](model, head, context, options, max_tokens)


def _pretend(num_processes: int, process: int) -> None:
    """Make a default process group of which only this process exists."""
    from penstock.workers.engines.fsdp_engine import mesh
    from penstock.workers.engines.megatron_engine import groups
    from penstock.workers.training import data_parallel

    if dist.is_initialized():
        dist.destroy_process_group()
    # What is kept of the groups of a process belongs to its default group.
    for module in (groups, mesh, data_parallel):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    dist.init_process_group("fake", rank=process, world_size=num_processes, store=FakeStore())


def _torch(
    model: ModelSpec, head: Head, context: WorkerContext, options: Mapping[str, Any], longest: int
) -> Built:
    from penstock.workers.engines.torch_engine.network import make_network
    from penstock.workers.engines.torch_engine.specs import check_divided
    from penstock.workers.models.architecture import empty_model
    from penstock.workers.models.lora import LoraSpec

    del options, longest
    check_divided(model, context, trained=True, lora=LoraSpec())
    dtype = getattr(torch, model.dtype)
    module: Any = empty_model(model.config).to(dtype)
    if head.is_scalar:
        from penstock.workers.models.spec import HeadedModel

        linear = torch.nn.Linear(model.config.hidden_size, 1, device="meta")
        module = HeadedModel(module.base_model, head.name, linear).to(dtype)
    network = make_network(module, head, context)
    return network.layout.bytes_on[context.process]


def _torch_part(model: ModelSpec, head: Head, context: WorkerContext) -> Built:
    """A part that evaluates or generates; only training needs the model whole."""
    from penstock.workers.engines.torch_engine.specs import check_divided
    from penstock.workers.engines.torch_engine.tensor_parallel import part_of_module
    from penstock.workers.models.lora import LoraSpec

    check_divided(model, context, trained=False, lora=LoraSpec())
    part_of_module(model, head, dataclasses.replace(context, device="meta"))
    return None


def _fsdp(
    model: ModelSpec, head: Head, context: WorkerContext, options: Mapping[str, Any], longest: int
) -> Built:
    from penstock.workers.engines.fsdp_engine.mesh import join_mesh
    from penstock.workers.engines.fsdp_engine.model import build_model
    from penstock.workers.engines.fsdp_engine.network import FsdpNetwork
    from penstock.workers.models.lora import LoraSpec

    del longest
    mesh = join_mesh(context, options["shards"], options["context_parallel"])
    shards = dataclasses.replace(mesh.shards, device=torch.device("meta"))
    mesh = dataclasses.replace(mesh, shards=shards)
    again = options.get("activation_checkpointing", False)
    module = build_model(model, mesh, head, LoraSpec(), again=again)
    network = FsdpNetwork(module, mesh, context, model, head, LoraSpec())
    return network.layout.bytes_on[context.process]


def _megatron(
    model: ModelSpec, head: Head, context: WorkerContext, options: Mapping[str, Any], longest: int
) -> Built:
    from penstock.workers.engines.megatron_engine.specs import MegatronOptions

    del longest
    kept = {name: value for name, value in options.items() if name != "offload"}
    with torch.device("meta"):
        network = MegatronOptions(**kept).empty_network(model, context, head)
    return network.layout.bytes_on[context.process]


def _vllm(
    model: ModelSpec, head: Head, context: WorkerContext, options: Mapping[str, Any], longest: int
) -> Built:
    """Its configuration, which vLLM checks against the model; its worker on GPUs needs one."""
    from penstock.workers.engines.vllm_engine.engine import EngineOptions, engine_arguments
    from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec

    del head, options
    VllmPolicySpec(model=model, end_ids=()).check_group(context)
    folder = _config_folder(repr(sorted(model.config.to_dict().items(), key=str)), model)
    asked = EngineOptions(
        dtype=model.dtype,
        max_model_len=longest,
        max_rows=256,
        kv_cache_bytes=1 << 30,
        memory_fraction=None,
        quantization=None,
        enforce_eager=True,
        device="cpu",
        tensor_parallel=context.tensor_parallel,
        process=context.process,
    )
    engine_arguments(folder, asked).create_engine_config()
    return None


_FOLDERS: dict[str, Path] = {}


def _config_folder(key: str, model: ModelSpec) -> Path:
    """A folder with the model's config.json."""
    if key not in _FOLDERS:
        _FOLDERS[key] = Path(tempfile.mkdtemp(prefix="plans-run-"))
        model.config.save_pretrained(_FOLDERS[key])
    return _FOLDERS[key]


_BUILDERS: Mapping[str, Callable[..., Built]] = {
    "torch": _torch,
    "fsdp": _fsdp,
    "megatron": _megatron,
    "vllm": _vllm,
}
