"""JSON lines to and from another process, over raw descriptors, in whichever event loop waits.

Between two messages nothing is bound to an event loop, so a process outlives the loop that started
it, and may be used by the next one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

_PIECE = 1 << 16


class NotSaid(Exception):
    """There is no answer, or one that cannot be believed.

    Attributes:
        timed_out: Whether it took too long.
        ended: Whether the process closed its end, as one that ends does.
    """

    def __init__(self, why: str, *, timed_out: bool = False, ended: bool = False) -> None:
        super().__init__(why)
        self.timed_out, self.ended = timed_out, ended


class Lines:
    """Messages to a process and its answers, which may be anything.

    Args:
        writing: Descriptor of the pipe to it.
        reading: Descriptor of the pipe from it.
        most_bytes: Of an answer.
    """

    def __init__(self, writing: int, reading: int, most_bytes: int) -> None:
        self._writing, self._reading, self._most_bytes = writing, reading, most_bytes
        os.set_blocking(writing, False)
        os.set_blocking(reading, False)

    async def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer, an object with the same nonce.

        Args:
            message: With a `nonce`.
            limit_s: Seconds that all of it may take.

        Raises:
            NotSaid: If there is no such answer by then.
        """
        deadline = asyncio.get_running_loop().time() + limit_s
        await self._send(json.dumps(message).encode() + b"\n", deadline)
        line = await self._receive(deadline)
        try:
            answer: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise NotSaid("it did not answer in JSON") from None
        if not isinstance(answer, dict) or answer.get("nonce") != message["nonce"]:
            raise NotSaid("what it said is no answer")
        return answer

    @property
    def quiet(self) -> bool:
        """Whether the other side lives and has said nothing since its last answer."""
        try:
            os.read(self._reading, 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def _send(self, line: bytes, deadline: float) -> None:
        unsent = memoryview(line)
        while unsent:
            try:
                unsent = unsent[os.write(self._writing, unsent) :]
            except BlockingIOError:
                await ready(self._writing, deadline, to_write=True)
            except OSError:  # it has died; what it has answered, if anything, says more
                return

    async def _receive(self, deadline: float) -> bytes:
        received = bytearray()
        while True:
            try:
                piece = os.read(self._reading, _PIECE)
            except BlockingIOError:
                await ready(self._reading, deadline)
                continue
            if not piece:
                raise NotSaid("its process ended", ended=True)
            received += piece
            if b"\n" in piece:
                break
            if len(received) > self._most_bytes:
                raise NotSaid("it said more than it may")
        line, _, rest = bytes(received).partition(b"\n")
        if rest:
            raise NotSaid("it answered twice")
        return line


async def ready(descriptor: int, deadline: float, *, to_write: bool = False) -> None:
    """Wait until a pipe has something, or takes something.

    Raises:
        NotSaid: If it does not by then.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    if to_write:
        loop.add_writer(descriptor, tell)
    else:
        loop.add_reader(descriptor, tell)
    try:
        async with asyncio.timeout_at(deadline):
            await ready
    except TimeoutError:
        raise NotSaid("it took too long", timed_out=True) from None
    finally:
        if to_write:
            loop.remove_writer(descriptor)
        else:
            loop.remove_reader(descriptor)
