"""Verifiable instructions: which of them a response keeps, and what that is worth.

The checks are in `ifeval`, `iftrain` and `ifbench`; here they are looked up by id, called strictly
or loosely, and added up.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ....dataflow.errors import nearest
from . import ifbench, ifeval, iftrain
from .text import CHECKS, COMPAT

# Importing these registered what they hold.
_SOURCES = (ifeval, iftrain, ifbench)

Mode = Literal["strict", "loose"]
"""`loose` also tries the response without its first line, last line, both, and without stars."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    name: str  # its id: `keywords:existence`
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options from the data set: `{"keywords": ["tea"]}`."""
    weight: float = 1.0  # what keeping it is worth
    multiplier: float = 1.0  # a factor on that


def known_instructions() -> tuple[str, ...]:
    """Ids of all instructions that can be checked, sorted."""
    return tuple(sorted(CHECKS))


def follows(
    response: str, instruction: Instruction, *, mode: Mode = "strict", compat: bool = False
) -> bool:
    """Return whether a response keeps an instruction; an empty one keeps none."""
    options = bound_options(instruction)
    check = CHECKS[instruction.name]
    if compat and COMPAT in inspect.signature(check).parameters:
        options[COMPAT] = True
    variants = [response] if mode == "strict" else _variants(response)
    return any(variant.strip() and check(variant, **options) for variant in variants)


def bound_options(instruction: Instruction) -> dict[str, Any]:
    """Return the options as the instruction's check takes them."""
    if instruction.name not in CHECKS:
        raise ValueError(
            f"there is no instruction '{instruction.name}'"
            f"{nearest(instruction.name, known_instructions())}; "
            f"{len(CHECKS)} are known, see known_instructions()"
        )
    check = CHECKS[instruction.name]
    parameters = inspect.signature(check).parameters
    # Data sets give every option of any instruction, null where it is another one's.
    # A column of Parquet that has a null may hold its whole numbers as floats.
    options = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in instruction.options.items()
        if value is not None
    }
    try:
        inspect.signature(check).bind("", **options)
    except TypeError as error:
        taken = [name for name in parameters if name not in ("response", COMPAT)]
        raise ValueError(
            f"instruction '{instruction.name}' with options {sorted(options)}: {error}; "
            f"its options are: {', '.join(taken) or 'none'}"
        ) from None
    return options


def _variants(response: str) -> list[str]:
    """The eight texts of which one has to pass loosely."""
    lines = response.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    texts = ["\n".join(cut).strip() if i else response for i, cut in enumerate(cuts)]
    return [*texts, *(text.replace("*", "") for text in texts)]


def instructions_of(answer: str | Mapping[str, Any] | Sequence[Any]) -> list[Instruction]:
    read: Any = json.loads(answer) if isinstance(answer, str) else answer
    if isinstance(read, list) and len(read) == 1 and "instruction_id_list" in read[0]:
        read = read[0]
    if isinstance(read, Mapping) and "instruction_id_list" in read:
        names = list(read["instruction_id_list"])
        options = list(read.get("kwargs") or [{}] * len(names))
        pairs = zip(names, options, strict=True)
        return [Instruction(name=name, options=given or {}) for name, given in pairs]
    if not isinstance(read, list) or not read or not all("id" in item for item in read):
        raise ValueError(
            "the answer must list instructions as JSON, such as "
            '[{"id": "keywords:existence", "kwargs": {"keywords": ["tea"]}}], or be an IFEval row '
            f"with instruction_id_list and kwargs; got {answer!r:.200}"
        )
    return [
        Instruction(
            name=item["id"],
            options=item.get("kwargs") or {},
            weight=float(item.get("weight", 1.0)),
            multiplier=float(item.get("multiplier", 1.0)),
        )
        for item in read
    ]


def instruction_score(
    prompt: str,
    response: str,
    answer: str | None,
    *,
    mode: Mode = "strict",
    compat: bool = False,
    score: Literal["share", "sum", "all"] = "share",
) -> float:
    """A verifier: how far a response keeps the instructions that the answer lists."""
    if answer is None:
        raise ValueError("instructions need an answer that lists them as JSON")
    listed = instructions_of(answer)
    kept = [i for i in listed if follows(response, i, mode=mode, compat=compat)]
    if score == "all":
        return float(len(kept) == len(listed))
    # Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025.
    earned = sum(i.weight * i.multiplier for i in kept)
    return earned if score == "sum" else earned / sum(i.weight * i.multiplier for i in listed)
