"""Requests with one instruction that can be checked, made by a seed.

"Write one sentence about tea. Use no commas." is one of them. Every prompt is one topic, one
request and one instruction below. What is held out are two suites: seen kinds of
instruction with new topics, and unseen kinds, also with new topics.

An answer of fewer than five words is no sentence, and counts as not kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from ...dataflow.errors import ConfigError
from ...dataflow.options import NonNegativeInt, PositiveInt, option_class
from ..verifiers.instructions.instructions import instruction_score
from .task import Task


@dataclass(frozen=True, kw_only=True)
class InstructionKind:
    name: str  # as messages call it
    check: str  # the id of its check, as in IFEval: "change_case:english_lowercase"
    phrasings: Sequence[str]  # ways to ask for it; `{option}` stands for the option's value
    # Option of the check -> values to choose from.
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])


def _kind(
    name: str, check: str, *phrasings: str, options: Mapping[str, Sequence[Any]] | None = None
) -> InstructionKind:
    return InstructionKind(name=name, check=check, phrasings=phrasings, options=options or {})


REQUESTS = (
    "Write one sentence about {topic}.",
    "Write a short sentence about {topic}.",
    "Tell me one thing about {topic}.",
    "Describe {topic} in one sentence.",
)

_TOPIC_TEXT = (
    "a lighthouse; a bicycle; a train station; an old bridge; a market; a library; a bakery; a "
    "garden; a kitchen; a classroom; a hospital; an airport; a theater; a museum; a castle; a "
    "farm; a forest; a desert; an island; a mountain; a river; a waterfall; a volcano; a glacier; "
    "the ocean; the beach; the moon; the stars; the sun; a rainbow; a thunderstorm; the first "
    "snow; fog; the wind; autumn leaves; spring flowers; a summer evening; a winter morning; "
    "sunrise; midnight; cats; dogs; horses; elephants; whales; owls; penguins; bees; butterflies; "
    "ants; frogs; turtles; wolves; bears; foxes; rabbits; parrots; spiders; sharks; dolphins; "
    "coffee; tea; bread; cheese; chocolate; apples; oranges; honey; rice; soup; pancakes; ice "
    "cream; pizza; salad; mushrooms; garlic; potatoes; strawberries; breakfast; a family dinner; "
    "a violin; a piano; drums; a guitar; an orchestra; jazz; a lullaby; singing; dancing; "
    "painting; photography; poetry; a novel; a fairy tale; a comic book; a diary; handwriting; a "
    "postcard; a dictionary; a crossword puzzle; chess; football; tennis; swimming; running; "
    "skiing; sailing; climbing; cycling; yoga; a birthday; a wedding; a holiday; a parade; a "
    "picnic; a road trip; camping; fishing; hiking; gardening; honesty; courage; patience; "
    "friendship; kindness; curiosity; hope; memory; silence; laughter; dreams; time; luck; "
    "freedom; gratitude; loneliness; pride; trust; growing old; childhood; a doctor; a teacher; a "
    "pilot; a baker; a firefighter; a nurse; a carpenter; a judge; an astronaut; a sailor; a "
    "clown; a detective; a king; a neighbor; a grandmother; twins; a robot; a pirate; a wizard; a "
    "ghost; electricity; gravity; magnets; batteries; computers; the internet; telephones; "
    "clocks; a microscope; a telescope; steam engines; rockets; satellites; bridges; tunnels; "
    "skyscrapers; elevators; umbrellas; mirrors; candles; paper; glass; gold; salt; sand; wood; "
    "iron; water; ice; fire; mathematics; history; geography; languages; music lessons; homework; "
    "exams; a science fair; a school bus; recess; money; a bank; a shop; a job interview; a lost "
    "key; a broken window; an old map; a secret; a promise; a mistake; shoes; hats; gloves; a "
    "raincoat; a blanket; a pillow; a chair; a door; a staircase; a fireplace; a suitcase; a "
    "passport; a ferry; a taxi; a traffic jam; a subway; a hot-air balloon; a canoe; a camel; a "
    "snowman; a treehouse; a playground; a puzzle; a kite; a teddy bear; marbles; a magic trick; "
    "a scarecrow; a windmill; a fountain"
)
_TOPICS = _TOPIC_TEXT.split("; ")
HELD_OUT_TOPICS = tuple(_TOPICS[::3])
TRAIN_TOPICS = tuple(topic for topic in _TOPICS if topic not in HELD_OUT_TOPICS)

# Words that can be asked for in a sentence about anything.
_WORDS = ("river", "morning", "simple", "together", "always", "light", "people", "little")
_LETTER = {"let_frequency": (1,)}
_ONCE = {**_LETTER, "let_relation": ("at least",)}

SEEN = (
    _kind(
        "quoted",
        "startend:quotation",
        "Wrap your whole answer in double quotation marks.",
        "Put your entire answer in double quotation marks.",
        "Start and end your answer with double quotation marks.",
        'Your answer must begin and end with a double quotation mark (").',
    ),
    _kind(
        "no commas",
        "punctuation:no_comma",
        "Do not use any commas.",
        "Use no commas.",
        "Your answer must not contain a comma.",
        "Avoid commas.",
    ),
    _kind(
        "few words",
        "length_constraints:number_words",
        "Use fewer than {num_words} words.",
        "Your answer must have fewer than {num_words} words.",
        "Write less than {num_words} words.",
        "Keep it below {num_words} words.",
        options={"num_words": (9, 10, 11, 12, 13), "relation": ("less than",)},
    ),
    _kind(
        "title",
        "detectable_format:title",
        "Put a title in double angular brackets first, such as <<title>>.",
        "Begin with a title wrapped in double angular brackets, such as <<title>>.",
        "Your answer must contain a title in double angular brackets, such as <<title>>.",
    ),
    _kind(
        "placeholder",
        "detectable_content:number_placeholders",
        "Include a placeholder in square brackets, such as [name].",
        "Your answer must contain a placeholder in square brackets, such as [place].",
        "Use at least one placeholder in square brackets, such as [date].",
        options={"num_placeholders": (1,)},
    ),
    _kind(
        "question mark",
        "letters:letter_counting2",
        "Use a question mark.",
        "Your answer must contain a question mark.",
        "Write it as a question.",
        "Include a question.",
        options={"letter": ("?",), **_ONCE},
    ),
    _kind(
        "section",
        "detectable_format:multiple_sections",
        'Begin with the heading "{section_spliter} 1".',
        'Your answer must have the heading "{section_spliter} 1".',
        'Write "{section_spliter} 1" first.',
        options={"section_spliter": ("Section", "Part", "Chapter"), "num_sections": (1,)},
    ),
    _kind(
        "no repeats",
        "words:repeats",
        "Use no word more than once.",
        "Do not repeat any word.",
        "Every word of your answer must be different.",
        options={"small_n": (1,)},
    ),
)
"""Kinds that are trained on."""

UNSEEN = (
    _kind(
        "two keywords",
        "keywords:existence",
        'Include the words "{keywords[0]}" and "{keywords[1]}".',
        'Your answer must contain the words "{keywords[0]}" and "{keywords[1]}".',
        'Use the words "{keywords[0]}" and "{keywords[1]}".',
        options={"keywords": tuple(zip(_WORDS, _WORDS[3:], strict=False))},
    ),
    _kind(
        "forbidden word",
        "keywords:forbidden_words",
        'Do not use the word "{forbidden_words[0]}".',
        'Your answer must not contain the word "{forbidden_words[0]}".',
        'Avoid the word "{forbidden_words[0]}".',
        options={"forbidden_words": (("the",), ("is",), ("and",), ("a",))},
    ),
    _kind(
        "rare letter",
        "keywords:letter_frequency",
        "Use the letter {letter} at least once.",
        "Include the letter {letter}.",
        "Your answer must contain the letter {letter}.",
        options={"letter": ("j", "x", "z", "q"), **_ONCE},
    ),
    _kind(
        "missing letter",
        "keywords:letter_frequency",
        "Do not use the letter {letter}.",
        "Avoid the letter {letter}.",
        "Your answer must not contain the letter {letter}.",
        options={"letter": ("b", "m", "p", "v"), **_LETTER, "let_relation": ("less than",)},
    ),
    _kind(
        "postscript",
        "detectable_content:postscript",
        "Add a postscript that starts with {postscript_marker}",
        "At the end, add a postscript starting with {postscript_marker}",
        "Your answer must have a postscript that begins with {postscript_marker}",
        options={"postscript_marker": ("P.S.",)},
    ),
    _kind(
        "highlight",
        "detectable_format:number_highlighted_sections",
        "Highlight a part of it with stars, such as *this*.",
        "Put one word between stars, such as *this*.",
        "Your answer must have a highlighted part, such as *highlighted part*.",
        options={"num_highlights": (1,)},
    ),
    _kind(
        "few letters",
        "letters:letter_counting",
        "Use fewer than {N} letters.",
        "Your answer must have fewer than {N} letters.",
        "Write less than {N} letters.",
        options={"N": (50, 60, 70), "relation": ("less than",)},
    ),
    _kind(
        "word twice",
        "keywords:frequency",
        'Use the word "{keyword}" at least {frequency} times.',
        'The word "{keyword}" must appear at least {frequency} times.',
        'Include the word "{keyword}" at least {frequency} times.',
        options={"keyword": _WORDS, "frequency": (2,), "relation": ("at least",)},
    ),
    _kind(
        "no full stop",
        "punctuation:punctuation_dot",
        "Do not use any full stop.",
        "Use no periods.",
        "Your answer must not contain a period.",
    ),
    _kind(
        "last word",
        "last_word:last_word_answer",
        'End with the word "{last_word}".',
        'The last word must be "{last_word}".',
        'Your answer must end with the word "{last_word}".',
        options={"last_word": ("now", "world", "again", "today")},
    ),
)
"""Kinds for evaluation alone."""


# Draws in a row that may all be known already, before they count as all that there are.
_MOST_TRIES = 5000
# What every answer must be besides: without it a policy learns to answer with one word.
_SENTENCE = {
    "id": "length_constraints:number_words",
    "kwargs": {"num_words": 5, "relation": "at least"},
}
SEEN_SUITE, UNSEEN_SUITE = "seen_kinds", "unseen_kinds"


@option_class
class InstructionTaskSpec:
    """Number and seed of requests."""

    num_train: PositiveInt = 1000
    """Training prompts."""
    num_held_out: NonNegativeInt = 240
    """Held-out prompts with the kinds of instruction that are trained on, and new topics."""
    num_unseen: NonNegativeInt = 480
    """Held-out prompts with other kinds of instruction, and new topics."""
    seed: int = 0
    """Seed of the prompts; the run's seed does not change them."""

    def build(self) -> InstructionTask:
        return InstructionTask(self)


