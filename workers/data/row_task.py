"""Tasks made of rows: prompts with answers, demonstrations or pairs, wherever the rows come from.

Rows are checked by `row_parts`; the reward is a named verifier of `verifiers.py`, one that each row
names, or the user's own function. `file_task` and `hf_task` give the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError
from ...dataflow.option_checks import check_range
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
from .row_parts import Columns, good_rows
from .row_report import DataReport

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RowSource:
    """Where rows come from.

    Attributes:
        name: As the user named it.
        rows: Where each row stands, and the row; read once.
    """

    name: str
    rows: Iterable[tuple[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RowTaskSpec:
    """How rows are read and scored."""

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
    correct_score: float = 1.0
    """A response with at least this score counts as right."""
    max_bad_fraction: float = 0.1
    """Largest share of bad rows to go on without; more stops the run before it starts."""
    seed: int = 0
    """Seed of the choice of held-out prompts; the run's seed does not change it."""

    def __post_init__(self) -> None:
        check_range(self, "correct_score")


class RowTask:
    """Problems of rows; see `Task` for the methods.

    Args:
        spec: How rows are read and scored.
        task_id: Names the task.
        source: The rows.
        held_out: Other rows for evaluation; None to take them from `source`.
    """

    def __init__(
        self, spec: RowTaskSpec, task_id: str, source: RowSource, held_out: RowSource | None
    ) -> None:
        _check_spec(spec, source.name)
        self.spec = spec
        self.task_id = task_id
        self.correct_score = spec.correct_score
        self._name = source.name
        self._reward, self._reference = _reward(spec)
        rows, self.report = _read(spec, _observed(source, self._check_parameters))
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

    def _check_parameters(self, columns: Iterable[str]) -> None:
        spec = self.spec
        if spec.reward in BUILT_IN or spec.reward_field is not None:
            return
        name = spec.reward if isinstance(spec.reward, str) else repr(spec.reward)
        read_as = {"prompt": spec.prompt_field, "answer": spec.answer_field}
        check_parameters(name, self._reward, columns, read_as)

    @property
    def verifier(self) -> VerifierSpec | None:
        """How to score in a process of its own; None for exact match and `reward_in_process`.

        Raises:
            ConfigError: If the reward needs an answer and the file is read without one.
        """
        spec = self.spec
        if (spec.reward in BUILT_IN or spec.reward_field) and spec.answer_field is None:
            which = f"'{spec.reward}'" if spec.reward_field is None else f"of '{spec.reward_field}'"
            raise ConfigError(
                f"reward {which} compares with the answer, but '{self._name}' is read without one\n"
                "    set answer_field, or another reward; to answer no held-out problems: "
                "evaluation.num_prompts=0"
            )
        if spec.reward_field is not None:
            return self._verifier_of_rows()
        if self._reference is None:
            return None
        return VerifierSpec(
            factory="penstock.workers.verifiers.verifiers:make_verifier",
            arguments={"reward": self._reference},
        )

    def _verifier_of_rows(self) -> VerifierSpec | None:
        names = sorted(set(self._rows["reward"]))
        if names == ["exact_match"]:
            return None
        factory = "penstock.workers.data.row_task:make_row_verifier"
        return VerifierSpec(factory=factory, arguments={"rewards": names})

    def prompt_text(self, index: int) -> str:
        """The prompt's field; of a conversation, what the user said last."""
        return self._rows[index]["prompt"]

    def messages(self, index: int) -> list[dict[str, Any]] | None:
        """The prompt's field if it holds messages; see `Converses`."""
        given: str = self._rows[index]["messages"]
        return json.loads(given) if given else None

    def tools(self, index: int) -> list[dict[str, Any]] | None:
        """The tools' field, if it holds any."""
        given: str = self._rows[index]["tools"]
        return json.loads(given) if given else None

    def imitates_history(self, index: int) -> bool:
        """Whether all turns of the assistant are imitated; see `HasReplies`."""
        return self.spec.messages_field is not None

    def replies(self, index: int) -> list[list[dict[str, Any]]] | None:
        """The response's or the pair's fields, if the prompt is a conversation."""
        given: str = self._rows[index]["replies"]
        return json.loads(given) if given else None

    def answer_text(self, index: int) -> str | None:
        """The response's field, or else the answer's."""
        row = self._rows[index]
        return row.get("response", row.get("answer"))

    def reward_answer(self, index: int) -> str | None:
        """The answer's field, also where there is a response to imitate; see `HasRewardAnswer`."""
        return self._rows[index].get("answer")

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """The better and the worse response, if the file has them."""
        row = self._rows[index]
        return (row["chosen"], row["rejected"]) if "chosen" in row else None

    def pair_scores(self, index: int) -> tuple[float, float] | None:
        """How good the two responses are, if the file says it."""
        row = self._rows[index]
        if "chosen_score" not in row:
            return None
        return float(row["chosen_score"]), float(row["rejected_score"])

    def score(self, index: int, response: str) -> float | None:
        """Call the reward here, without a time limit.

        Raises:
            Exception: Whatever the reward raises.
        """
        prompt, _, answer, *named = self.verifier_call(index, response)
        reward = BUILT_IN[named[0]] if named else self._reward
        return reward(prompt, response, answer)

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Prompt, response and answer, and the row's own reward if rows name theirs."""
        row = self._rows[index]
        call = (row["prompt"], response, row.get("answer"))
        return (*call, row["reward"]) if "reward" in row else call

    def pass_rate(self, index: int) -> float | None:
        """The pass rate's field; see `HasPassRates`."""
        given = self._rows[index].get("pass_rate")
        return None if given is None else float(given)

    def where(self, index: int) -> str:
        """File and line, or data set and row, counted from 1."""
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
    """The function, and the name by which another process loads it if it is to run there."""
    here = spec.reward_in_process or spec.reward == "exact_match"
    if isinstance(spec.reward, str):
        return load_verifier(spec.reward), None if here else _absolute(spec.reward)
    return spec.reward, None if here else reference_of(spec.reward)


