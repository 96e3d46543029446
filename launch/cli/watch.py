"""`penstock watch`: a page of runs in the browser, live, served by this machine to itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from ...dataflow.errors import ConfigError
from ..run_dir.loopback_server import PageServer
from ..run_dir.stop import visible
from ..runs.values import folder_of
from ..watch.known_runs import KnownRuns
from ..watch.pages import Pages
from .words import split_words

_KEYS: Mapping[str, str] = {
    "port": "of this machine; 0 (the default) for any that is free",
    "runs": "the folder of all runs, `runs` by default",
}

_HELP = """\
usage: penstock watch [RUN ...] [key=value ...]

Serves one page of runs to this machine alone: curves, samples, evaluations and timelines, live.
RUN is a run's folder, or its name in the folder of all runs; without any, all runs are shown.

{keys}

It prints the page's address, which nobody else knows, and goes on until Ctrl-C.
"""


def watch_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock watch`.

    Raises:
        ConfigError: If a word is wrong, a run is not there, or the port is taken.
    """
    if {"-h", "--help"} & set(arguments):
        keys = "\n".join(f"  {name:<8}{what}" for name, what in _KEYS.items())
        print(_HELP.format(keys=keys), end="")
        return 0
    words = split_words("watch", arguments, (*_KEYS,))
    port = _port(words.option("port", "0"))
    runs = words.home if not words.names else Path(words.option("runs", "runs"))
    folders = [folder_of(word, runs).path.resolve() for word in dict.fromkeys(words.names)]
    try:
        server = PageServer(Pages(KnownRuns(folders, runs)).answer, port)
    except OSError as error:
        raise ConfigError(
            f"'port': 127.0.0.1:{port} cannot be used: {error.strerror}\n"
            "    give another one, or port=0 for any that is free"
        ) from error
    with server:
        what = f"all runs in {runs}" if not folders else ", ".join(one.name for one in folders)
        print(visible(f"penstock watch: {what}"))
        print(server.url)
        sys.stdout.flush()  # Whoever reads it through a pipe waits for the address.
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("penstock watch: ended")
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65536):
        raise ConfigError(f"'port': expected a whole number from 0 to 65535, got '{text:.40}'")
    return int(text)
