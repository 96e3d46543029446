"""What `instruction_task` makes its requests of: topics, requests, and kinds of instruction.

A kind is a check of `verifiers.instructions` with the ways in which a person would ask for it. The
seen kinds are trained on; the unseen ones are for evaluation alone. How often an instruct model of
135M parameters follows each of them before training is in `docs/data.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of instruction."""

    name: str
    """How it is called in messages: "lowercase"."""
    check: str
    """The id of its check, as in IFEval: "change_case:english_lowercase"."""
    phrasings: Sequence[str]
    """Ways to ask for it; `{option}` stands for the option's value."""
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Option of the check -> values to choose from."""


REQUESTS = (
    "Write one sentence about {topic}.",
    "Write a short sentence about {topic}.",
    "Tell me one thing about {topic}.",
    "Describe {topic} in one sentence.",
)
"""What every prompt begins with."""

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
"""Topics of prompts that are evaluated on."""
TRAIN_TOPICS = tuple(topic for topic in _TOPICS if topic not in HELD_OUT_TOPICS)
"""All others."""

_WORDS = ("river", "morning", "simple", "together", "always", "light", "people", "little")
"""Words that can be asked for in a sentence about anything."""
_LETTER = {"let_frequency": (1,)}
_ONCE = {**_LETTER, "let_relation": ("at least",)}

SEEN = (
    Kind(
        name="quoted",
        check="startend:quotation",
        phrasings=(
            "Wrap your whole answer in double quotation marks.",
            "Put your entire answer in double quotation marks.",
            "Start and end your answer with double quotation marks.",
            'Your answer must begin and end with a double quotation mark (").',
        ),
    ),
    Kind(
        name="no commas",
        check="punctuation:no_comma",
        phrasings=(
            "Do not use any commas.",
            "Use no commas.",
            "Your answer must not contain a comma.",
            "Avoid commas.",
        ),
    ),
    Kind(
        name="few words",
        check="length_constraints:number_words",
        phrasings=(
            "Use fewer than {num_words} words.",
            "Your answer must have fewer than {num_words} words.",
            "Write less than {num_words} words.",
            "Keep it below {num_words} words.",
        ),
        options={"num_words": (9, 10, 11, 12, 13), "relation": ("less than",)},
    ),
    Kind(
        name="title",
        check="detectable_format:title",
        phrasings=(
            "Put a title in double angular brackets first, such as <<title>>.",
            "Begin with a title wrapped in double angular brackets, such as <<title>>.",
            "Your answer must contain a title in double angular brackets, such as <<title>>.",
        ),
    ),
    Kind(
        name="placeholder",
        check="detectable_content:number_placeholders",
        phrasings=(
            "Include a placeholder in square brackets, such as [name].",
            "Your answer must contain a placeholder in square brackets, such as [place].",
            "Use at least one placeholder in square brackets, such as [date].",
        ),
        options={"num_placeholders": (1,)},
    ),
    Kind(
        name="question mark",
        check="letters:letter_counting2",
        phrasings=(
            "Use a question mark.",
            "Your answer must contain a question mark.",
            "Write it as a question.",
            "Include a question.",
        ),
        options={"letter": ("?",), **_ONCE},
    ),
    Kind(
        name="section",
        check="detectable_format:multiple_sections",
        phrasings=(
            'Begin with the heading "{section_spliter} 1".',
            'Your answer must have the heading "{section_spliter} 1".',
            'Write "{section_spliter} 1" first.',
        ),
        options={"section_spliter": ("Section", "Part", "Chapter"), "num_sections": (1,)},
    ),
    Kind(
        name="no repeats",
        check="words:repeats",
        phrasings=(
            "Use no word more than once.",
            "Do not repeat any word.",
            "Every word of your answer must be different.",
        ),
        options={"small_n": (1,)},
    ),
)
"""Kinds that are trained on."""

UNSEEN = (
    Kind(
        name="two keywords",
        check="keywords:existence",
        phrasings=(
            'Include the words "{keywords[0]}" and "{keywords[1]}".',
            'Your answer must contain the words "{keywords[0]}" and "{keywords[1]}".',
            'Use the words "{keywords[0]}" and "{keywords[1]}".',
        ),
        options={"keywords": tuple(zip(_WORDS, _WORDS[3:], strict=False))},
    ),
    Kind(
        name="forbidden word",
        check="keywords:forbidden_words",
        phrasings=(
            'Do not use the word "{forbidden_words[0]}".',
            'Your answer must not contain the word "{forbidden_words[0]}".',
            'Avoid the word "{forbidden_words[0]}".',
        ),
        options={"forbidden_words": (("the",), ("is",), ("and",), ("a",))},
    ),
    Kind(
        name="rare letter",
        check="keywords:letter_frequency",
        phrasings=(
            "Use the letter {letter} at least once.",
            "Include the letter {letter}.",
            "Your answer must contain the letter {letter}.",
        ),
        options={"letter": ("j", "x", "z", "q"), **_ONCE},
    ),
    Kind(
        name="missing letter",
        check="keywords:letter_frequency",
        phrasings=(
            "Do not use the letter {letter}.",
            "Avoid the letter {letter}.",
            "Your answer must not contain the letter {letter}.",
        ),
        options={"letter": ("b", "m", "p", "v"), **_LETTER, "let_relation": ("less than",)},
    ),
    Kind(
        name="postscript",
        check="detectable_content:postscript",
        phrasings=(
            "Add a postscript that starts with {postscript_marker}",
            "At the end, add a postscript starting with {postscript_marker}",
            "Your answer must have a postscript that begins with {postscript_marker}",
        ),
        options={"postscript_marker": ("P.S.",)},
    ),
    Kind(
        name="highlight",
        check="detectable_format:number_highlighted_sections",
        phrasings=(
            "Highlight a part of it with stars, such as *this*.",
            "Put one word between stars, such as *this*.",
            "Your answer must have a highlighted part, such as *highlighted part*.",
        ),
        options={"num_highlights": (1,)},
    ),
    Kind(
        name="few letters",
        check="letters:letter_counting",
        phrasings=(
            "Use fewer than {N} letters.",
            "Your answer must have fewer than {N} letters.",
            "Write less than {N} letters.",
        ),
        options={"N": (50, 60, 70), "relation": ("less than",)},
    ),
    Kind(
        name="word twice",
        check="keywords:frequency",
        phrasings=(
            'Use the word "{keyword}" at least {frequency} times.',
            'The word "{keyword}" must appear at least {frequency} times.',
            'Include the word "{keyword}" at least {frequency} times.',
        ),
        options={"keyword": _WORDS, "frequency": (2,), "relation": ("at least",)},
    ),
    Kind(
        name="no full stop",
        check="punctuation:punctuation_dot",
        phrasings=(
            "Do not use any full stop.",
            "Use no periods.",
            "Your answer must not contain a period.",
        ),
    ),
    Kind(
        name="last word",
        check="last_word:last_word_answer",
        phrasings=(
            'End with the word "{last_word}".',
            'The last word must be "{last_word}".',
            'Your answer must end with the word "{last_word}".',
        ),
        options={"last_word": ("now", "world", "again", "today")},
    ),
)
"""Kinds for evaluation alone."""
