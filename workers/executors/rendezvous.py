"""Where processes of several machines meet: on the address that each is given, and on no other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

__all__ = ["Address", "Store", "meet"]

Address = tuple[str, int]

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage] - torch documents it


def meet(
    address: Address,
    listener: socket.socket | None,
    host: str,
    num_processes: int,
    start_s: float,
) -> Store:
    """The store that processes share to find each other.

    Torch's own store would listen on every interface, and gloo on the one that the host's name
    resolves to; both are given the interface of this process's own address.

    Args:
        address: Of the listener.
        listener: In the process that has opened it; it is used up.
        host: This process's own address.
        num_processes: That meet.
        start_s: How long they may take.
    """
    interface = _interface(host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch documents it
        *address,
        num_processes,
        is_master=listener is not None,
        timeout=timedelta(seconds=start_s),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _interface(address: str) -> str:
    """The network interface that has an address: "lo", "eth0"."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise OSError(f"no network interface of this machine has its address {address}")
