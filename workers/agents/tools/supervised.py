"""A script that runs a command, and kills whatever that has started when it ends or is to end.

The command has this script's streams. It is to end when the script is sent SIGTERM, which the
kernel does when the process that started it dies. What is killed how is `verifiers/child.py`'s.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def supervised(command: tuple[str, ...]) -> tuple[str, ...]:
    """What to start instead of a command, so that nothing of it is left."""
    return (sys.executable, "-I", "-S", str(Path(__file__).resolve()), *command)


def supervisor() -> ModuleType:
    """`verifiers/child.py` by its path: the package need not be importable here."""
    path = Path(__file__).resolve().parents[2] / "verifiers" / "child.py"
    spec = spec_from_file_location("_penstock_supervisor", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(command: list[str]) -> None:
    """Run the command below this process, and end as it does."""
    child = supervisor()
    lifeline, end = os.pipe()

    def stop(number: int, frame: object) -> None:
        os.write(end, b"x")

    signal.signal(signal.SIGTERM, stop)
    child.prctl(child.DEATH_SIGNAL, signal.SIGTERM)
    child.prctl(child.SUBREAPER, 1)
    parent = os.getpid()
    started = os.fork()
    if not started:
        _become(command, child, parent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)  # so that only the command holds them, and their ends tell
    os.dup2(nowhere, 1)
    child.supervise(started, lifeline)


def _become(command: list[str], child: ModuleType, parent: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        child.prctl(child.DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:  # else it died before it was to be told of
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    _main(sys.argv[1:])
