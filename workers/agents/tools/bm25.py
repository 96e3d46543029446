"""Which of some texts fit a query best: Okapi BM25, without any model.

Words are runs of letters, digits and underscores, whatever their case. What is found is a function
of the texts and the query alone: texts of one score stand in the order in which they were given.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ....dataflow.option_checks import check_range

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Found:
    """One text that fits.

    Attributes:
        place: Its index among the texts.
        score: How well it fits, above 0.
    """

    place: int
    score: float


def words_of(text: str) -> list[str]:
    """The words of a text, in order."""
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

    Args:
        texts: What is searched.
        k1: How much a word counts that stands in a text several times; 0: no more than one.
        b: How much long texts lose, from 0, nothing, to 1.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.k1, self.b = k1, b
        check_range(self, "k1", at_least=0)
        check_range(self, "b", at_least=0, at_most=1)
        self._weights: dict[str, list[tuple[int, float]]] = {}
        lengths = [len(words_of(text)) for text in texts]
        mean = sum(lengths) / len(lengths) if sum(lengths) else 1.0
        for place, text in enumerate(texts):
            norm = k1 * (1 - b + b * lengths[place] / mean)
            for word, count in Counter(words_of(text)).items():
                self._weights.setdefault(word, []).append((place, count / (count + norm)))
        self._num_texts = len(texts)

    def find(self, query: str, most: int) -> list[Found]:
        """The texts that fit best, the best first; those that have no word of the query never.

        Args:
            query: Any text.
            most: How many at most.
        """
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words_of(query)):
            having = self._weights.get(word, ())
            rest = self._num_texts - len(having)
            idf = math.log(1 + (rest + 0.5) / (len(having) + 0.5))
            for place, weight in having:
                scores[place] = scores.get(place, 0.0) + idf * weight
        best = heapq.nsmallest(most, scores.items(), key=lambda one: (-one[1], one[0]))
        return [Found(place, score) for place, score in best]
