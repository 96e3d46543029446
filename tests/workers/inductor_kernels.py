"""The kernels that torch's inductor makes of a function on a CUDA device, and the bytes they move.

Nothing is compiled and no device is needed: its scheduler alone decides both. Private to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

_ANY: Any = DeviceProperties
_H100 = _ANY(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)
_CUDA = torch.device("cuda")


def kernels_of(
    function: Callable[..., Any], *inputs: tuple[Sequence[int], torch.dtype]
) -> tuple[int, int]:
    """Kernels, and bytes that they read and write, for inputs of some shapes and types."""
    mode: Any = FakeTensorMode()
    compiler: Any = V

    def made(device: str) -> list[Tensor]:
        with mode:
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in inputs]

    functional: Any = torch.func.functionalize(function)
    table = select_decomp_table()
    graph = make_fx(functional, decomposition_table=table, tracing_mode="fake")(*made("cpu"))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _CUDA}
    graph.recompile()
    given = made("cuda")
    FakeTensorProp(graph, mode=mode).propagate(*given)
    updater: Any = FakeTensorUpdater
    reinplace_inplaceable_ops(updater(graph), graph.graph)
    graph.recompile()
    with ExitStack() as stack:
        for name, value in (
            ("torch._inductor.scheduler.has_triton", True),
            ("torch.cuda.current_device", 0),
            ("torch.cuda.get_device_capability", (9, 0)),
        ):
            stack.enter_context(mock.patch(name, return_value=value))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=_H100))
        lowering: Any = GraphLowering(graph, example_inputs=given)
        for context in (
            compiler.set_graph_handler(lowering),
            compiler.set_fake_mode(mode),
            compiler.set_debug_handler(DebugContext()),
        ):
            stack.enter_context(context)
        lowering.run(*given)
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        num_bytes, _, _ = lowering.count_bytes()
        return len(lowering.scheduler.nodes), int(num_bytes)
