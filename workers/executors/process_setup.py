"""Setup of a process before it works: its rendezvous with the others, and its threads.

Processes of several machines meet on the address that each is given, and on no other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits
from torch.distributed import distributed_c10d

Address = tuple[str, int]

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage] - torch documents it


def meet(
    address: Address, listener: socket.socket | None, host: str, num_processes: int, start_s: float
) -> Store:
    """The store that processes share to find each other.

    Torch's own store would listen on every interface, and gloo on the one that the host's name
    resolves to; both are given the interface of this process's own address.
    """
    addresses = psutil.net_if_addrs().items()
    interface = next((name for name, own in addresses if host in {one.address for one in own}), "")
    if not interface:
        raise OSError(f"no network interface of this machine has its address {host}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch documents it
        *address,
        num_processes,
        is_master=listener is not None,
        timeout=timedelta(seconds=start_s),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def bound_groups(deadline_s: float) -> None:
    """Have process groups that are made from now on wait at least so long for each other."""
    # Those that libraries make beside the default group have no timeout of their own. torch gives
    # them 10 minutes under NCCL and 30 under gloo, however long a call may take.
    limit = timedelta(seconds=deadline_s)
    own: Any = distributed_c10d  # it reads its own globals
    own.default_pg_timeout = max(own.default_pg_timeout, limit)
    own.default_pg_nccl_timeout = max(own.default_pg_nccl_timeout or limit, limit)


def use_threads(num_threads: int) -> None:
    """Let this process compute with so many from now on.

    How a sum is shared among threads decides its last bits, and actors of perceptrons are computed
    by numpy: with torch's threads alone, a run would depend on the machine's cores.
    """
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads, user_api="blas")


@contextmanager
def threads_within(num_threads: int | None) -> Generator[None]:
    """Let this process compute with so many while the block lasts; None changes nothing."""
    before = torch.get_num_threads()
    with threadpool_limits(num_threads, user_api="blas"):
        torch.set_num_threads(num_threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
