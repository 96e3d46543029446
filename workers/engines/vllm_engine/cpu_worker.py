"""vLLM's worker on CPUs, for processes that share a model.

They exchange activations through shared memory, which vLLM names after the address where they meet.
If torch.distributed is initialized already, that is "env://" for every group on the machine. Then a
second group of processes, or one whose predecessor was killed and left its memory behind, would not
start. This worker adds a name of the group's own.
"""

from __future__ import annotations

import os
import secrets

import torch
import torch.distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

_NAME = "PENSTOCK_VLLM_SHARED_MEMORY"


def agree_on_name() -> str:
    """Give all processes of the default group one random name; the class that reads it."""
    number = torch.tensor([secrets.randbits(62)])
    dist.broadcast(number, 0)
    os.environ[_NAME] = f"{int(number):016x}"
    return f"{__name__}.{NamedCPUWorker.__name__}"


class NamedCPUWorker(CPUWorker):
    """See this module."""

    def init_device(self) -> None:
        self.distributed_init_method = f"{self.distributed_init_method}:{os.environ[_NAME]}"
        super().init_device()
