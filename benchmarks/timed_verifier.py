"""A verifier whose sandboxed program takes its time, for `planned_environments.py`."""

from __future__ import annotations

import zlib

from penstock.workers.verifiers.code_tests import code_tests

PROGRAM = """
import time
end_s = time.process_time() + {seconds}
while time.process_time() < end_s:
    pass
def answer():
    return 1
"""


def verify(prompt: str, response: str, answer: str | None) -> float:
    """A score that follows from the response, after a program of 20 to 120 ms of a core."""
    share = zlib.crc32(response.encode()) / 2**32
    program = PROGRAM.format(seconds=0.02 + 0.1 * share)
    return share * code_tests(prompt, program, '["assert answer() == 1"]')
