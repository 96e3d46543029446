"""Questions about a made-up world, and a search tool that knows it.

The prompt is a question such as `Who is the mayor of Velden?`. A turn of `[mayor Velden]` searches
the sentences that are true of the world; a turn without a call is the answer, and is worth 1 if it
ends with the right one. No town has two questions, so what is held out is about towns and people
that no training question is about, and can only be found.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, PositiveInt, option_class
from ..environment import ToolCall
from ..tools.search_tool import SearchTool, SearchTools, words_of
from .generated_task import ToolQuestions, ToolQuestionsSpec, check_template

_BEGIN = (
    *("B", "Br", "D", "Dr", "F", "G", "Gl", "H", "K", "Kl", "L", "M", "N", "P", "R", "S", "St"),
    *("T", "V", "Z"),
)
_MIDDLE = ("al", "am", "ar", "el", "em", "en", "ir", "ol", "on", "or", "ul", "un")
_END = (
    *("bach", "berg", "den", "dorf", "feld", "gen", "ham", "hof", "kirch", "ling", "mark", "ow"),
    *("stad", "tal", "wick"),
)
_FIRST = (
    *("Ada", "Ana", "Bea", "Cora", "Dina", "Edda", "Emma", "Greta", "Hana", "Ida", "Jana", "Kira"),
    *("Lea", "Lena", "Mara", "Mia", "Nora", "Olga", "Rosa", "Tea", "Adam", "Ben", "Carl", "David"),
    *("Emil", "Fritz", "Georg", "Hugo", "Ivan", "Jakob", "Karl", "Leo", "Max", "Nils", "Otto"),
    *("Paul", "Ralf", "Sven", "Timo", "Udo"),
)
_LAST = ("ach", "ank", "eck", "eder", "ell", "ert", "ing", "itz", "ohn", "oss", "ott", "uber")
_RIVER = ("a", "ava", "e", "ena", "ina", "ira", "o", "ona", "ura", "usa")

MOST_TOWNS = 2000
"""Number of different names of rivers; there are more names of towns and people."""


@dataclass(frozen=True)
class Town:
    """A town, its river and year, and its mayor, born in some year and town (`home`)."""

    name: str
    river: str
    founded: int
    mayor: str
    born: int
    home: str


def make_towns(num_towns: int, seed: int) -> Sequence[Town]:
    if num_towns > MOST_TOWNS:
        raise ConfigError(
            f"a world of {num_towns} towns has not enough names\n"
            f"    give at most {MOST_TOWNS}: task.num_towns"
        )
    rng = random.Random(f"search/{seed}/world")
    names = _shuffled(["".join(parts) for parts in product(_BEGIN, _MIDDLE, _END)], rng)
    rivers = _shuffled(["".join(parts) for parts in product(_BEGIN, _MIDDLE, _RIVER)], rng)
    last = ["".join(parts) for parts in product(_BEGIN, _LAST)]
    people = _shuffled([f"{a} {b}" for a, b in product(_FIRST, last)], rng)
    homes = _shuffled(names[:MOST_TOWNS], rng)
    years = [(rng.randint(1000, 1899), rng.randint(1930, 1999)) for _ in range(MOST_TOWNS)]
    return [
        Town(names[i], rivers[i], years[i][0], people[i], years[i][1], homes[i])
        for i in range(num_towns)
    ]


def facts_of(town: Town) -> Sequence[str]:
    return (
        f"The mayor of {town.name} is {town.mayor}.",
        f"The river of {town.name} is the {town.river}.",
        f"{town.name} was founded in {town.founded}.",
        f"{town.mayor} was born in the year {town.born}.",
        f"{town.mayor} was born in the town {town.home}.",
    )


def _shuffled(names: list[str], rng: random.Random) -> list[str]:
    return rng.sample(names, len(names))


_TOOL = "search"
_CALL = re.compile(r"\[([^\[\]]*)\]")

_ONE_HOP = (
    ("Who is the mayor of {name}?", "mayor {name}", "{mayor}"),
    ("What is the river of {name}?", "river {name}", "{river}"),
    ("In which year was {name} founded?", "founded {name}", "{founded}"),
)
"""A question, what the expert searches for, and the answer."""
_TWO_HOPS = (
    ("In which year was the mayor of {name} born?", "born year {mayor}", "{born}"),
    ("In which town was the mayor of {name} born?", "born town {mayor}", "{home}"),
)
"""The same, of the second search; the first is for the mayor."""


@option_class
class SearchTaskSpec(ToolQuestionsSpec):
    """Size of the world, and how its questions are answered."""

    num_towns: PositiveInt = 2000
    """Towns of the world, five sentences each; the questions are about some of them."""
    two_hops: Fraction = 0.0
    """Share of the questions that take two searches, as the first finds whom to search for next."""
    num_results: PositiveInt = 1
    """Sentences that a search shows, the best first."""
    max_chars: PositiveInt = 200
    """Characters that are shown of each."""

    def build(self) -> SearchTask:
        check_template(self)
        asked = self.num_train + self.num_held_out
        if asked > self.num_towns:
            raise ConfigError(
                f"task 'search' has one question for each of {self.num_towns} towns, and {asked} "
                "are asked for\n    lower task.num_train or task.num_held_out, or raise "
                "task.num_towns"
            )
        return SearchTask(self)


@dataclass(frozen=True)
class SearchQuestion:
    """A question, the expert's queries in order, and the right answer."""

    question: str
    queries: tuple[str, ...]
    answer: str


class SearchTask(ToolQuestions[SearchQuestion]):
    """Questions about towns, to search for."""

    def __init__(self, spec: SearchTaskSpec) -> None:
        self.spec = spec
        self.towns: Sequence[Town] = make_towns(spec.num_towns, spec.seed)
        facts = [fact for town in self.towns for fact in facts_of(town)]
        limits = SearchTools(
            texts=tuple(facts), name=_TOOL, num_results=spec.num_results, max_chars=spec.max_chars
        )
        self._search = SearchTool(limits, facts)
        super().__init__("search", spec, self._search)

    def make(self, number: int, rng: random.Random) -> SearchQuestion:
        town = vars(self.towns[number])
        two = rng.random() < self.spec.two_hops
        question, query, answer = rng.choice(_TWO_HOPS if two else _ONE_HOP)
        queries = (_ONE_HOP[0][1], query) if two else (query,)
        return SearchQuestion(
            question.format(**town),
            tuple(query.format(**town) for query in queries),
            answer.format(**town),
        )

    def question(self, problem: SearchQuestion) -> str:
        return problem.question

    def read(self, text: str) -> ToolCall | None:
        """A query in brackets, if that is all that is said."""
        found = _CALL.fullmatch(text.strip())
        return None if found is None else ToolCall(_TOOL, {"query": found[1]})

    def calls(self, problem: SearchQuestion) -> Sequence[str]:
        return [f"[{query}]" for query in problem.queries]

    def result(self, problem: SearchQuestion, call: ToolCall) -> str:
        return self._search.search(call.arguments["query"])

    def answer(self, problem: SearchQuestion) -> str:
        return problem.answer

    def is_right(self, problem: SearchQuestion, said: str) -> bool:
        right = words_of(problem.answer)
        return words_of(said)[-len(right) :] == right
