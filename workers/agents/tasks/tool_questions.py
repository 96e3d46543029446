"""Questions of a generator that are answered with a tool at hand: a search, or Python.

Of a search, the prompt is a question about a made-up world such as `Who is the mayor of Velden?`. A
turn of `[mayor Velden]` searches the sentences that are true of the world; a turn without a call is
the answer, and is worth 1 if it ends with the right one. No town has two questions, so what is held
out is about towns and people that no training question is about, and can only be found.

Of tables, the prompt is a small table and a question about it. A turn that begins with `>>>` is
Python code, which runs in the sandbox and is answered with what it prints and the value of its last
expression; a turn without a call is the answer, and is worth 1 if its last number is the right one.
Interpreters know nothing of the table: a policy has to copy what it computes with.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, Le

from ....dataflow.errors import ConfigError, nearest
from ....dataflow.options import Fraction, Int, PositiveInt, option_class
from ...models.tokenizer import PRINTABLE
from ..environment import Environment, Reply, ToolCall, TurnResult
from ..tools.python_tool import PythonTools
from ..tools.search_tool import SearchTool, SearchTools, words_of
from ..tools.tool import Tool, ToolEnvironment, ToolLimits
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment, check_template


@option_class
class ToolQuestionsSpec(GeneratedSpec):
    """Number of questions, and how experts and policies answer them."""

    prompt_template: str = "{question}"
    """The prompt, with `{question}` where the question stands: a model that knows language needs to
    be told what to do."""
    expert_calls: Fraction = 1.0
    """Share of the demonstrations that call the tool; in the others the expert knows the answer and
    says it at once."""
    max_turns: PositiveInt = 8
    """Turns after which a conversation without an answer is over, and worth 0."""


@dataclass(frozen=True)
class ToolQuestion:
    """A question, the expert's calls turn by turn, and the right answer."""

    text: str
    calls: tuple[str, ...]
    answer: str


class ToolQuestions(GeneratedTask[ToolQuestion]):
    """Questions of a generator, answered with a tool at hand."""

    def __init__(self, task_id: str, spec: ToolQuestionsSpec, tool: Tool) -> None:
        check_template(spec.prompt_template, "{question}", "question")
        self._options, self._tool = spec, tool
        self.deterministic = tool.deterministic
        self.further_characters = PRINTABLE
        super().__init__(task_id, spec)

    @abstractmethod
    def read(self, text: str) -> ToolCall | None:
        """Return the call that a turn is, if it is nothing else."""

    @abstractmethod
    def result(self, problem: ToolQuestion, call: ToolCall) -> str:
        """Return the tool's result of the expert's calls, and of others that it is not known."""

    @abstractmethod
    def is_right(self, problem: ToolQuestion, said: str) -> bool:
        """Return whether a turn says the right answer."""

    def prompt_of(self, problem: ToolQuestion) -> str:
        return self._options.prompt_template.replace("{question}", problem.text)

    def turns(self, problem: ToolQuestion, rng: random.Random) -> list[str] | None:
        known = rng.random() >= self._options.expert_calls
        return [*(() if known else problem.calls), problem.answer]

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        return self._tool.schemas

    def environment(self, problem: int) -> Environment:
        asked, limits = self.problem(problem), ToolLimits(max_turns=self._options.max_turns)

        def score(said: str) -> float:
            return float(self.is_right(asked, said))

        return PlainCalls(self, self._tool, score, limits)

    def begin(self, index: int) -> PlainEnvironment:
        return ScriptedCalls(self, self.problem(index), self._options.max_turns)

    async def close_environments(self) -> None:
        await self._tool.close()


class PlainCalls(ToolEnvironment):
    """Lets a model without a format of calls make them.

    A reply that was cut off is no answer: it ends the conversation and is worth 0.
    """

    def __init__(
        self, task: ToolQuestions, tool: Tool, score: Callable[[str], float], limits: ToolLimits
    ) -> None:
        super().__init__([tool], score, limits)
        self._task = task

    async def step(self, reply: Reply) -> TurnResult:
        if not reply.finished:
            return TurnResult(done=True)
        call = None if reply.calls else self._task.read(reply.text)
        if call is not None:
            reply = replace(reply, content="", calls=(call,))
        return await super().step(reply)


