"""A made-up world to search: towns, their mayors, and what can be said of both.

Every name is one of a kind and made from syllables by the seed, so nothing that a model has read
before helps it. A town of some number, and all that is said of it, is a function of the seed and
the number: a larger world has the same towns first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....dataflow.errors import ConfigError

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
"""Names of rivers that there are; of towns and people there are more."""


@dataclass(frozen=True)
class Town:
    """What is true of a town and its mayor.

    Attributes:
        name: Of the town.
        river: That runs through it.
        founded: The year.
        mayor: First and last name.
        born: The year in which the mayor was.
        home: The town where the mayor was born.
    """

    name: str
    river: str
    founded: int
    mayor: str
    born: int
    home: str


def make_towns(num_towns: int, seed: int) -> Sequence[Town]:
    """The first towns of a seed's world.

    Args:
        num_towns: How many.
        seed: Of all names and years.

    Raises:
        ConfigError: If there are not so many names.
    """
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
    """All that is said of a town and its mayor, a sentence for each."""
    return (
        f"The mayor of {town.name} is {town.mayor}.",
        f"The river of {town.name} is the {town.river}.",
        f"{town.name} was founded in {town.founded}.",
        f"{town.mayor} was born in the year {town.born}.",
        f"{town.mayor} was born in the town {town.home}.",
    )


def _shuffled(names: list[str], rng: random.Random) -> list[str]:
    return rng.sample(names, len(names))
