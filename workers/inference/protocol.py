"""Requests and answers as bytes: a length, a JSON header, and the arrays as they lie in memory.

    u32 bytes of the header | u64 bytes of all arrays | header, JSON | arrays, one after another

Everything is little-endian. The header names each array's dtype and shape, or null for a missing
one. Nothing is unpickled, and what a frame may claim is bounded before anything is made of it.

Whoever connects must know the token first: the server sends 16 random bytes, and the client answers
with their HMAC-SHA256 under the token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.remote_inference import Array, InferenceRequest

CHALLENGE_BYTES = 16
PROOF_BYTES = 32

_LENGTHS = struct.Struct("<IQ")
_MOST_HEADER = 1 << 20
_MOST_ARRAYS = 1 << 31
_MOST_AXES = 32
_MOST_ERROR = 1 << 16  # Characters of an error; as JSON one takes 12 bytes at most
# What arrays may hold, as numpy spells it, without the byte order.
_DTYPES = {"f4", "f8", "i8", "i4", "i2", "i1", "u1", "b1"}


def proof(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, hashlib.sha256)


@dataclass(frozen=True)
class Frame:
    """One message."""

    header: Mapping[str, Any]  # From JSON
    arrays: tuple[Array | None, ...]  # The arrays it came with; writable, and nobody else's


class FrameReader:
    """Puts frames together from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes | memoryview) -> None:
        """Take what has arrived."""
        self._bytes += piece

    @property
    def has_begun(self) -> bool:
        return bool(self._bytes)

    def take(self) -> Frame | None:
        """The next frame, if all of it is there."""
        begin = _LENGTHS.size
        if len(self._bytes) < begin:
            return None
        num_header, num_arrays = _LENGTHS.unpack_from(self._bytes)
        if num_header > _MOST_HEADER or num_arrays > _MOST_ARRAYS:
            raise WorkerError(
                f"a message claims a header of {num_header} bytes and {num_arrays} bytes of "
                f"arrays; at most {_MOST_HEADER} and {_MOST_ARRAYS} are taken"
            )
        end = begin + num_header + num_arrays
        if len(self._bytes) < end:
            return None
        whole, self._bytes = self._bytes, self._bytes[end:]
        return _frame(whole, begin, begin + num_header, end)


def _frame(whole: bytearray, begin: int, arrays: int, end: int) -> Frame:
    try:
        header = json.loads(whole[begin:arrays])
        specs = header["arrays"]
        found: list[Array | None] = []
        for spec in specs:
            array = None if spec is None else _array(whole, arrays, end, spec)
            found.append(array)
            arrays += 0 if array is None else array.nbytes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WorkerError(f"a message cannot be read: {error}") from error
    if arrays != end:
        raise WorkerError(f"a message has {end - arrays} bytes more than its arrays")
    return Frame(header, tuple(found))


def _array(whole: bytearray, at: int, end: int, spec: Sequence[Any]) -> Array:
    dtype, *shape = spec
    if dtype not in _DTYPES:
        raise ValueError(f"it has an array of '{dtype}'; known are {', '.join(sorted(_DTYPES))}")
    if len(shape) > _MOST_AXES or any(
        type(size) is not int or not 0 <= size <= _MOST_ARRAYS for size in shape
    ):
        raise ValueError(f"it has an array of shape {shape!s:.200}")
    kind, count = np.dtype(f"<{dtype}"), math.prod(shape)
    if count * kind.itemsize > end - at:
        raise ValueError(f"it has an array of shape {shape} and {end - at} bytes for it")
    return np.frombuffer(whole, kind, count, at).reshape(shape)


def _encode(header: dict[str, Any], arrays: Sequence[Array | None]) -> bytes:
    specs: list[list[Any] | None] = []
    pieces: list[bytes] = []
    for array in arrays:
        if array is None:
            specs.append(None)
            continue
        kind = array.dtype.str[1:]
        if kind not in _DTYPES:
            raise WorkerError(
                f"an array of {array.dtype} cannot be sent; known are {', '.join(sorted(_DTYPES))}"
            )
        specs.append([kind, *array.shape])
        pieces.append(array.astype(f"<{kind}", order="C", copy=False).tobytes())
    text, num_bytes = json.dumps({**header, "arrays": specs}).encode(), sum(map(len, pieces))
    if len(text) > _MOST_HEADER or num_bytes > _MOST_ARRAYS:
        raise WorkerError(
            f"a message of {num_bytes} bytes of arrays and a header of {len(text)} cannot be sent; "
            f"at most {_MOST_ARRAYS} and {_MOST_HEADER} are taken. Ask about fewer rows at once"
        )
    return b"".join((_LENGTHS.pack(len(text), num_bytes), text, *pieces))


def request_frame(request: InferenceRequest) -> bytes:
    """A request as bytes."""
    for index, argument in enumerate(request.arguments):
        if argument is not None and not isinstance(argument, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
            raise WorkerError(
                f"argument {index} of '{request.role}.{request.method}' is a "
                f"{type(argument).__name__}; a role that is served is called with numpy arrays"
            )
    header = {"role": request.role, "method": request.method, "version": request.version}
    return _encode(header, request.arguments)


def request_from(frame: Frame) -> InferenceRequest:
    """The reverse."""
    role, method, version = (frame.header.get(name) for name in ("role", "method", "version"))
    if not (isinstance(role, str) and isinstance(method, str) and type(version) is int):
        raise WorkerError(f"a request lacks its role, method or version: {frame.header!s:.200}")
    return InferenceRequest(role, method, version, frame.arrays)


def answer_frame(answer: Any) -> bytes:
    """An answer, a named tuple of arrays, as bytes."""
    if not isinstance(answer, tuple):
        raise WorkerError(f"the answer is a {type(answer).__name__}, no named tuple of arrays")
    arrays: tuple[Any, ...] = answer
    for index, array in enumerate(arrays):
        if array is not None and not isinstance(array, np.ndarray):
            raise WorkerError(
                f"entry {index} of the answer is a {type(array).__name__}, which is no array"
            )
    return _encode({}, arrays)


def error_frame(text: str) -> bytes:
    if len(text) > _MOST_ERROR:
        half = _MOST_ERROR // 2
        text = f"{text[:half]}\n... {len(text) - _MOST_ERROR} characters ...\n{text[-half:]}"
    return _encode({"error": text}, ())


def answer_from(frame: Frame, returns: type[Any]) -> Any:
    """The reverse of both."""
    if "error" in frame.header:
        raise WorkerError(str(frame.header["error"]))
    num_fields = len(returns._fields)
    if num_fields != len(frame.arrays):
        raise WorkerError(
            f"an answer has {len(frame.arrays)} arrays; {returns.__name__} has {num_fields}"
        )
    return returns(*frame.arrays)
