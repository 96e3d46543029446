"""A client of OpenAI-compatible chat completions that cannot hang: retries, and two deadlines.

Each attempt has a time limit that holds over resolving, connecting, headers and body together: when
it ends, the attempt is canceled, whatever it waits for. A reply is bounded, is not decompressed,
and leads to no other address. The API key is read from an environment variable and appears in no
message, nor in an answer.
"""

from __future__ import annotations

import asyncio
import base64
import html
import json
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Le

from ...dataflow.errors import ConfigError
from ...dataflow.options import FiniteFloat, Int, NonNegativeFloat, PositiveInt, option_class
from ..verifiers.pool import LONGEST_S, SHORTEST_S

if TYPE_CHECKING:
    import httpx

_MAX_REPLY_BYTES = 1 << 20
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_NEVER = frozenset({401, 403, 404, 405})
_MOST_ATTEMPTS = 100
_OWN_FIELDS = frozenset({"messages", "model"})
"""Fields of a request that `ChatClientOptions.extra` may not hold."""


class ChatError(Exception):
    """No answer to this request: it was refused, or failed as often as it may."""


class ChatTimeout(ChatError):
    """The time for this request is up."""


class ChatRefused(Exception):
    """The server refuses every such request: a wrong key, address or model."""


@option_class
class ChatClientOptions:
    """The model to ask, and limits of patience."""

    url: str = ""
    """The server's base address: `http://127.0.0.1:8000/v1`."""
    model: str = ""
    """The model's name there."""
    api_key_env: str | None = None
    """Environment variable with the API key, where the reward runs; null for none."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of the model's answers."""
    max_tokens: PositiveInt = 256
    """Longest answer."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of each request, such as `{seed: 0}`."""
    attempt_s: Annotated[FiniteFloat, Ge(SHORTEST_S), Le(LONGEST_S)] = 30.0
    """Seconds one attempt may take."""
    deadline_s: Annotated[FiniteFloat, Ge(SHORTEST_S), Le(LONGEST_S)] = 120.0
    """Seconds a request may take with all its attempts and pauses."""
    max_attempts: Annotated[Int, Ge(1), Le(_MOST_ATTEMPTS)] = 4
    """Attempts per request; what may pass is tried again after a pause that doubles."""
    pause_s: Annotated[FiniteFloat, Ge(0), Le(LONGEST_S)] = 0.5
    """The first pause, unless the server says how long to wait."""

    def __post_init__(self) -> None:
        if taken := _OWN_FIELDS & self.extra.keys():
            raise ValueError(
                f"extra holds {', '.join(sorted(taken))}, which would not reach the server: the "
                "messages are the judge's own, and the model has an option"
            )
        if any(char.isspace() or not char.isprintable() for char in self.url):
            raise ValueError(f"url {self.url!r} holds a blank or a control character")
        try:
            address = urlsplit(self.url)
            usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # of a port or an address in brackets
            address, usable = urlsplit(""), False
        if not usable or not self.model:
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

    Attributes:
        num_retries: Attempts after the first, over all requests.
    """

    def __init__(self, options: ChatClientOptions) -> None:
        self._options = options
        address = urlsplit(options.url)
        path = address.path.rstrip("/")
        path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
        self._url = address._replace(path=path).geturl()
        # Making one reads the system's certificates, which takes long.
        self._tls = ssl.create_default_context() if address.scheme == "https" else False
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._secret: re.Pattern[str] | None = None
        if options.api_key_env is not None:
            key = _key(options.api_key_env)
            self._headers["Authorization"] = f"Bearer {key}"
            self._secret = _spellings(key)
        self._lock = threading.Lock()
        self.num_retries = 0
        for name in ("httpx", "httpcore"):  # they log every request, and headers of replies
            logging.getLogger(name).setLevel(logging.WARNING)

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        asked = {
            **self._options.extra,
            "model": self._options.model,
            "messages": list(messages),
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
        }
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._answer(json.dumps(asked).encode()))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()  # asyncio.run would wait for a name that does not resolve

    async def _answer(self, body: bytes) -> str:
        import httpx  # takes 0.1 s to import

        options = self._options
        deadline = time.monotonic() + options.deadline_s
        reason = ""
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client:
            for attempt in range(options.max_attempts):
                if attempt:
                    with self._lock:
                        self.num_retries += 1
                limit_s = min(options.attempt_s, deadline - time.monotonic())
                if limit_s <= 0:
                    break
                wait = None
                try:
                    async with asyncio.timeout(limit_s):
                        response, reply = await self._post(client, body)
                except TimeoutError:
                    reason = f"no whole answer within {limit_s:.3g} s"
                except Exception as error:  # noqa: BLE001 - a server can have a client raise anything
                    reason = self._shown(f"{type(error).__name__}: {error}")
                else:
                    if response.status_code == 200:
                        return self._content(reply)
                    reason = f"status {response.status_code}: {self._shown(reply)}"
                    if response.status_code in _NEVER:
                        raise ChatRefused(reason)
                    if response.status_code not in _RETRIED:
                        raise ChatError(reason)
                    wait = _retry_after(response.headers.get("retry-after"))
                if attempt + 1 < options.max_attempts:
                    pause = options.pause_s * 2**attempt if wait is None else wait
                    await asyncio.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            raise ChatTimeout(f"no answer within {options.deadline_s:g} s; the last: {reason}")
        raise ChatError(f"{options.max_attempts} attempts failed; the last: {reason}")

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> tuple[httpx.Response, str]:
        """A response and its body, as it came: it is not decompressed."""
        reply = bytearray()
        async with client.stream(
            "POST", self._url, content=body, headers=self._headers
        ) as response:
            async for piece in response.aiter_raw():
                reply += piece
                if len(reply) > _MAX_REPLY_BYTES:
                    raise ValueError(f"the reply has more than {_MAX_REPLY_BYTES} bytes")
        return response, reply.decode("utf-8", errors="replace")

    def _content(self, reply: str) -> str:
        try:
            read = json.loads(reply)
            content = read["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ChatError(f"the reply is no chat completion: {self._shown(reply)!r}") from None
        if not isinstance(content, str):
            raise ChatError("the reply has no text")
        return self._masked(content)  # whoever asked may show it

    def _shown(self, text: str) -> str:
        """The beginning of a text, for messages; the key is masked before anything is cut."""
        words = " ".join(self._masked(text).split())[:200]
        return "".join(char if char.isprintable() else "?" for char in words)

    def _masked(self, text: str) -> str:
        return self._secret.sub("***", text) if self._secret else text


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"environment variable {variable}, which is to hold the judge's API key, is not set "
            "where the reward runs\n    set it, or leave api_key_env out"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"environment variable {variable}, which is to hold the judge's API key, holds "
            "characters that a header cannot carry\n    set it to the key alone"
        )
    return key


def _spellings(key: str) -> re.Pattern[str]:
    """Finds a key in a text: each character as it is or escaped, or all of them as base64 or hex.

    What encodes other text beside the key is base64 of the key in one of three alignments, of which
    the characters are known that hold nothing but the key.
    """
    plain = "".join(
        f"(?:{'|'.join(map(re.escape, forms))})"
        for char in key
        for forms in [
            (
                f"\\u{ord(char):04x}",
                f"\\x{ord(char):02x}",
                f"\\{char}",
                f"%{ord(char):02x}",
                f"&#{ord(char)};",
                f"&#x{ord(char):x};",
                html.escape(char),
                char,
            )
        ]
    )
    found = [plain, key.encode().hex()]
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + key.encode()).decode()
        known = encoded[-(-offset * 8 // 6) : (offset + len(key)) * 8 // 6]
        found += [re.escape(known), re.escape(known.replace("+", "-").replace("/", "_"))]
    return re.compile("|".join(found), re.IGNORECASE)


def _retry_after(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:  # a date; the usual pause will do
        return None
