"""Tasks made of rows: prompts with answers, demonstrations or pairs, wherever the rows come from.

Rows are checked by `row_parts`; the reward is a named verifier of `verifiers.py`, one that each row
names, or the user's own function. `file_task` and `hf_task` give the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...dataflow.errors import ConfigError
from ...dataflow.options import FiniteFloat, option_class
from ..verifiers.pool import VerifierSpec
from ..verifiers.verifiers import (
    BUILT_IN,
    Verifier,
    check_parameters,
    load_verifier,
    make_verifier,
    reference_of,
)
from .orders import epoch_order
from .row_parts import PARTS, good_rows
from .row_report import DataReport
from .task import Task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RowSource:
    """Rows, and their name in messages."""

    name: str  # as the user named it
    rows: Iterable[tuple[str, Any]]  # where each row stands, and the row; read once


@option_class
class RowTaskSpec:
    """Options of reading and scoring rows."""

    num_held_out: int = 0
    """How many different prompts to keep for evaluation, where no other rows are given for it."""
    messages_field: str | None = None
    """Field with a whole conversation, read instead of a prompt and a response: all that the
    assistant says is imitated, and the prompt is what comes before its last turn."""
    prompt_field: str | None = "prompt"
    """Field with what the model reads: a text, or a conversation as a list of messages. Null where
    the prompt is what `chosen_field` and `rejected_field` begin with."""
    tools_field: str | None = None
    """Field with JSON schemas of what the model may call in a conversation; null if there is
    none."""
    answer_field: str | None = "answer"
    """Field with the right answer, text or number, for the reward; null if there is none."""
    response_field: str | None = None
    """Field with a response to imitate, a text or messages; null to imitate the answer."""
    chosen_field: str | None = None
    """Field with the better response of a pair, a text or messages; null if there are no pairs."""
    rejected_field: str | None = None
    """Field with the worse response of a pair."""
    chosen_score_field: str | None = None
    """Field with a number for how good the better response is; null if there are none."""
    rejected_score_field: str | None = None
    """Field with a number for how good the worse response is."""
    pass_rate_field: str | None = None
    """Field with how often the problem is solved, from 0 to 1, for `task.order`; null if it is not
    known."""
    id_field: str | None = None
    """Field with a name of the row, which must not occur twice; null if rows have none."""
    reward: str | Verifier = "exact_match"
    """`exact_match`, `math_verify`, `instructions`, `code_tests`, or your function of (prompt,
    response, answer) that returns a number: as a callable, `module:function` or
    `path.py:function`."""
    reward_field: str | None = None
    """Field with the built-in reward of the row, instead of one for all; null if there is none."""
    reward_in_process: bool = False
    """Whether your function runs in the worker itself: quicker, but nothing stops it if it
    hangs."""
    correct_score: FiniteFloat = 1.0
    """A response with at least this score counts as right."""
    max_bad_fraction: float = 0.1
    """Largest share of bad rows to go on without; more stops the run before it starts."""
    seed: int = 0
    """Seed of the choice of held-out prompts; the run's seed does not change it."""