def _absolute(reference: str) -> str:
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else reference


def _observed(source: RowSource, look: Callable[[Iterable[str]], None]) -> RowSource:
    """Return the same rows; `look` is called with the names of the first one's columns."""

    def rows() -> Iterator[tuple[str, Any]]:
        for number, (where, row) in enumerate(source.rows):
            if number == 0 and isinstance(row, Mapping):
                look([str(name) for name in row])
            yield where, row

    return RowSource(source.name, rows())


def _read(spec: RowTaskSpec, source: RowSource) -> tuple[Dataset, DataReport]:
    columns = Columns(
        messages=spec.messages_field,
        prompt=spec.prompt_field if spec.messages_field is None else None,
        tools=spec.tools_field,
        answer=spec.answer_field,
        response=spec.response_field,
        chosen=spec.chosen_field,
        rejected=spec.rejected_field,
        chosen_score=spec.chosen_score_field,
        rejected_score=spec.rejected_score_field,
        reward=spec.reward_field,
        pass_rate=spec.pass_rate_field,
        id=spec.id_field,
        verifier=spec.reward if isinstance(spec.reward, str) else "",
    )
    report = DataReport(source.name)
    rows = good_rows(source.rows, columns, report)
    report.check(spec.max_bad_fraction)
    return rows, report


def _held_out_rows(spec: RowTaskSpec, name: str, rows: Dataset) -> list[int]:
    """One row for each of `num_held_out` different prompts, in a seeded order."""
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
    """Rows whose prompt is not held out; others with such a prompt are reported."""
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
    """Each prompt with all that stands before it in its conversation."""
    pairs = zip(rows["messages"], rows["prompt"], strict=True)
    return [messages or prompt for messages, prompt in pairs]