@dataclass(frozen=True)
class _Problem:
    prompt: str
    kind: str
    answer: str


class InstructionTask(Task):
    """Requests with one instruction, in suites of seen and unseen kinds."""

    def __init__(self, spec: InstructionTaskSpec) -> None:
        self.spec = spec
        parts = [
            _problems(spec.seed, "train", spec.num_train, SEEN, TRAIN_TOPICS),
            _problems(spec.seed, SEEN_SUITE, spec.num_held_out, SEEN, HELD_OUT_TOPICS),
            _problems(spec.seed, UNSEEN_SUITE, spec.num_unseen, UNSEEN, HELD_OUT_TOPICS),
        ]
        self._problems = [problem for part in parts for problem in part]
        prompts = [problem.prompt for problem in self._problems]
        super().__init__("instructions", prompts, spec.num_held_out + spec.num_unseen)
        first_unseen = spec.num_train + spec.num_held_out
        suites = {
            SEEN_SUITE: range(spec.num_train, first_unseen),
            UNSEEN_SUITE: range(first_unseen, len(self._problems)),
        }
        self._suites: Mapping[str, Sequence[int]] = {n: part for n, part in suites.items() if part}

    @override
    def suites(self) -> Mapping[str, Sequence[int]]:
        return self._suites

    @override
    def reward_answer(self, index: int) -> str:
        """Return what is checked, as JSON that `instructions_of` reads."""
        return self._problems[index].answer

    @override
    def score(self, index: int, response: str) -> float:
        return instruction_score(*self.verifier_call(index, response), score="all")

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        problem = self._problems[index]
        return (problem.prompt, response, problem.answer)

    @override
    def where(self, index: int) -> str:
        return f"{self.task_id}[{index}], {self._problems[index].kind}"


def _problems(
    seed: int, part: str, count: int, kinds: Sequence[InstructionKind], topics: Sequence[str]
) -> list[_Problem]:
    rng = random.Random(f"instructions/{seed}/{part}")
    found: dict[str, _Problem] = {}
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > _MOST_TRIES:
            raise ConfigError(
                f"task 'instructions' has only about {len(found)} different prompts of this part "
                f"({part}), and {count} are asked for\n"
                "    lower task.num_train, task.num_held_out or task.num_unseen"
            )
        kind = kinds[len(found) % len(kinds)]
        topic = rng.choice(topics)
        options = {name: rng.choice(values) for name, values in kind.options.items()}
        request = rng.choice(REQUESTS).format(topic=topic)
        instruction = rng.choice(kind.phrasings).format(**options)
        answer = json.dumps([{"id": kind.check, "kwargs": options}, _SENTENCE])
        problem = _Problem(f"{request} {instruction}", kind.name, answer)
        if problem.prompt not in found:
            found[problem.prompt], tries = problem, 0
    return list(found.values())