class ScriptedCalls(PlainEnvironment):
    """A conversation with a tool whose results are known beforehand."""

    def __init__(self, task: ToolQuestions, problem: ToolQuestion, max_turns: int) -> None:
        self._task, self._problem, self._max_turns = task, problem, max_turns

    def step(self, reply: Reply) -> TurnResult:
        call = self._task.read(reply.text) if reply.finished else None
        if call is None:
            right = reply.finished and self._task.is_right(self._problem, reply.text)
            return TurnResult(reward=float(right), done=True)
        done = reply.turn + 1 >= self._max_turns
        result = self._task.result(self._problem, call)
        said = {"role": "tool", "name": call.name, "content": result}
        return TurnResult(messages=() if done else [said], done=done)


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

MOST_TOWNS = 2000  # number of different names of rivers; there are more names of towns and people


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
    """Share of the questions that take two searches, as the first finds the name for the second."""
    num_results: PositiveInt = 1
    """Sentences that a search shows, the best first."""
    max_chars: PositiveInt = 200
    """Characters that are shown of each."""

    def build(self) -> SearchTask:
        asked = self.num_train + self.num_held_out
        if asked > self.num_towns:
            raise ConfigError(
                f"task 'search' has one question for each of {self.num_towns} towns, and {asked} "
                "are asked for\n    lower task.num_train or task.num_held_out, or raise "
                "task.num_towns"
            )
        return SearchTask(self)


class SearchTask(ToolQuestions):
    def __init__(self, spec: SearchTaskSpec) -> None:
        self.spec = spec
        self.towns: Sequence[Town] = make_towns(spec.num_towns, spec.seed)
        facts = [fact for town in self.towns for fact in facts_of(town)]
        self._search = SearchTool(
            SearchTools(texts=tuple(facts), num_results=spec.num_results, max_chars=spec.max_chars),
            facts,
        )
        super().__init__("search", spec, self._search)

    def make(self, number: int, rng: random.Random) -> ToolQuestion:
        town = vars(self.towns[number])
        two = rng.random() < self.spec.two_hops
        question, query, answer = rng.choice(_TWO_HOPS if two else _ONE_HOP)
        queries = (_ONE_HOP[0][1], query) if two else (query,)
        return ToolQuestion(
            question.format(**town),
            tuple(f"[{query.format(**town)}]" for query in queries),
            answer.format(**town),
        )

    def read(self, text: str) -> ToolCall | None:
        """A query in brackets, if that is all that is said."""
        found = _CALL.fullmatch(text.strip())
        return None if found is None else ToolCall("search", {"query": found[1]})

    def result(self, problem: ToolQuestion, call: ToolCall) -> str:
        return self._search.search(call.arguments["query"])

    def is_right(self, problem: ToolQuestion, said: str) -> bool:
        right = words_of(problem.answer)
        return words_of(said)[-len(right) :] == right


_MARK = ">>>"
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
_MOST_DIGITS = 18  # of a number that is read as an answer; Python refuses to read very long ones

_ITEMS = (
    *("apple", "bag", "bell", "book", "box", "bread", "cake", "chair", "coat", "cup", "door"),
    *("fan", "fish", "hat", "key", "lamp", "map"),
)
_COLUMNS = (
    ("price", "stock"),
    ("cost", "sold"),
    ("weight", "count"),
    ("speed", "hours"),
    ("width", "height"),
)

_Rows: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Kind:
    """Texts name columns as `{one}`, which is asked for, and `{other}`, and `{limit}`.

    Code calls the two columns `{x}` and `{y}`; `{t}` is the table, and `{n}` its rows.
    """

    question: str
    code: str
    value: Callable[[_Rows, int], int]


