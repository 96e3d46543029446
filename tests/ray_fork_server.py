"""Runs Ray's workers as forks of one process that has imported what they import.

A worker of Ray starts two interpreters and imports torch, transformers and Penstock: some ten
seconds of processor time for a test that computes for one. The raylets of tests start this script
in place of Ray's `setup_worker.py`. It asks a server, which is this script as well, for a fork that
goes on with Ray's own `default_worker.py`, with the words, environment, folder and files that Ray
gave the script. The server has not imported Ray, which reads the environment.
"""

from __future__ import annotations

import json
import os
import socket
import sys

NAME = "PENSTOCK_RAY_FORKS"
"""The variable with the name of the server's socket, which lies in no folder."""
_PRELOADED = (
    "penstock.workers.engines.torch_engine.specs",
    "penstock.workers.executors.rank_process",
    "reasoning_gym",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
_READ_BYTES = 1 << 20
_LOOKS_S = 1.0
_ASK_S = 60.0


def serve(listening: socket.socket) -> None:
    """Fork for everyone who asks, for as long as the process that started this one lives."""
    import gc
    import importlib
    import signal
    from importlib.util import find_spec

    import torch
    from penstock.workers.engines.megatron_engine.groups import prepare_megatron

    parent = os.getppid()
    for name in _PRELOADED:
        importlib.import_module(name)
    if find_spec("megatron") and torch.version.cuda is None:
        prepare_megatron("cpu")
    gc.collect()
    gc.freeze()  # else the first collection in each child would copy all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no fork stays as a zombie
    listening.settimeout(_LOOKS_S)
    while os.getppid() == parent:
        try:
            asking, _ = listening.accept()
        except TimeoutError:
            continue
        text, files, _, _ = socket.recv_fds(asking, _READ_BYTES, 3)
        while more := asking.recv(_READ_BYTES):
            text += more
        is_child = bool(text) and os.fork() == 0  # no text only asks whether this is ready
        asking.close()
        if is_child:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(files, **json.loads(text))
            return
        for file in files:
            os.close(file)


def _become(
    files: list[int], words: list[str], environment: dict[str, str], path: list[str], folder: str
) -> None:
    """Be the process that Ray meant to start."""
    import runpy

    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [os.path.dirname(words[0]), *path]
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


def ask(words: list[str]) -> None:
    """Have the server start a worker in this process's place."""
    environment = dict(os.environ)
    given: list[str] = []
    for word in words:
        option, _, value = word.partition("=")
        if option == "--serialized-runtime-env-context":
            environment |= json.loads(value).get("env_vars") or {}
        elif option != "--language" and (given or word.endswith(".py")):
            given.append(word)
    asked = {"words": given, "environment": environment, "path": sys.path[1:]}
    text = json.dumps(asked | {"folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ASK_S)
        server.connect("\0" + os.environ[NAME])
        sent = socket.send_fds(server, [text], [0, 1, 2])
        server.sendall(text[sent:])
        server.shutdown(socket.SHUT_WR)
        server.recv(1)  # ends when the server has forked


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        ask(sys.argv[1:])
