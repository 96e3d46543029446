"""Try a folder's tokenizer and chat template in a process with limits, before they are used.

Both are programs that came with a model: a normalizer may make millions of characters of one, and a
template may loop for hours. `check_tokenizer` lets a child process try them on little input, with
bounds on time, memory and what comes out, so that a run that could not be carried out is refused
before its own process has run anything of the folder.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.files import check_folder_files, read_bytes, read_json
from ..verifiers.pool import VerifierPool, VerifierSpec

_LIMIT_S = 10.0
_MEMORY_BYTES = 2 << 30
_MOST_TOKENS = 64
"""Most tokens of a character: a byte makes one at most, and a character has up to four."""
_MOST_CHARS = 1 << 20
"""Longest text of a conversation of a few words, with tools, dates and instructions."""
_FINE, _TOKENS, _CHARS, _MEMORY, _IDS = range(5)
_FAULTS = {
    _TOKENS: f"its tokenizer makes more than {_MOST_TOKENS} tokens of a character",
    _CHARS: f"its chat template makes more than {_MOST_CHARS:,} characters of a few words",
    _MEMORY: f"its tokenizer and chat template take over {_MEMORY_BYTES:,} bytes for a few words",
    _IDS: "its tokenizer.json gives two words one id",
}
_PROBE = "".join(map(chr, range(32, 127))) + "\n\t\u00e9\u4e2d\U0001f600"
_GENERATED = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks that transformers reads and that write no text."""


def check_tokenizer(folder: Path, given: Any = None) -> None:
    """Refuse a folder whose tokenizer or chat template takes time or memory without a bound.

    Two words with one id are refused as well: of those, only this process sees both.
    """
    check_folder_files(folder)
    files = [folder / name for name in ("tokenizer.json", *_TEMPLATES)]
    stamps = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file())
    _check(str(folder), given if isinstance(given, str) else None, stamps)


_TEMPLATES = ("tokenizer_config.json", "chat_template.jinja")


@functools.lru_cache(maxsize=64)
def _check(folder: str, given: str | None, stamps: tuple[Any, ...]) -> None:
    del stamps  # of the files, whose content may change while their names do not
    templates = _templates(Path(folder)) if given is None else [given]
    spec = VerifierSpec(factory=f"{__name__}:make_trial", arguments={})
    pool = VerifierPool(spec, num_processes=1, time_limit_s=_LIMIT_S)
    try:
        (outcome,) = pool.run([[folder, templates]])
    finally:
        pool.close()
    if outcome.timed_out:
        what = f"its tokenizer or chat template needs over {_LIMIT_S:g} s for a few words"
    elif outcome.error is not None:
        what = f"its tokenizer or chat template ends its process: {outcome.error.strip()[-200:]}"
    elif outcome.score == _FINE:
        return
    else:
        what = _FAULTS[int(outcome.score or 0)]
    raise ConfigError(
        f"model folder '{folder}' cannot be used: {what}\n    take the tokenizer and the template "
        "that the model's publisher gives"
    )


def _templates(folder: Path) -> list[str]:
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return [read_bytes(own).decode(errors="replace")]
        except OSError as error:
            raise ConfigError(f"'{own}' cannot be read: {error.strerror}") from error
    try:
        config: Any = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError, RecursionError):  # loading the tokenizer reports it
        return []
    found: Any = config.get("chat_template") if isinstance(config, dict) else None  # pyright: ignore[reportUnknownMemberType]
    if isinstance(found, list):
        named: list[Any] = found
        return [str(one.get("template")) for one in named if isinstance(one, dict)]  # pyright: ignore[reportUnknownMemberType]
    return [found] if isinstance(found, str) else []


# --- in the child


def make_trial() -> Callable[[str, Sequence[str]], float]:
    """Return the trial of a folder, which runs in a process with bounded memory."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def trial(folder: str, templates: Sequence[str]) -> float:
        try:
            return float(_tokens_fault(folder) or _template_fault(templates))
        except MemoryError:
            return float(_MEMORY)

    return trial


def _tokens_fault(folder: str) -> int:
    from tokenizers import Tokenizer

    file = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        if len({*vocabulary.values()}) < len(vocabulary):
            return _IDS
        for character in _PROBE:  # one after another, so that the first that is too much tells
            if len(tokenizer.encode(character, add_special_tokens=False).ids) > _MOST_TOKENS:
                return _TOKENS
        most = len(_PROBE) * _MOST_TOKENS
        return _TOKENS if len(tokenizer.encode(_PROBE).ids) > most else _FINE
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - loading the tokenizer reports it
        return _FINE


def _template_fault(templates: Sequence[str]) -> int:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)  # pyright: ignore
    for template in templates:
        for number, messages in enumerate(_CONVERSATIONS):
            variables: dict[str, Any] = {
                "messages": messages,
                "tools": [_TOOL] if number else None,
                "add_generation_prompt": True,
                "strftime_now": lambda form: "26 Jul 2024",  # pyright: ignore
                "bos_token": "<s>",
                "eos_token": "</s>",
            }
            length = 0
            try:
                made = environment.from_string(_GENERATED.sub("", template))
                for piece in made.generate(**variables):
                    length += len(piece)
                    if length > _MOST_CHARS:
                        return _CHARS
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001 - it may refuse these; what renders the prompts says so
                continue
    return _FINE


_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}
_ASKS, _SAYS = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_SYSTEM = {"role": "system", "content": "s"}
# Of few words, in one message and in many: growth with each must show.
_CONVERSATIONS = ([_ASKS], [_SYSTEM, _ASKS], [*[_ASKS, _SAYS] * 20, _ASKS])
