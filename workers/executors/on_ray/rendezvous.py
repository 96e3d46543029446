"""Where processes of several machines meet: on the address that Ray has there, and no other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import ray
import torch.distributed as dist

from ...weight_sync.packet_server import Store

__all__ = ["Address", "meet", "open_listener"]

Address = tuple[str, int]


def open_listener() -> socket.socket:
    """A socket on this node's own address, at which others can meet its process."""
    return socket.create_server((ray.util.get_node_ip_address(), 0))


def meet(
    address: Address, listener: socket.socket | None, num_processes: int, start_s: float
) -> Store:
    """The store that processes share to find each other.

    Torch's own store would listen on every interface, and gloo on the one that the host's name
    resolves to; both are given the interface that Ray uses.

    Args:
        address: Of the listener.
        listener: In the process that has opened it; it is used up.
        num_processes: That meet.
        start_s: How long they may take.
    """
    host, port = address
    interface = _interface(ray.util.get_node_ip_address())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - torch documents it
        host,
        port,
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
    raise OSError(f"no network interface of this machine has Ray's address {address}")