KINDS: Mapping[str, _Kind] = {
    "total": _Kind(
        "What is the total {one}?",
        "sum({x} for a,b in {t})",
        lambda rows, limit: sum(x for x, _ in rows),
    ),
    "where": _Kind(
        "What is the total {one} where {other} > {limit}?",
        "sum({x} for a,b in {t} if {y}>{limit})",
        lambda rows, limit: sum(x for x, y in rows if y > limit),
    ),
    "product": _Kind(
        "What is the total of {one} * {other}?",
        "sum({x}*{y} for a,b in {t})",
        lambda rows, limit: sum(x * y for x, y in rows),
    ),
    "largest": _Kind(
        "What is the largest {one} * {other}?",
        "max({x}*{y} for a,b in {t})",
        lambda rows, limit: max(x * y for x, y in rows),
    ),
    "average": _Kind(
        "What is the average {one}, rounded down?",
        "sum({x} for a,b in {t})//{n}",
        lambda rows, limit: sum(x for x, _ in rows) // len(rows),
    ),
}
"""Name -> a kind of question. `value` is given rows of the column asked for and the other one."""


@option_class
class TableQuestionsSpec(ToolQuestionsSpec):
    """Sizes of tables and kinds of questions."""

    num_rows: Annotated[Int, Ge(2), Le(len(_ITEMS))] = 5
    """Rows of a table, below its header."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of questions, each as likely as the others."""
    python: PythonTools = field(
        default_factory=lambda: PythonTools(deterministic=True, max_bytes=200)
    )
    """Limits of the interpreter. A policy that asks for the time makes a run that cannot be
    repeated to the last bit, which `deterministic` says does not happen."""

    def build(self) -> TableQuestionsTask:
        for kind in self.kinds or ("",):
            if kind not in KINDS:
                raise ConfigError(
                    f"'task.kinds': there is no kind '{kind}' of question{nearest(kind, KINDS)}\n"
                    f"    give some of {', '.join(KINDS)}"
                )
        return TableQuestionsTask(self)


class TableQuestionsTask(ToolQuestions):
    def __init__(self, spec: TableQuestionsSpec) -> None:
        self.spec = spec
        super().__init__("table_questions", spec, spec.python.build())

    def make(self, number: int, rng: random.Random) -> ToolQuestion:
        names, columns = rng.sample(_ITEMS, self.spec.num_rows), rng.choice(_COLUMNS)
        rows = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in names]
        lines = [f"{name} {a} {b}" for name, (a, b) in zip(names, rows, strict=True)]
        table = "\n".join([f"item {columns[0]} {columns[1]}", *lines])
        kind = KINDS[rng.choice(self.spec.kinds)]
        second = rng.random() < 0.5
        asked = [(b, a) if second else (a, b) for a, b in rows]
        limits = sorted(y for _, y in asked)[:-1]  # one row is above it at least
        limit = rng.choice(limits)
        one, other = columns[::-1] if second else columns
        question = kind.question.format(one=one, other=other, limit=limit)
        copied = ",".join(f"({a},{b})" for a, b in rows)
        x, y = "ba" if second else "ab"
        code = kind.code.format(x=x, y=y, t=f"[{copied}]", n=len(rows), limit=limit)
        value = str(kind.value(asked, limit))
        return ToolQuestion(f"{table}\n{question}", (f"{_MARK} {code}",), value)

    def read(self, text: str) -> ToolCall | None:
        text = text.strip()
        code = text.removeprefix(_MARK).strip()
        return ToolCall("python", {"code": code}) if text.startswith(_MARK) else None

    def result(self, problem: ToolQuestion, call: ToolCall) -> str:
        """Return what the expert's code prints; other code does not run here."""
        known = f"{_MARK} {call.arguments['code']}" in problem.calls
        return f"{problem.answer}\n" if known else "Error: this code is not run\n"

    def is_right(self, problem: ToolQuestion, said: str) -> bool:
        found = _NUMBER.findall(said)
        return (
            bool(found) and len(found[-1]) <= _MOST_DIGITS and int(found[-1]) == int(problem.answer)
        )
