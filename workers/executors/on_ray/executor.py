"""The Ray executor: every process of every group is an actor; outputs stay where they were made.

Who can connect: a Ray that is started here listens on the loopback address only, and the processes
of a group meet and talk on the address that Ray has on their machine. On a cluster that the
user started Ray listens as it was told to. It may ask for a token; torch.distributed asks for
none, so a cluster belongs on a private network.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from ....dataflow.errors import ConfigError
from ...weight_sync.channel import DEFAULT_TRANSPORT, Transport
from ..assignment import Machine
from ..process_backend import ProcessBackend
from ..rank_group import forget_warm
from ..registry import ExecutorKind
from ..supervisor import Supervisor

_LOCK = ".lock"
_STOP_S = 5.0
_OLD_S = 60.0  # Age after which a folder without a lock is left behind
# The longest path that Ray adds to the folder of a user.
_SOCKET = "/abcdefgh/session_2026-11-22_12-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_SOCKET = 104  # Most characters of a socket's path


class SessionFolder:
    """This process's folder, made now, after those of ended processes are removed."""

    def __init__(self) -> None:
        name, top = f"penstock-ray-{os.getuid()}", Path("/tmp")
        for temporary in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"):
            if len(f"{temporary}/{name}{_SOCKET}") <= _LONGEST_SOCKET:
                top = Path(temporary)
                break
        top /= name
        top.mkdir(mode=0o700, exist_ok=True)
        if top.is_symlink() or top.stat().st_uid != os.getuid():
            raise ConfigError(
                f"'{top}' belongs to another user, and Ray's files are to lie there\n"
                "    remove it, or set TMPDIR to a folder of your own"
            )
        for folder in top.iterdir():
            _clear_if_left(folder)
        made = Path(tempfile.mkdtemp(prefix=_NEW, dir=top))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(top / made.name.removeprefix(_NEW))  # locked before it counts

    def remove(self) -> None:
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


_NEW = "new."


def _clear_if_left(folder: Path) -> None:
    if folder.name.startswith(_NEW):
        with contextlib.suppress(OSError):  # it may have its final name by now
            if time.time() - folder.stat().st_mtime > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being made or removed by its process at this moment
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        ours = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
        left = [
            process
            for process in psutil.process_iter()
            if process.pid not in ours and _runs_in(process, folder)
        ]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=_STOP_S)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    inside = f"{folder}/"
    try:
        words = process.cmdline()
        program = " ".join(words[:3])
        if not (program.startswith("ray::") or "/ray/" in program):
            return False
        return any(inside in word for word in words) or any(
            file.path.startswith(inside) for file in process.open_files()
        )
    except (psutil.Error, OSError):  # it has ended
        return False


# Ray's switch for listening where other machines can connect; says what it does elsewhere.
_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


_ANSWERS_S = 10.0  # How long the Ray that is to be joined may take to answer

# Where the Ray that was started here keeps its files, if one was.
_SESSION: list[SessionFolder] = []


class RayExecutor(Supervisor):
    """Runs a program on Ray actors; see `Supervisor`.

    Joins the cluster of `RAY_ADDRESS` if that is set; otherwise starts Ray on this machine, bound
    to the loopback address, whatever other Ray runs here. Ray stays up between executors;
    `shutdown_ray` ends it.
    """

    def __init__(
        self, num_threads: int | None = None, *, transport: Transport = DEFAULT_TRANSPORT
    ) -> None:
        super().__init__("Ray", ray_backend, num_threads, transport=transport)


def ray_backend() -> ProcessBackend:
    """Ray's processes, on the cluster that was joined or the Ray that was started here."""
    connect_ray()
    from .backend import RayBackend

    return RayBackend()


def connect_ray() -> None:
    """Join the cluster of `RAY_ADDRESS`, or start Ray here; nothing if that has been done."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        # Only a process in this mode shows the token that it has.
        if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    else:
        # A Ray of our own shall listen on the loopback address only, as it does by itself on other
        # systems than Linux. The processes it starts read this.
        os.environ.setdefault(_ON_NETWORK, "0")
        # Ray lowers its workers' priority by 15 to keep a desktop responsive; here they are the
        # job.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray would keep a record of each of the last 100,000 calls, 0.1 MB for a step of a small
        # run, for a dashboard that is not there.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    import ray  # not before, because it reads the environment
    from ray._private import ray_constants  # pyright: ignore[reportPrivateImportUsage]

    if ray.is_initialized():
        return
    if address:
        _check_joins(address)
    else:
        # Read when ray was imported, which may have been before.
        ray_constants.ENABLE_RAY_CLUSTER = os.environ[_ON_NETWORK] not in ("0", "false")
    own: dict[str, Any] = {}
    if not address:
        _SESSION.append(SessionFolder())
        atexit.register(shutdown_ray)
        own = {"_temp_dir": str(_SESSION[-1].path)}
    terminated = signal.getsignal(signal.SIGTERM)
    # "local", because by default Ray joins whatever `ray start` has left on this machine.
    ray.init(
        **own,
        address=address or "local",
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.ERROR,
    )
    if threading.current_thread() is threading.main_thread():
        # Ray has put others in its place, which end the process without a checkpoint.
        signal.signal(signal.SIGTERM, terminated or signal.SIG_DFL)


def _check_joins(address: str) -> None:
    # Refuse at once an address at which Ray would try for a long time, and then not say why.
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import (
        GcsClient,  # pyright: ignore[reportAttributeAccessIssue] - it is compiled
    )
    from ray.exceptions import AuthenticationError, RayError

    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # "auto", or Ray's client, which goes another way
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS is {address}, where nothing answers: {error}\n    start Ray there with "
            "`ray start --head`, or unset RAY_ADDRESS to start one on this machine"
        ) from error
    client: Any = GcsClient
    try:
        # Without it, Ray ends the process where a token is missing.
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        client(address=address).check_alive([], timeout=_ANSWERS_S)
    except AuthenticationError as error:
        given = "another one" if os.environ.get("RAY_AUTH_MODE") == "token" else "none"
        given = "none" if "no authentication token" in str(error) else given
        raise ConfigError(
            f"the Ray of RAY_ADDRESS={address} asks for its token, and was given {given}\n"
            "    set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token"
        ) from error
    except RayError as error:
        raise ConfigError(
            f"RAY_ADDRESS is {address}, where something answers that is no Ray: {error}"
        ) from error


def shutdown_ray() -> None:
    """End the Ray that `RayExecutor` started on this machine, or leave the cluster it joined."""
    import ray

    if ray.is_initialized():
        from .backend import RayBackend

        forget_warm(RayBackend())
        ray.shutdown()
    while _SESSION:
        _SESSION.pop().remove()


def _machines() -> Sequence[Machine]:
    if not os.environ.get("RAY_ADDRESS"):
        return ()
    connect_ray()
    from .devices import ray_nodes

    return ray_nodes()


RAY = ExecutorKind(
    name="ray",
    create=lambda num_threads, transport: RayExecutor(num_threads, transport=transport),
    package="ray",
    connect=ray_backend,
    machines=_machines,
    end=shutdown_ray,
)