class RowTask(Task):
    """Problems of rows."""

    def __init__(
        self, spec: RowTaskSpec, task_id: str, source: RowSource, held_out: RowSource | None
    ) -> None:
        _check_spec(spec, source.name)
        self.spec = spec
        self.task_id = task_id
        self.correct_score = spec.correct_score
        self._name = source.name
        self._reward, self._reference = _reward(spec)
        rows, self.report = _read(spec, self._with_checked_columns(source))
        if held_out is not None:
            evaluated, other = _read(spec, held_out)
            self.report = self.report.joined(other)
        else:
            evaluated = rows.select(_held_out_rows(spec, source.name, rows))
        train = _without(rows, evaluated, self.report)
        if not len(train):
            raise ConfigError(
                f"'{source.name}' has no problem left to train on: all its prompts are held out\n"
                "    lower num_held_out, or give other held-out rows"
            )
        from datasets import concatenate_datasets

        self._rows: Dataset = concatenate_datasets([train, evaluated])
        self.train = range(len(train))
        self.held_out = range(len(train), len(self._rows))

    def _with_checked_columns(self, source: RowSource) -> RowSource:
        """Return the same rows; a reward of the user's must take the columns of the first one."""
        spec, rows = self.spec, iter(source.rows)
        first = list(islice(rows, 1))
        columns = first[0][1] if first else None
        is_own = spec.reward not in BUILT_IN and spec.reward_field is None
        if is_own and isinstance(columns, Mapping):
            name = spec.reward if isinstance(spec.reward, str) else repr(spec.reward)
            read_as = {"prompt": spec.prompt_field, "answer": spec.answer_field}
            check_parameters(name, self._reward, [str(column) for column in columns], read_as)
        return RowSource(source.name, chain(first, rows))

    @property
    def verifier(  # pyright: ignore[reportIncompatibleVariableOverride] - it raises only if asked
        self,
    ) -> VerifierSpec | None:
        """The verifier for a process of its own; None for exact match and `reward_in_process`."""
        spec = self.spec
        if (spec.reward in BUILT_IN or spec.reward_field) and spec.answer_field is None:
            which = f"'{spec.reward}'" if spec.reward_field is None else f"of '{spec.reward_field}'"
            raise ConfigError(
                f"reward {which} compares with the answer, but '{self._name}' is read without one\n"
                "    set answer_field, or another reward; to answer no held-out problems: "
                "evaluation.num_prompts=0"
            )
        if spec.reward_field is not None:
            names = sorted(set(self._rows["reward"]))
            factory = "penstock.workers.data.row_task:make_row_verifier"
            spec_of_rows = VerifierSpec(factory=factory, arguments={"rewards": names})
            return None if names == ["exact_match"] else spec_of_rows
        if self._reference is None:
            return None
        return VerifierSpec(
            factory="penstock.workers.verifiers.verifiers:make_verifier",
            arguments={"reward": self._reference},
        )

    @override
    def prompt_text(self, index: int) -> str:
        return self._rows[index]["prompt"]

    @override
    def messages(self, index: int) -> list[dict[str, Any]] | None:
        given: str = self._rows[index]["messages"]
        return json.loads(given) if given else None

    @override
    def tools(self, index: int) -> list[dict[str, Any]] | None:
        given: str = self._rows[index]["tools"]
        return json.loads(given) if given else None

    @override
    def imitates_history(self, index: int) -> bool:
        return self.spec.messages_field is not None

    @override
    def replies(self, index: int) -> list[list[dict[str, Any]]] | None:
        given: str = self._rows[index]["replies"]
        return json.loads(given) if given else None

    @override
    def answer_text(self, index: int) -> str | None:
        row = self._rows[index]
        return row.get("response", row.get("answer"))

    @override
    def reward_answer(self, index: int) -> str | None:
        return self._rows[index].get("answer")

    @override
    def pair_texts(self, index: int) -> tuple[str, str] | None:
        row = self._rows[index]
        return (row["chosen"], row["rejected"]) if "chosen" in row else None

    @override
    def pair_scores(self, index: int) -> tuple[float, float] | None:
        row = self._rows[index]
        if "chosen_score" not in row:
            return None
        return float(row["chosen_score"]), float(row["rejected_score"])

    @override
    def score(self, index: int, response: str) -> float | None:
        prompt, _, answer, *named = self.verifier_call(index, response)
        reward = BUILT_IN[named[0]] if named else self._reward
        return reward(prompt, response, answer)

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        row = self._rows[index]
        call = (row["prompt"], response, row.get("answer"))
        return (*call, row["reward"]) if "reward" in row else call

    @override
    def pass_rate(self, index: int) -> float | None:
        given = self._rows[index].get("pass_rate")
        return None if given is None else float(given)

    @override
    def where(self, index: int) -> str:
        return self._rows[index]["where"]


def make_row_verifier(rewards: Sequence[str]) -> Any:
    """A verifier that is told which of these built-in ones to use, in a process of its own."""
    known = {name: make_verifier(name) for name in rewards}

    def verify(prompt: str, response: str, answer: str | None, reward: str) -> float | None:
        return known[reward](prompt, response, answer)

    return verify


