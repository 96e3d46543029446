"""The Ray executor: every process of every group is an actor; outputs stay where they were made.

Who can connect: a Ray that is started here listens on the loopback address only, and the processes
of a group meet and talk on the address that Ray has on their machine. On a cluster that somebody
else started Ray listens as it was told to, and neither it nor torch.distributed asks who connects:
it belongs on a private network.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any

from ...weight_sync.registry import DEFAULT_TRANSPORT, Transport
from ..process_backend import ProcessBackend
from ..rank_group import forget_warm
from ..supervisor import Supervisor
from .session_folder import SessionFolder

__all__ = ["RayExecutor", "connect_ray", "shutdown_ray"]

_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for listening where other machines can connect; says what it does elsewhere."""


_SESSION: list[SessionFolder] = []
"""Where the Ray that was started here keeps its files, if one was."""


class RayExecutor(Supervisor):
    """Runs a program on Ray actors; see `Supervisor`.

    Joins the cluster of `RAY_ADDRESS` if that is set; otherwise starts Ray on this machine, bound
    to the loopback address, whatever other Ray runs here. Ray stays up between executors;
    `shutdown_ray` ends it.
    """

    def __init__(
        self, num_threads: int | None = None, *, transport: Transport = DEFAULT_TRANSPORT
    ) -> None:
        super().__init__("Ray", _connected, num_threads, transport=transport)


def _connected() -> ProcessBackend:
    connect_ray()
    from .backend import RayBackend

    return RayBackend()


def connect_ray() -> None:
    """Join the cluster of `RAY_ADDRESS`, or start Ray here; nothing if that has been done."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        # A Ray of our own shall listen on the loopback address only, as it does by itself on other
        # systems than Linux. The processes it starts read this.
        os.environ.setdefault(_ON_NETWORK, "0")
        # Ray lowers its workers' priority by 15 to keep a desktop responsive; here they are the
        # job.
        os.environ.setdefault("RAY_worker_niceness", "0")
    import ray  # not before, because it reads the environment
    from ray._private import ray_constants  # pyright: ignore[reportPrivateImportUsage]

    if ray.is_initialized():
        return
    if not address:
        # Read when ray was imported, which may have been before.
        ray_constants.ENABLE_RAY_CLUSTER = os.environ[_ON_NETWORK] not in ("0", "false")
    own: dict[str, Any] = {}
    if not address:
        _SESSION.append(SessionFolder())
        atexit.register(shutdown_ray)
        own = {"_temp_dir": str(_SESSION[-1].path)}
    # "local", because by default Ray joins whatever `ray start` has left on this machine.
    ray.init(
        **own,
        address=address or "local",
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.ERROR,
    )


def shutdown_ray() -> None:
    """End the Ray that `RayExecutor` started on this machine, or leave the cluster it joined."""
    import ray

    if ray.is_initialized():
        from .backend import RayBackend

        forget_warm(RayBackend())
        ray.shutdown()
    while _SESSION:
        _SESSION.pop().remove()
