"""A client of OpenAI-compatible chat completions that cannot hang: retries, and two deadlines.

Each attempt has a time limit that holds over connecting, headers and body together: when it ends,
the connection is shut, whatever it waits for. The API key is read from an environment variable and
appears in no message.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ...dataflow.errors import ConfigError
from ...dataflow.option_checks import check_range

__all__ = ["ChatClient", "ChatError", "ChatOptions", "ChatRefused", "ChatTimeout"]

_MAX_REPLY_BYTES = 4 << 20
_MAX_SHOWN_BYTES = 64 << 10
"""Of a reply in a message, looked through for the key before it is cut to what is shown."""
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_NEVER = frozenset({401, 403, 404, 405})


class ChatError(Exception):
    """No answer to this request: it was refused, or failed as often as it may."""


class ChatTimeout(ChatError):
    """The time for this request is up."""


class ChatRefused(Exception):
    """The server refuses every such request: a wrong key, address or model."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Which model to ask, and how patiently."""

    url: str = ""
    """The server's base address: `http://127.0.0.1:8000/v1`."""
    model: str = ""
    """The model's name there."""
    api_key_env: str | None = None
    """Environment variable with the API key, where the reward runs; null for none."""
    temperature: float = 0.0
    """Temperature of the model's answers."""
    max_tokens: int = 256
    """Longest answer."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of each request, such as `{seed: 0}`."""
    attempt_s: float = 30.0
    """Seconds one attempt may take."""
    deadline_s: float = 120.0
    """Seconds a request may take with all its attempts and pauses."""
    max_attempts: int = 4
    """Attempts per request; what may pass is tried again after a pause that doubles."""
    pause_s: float = 0.5
    """The first pause, unless the server says how long to wait."""

    def __post_init__(self) -> None:
        check_range(self, "temperature", "pause_s", at_least=0)
        check_range(self, "max_tokens", "max_attempts", at_least=1)
        check_range(self, "attempt_s", "deadline_s", above=0)
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname or not self.model:
            raise ValueError(
                f"a judge needs an address and a model, got url={self.url!r}, model={self.model!r};"
                " such as url=http://127.0.0.1:8000/v1 model=NAME"
            )
        if address.username or address.password:
            raise ValueError(
                "url holds a name or a password, which would be logged; put the key into an "
                "environment variable and name that in api_key_env"
            )


class ChatClient:
    """Asks one model; may be used by several threads.

    Args:
        options: See `ChatOptions`.

    Raises:
        ConfigError: If the API key's variable is not set.

    Attributes:
        num_retries: Attempts after the first, over all requests.
    """

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        address = urlsplit(options.url)
        assert address.hostname, "ChatOptions has looked at it"
        self._secure = address.scheme == "https"
        self._host, self._port = address.hostname, address.port
        path = address.path.rstrip("/")
        self._path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
        self._key = _key(options.api_key_env)
        self._lock = threading.Lock()
        self.num_retries = 0

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The model's answer.

        Args:
            messages: `{"role", "content"}` each.

        Raises:
            ChatError: If there is none after all attempts.
            ChatTimeout: If the deadline passed.
            ChatRefused: If the server refuses all such requests.
        """
        options = self._options
        deadline = time.monotonic() + options.deadline_s
        asked = {
            **options.extra,
            "model": options.model,
            "messages": list(messages),
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        body = json.dumps(asked).encode()
        reason = ""
        for attempt in range(options.max_attempts):
            if attempt:
                with self._lock:
                    self.num_retries += 1
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                status, headers, reply = self._post(body, min(left, options.attempt_s))
            except (OSError, http.client.HTTPException) as error:
                reason, wait = f"{type(error).__name__}: {error}", None
            else:
                if status == 200:
                    return self._content(reply)
                reason = f"status {status}: {self._shown(reply)}"
                if status in _NEVER:
                    raise ChatRefused(reason)
                if status not in _RETRIED:
                    raise ChatError(reason)
                wait = _retry_after(headers.get("retry-after"))
            self._pause(attempt, wait, deadline)
        if time.monotonic() >= deadline:
            raise ChatTimeout(f"no answer within {options.deadline_s:g} s; the last: {reason}")
        raise ChatError(f"{options.max_attempts} attempts failed; the last: {reason}")

    def _pause(self, attempt: int, wait: float | None, deadline: float) -> None:
        if attempt + 1 < self._options.max_attempts:
            pause = self._options.pause_s * 2**attempt if wait is None else wait
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def _post(self, body: bytes, limit_s: float) -> tuple[int, Mapping[str, str], bytes]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        options: dict[str, Any] = {"timeout": limit_s}
        if self._secure:
            options["context"] = ssl.create_default_context()
        connection = kind(self._host, self._port, **options)
        expired = threading.Event()
        # The socket's own timeout starts again with every byte, so a server that drips would hold
        # the attempt for ever.
        watchdog = threading.Timer(limit_s, _shut, (connection, expired))
        watchdog.daemon = True
        watchdog.start()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request("POST", self._path, body, headers)
            response = connection.getresponse()
            reply = response.read(_MAX_REPLY_BYTES + 1)
            if expired.is_set():
                raise TimeoutError(f"no whole answer within {limit_s:g} s")
            if len(reply) > _MAX_REPLY_BYTES:
                raise http.client.HTTPException(f"more than {_MAX_REPLY_BYTES} bytes")
            if response.length:  # the connection broke, which a bounded read does not say
                raise http.client.IncompleteRead(reply, response.length)
            return response.status, {k.lower(): v for k, v in response.getheaders()}, reply
        except (OSError, http.client.HTTPException, AttributeError, ValueError):
            if expired.is_set():  # whatever a shut connection looks like from inside
                raise TimeoutError(f"no whole answer within {limit_s:g} s") from None
            raise
        finally:
            watchdog.cancel()
            connection.close()

    def _content(self, reply: bytes) -> str:
        try:
            read = json.loads(reply)
            content = read["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ChatError(f"the reply is no chat completion: {self._shown(reply)!r}") from None
        if not isinstance(content, str):
            raise ChatError("the reply has no text")
        return self._masked(content)  # whoever asked may show it

    def _shown(self, reply: bytes) -> str:
        """The beginning of a reply, for messages; the key is masked before anything is cut."""
        text = self._masked(reply[:_MAX_SHOWN_BYTES].decode("utf-8", errors="replace"))
        return " ".join(text.split())[:200]

    def _masked(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _shut(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    expired.set()
    with contextlib.suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"environment variable {variable}, which is to hold the judge's API key, is not set "
            "where the reward runs\n    set it, or leave api_key_env out"
        )
    return key


def _retry_after(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:  # a date; the usual pause will do
        return None
