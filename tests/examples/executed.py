"""Executes a notebook in a folder, and writes it with its outputs: a process for each notebook.

The kernel's client leaves sockets to be collected, which a test must not do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

DEADLINE_S = 600
"""Of a cell."""


def main(notebook: str, folder: str, output: str) -> None:
    """Run every cell of `notebook` in `folder`; the first that fails ends it with its error."""
    read: Any = nbformat.read(notebook, as_version=4)
    # Files in place of ports: nobody else on the machine can connect.
    kernel = AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=str(Path(folder) / "kernel")
    )
    resources = {"metadata": {"path": folder}}
    NotebookClient(read, km=kernel, timeout=DEADLINE_S, resources=resources).execute()
    nbformat.write(read, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
