"""A tool that searches texts of ours by their words: no network, no model, no process.

The texts are those of a JSONL file, or are given. They are indexed once, when the tool is made, and
each call is answered where it is made, in about as much time as the query's words have texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from ...data.file_task import file_rows
from ...data.row_parts import BadPart
from .bm25 import Bm25
from .tool import Tool, ToolSession, ToolText

NOTHING = "nothing was found"
"""What a search without a result says."""

_LONGEST_QUERY = 1000
"""Characters; who asks for more has not understood what a query is."""
_DESCRIPTION = "Search a collection of texts and read those that fit the query best."


@dataclass(frozen=True, kw_only=True)
class SearchTools:
    """The tool `search(query)`.

    Raises:
        ValueError: If a number is out of range.
    """

    path: str | None = None
    """JSONL with a `text` in each row, and a `title` that is searched and shown before it if there
    is one."""
    texts: tuple[str, ...] = ()
    """Texts to search instead of a file's."""
    name: str = "search"
    """What the model calls."""
    num_results: int = 3
    """Texts that a call shows, the best first."""
    max_chars: int = 500
    """Characters that are shown of each text, its title included."""
    k1: float = 1.2
    """Of BM25: how much a word counts that stands in a text several times."""
    b: float = 0.75
    """Of BM25: how much long texts lose, from 0 to 1."""

    def __post_init__(self) -> None:
        check_range(self, "num_results", "max_chars", at_least=1)
        check_range(self, "k1", at_least=0)
        check_range(self, "b", at_least=0, at_most=1)

    def build(self) -> Tool:
        """Read and index the texts.

        Raises:
            ConfigError: If the name is no identifier, there are no texts or two places of them, or
                the file cannot be read or has a row without a text.
        """
        if not self.name.isidentifier():
            raise ConfigError(f"name '{self.name}' is no name\n    use letters, digits and _")
        if (self.path is None) == (not self.texts):
            raise ConfigError(
                "a search needs either a path or texts\n    give one of them, such as "
                '{kind: search, path: texts.jsonl}, with rows like {"title": ..., "text": ...}'
            )
        texts = self.texts if self.path is None else tuple(_texts_of(self.path))
        if not texts:
            raise ConfigError(f"'{self.path}' has no rows\n    name a file of texts")
        return SearchTool(self, texts)


def _texts_of(path: str) -> Iterator[str]:
    """What stands in each row: its title, a colon, and its text."""
    for where, row in file_rows(path):
        fields = cast("Mapping[str, object]", row if isinstance(row, Mapping) else {})
        title, text = fields.get("title") or "", fields.get("text")
        if isinstance(row, BadPart) or not isinstance(title, str) or not isinstance(text, str):
            why = f": {row}" if isinstance(row, BadPart) else ""
            raise ConfigError(
                f"{where} is no text to search{why}\n"
                '    write an object with texts in each row: {"title": ..., "text": ...}'
            )
        yield f"{title}: {text}" if title else text


class SearchTool:
    """An index of texts; a `Tool`, and the session of every conversation, which is not remembered.

    Args:
        options: Limits.
        texts: What is searched.

    Attributes:
        deterministic: True.
    """

    deterministic = True

    def __init__(self, options: SearchTools, texts: Sequence[str]) -> None:
        self._options, self._texts = options, tuple(texts)
        self._index = Bm25(self._texts, k1=options.k1, b=options.b)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Of the one function."""
        query = {"type": "string", "description": "A few words."}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        function = {
            "name": self._options.name,
            "description": _DESCRIPTION,
            "parameters": parameters,
        }
        return ({"type": "function", "function": function},)

    def search(self, query: str) -> str:
        """The texts that fit best, one below the other, or that there are none."""
        found = self._index.find(query, self._options.num_results)
        shown = [self._shown(self._texts[one.place]) for one in found]
        return "\n".join(shown) or NOTHING

    def open(self, seed: int) -> ToolSession:
        """Begin a conversation."""
        return self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Search, or say what is wrong with the call."""
        if name != self._options.name:
            return ToolText(f"there is no tool {name!r}", error=True)
        query = arguments.get("query")
        if len(arguments) != 1 or not isinstance(query, str):
            return ToolText(f"{name} needs one argument, 'query', which is a text", error=True)
        if not query.strip():
            return ToolText("the query is empty", error=True)
        if len(query) > _LONGEST_QUERY:
            text = f"a query has at most {_LONGEST_QUERY} characters, and this one {len(query)}"
            return ToolText(text, error=True)
        return ToolText(self.search(query))

    async def close(self) -> None:
        """Nothing is open."""

    def _shown(self, text: str) -> str:
        most = self._options.max_chars
        return text if len(text) <= most else f"{text[:most]}..."