def _check_spec(spec: RowTaskSpec, name: str) -> None:
    if (spec.chosen_field is None) != (spec.rejected_field is None):
        given = "chosen_field" if spec.rejected_field is None else "rejected_field"
        raise ConfigError(
            f"'{name}': only {given} is given, but a pair has a better and a worse response\n"
            "    give chosen_field and rejected_field together"
        )
    if spec.messages_field is None and spec.prompt_field is None and spec.chosen_field is None:
        raise ConfigError(
            f"'{name}': prompt_field is null, and nothing else says what is asked\n"
            "    give prompt_field, messages_field, or chosen_field and rejected_field"
        )
    if spec.messages_field is not None and (spec.response_field or spec.chosen_field):
        raise ConfigError(
            f"'{name}': messages_field holds the responses already\n"
            "    leave out response_field, chosen_field and rejected_field, or messages_field"
        )
    scores = (spec.chosen_score_field, spec.rejected_score_field)
    if (None in scores and scores != (None, None)) or (scores[0] and not spec.chosen_field):
        raise ConfigError(
            f"'{name}': scores are of the two responses of a pair\n"
            "    give chosen_score_field and rejected_score_field together, beside chosen_field"
        )
    if spec.num_held_out < 0 or not 0 <= spec.max_bad_fraction <= 1:
        raise ConfigError(
            f"'{name}': num_held_out={spec.num_held_out}, "
            f"max_bad_fraction={spec.max_bad_fraction:g}\n"
            "    num_held_out must be at least 0 and max_bad_fraction from 0 to 1"
        )


def _reward(spec: RowTaskSpec) -> tuple[Verifier, str | None]:
    """Return the verifier, and how another process finds it; None if it runs here."""
    here = spec.reward_in_process or spec.reward == "exact_match"
    if not isinstance(spec.reward, str):
        return spec.reward, None if here else reference_of(spec.reward)
    reference = spec.reward
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        reference = f"{Path(place).expanduser().resolve()}:{name}"
    return load_verifier(spec.reward), None if here else reference


def _read(spec: RowTaskSpec, source: RowSource) -> tuple[Dataset, DataReport]:
    named = {part: getattr(spec, f"{part}_field") for part in PARTS}
    if spec.messages_field is not None:
        named["prompt"] = None
    given = {part: field for part, field in named.items() if field is not None}
    report = DataReport(source.name)
    verifier = spec.reward if isinstance(spec.reward, str) else ""
    rows = good_rows(source.rows, given, report, verifier)
    report.check(spec.max_bad_fraction)
    return rows, report


def _held_out_rows(spec: RowTaskSpec, name: str, rows: Dataset) -> list[int]:
    prompts = _whole_prompts(rows)
    chosen: dict[str, int] = {}
    for row in epoch_order(len(prompts), spec.seed, 0).tolist():
        if len(chosen) == spec.num_held_out:
            break
        chosen.setdefault(prompts[row], row)
    if len(chosen) < spec.num_held_out:
        raise ConfigError(
            f"'{name}' has {len(chosen)} different prompts, of which {spec.num_held_out} are "
            f"to be held out\n    set num_held_out below {len(chosen)}"
        )
    return list(chosen.values())


def _without(rows: Dataset, held_out: Dataset, report: DataReport) -> Dataset:
    evaluated = set(_whole_prompts(held_out))
    own = set(held_out["where"])  # no other rows have these: they begin with the path
    left: list[int] = []
    for index, (prompt, where) in enumerate(zip(_whole_prompts(rows), rows["where"], strict=True)):
        if prompt not in evaluated:
            left.append(index)
        elif where not in own:
            report.drop(where, "prompt is held out")
    return rows.select(left)


def _whole_prompts(rows: Dataset) -> list[str]:
    pairs = zip(rows["messages"], rows["prompt"], strict=True)
    return [messages or prompt for messages, prompt in pairs]
