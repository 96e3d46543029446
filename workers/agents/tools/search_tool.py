"""A tool that searches texts of ours by their words: no network, no model, no process.

The texts are those of a JSONL file, or are given. They are indexed once, when the tool is made, and
each call is answered where it is made, in about as much time as the query's words have texts.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, NonNegativeFloat, PositiveInt, option_class
from ...data.row_sources import file_rows
from ...data.task import BadRow
from .tool import TextFunction, Tool, ToolSession, ToolText

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class Bm25:
    """An index of texts.

    The score of a text d for a query q is that of Robertson and Zaragoza, The Probabilistic
    Relevance Framework: BM25 and Beyond (2009), equation 3.15, summed over the different words t of
    the query:

        sum_t idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / mean |d|))

    where tf(t, d) is how often t stands in d and |d| the number of words of d. As in Lucene,
    idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5)), with n(t) of N texts having t, which is above
    0 also for a word that most texts have.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.k1, self.b = k1, b
        self._weights: dict[str, list[tuple[int, float]]] = {}
        lengths = [len(words_of(text)) for text in texts]
        mean = sum(lengths) / len(lengths) if sum(lengths) else 1.0
        for place, text in enumerate(texts):
            norm = k1 * (1 - b + b * lengths[place] / mean)
            for word, count in Counter(words_of(text)).items():
                self._weights.setdefault(word, []).append((place, count / (count + norm)))
        self._num_texts = len(texts)

    def find(self, query: str, most: int) -> list[tuple[int, float]]:
        """Return indices and scores of the texts that fit best, the best first; all above 0."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words_of(query)):
            having = self._weights.get(word, ())
            rest = self._num_texts - len(having)
            idf = math.log(1 + (rest + 0.5) / (len(having) + 0.5))
            for place, weight in having:
                scores[place] = scores.get(place, 0.0) + idf * weight
        return heapq.nsmallest(most, scores.items(), key=lambda one: (-one[1], one[0]))


NOTHING = "nothing was found"  # the result of a search that finds nothing

_LONGEST_QUERY = 1000  # characters; who asks for more has not understood what a query is
_DESCRIPTION = "Search a collection of texts and read those that fit the query best."


@option_class
class SearchTools:
    """The tool `search(query)`."""

    path: str | None = None
    """JSONL with a `text` in each row, and a `title` that is searched and shown before it if there
    is one."""
    texts: tuple[str, ...] = ()
    """Texts to search instead of a file's."""
    name: str = "search"
    """Name of the tool, as the model calls it."""
    num_results: PositiveInt = 3
    """Texts that a call shows, the best first."""
    max_chars: PositiveInt = 500
    """Characters that are shown of each text, its title included."""
    k1: NonNegativeFloat = 1.2
    """BM25's weight of a word that stands in a text several times."""
    b: Fraction = 0.75
    """BM25's penalty of long texts, from 0 to 1."""

    def build(self) -> Tool:
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
    for where, row in file_rows(path):
        fields = cast("Mapping[str, object]", row if isinstance(row, Mapping) else {})
        title, text = fields.get("title") or "", fields.get("text")
        if isinstance(row, BadRow) or not isinstance(title, str) or not isinstance(text, str):
            why = f": {row}" if isinstance(row, BadRow) else ""
            raise ConfigError(
                f"{where} is no text to search{why}\n"
                '    write an object with texts in each row: {"title": ..., "text": ...}'
            )
        yield f"{title}: {text}" if title else text


class SearchTool(Tool, ToolSession):
    """An index of texts, and the session of every conversation, which is not remembered."""

    def __init__(self, options: SearchTools, texts: Sequence[str]) -> None:
        self._function = TextFunction(options.name, _DESCRIPTION, "query", "A few words.")
        self._options, self._texts = options, tuple(texts)
        self._index = Bm25(self._texts, k1=options.k1, b=options.b)
        self.schemas = self._function.schemas

    def search(self, query: str) -> str:
        found = self._index.find(query, self._options.num_results)
        most, texts = self._options.max_chars, [self._texts[place] for place, _ in found]
        shown = [text if len(text) <= most else f"{text[:most]}..." for text in texts]
        return "\n".join(shown) or NOTHING

    @override
    def open(self, seed: int) -> ToolSession:
        return self

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        query = self._function.text(name, arguments)
        if isinstance(query, ToolText):
            return query
        if not query.strip():
            return ToolText("the query is empty", error=True)
        if len(query) > _LONGEST_QUERY:
            text = f"a query has at most {_LONGEST_QUERY} characters, and this one {len(query)}"
            return ToolText(text, error=True)
        return ToolText(self.search(query))
