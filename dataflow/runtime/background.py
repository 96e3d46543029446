"""A function that runs in a thread of its own, and whose end is waited for with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background(Generic[T]):
    """Begins at once. An interpreter that ends does not wait for it: a disk may hang for good.

    Args:
        function: What to do; it must not touch what others change meanwhile.
        name: Of the thread.

    Example:
        >>> hashed = Background(lambda: sha256(path), "hash")
        >>> hashed.wait(10.0) and hashed.result()
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end for so long; says whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What the function has returned; call it once `wait` has said that it has ended.

        Raises:
            BaseException: What the function raised.
        """
        if self._error is not None:
            raise self._error
        return self._found[0]
