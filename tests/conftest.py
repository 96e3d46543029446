"""What holds for every test: a known environment, and nothing left running or open afterwards."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

# Before anything imports torch. One thread per process, because the order of a sum depends on how
# many threads share it (and so do the bits of a result), and because several test processes and
# their Ray workers, which inherit this, share two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# A test that asks torch for more threads must not spin while it waits for them: on a machine whose
# cores are all busy that made some of them 2 to 9 times slower. It does not change a result.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# No test may reach for a model hub or a data set hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import psutil
import pytest
from hypothesis import settings

_INHERITED = (
    *("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "LINES", "NO_COLOR", "PY_COLORS"),
    *("GOMP_SPINCOUNT", "HYDRA_FULL_ERROR", "LANG", "LANGUAGE", "PYTHONIOENCODING"),
    *("PYTHONWARNINGS", "RAY_ADDRESS", "RAY_NAMESPACE"),
    *("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
)
"""Variables that change what a program prints, or whom it talks to."""


def _forget_what_was_inherited() -> None:
    """Whoever starts the tests, from wherever, the processes that tests start find the same.

    A shell without job control starts what it runs in the background deaf to SIGINT, and a signal
    that a process ignores is ignored by what it starts. SIGHUP stays as it is: `nohup` is meant.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    for name in _INHERITED:
        os.environ.pop(name, None)
    os.environ.update(COLUMNS="80", LC_ALL="C.UTF-8", TERM="dumb")
    # As a Ray that Penstock starts: else processes of a test's cluster wait for all other tests.
    os.environ.update(RAY_worker_niceness="0")


_forget_what_was_inherited()

# The same examples in every run, so that a green run stays green; HYPOTHESIS_PROFILE=explore looks
# for new ones. No per-example deadline: machines are shared, and pytest's timeout bounds a test.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

GRACE_S = 5.0
"""How long what a test started may take to end after it."""

_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "ray_fork_server.py serve",
)
"""Processes that Python and these tests start once, on first use, and keep."""

_KEPT_THREADS = ("tqdm_monitor", "fsspecIO")
"""Threads that libraries start once, on first use, and keep."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while everything is imported, and look at none of that ever again.

    Of a million objects each full collection takes a second of a core.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Else what C++ has made is not taken apart at the end, and some of it complains."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process is left alone with one at the end.

    Skip `gpu` tests where there is no CUDA device; torch is imported only to find that out.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _children() -> list[psutil.Process]:
    """From each thread's own list, where there is one: psutil reads of every process who made it.

    This is asked twice for each of thousands of tests.
    """
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return psutil.Process().children()
    numbers: list[str] = []
    for file in lists:
        with suppress(OSError):  # the thread has ended meanwhile
            numbers += file.read_text().split()
    found: list[psutil.Process] = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(number)))
    return found


def _processes() -> dict[int, str]:
    """Living or unreaped direct children, by process id."""
    found: dict[int, str] = {}
    for child in _children():
        try:
            ended = child.status() == psutil.STATUS_ZOMBIE
            command = f"{child.name()} (zombie)" if ended else " ".join(child.cmdline())
        except psutil.Error:
            continue  # It ended between being listed and being asked.
        if not any(helper in command for helper in _HELPERS):
            found[child.pid] = command
    return found


def _threads() -> dict[int, str]:
    """Python threads, by identifier."""
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None
        # The second stands for a thread of C++ that has run Python, as autograd's of a GPU do.
        and type(thread).__name__ not in ("TMonitor", "_DummyThread")
        and not thread.name.startswith(_KEPT_THREADS)
    }


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


def _cuda_is_up() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


def _files() -> dict[tuple[int, str], str]:
    """Open file descriptors with what they point at; nothing where the system does not list them.

    Ray's and gRPC's own sockets come and go while a Ray instance that outlives the test is up; the
    driver of CUDA keeps pipes and events for as long as the process lives.
    """
    folder = Path("/proc/self/fd")
    found: dict[tuple[int, str], str] = {}
    for entry in folder.iterdir() if folder.exists() else ():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
        unnamed = target.startswith(("socket:", "anon_inode:", "pipe:"))
        transient = unnamed and (_ray_is_up() or _cuda_is_up())
        if not transient and not target.startswith("/dev/"):
            found[int(entry.name), target] = target
    return found


def _end(left: dict[int, str]) -> None:
    """End children and all below them, and let go of them, so that no later test meets them."""
    for pid in left:
        try:
            family = [child := psutil.Process(pid), *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=GRACE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        popened = [item for item in gc.get_objects() if isinstance(item, subprocess.Popen)]
    for item in popened:
        if item.pid in left:
            # Else it says when it is collected, in a later test, that nobody waited for it.
            for pipe in (item.stdin, item.stdout, item.stderr):
                with suppress(OSError):  # what it was still to be told
                    if pipe is not None:
                        pipe.close()
            item.poll()


def _left_over(before: tuple[dict[int, str], dict[int, str], dict[tuple[int, str], str]]) -> str:
    """What is there now and was not before, as text."""
    lines: list[str] = []
    for kind, old, new in zip(
        ("process", "thread", "file"), before, (_processes(), _threads(), _files()), strict=True
    ):
        lines += [f"{kind} {key}: {text}" for key, text in new.items() if key not in old]
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Generator[None]:
    """Fail a test that leaves a child process, a thread or an open file behind.

    Processes are ended then, whatever else they would have done to the tests after it. Fixtures of
    a wider scope are set up before this one, so what they hold is not counted.
    """
    before = (_processes(), _threads(), _files())
    yield
    left = _left_over(before)
    if left:
        gc.collect()  # A file or a pool in a reference cycle is not a leak.
    deadline = time.monotonic() + GRACE_S
    while (left := _left_over(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        _end({pid: text for pid, text in _processes().items() if pid not in before[0]})
        pytest.fail(f"the test left behind, {GRACE_S:g} s after its end:\n{left}", pytrace=False)
