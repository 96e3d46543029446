"""Programs that tests give a policy to: plain users of the openai package, and bad ones."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

LONGEST_S = 1.0


def turns(base_url: str, api_key: str, prompt: str) -> str:
    """Three turns, the last one streamed."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    said: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(2):
        answer = client.chat.completions.create(model="x", messages=said, logprobs=True)
        choice = answer.choices[0]
        assert answer.usage is not None
        assert choice.logprobs is not None
        assert answer.usage.completion_tokens == len(choice.logprobs.content or ())
        said += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "abc"}]
    parts = client.chat.completions.create(model="x", messages=said, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    client.close()
    return text


async def branches(base_url: str, api_key: str, prompt: str, seed: int) -> str:
    """A turn, two that go on from it at once, one more, and a sub-agent with a text of its own."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(*said: str) -> str:
            await asyncio.sleep((seed + len(said)) % 5 * 0.01)
            roles = ("user", "assistant") * len(said)
            messages: Any = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
            answer = await client.chat.completions.create(model="x", messages=messages)
            return answer.choices[0].message.content or ""

        first = await ask(prompt)
        left, _, alone = await asyncio.gather(
            ask(prompt, first, "a"), ask(prompt, first, "b"), ask("abcd")
        )
        return await ask(prompt, first, "a", left, alone[:2])


def lasts(base_url: str, api_key: str, prompt: str) -> str:
    """A turn, and a while: eight of them take longer than one may."""
    RUNNING.append(prompt)
    MOST[0] = max(MOST[0], len(RUNNING))
    calls(base_url, api_key, prompt)
    time.sleep(0.3)
    RUNNING.remove(prompt)
    return "done"


def calls(base_url: str, api_key: str, prompt: str, **fields: Any) -> tuple[int, Any]:
    """A bare request: the status and what came."""
    body = {"messages": [{"role": "user", "content": prompt}], **fields}
    return post(f"{base_url}/chat/completions", api_key, json.dumps(body).encode())


def post(url: str, key: str, body: bytes | None) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def misbehave(base_url: str, api_key: str, prompt: str) -> Any:
    """What the first letter of a problem says, in conversations with every second one."""
    how = HOW[0]
    if len(prompt) % 2:
        return turns(base_url, api_key, prompt)
    match how:
        case "raises":
            raise RuntimeError("boom")
        case "exits":
            raise SystemExit(3)
        case "answers nothing":
            return None
        case "hangs":
            time.sleep(LONGEST_S + 1)
        case "hangs after a turn":
            calls(base_url, api_key, prompt)
            time.sleep(LONGEST_S + 1)
        case "asks for ever":
            while calls(base_url, api_key, prompt)[0] == 200:
                pass
            raise ValueError("no more turns")
        case "asks too long":
            status, said = calls(base_url, api_key, "abc" * 100)
            assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
            raise ValueError("too long")
        case "has a wrong key":
            assert calls(base_url, "sk-guessed", prompt)[0] == 401
        case "has the key of another":
            number = int(base_url.split("/")[-2])
            other = base_url.replace(f"/c/{number}/", f"/c/{number + 1}/")
            assert calls(other, api_key, prompt)[0] == 401
        case "sends too much":
            with suppress(OSError):  # the server need not read to the end
                assert calls(base_url, api_key, "a" * (10 << 20))[0] == 413
        case "sends nonsense":
            assert post(f"{base_url}/chat/completions", api_key, b"{")[0] == 400
        case "asks for what is not served":
            status, said = post(f"{base_url}/embeddings", api_key, b"{}")
            assert (status, said["error"]["code"]) == (404, "not_found")
        case "asks for tools":
            tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
            status, said = calls(base_url, api_key, prompt, tools=[tool])
            assert status == 400
            # Written into the messages, as the template shows none: too long for this policy.
            assert said["error"]["code"] == "context_length_exceeded"
        case "answers after its end":
            return "late"
        case _:
            raise AssertionError(how)
    return "done"


HOW = [""]
RUNNING: list[str] = []
MOST = [0]
