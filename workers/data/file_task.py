"""Tasks from a local JSONL or Parquet file: prompts with answers, demonstrations or pairs.

Rows are read and checked by `rows_file.py`; the reward is a named verifier of `verifiers.py` or the
user's own function.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError
from ...dataflow.option_checks import check_range
from ..verifiers.pool import VerifierSpec
from ..verifiers.verifiers import BUILT_IN, Verifier, load_verifier, reference_of
from .row_parts import Columns
from .row_report import DataReport
from .rows_file import read_rows
from .sources import epoch_order

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["FileTask", "FileTaskSpec"]


@dataclass(frozen=True, kw_only=True)
class FileTaskSpec:
    """A file of problems and how to read it."""

    path: str
    """JSONL (.jsonl, .ndjson, .json: an object a line) or Parquet (.parquet, .pq)."""
    held_out_path: str | None = None
    """A file of problems kept for evaluation, read in the same way."""
    num_held_out: int = 0
    """Without `held_out_path`: how many different prompts of `path` to keep for evaluation."""
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
    id_field: str | None = None
    """Field with a name of the row, which must not occur twice; null if rows have none."""
    reward: str | Verifier = "exact_match"
    """`exact_match`, `math_verify`, `instructions`, `code_tests`, or your function of (prompt,
    response, answer) that returns a number: as a callable, `module:function` or
    `path.py:function`."""
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

    def build(self) -> FileTask:
        """Read the file and load the reward.

        Raises:
            ConfigError: If a file is missing or cannot be read, too many of its rows are bad, too
                few prompts are left to hold out, options contradict each other, or the reward
                cannot be loaded.
        """
        return FileTask(self)


class FileTask:
    """Problems of a file; see `Task` for the methods."""

    def __init__(self, spec: FileTaskSpec) -> None:
        _check_spec(spec)
        self.spec = spec
        self.task_id = Path(spec.path).stem
        self.correct_score = spec.correct_score
        self._reward, self._reference = _reward(spec)
        rows, self.report = _read(spec, spec.path)
        if spec.held_out_path is not None:
            held_out, other = _read(spec, spec.held_out_path)
            self.report = self.report.joined(other)
        else:
            held_out = rows.select(_held_out_rows(spec, rows))
        train = _without(rows, held_out, self.report)
        if not len(train):
            raise ConfigError(
                f"'{spec.path}' has no problem left to train on: all its prompts are held out\n"
                "    lower num_held_out, or give another held_out_path"
            )
        from datasets import concatenate_datasets

        self._rows: Dataset = concatenate_datasets([train, held_out])
        self.train = range(len(train))
        self.held_out = range(len(train), len(self._rows))

    @property
    def verifier(self) -> VerifierSpec | None:
        """How to score in a process of its own; None for exact match and `reward_in_process`.

        Raises:
            ConfigError: If the reward needs an answer and the file is read without one.
        """
        spec = self.spec
        if spec.reward in BUILT_IN and spec.answer_field is None:
            raise ConfigError(
                f"reward '{spec.reward}' compares with the answer, but '{spec.path}' is read "
                "without one\n    set answer_field, or another reward"
            )
        if self._reference is None:
            return None
        return VerifierSpec(
            factory="penstock.workers.verifiers.verifiers:make_verifier",
            arguments={"reward": self._reference},
        )

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

    @property
    def imitates_history(self) -> bool:
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

    def score(self, index: int, response: str) -> float:
        """Call the reward here, without a time limit.

        Raises:
            Exception: Whatever the reward raises.
        """
        prompt, _, answer = self.verifier_call(index, response)
        return float(self._reward(prompt, response, answer))

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Prompt, response and answer."""
        row = self._rows[index]
        return (row["prompt"], response, row.get("answer"))

    def where(self, index: int) -> str:
        """File and line (for Parquet: row), counted from 1."""
        return self._rows[index]["where"]


def _check_spec(spec: FileTaskSpec) -> None:
    if (spec.chosen_field is None) != (spec.rejected_field is None):
        given = "chosen_field" if spec.rejected_field is None else "rejected_field"
        raise ConfigError(
            f"'{spec.path}': only {given} is given, but a pair has a better and a worse response\n"
            "    give chosen_field and rejected_field together"
        )
    if spec.messages_field is None and spec.prompt_field is None and spec.chosen_field is None:
        raise ConfigError(
            f"'{spec.path}': prompt_field is null, and nothing else says what is asked\n"
            "    give prompt_field, messages_field, or chosen_field and rejected_field"
        )
    if spec.messages_field is not None and (spec.response_field or spec.chosen_field):
        raise ConfigError(
            f"'{spec.path}': messages_field holds the responses already\n"
            "    leave out response_field, chosen_field and rejected_field, or messages_field"
        )
    scores = (spec.chosen_score_field, spec.rejected_score_field)
    if (None in scores and scores != (None, None)) or (scores[0] and not spec.chosen_field):
        raise ConfigError(
            f"'{spec.path}': scores are of the two responses of a pair\n"
            "    give chosen_score_field and rejected_score_field together, beside chosen_field"
        )
    if spec.held_out_path is not None and spec.num_held_out:
        raise ConfigError(
            f"'{spec.path}': both held_out_path and num_held_out={spec.num_held_out} are given\n"
            "    give one of them"
        )
    if spec.num_held_out < 0 or not 0 <= spec.max_bad_fraction <= 1:
        raise ConfigError(
            f"'{spec.path}': num_held_out={spec.num_held_out}, "
            f"max_bad_fraction={spec.max_bad_fraction:g}\n"
            "    num_held_out must be at least 0 and max_bad_fraction from 0 to 1"
        )


def _reward(spec: FileTaskSpec) -> tuple[Verifier, str | None]:
    """The function, and the name by which another process loads it if it is to run there."""
    here = spec.reward_in_process or spec.reward == "exact_match"
    if isinstance(spec.reward, str):
        return load_verifier(spec.reward), None if here else _absolute(spec.reward)
    return spec.reward, None if here else reference_of(spec.reward)


def _absolute(reference: str) -> str:
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else reference


def _read(spec: FileTaskSpec, path: str) -> tuple[Dataset, DataReport]:
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
        id=spec.id_field,
    )
    report = DataReport(path)
    rows = read_rows(path, columns, report)
    report.check(spec.max_bad_fraction)
    return rows, report


def _held_out_rows(spec: FileTaskSpec, rows: Dataset) -> list[int]:
    """One row for each of `num_held_out` different prompts, in a seeded order."""
    prompts = _whole_prompts(rows)
    chosen: dict[str, int] = {}
    for row in epoch_order(len(prompts), spec.seed, 0).tolist():
        if len(chosen) == spec.num_held_out:
            break
        chosen.setdefault(prompts[row], row)
    if len(chosen) < spec.num_held_out:
        raise ConfigError(
            f"'{spec.path}' has {len(chosen)} different prompts, of which {spec.num_held_out} are "
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
