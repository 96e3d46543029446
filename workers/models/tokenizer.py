"""Text to token ids and back, offline: characters, bytes, or a model folder's own tokenizer.

Token columns are padded with -1, so no tokenizer's padding token ever stands in a table; `pad_id`
is what an engine may feed a model at padded positions. It always differs from `eos_id`.

Chat templates without tools get schemas, calls and results as text, in the words of the templates
of Hermes and Qwen: a model that has seen such data, or is to be served so, reads what it knows.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...algorithms.roles.language_tables import Sampling
from ...dataflow.errors import ConfigError
from ...dataflow.files import check_folder_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "penstock9tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""A tool whose name every template writes that shows tools."""

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    system: bool,
) -> list[Mapping[str, Any]]:
    """Return the conversation with everything about tools in the contents of its messages."""
    written: list[Mapping[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        plain = _plain(message)
        if is_result and follows_result:  # results of one turn are one message
            plain = {**plain, "content": f"{written.pop()['content']}\n{plain['content']}"}
        written.append(plain)
        follows_result = is_result
    if not tools:
        return written
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(schemas=schemas)
    first, role = written[0] if written else {}, "system" if system else "user"
    if first.get("role") not in ("system", role):
        return [{"role": role, "content": text}, *written]
    before, after = (first["content"], text) if system else (text, first["content"])
    return [{**first, "content": f"{before}\n\n{after}"}, *written[1:]]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message about tools with a role and a content alone; others as they are."""
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message["tool_calls"]]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([content, *calls] if content else calls)}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI has them
        return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments or "{}"}}}'
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True)
class ResponseEnd:
    """The ends of a response.

    Attributes:
        ids: Tokens; the first is the tokenizer's end of sequence.
        strings: A response ends with the token that completes one of them in its text.
    """

    ids: tuple[int, ...]
    strings: tuple[str, ...] = ()

    def also(self, ids: Iterable[int], strings: Iterable[str] = ()) -> ResponseEnd:
        return ResponseEnd(
            tuple(dict.fromkeys((*self.ids, *ids))),
            tuple(dict.fromkeys((*self.strings, *strings))),
        )

    def sampled_by(self, sampling: Sampling) -> ResponseEnd:
        """Return the ends of responses under a sampling, whose strings replace these."""
        return ResponseEnd(self.ids).also(sampling.stop_token_ids, sampling.stop)

    def as_generation_config(self) -> dict[str, Any]:
        """Return the ends as fields of generation_config.json."""
        ids = [*self.ids]
        found: dict[str, Any] = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
        return {**found, "stop_strings": [*self.strings]} if self.strings else found

    def said(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of one response without what ended it, if it has ended."""
        end = next((place for place, token in enumerate(ids) if token in self.ids), None)
        if end is not None:
            return decode(ids[:end])
        text = decode(ids)
        if not self.strings:
            return text
        # Only the last token can have ended it: `min_new_tokens` may have let a string pass before.
        # Before the last token the text may have ended with part of a character's bytes.
        before = len(decode(ids[:-1]).rstrip("\ufffd"))
        places = [text.find(one, max(before + 1 - len(one), 0)) for one in self.strings]
        return text[: min((place for place in places if place >= 0), default=len(text))]


PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
"""The default alphabet: printable ASCII and the line feed."""

END_MARK = "\ufdd0"
"""Mark of the end of sequence in a chat template of one of our own tokenizers, which no
spelled name of a token stands for. It is no character of Unicode, so no text holds it; where a
message does, it is taken out."""

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begin of a part of a chat template that the assistant generates."""

_WORD = "penstock9system"
"""A word that no template writes by itself."""

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
"""Special tokens of our own tokenizers; their ids are 0 to 3, in this order."""


_AT_ONCE = 256  # texts that are encoded in one call
_MOST_IDS = 1 << 24
"""Most ids of a vocabulary; no model has as many."""

_DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a day, and no moment
"""Time that the clock of chat templates always shows: the day that Llama 3's takes without one.
So a run that goes on tomorrow, or is made again, has the same prompts."""


class ChatTemplateError(ValueError):
    """A chat template's objection to a conversation."""


class Tokenizer:
    """Encodes and decodes, and knows the ids an engine needs.

    Args:
        backend: A Hugging Face tokenizer with an end-of-sequence token.
        alphabet: The characters it can express, or None if it can express any text.

    Attributes:
        eos_id: The end of sequence, with which texts that are imitated end.
        end: What ends a response: that, and whatever else was said to.
        pad_id: Any id but `eos_id`; fed to models at padded positions, never found in a table.
        bos_id: Begins a sequence, for models that want one; None if the tokenizer has none.
        vocab_size: One more than the largest id, of special tokens as well.

    Raises:
        ConfigError: If the tokenizer has no end-of-sequence token, or an id beyond all bounds.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, alphabet: str | None = None) -> None:
        if not isinstance(backend.eos_token_id, int):
            raise ConfigError(
                f"the tokenizer '{backend.name_or_path}' has no end-of-sequence token, so no "
                "response could ever end\n    add one to its tokenizer_config.json"
            )
        self.backend = backend
        self.alphabet = None if alphabet is None else frozenset(alphabet)
        self.eos_id: int = backend.eos_token_id
        self.end = ResponseEnd((self.eos_id,))
        self.bos_id = backend.bos_token_id if isinstance(backend.bos_token_id, int) else None
        pad = backend.pad_token_id
        if not isinstance(pad, int) or pad == self.eos_id:
            pad = int(self.eos_id == 0)
        self.pad_id = pad
        self.vocab_size = max(len(backend), 1 + max(backend.get_vocab().values(), default=0))
        split = bool(getattr(backend, "split_special_tokens", False))
        self._marks_ends = split and self.has_template
        self._written: dict[tuple[str, str], bool] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens added; what cannot be expressed becomes unknown.

        With one of our own tokenizers that has a chat template, `END_MARK` is the end of sequence.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call."""
        if not texts:
            return []
        if self._marks_ends and any(END_MARK in text for text in texts):
            marked = [map(self.encode, text.split(END_MARK)) for text in texts]
            return [
                [*next(parts), *(token for part in parts for token in (self.eos_id, *part))]
                for parts in marked
            ]
        try:
            # In pieces: beside ids the library makes ten times as much, which is dropped.
            pieces = (list(texts[at : at + _AT_ONCE]) for at in range(0, len(texts), _AT_ONCE))
            found = (self.backend(piece, add_special_tokens=False) for piece in pieces)
            return [ids for one in found for ids in one["input_ids"]]  # pyright: ignore[reportReturnType]
        except Exception as error:  # the tokenizers library raises Exception itself
            raise ConfigError(
                f"the tokenizer '{self.backend.name_or_path}' cannot encode {texts[0][:40]!r}: "
                f"{error}\n    give a folder that a tokenizer was saved to"
            ) from error

    def begun(self, ids: list[int]) -> list[int]:
        """Return ids of a prompt that is a plain text, begun as the tokenizer begins a text.

        Chat templates write their own beginning. A text that begins so already gets no second.
        """
        begin = self._begin
        return ids if not ids or ids[: len(begin)] == begin else [*begin, *ids]

    @functools.cached_property
    def _begin(self) -> list[int]:
        """Return ids that the tokenizer puts before a text: its beginning of sequence, or nothing.

        Only its own call tells: a tokenizer may name a beginning of sequence and not use it.
        """
        own: Any = self.backend("a")["input_ids"]
        text = self.encode("a")
        starts = [place for place in range(len(own)) if own[place : place + len(text)] == text]
        return list(own[: starts[0]]) if starts else []

    def encode_response(self, text: str) -> list[int]:
        return [*self.encode(text), self.eos_id]

    def end_of_turn(self, turn: Sequence[int], start: int) -> int:
        """Place behind the assistant's turn that begins at `start`, as a template writes it.

        What the template writes after what ends a response is not imitated.
        """
        ends = [place for place in range(start, len(turn)) if turn[place] in self.end.ids]
        if ends:
            return ends[-1] + 1
        # Else the last special token ends it, if nothing but white space comes behind.
        special = self.backend.added_tokens_decoder
        for place in reversed(range(start, len(turn))):
            if turn[place] in special and special[turn[place]].special:
                return place + 1
            if self.decode([turn[place]]).strip():
                break
        return len(turn)

    @property
    def name(self) -> str:
        """The folder it comes from, for messages; empty for one of our own."""
        return self.backend.name_or_path

    @property
    def has_template(self) -> bool:
        return bool(self.backend.chat_template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation by the tokenizer's chat template; `encode` it for its tokens."""
        from jinja2 import TemplateSyntaxError

        messages, tools = self._with_tools(messages, tools, variables)
        variables = self._frozen(variables)
        if self._marks_ends:
            messages = [_unmarked(message) for message in messages]
            variables = {"eos_token": END_MARK, **variables}
        try:
            text: Any = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,  # pyright: ignore[reportArgumentType]
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of the tokenizer '{self.name}' cannot be read, line "
                f"{error.lineno}: {error.message}\n    fix it, or take the one that came with the "
                "model"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return str(text)

    def _frozen(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the template, with a clock that stands still."""
        source = str(variables.get("chat_template") or self.backend.chat_template)
        if _draws(source):
            raise ConfigError(
                f"the chat template of the tokenizer '{self.name}' draws random numbers, so no "
                "prompt would be the same twice\n    take `random` and `lipsum` out of it"
            )
        return {"strftime_now": _DATE.strftime, **variables}

    def shows_tools(self, variables: Mapping[str, Any]) -> bool:
        """Whether the chat template writes the schemas of tools, found out by giving it one."""
        asked = [{"role": "user", "content": "a"}]
        return self._writes(PROBE_TOOL["function"]["name"], asked, [PROBE_TOOL], variables)

    def _with_tools(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return messages and schemas as the template takes them: no schemas if it has no tools."""
        used = tools or any(message.get("tool_calls") for message in messages)
        if not used or self.shows_tools(variables):
            return messages, tools
        asked = [{"role": "system", "content": _WORD}, {"role": "user", "content": "a"}]
        system = self._writes(_WORD, asked, None, variables)
        return with_tools_as_text(messages, tools, system=system), None

    def _writes(
        self,
        word: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> bool:
        """Return whether the template writes a word for these; each template is asked once."""
        key = (str(variables.get("chat_template") or self.backend.chat_template), word)
        if key not in self._written:
            self._written[key] = tools is not None  # if it fails, so does the real call
            with suppress(ChatTemplateError):
                self._written[key] = word in self.render(messages, tools=tools, **variables)
        return self._written[key]

    def generation_marks(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[bool] | None:
        """For each token of the conversation, whether the template marks it as generated.

        None if the template has no such marks, or the tokenizer is one of our own. It was rendered
        before, so it does not fail.
        """
        template = variables.get("chat_template") or self.backend.chat_template
        if self._marks_ends or not isinstance(template, str) or not _MARKED.search(template):
            return None  # tokens of our own tokenizers are not those that its backend would make
        messages, tools = self._with_tools(messages, tools, variables)
        variables = self._frozen(variables)
        both: Any = self.backend.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,  # pyright: ignore[reportArgumentType]
            return_dict=True,
            return_assistant_tokens_mask=True,
            **variables,
        )
        return [bool(mark) for mark in both["assistant_masks"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens appear as their names, ids out of range as unknown."""
        own = self.backend.unk_token_id
        unknown = own if isinstance(own, int) else self.pad_id
        known = [i if 0 <= i < self.vocab_size else unknown for i in ids]
        text = self.backend.decode(
            known, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def decode_responses(self, tokens: Tensor, mask: Tensor) -> list[str]:
        """Decode each row's response: its masked tokens without its end."""
        rows = zip(tokens.tolist(), mask.tolist(), strict=True)
        return [self.said([t for t, keep in zip(*both, strict=True) if keep]) for both in rows]

    def said(self, ids: Sequence[int]) -> str:
        """Return the text of one response as scored, judged, read and shown: without its end."""
        return self.end.said(ids, self.decode)

    def ends_with(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these tokens ends a response."""
        return bool(ids) and ids[-1] in self.end.ids

    def decode_rows(self, tokens: Tensor) -> list[str]:
        """Text of each row of i64[rows, T], its padding of -1 left out."""
        return [self.decode([token for token in row if token >= 0]) for row in tokens.tolist()]

    def inexpressible(self, text: str) -> str:
        """The characters of `text` that the tokenizer cannot express, each once, in order."""
        if self.alphabet is None:
            return ""
        return "".join(dict.fromkeys(c for c in text if c not in self.alphabet))

    def save(self, folder: Path) -> None:
        """Write the tokenizer to `folder` as JSON; `TokenizerSpec(kind="folder")` reads it back."""
        self.backend.save_pretrained(str(folder))


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """The tokenizer of a run."""

    kind: Literal["char", "byte", "folder"] = "char"
    """`char`: a token per character of `alphabet`. `byte`: a token per UTF-8 byte, for any text.
    `folder`: the tokenizer saved in a model's folder."""
    alphabet: str = PRINTABLE
    """For `char`: the characters. Fewer make a smaller and faster model; ids follow sorted
    order."""
    folder: str | None = None
    """For `folder`: where tokenizer.json lies. Nothing is downloaded."""
    chat_template: str | None = None
    """For `char` and `byte`: how conversations are rendered, in Jinja; `{{ eos_token }}` ends a
    turn. A folder's tokenizer has its own."""

    def build(self) -> Tokenizer:
        if self.kind == "char":
            return _char_tokenizer(self.alphabet, self.chat_template)
        if self.kind == "byte":
            return _byte_tokenizer(self.chat_template)
        if self.kind == "folder":
            return _folder_tokenizer(self.folder)
        raise ConfigError(f"tokenizer.kind is '{self.kind}'\n    use 'char', 'byte' or 'folder'")

    def ending(self, end: ResponseEnd) -> EndedTokenizerSpec:
        """Return this tokenizer with further ends of responses."""
        own = {field.name: getattr(self, field.name) for field in fields(TokenizerSpec)}
        return EndedTokenizerSpec(**own, end=end)

    def sampled_by(self, sampling: Sampling) -> EndedTokenizerSpec:
        """Return this tokenizer with the ends that a sampling adds."""
        return self.ending(ResponseEnd(()).sampled_by(sampling))


@dataclass(frozen=True, kw_only=True)
class EndedTokenizerSpec(TokenizerSpec):
    """A tokenizer with further ends of responses, besides those of its folder."""

    end: ResponseEnd = ResponseEnd(())  # Further ids; and the strings, which replace the folder's

    def build(self) -> Tokenizer:
        tokenizer = super().build()
        tokenizer.end = ResponseEnd(tokenizer.end.also(self.end.ids).ids, self.end.strings)
        return tokenizer

    def sampled_by(self, sampling: Sampling) -> EndedTokenizerSpec:
        return self.ending(self.end.sampled_by(sampling))


def _check_ids(file: Path) -> None:
    """Refuse ids for which the tokenizers library would take gigabytes, or end the process."""
    try:
        vocabulary: Any = json.loads(file.read_bytes())["model"]["vocab"]
        word, last = max(vocabulary.items(), key=lambda item: item[1], default=("", 0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # no table of words; what else is wrong is said by the library
    if last >= _MOST_IDS:
        raise ConfigError(
            f"the tokenizer '{file.parent}' gives '{word:.40}' the id {last}; expected one "
            f"below {_MOST_IDS}\n    give the tokenizer that the model came with"
        )


def _char_tokenizer(alphabet: str, chat_template: str | None) -> Tokenizer:
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    if not alphabet:
        raise ConfigError(
            "tokenizer.alphabet is empty: a character tokenizer needs at least one character\n"
            "    list the characters of the prompts and the answers, or leave the key out"
        )
    characters = [*_SPECIAL.values(), *sorted(set(alphabet))]
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(_wrapped(backend, chat_template), alphabet)


def _byte_tokenizer(chat_template: str | None) -> Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    letters = [*_SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return Tokenizer(_wrapped(backend, chat_template))


def _wrapped(backend: object, chat_template: str | None) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    # split_special_tokens: a prompt that spells "<eos>" is five characters, never the token.
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **_SPECIAL,
    )
    wrapped.chat_template = chat_template
    return wrapped


@functools.lru_cache(maxsize=64)
def _draws(template: str) -> bool:
    """Return whether a chat template uses the filter `random`, or `lipsum`."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        found = [v for _, kind, v in Environment().lex(template) if kind != "whitespace"]  # noqa: S701
    except TemplateSyntaxError:  # the renderer says where
        return False
    pairs = {(a, b.strip("'\"")) for a, b in zip(found, found[1:], strict=False)}
    return "lipsum" in found or not pairs.isdisjoint({("|", "random"), ("(", "random")})


def _unmarked(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or END_MARK not in content:
        return message
    return {**message, "content": content.replace(END_MARK, "")}


def _folder_tokenizer(folder: str | None) -> Tokenizer:
    # Not AutoTokenizer: importing it imports every kind of model first, and tokenizer.json already
    # holds the whole pipeline.
    from transformers import PreTrainedTokenizerFast

    if folder is None:
        raise ConfigError(
            "tokenizer.kind is 'folder' but tokenizer.folder is not given\n"
            "    give the folder of a local model, the one that holds tokenizer.json"
        )
    path = Path(folder)
    check_folder_files(path)
    if not (path / "tokenizer.json").is_file():
        what = "holds no tokenizer.json" if path.is_dir() else "is not a folder"
        raise ConfigError(
            f"tokenizer.folder '{folder}' {what}\n"
            "    give the folder of a local model; nothing is downloaded"
        )
    _check_ids(path / "tokenizer.json")
    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ConfigError(
            f"tokenizer.folder '{folder}' cannot be read: {error}\n"
            "    give a folder that a tokenizer was saved to"
        ) from error
    tokenizer = Tokenizer(loaded)
    tokenizer.end = folder_end(path, tokenizer.end)
    return tokenizer


def folder_end(folder: Path, own: ResponseEnd = ResponseEnd(())) -> ResponseEnd:  # noqa: B008
    """Return the ends of responses in the generation_config.json of a folder, besides `own`."""
    from .model_folder import generation_config

    found = generation_config(folder)
    ids, strings = found.get("eos_token_id"), found.get("stop_strings")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise ConfigError(
            f"'{folder / 'generation_config.json'}': eos_token_id is {ids!r}; expected the id of a "
            "token that ends a response, or a list of them\n    correct it, or remove the file"
        )
    given = [strings] if isinstance(strings, str) else strings or []
    return own.also(listed, [one for one in given if isinstance(one, str) and one])


def pad_rows(rows: Iterable[Sequence[int]]) -> Tensor:
    """Rows of ids as one column."""
    listed = [list(row) for row in rows]
    width = max(map(len, listed), default=0)
    padded = [row + [-1] * (width - len(row)) for row in listed]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(listed), width)
