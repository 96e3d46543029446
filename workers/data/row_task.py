"""Tasks made of rows: prompts with answers, demonstrations or pairs, wherever the rows come from.

Rows come in the forms of TRL and OpenAI: a prompt with an answer; a prompt with a completion, which
may be labelled good or bad; a prompt, or none, with a chosen and a rejected response; a whole
conversation; a text; or tokens. Each prompt and response is a text, or a list of messages. A row's
parts are found, checked and kept as text, in a Hugging Face dataset. `row_forms` tells the forms
apart. The reward is a named verifier of `verifiers.py`, one that each row names, or
the user's own function. `row_sources` gives the rows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.options import FiniteFloat, option_class
from ...dataflow.registry import imported
from ..isolation.child import USER_ERRORS
from ..verifiers.instructions.instructions import bound_options, instructions_of
from ..verifiers.pool import Outcome, VerifierSpec, joined
from ..verifiers.reward_function import ALL, RewardFunction, by_name, make_reward, reward_specs
from ..verifiers.verifiers import BUILT_IN, Reference, warm_up
from .orders import epoch_order
from .row_forms import BOOLEANS, at, recognized, remade, tokenized
from .task import (
    BadRow,
    DataReport,
    NotMessages,
    Task,
    check_messages,
    is_imitated,
    json_type,
    last_user_text,
    messages_in,
    response_facts,
)

if TYPE_CHECKING:
    from datasets import Dataset


# Of a text, far above what any model reads; tokenizing a longer one takes minutes.
_MOST_CHARACTERS = 1 << 20
_PEEKED = 64  # rows whose columns are those of all
_WRITTEN = ("messages", "prompt", "response", "chosen", "rejected")  # may be conversations
# Rewards whose answers may be lists or objects instead of their JSON text.
_READ_JSON = ("code_tests", "instructions")

_NOTHING_ASKED = {"prompt": "", "messages": "", "replies": ""}

_Messages = list[dict[str, Any]]


class WrittenFloat(float):
    """A number of a JSON file that keeps its text."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text)
        number.text = text
        return number


PARTS = (
    *("messages", "prompt", "tools", "answer", "response", "chosen", "rejected", "chosen_score"),
    *("rejected_score", "reward", "pass_rate", "id", "text", "tokens", "label"),
)
"""Parts of a row, in the order in which they are looked at.

Without `prompt`, the prompt is what `messages` says before its last answer, or else what `chosen`
and `rejected` have in common at the beginning.
"""


def good_rows(
    source: Iterable[tuple[str, Any]],
    fields: Mapping[str, str],
    report: DataReport,
    verifier: str = "",
    columns: Sequence[str] = (),
) -> Dataset:
    """Check rows; bad ones go to `report`, good ones to the result.

    Every part that `fields` has a field for must be there on every row: text, and not blank.
    Answers and ids may be numbers, scores and pass rates must be; they become text. Prompts and
    responses may be messages, and tools may be missing. Rows that name no reward have `verifier`.
    Of further `columns` a row has those that it has, as JSON.
    """
    from datasets import Dataset

    kept: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    for where, row in source:
        notes: list[str] = []
        try:
            good = _validated(row, fields, verifier, notes)
            if columns:
                own = {name: json.loads(_json(row[name], name)) for name in columns if name in row}
                good["columns"] = json.dumps(own)
            if (identity := good.get("id")) is not None:
                if identity in ids:
                    detail = f"'{identity}' first stands at {ids[identity]}"
                    raise BadRow("duplicate id", detail)
                ids[identity] = where
        except BadRow as bad:
            report.reject(where, bad.reason, bad.detail)
            continue
        report.notes.update(notes)
        kept.append({**good, "where": where})
    report.keep(len(kept))
    return Dataset.from_dict({n: [row[n] for row in kept] for n in sorted(kept[0] if kept else ())})


def _validated(
    row: Any, fields: Mapping[str, str], verifier: str, notes: list[str]
) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise BadRow("not an object", f"a row is an object with named fields, got {json_type(row)}")
    good: dict[str, Any] = {"tools": ""}
    written: dict[str, str | _Messages] = {}
    for part, field in fields.items():
        if part == "tools":
            good[part] = _tools(row.get(field), field)
        elif part == "text":  # one without a prompt, all of which is a response
            good |= _NOTHING_ASKED | {"response": _text(row, part, field)}
        elif part == "tokens":
            good["tokens"], good["trained"] = tokenized(row, field)
            good |= _NOTHING_ASKED | {"response": ""}
        elif part == "label":
            if (label := at(row, field)) not in BOOLEANS:
                detail = f"expected true or false, got {json_type(label)}"
                raise BadRow(f"wrong type of '{field}'", detail)
            good[part] = bool(label)
        elif part in _WRITTEN:
            # Beside a prompt that is a text, a response may be any text, one of messages as well.
            as_text = isinstance(written.get("prompt"), str)
            written[part] = _written(row, part, field, as_text)
        elif part == "answer" and isinstance(value := at(row, field), list | Mapping):
            reward = row.get(fields["reward"]) if "reward" in fields else verifier
            if reward not in _READ_JSON:
                read = f"{' and '.join(_READ_JSON)} read others"
                detail = f"expected text, got {json_type(value)}; {read}"
                raise BadRow(f"wrong type of '{field}'", detail)
            good[part] = _json(value, field)
        else:
            good[part] = _text(row, part, field)
    if good.get("reward", "exact_match") not in BUILT_IN:
        detail = f"'{good['reward']:.40}' is none of {', '.join(sorted(BUILT_IN))}"
        raise BadRow(f"unknown reward in '{fields['reward']}'", detail)
    if good.get("reward", verifier) == "instructions" and "answer" in good:
        try:
            for instruction in instructions_of(good["answer"]):
                bound_options(instruction)
        except (ValueError, TypeError) as error:
            raise BadRow("instructions that cannot be checked", f"{error!s:.300}") from None
    if "chosen" in written and written["chosen"] == written["rejected"]:
        detail = f"'{fields['chosen']}' and '{fields['rejected']}' are the same"
        raise BadRow("equal pair", detail)
    notes += _notes(row, written, fields)
    return {**good, **(_exchange(written, fields) if written else {})}


def _exchange(written: Mapping[str, str | _Messages], fields: Mapping[str, str]) -> dict[str, str]:
    """Return what to answer and the answers, of the parts that were written."""
    answers = {part: written[part] for part in _WRITTEN[2:] if part in written}
    if "messages" in written:
        whole = written["messages"]
        if isinstance(whole, str):
            detail = "expected a list of messages, got text"
            raise BadRow(f"wrong type of '{fields['messages']}'", detail)
        _check_reply(whole, fields["messages"])
        prompt, answers["response"] = whole[:-1], whole[-1:]
    elif "prompt" in written:
        prompt = written["prompt"]
    else:
        end = _common_end(written["chosen"], written["rejected"])
        prompt = written["chosen"][:end]
        answers = {part: answer[end:] for part, answer in answers.items()}
        for part, answer in answers.items():
            if not answer:
                raise BadRow(f"empty {part}", f"all of '{fields[part]}' is the prompt")
        if not prompt:
            raise BadRow("no prompt", "the two responses have no beginning in common")
    if isinstance(prompt, str):
        found = {"messages": "", "replies": "", "prompt": prompt}
        for part, answer in answers.items():
            if not isinstance(answer, str):
                detail = "the prompt is a text, and this is a list of messages"
                raise BadRow(f"wrong type of '{fields[part]}'", detail)
            found[part] = answer
        return found
    field = fields.get("messages") or fields.get("prompt") or fields.get("chosen", "")
    if not prompt or prompt[-1]["role"] == "assistant":
        what = "the last message is the assistant's, not one to answer"
        raise BadRow(f"no prompt in '{field}'", what if prompt else "nothing is asked")
    replies: dict[str, _Messages] = {}
    for part, answer in answers.items():
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        elif "messages" not in fields:
            _check_reply(answer, fields[part])
        replies[part] = answer
    return {
        "messages": _json(prompt, field),
        "replies": _json(list(replies.values()), field) if replies else "",
        "prompt": _whole(last_user_text(prompt), "prompt", field),
        **{part: str(reply[-1]["content"]) for part, reply in replies.items()},
    }


def _check_reply(turns: _Messages, field: str) -> None:
    if turns[-1]["role"] != "assistant":
        raise BadRow(f"no answer in '{field}'", "the last message is not the assistant's")
    if not any(map(is_imitated, turns)):
        raise BadRow(f"nothing to imitate in '{field}'", "every message has the weight 0")


def _common_end(chosen: str | _Messages, rejected: str | _Messages) -> int:
    """Return where the beginning that both have ends; a text is cut as TRL cuts it, at a space."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    end = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    at_space = isinstance(chosen, str) and chosen[end - 1 : end] == " "
    return end - 1 if at_space else end


def _written(row: Mapping[str, Any], part: str, field: str, as_text: bool) -> str | _Messages:
    """Return a text or messages, which may be given as JSON text as well unless `as_text`."""
    value = at(row, field)
    if isinstance(value, str) and not as_text:
        value = messages_in(value) or value
    if not isinstance(value, list):
        return _text(row, part, field)
    try:
        return check_messages(value)
    except NotMessages as error:
        raise BadRow(f"no conversation in '{field}'", str(error)) from None


def _text(row: Mapping[str, Any], part: str, field: str) -> str:
    value = at(row, field)
    if value is None:
        raise BadRow(f"missing field '{field}'", "it is null")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"wrong type of '{field}'", f"expected a finite number, got {value}")
    is_figure = part == "pass_rate" or part.endswith("_score")
    if is_figure and not (is_number and abs(value) <= sys.float_info.max):
        raise BadRow(f"wrong type of '{field}'", f"expected a number, got {json_type(value)}")
    if part == "pass_rate" and not 0 <= float(value) <= 1:
        raise BadRow(f"wrong value of '{field}'", f"expected 0 to 1, got {value:g}")
    if is_number and (part in ("answer", "id") or is_figure):
        value = value.text if isinstance(value, WrittenFloat) else json.dumps(value)
    if not isinstance(value, str):
        expected = "text or a list of messages" if part in _WRITTEN else "text"
        raise BadRow(f"wrong type of '{field}'", f"expected {expected}, got {json_type(value)}")
    return _whole(value, part, field)


def _whole(value: str, part: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            f"broken Unicode in '{field}'", f"half a surrogate pair at character {error.start + 1}"
        ) from None
    if len(value) > _MOST_CHARACTERS:
        raise BadRow(f"too long {part}", f"'{field}' has {len(value)} characters")
    if not value.strip():
        raise BadRow(f"empty {part}", f"'{field}' is {value!r:.40}")
    return value


def _tools(value: Any, field: str) -> str:
    """The tools as JSON; a text is JSON already, as some data sets have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"wrong type of '{field}'", f"text that is no JSON: {error}") from None
    if value is None or value == []:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        detail = f"expected a list of objects, got {json_type(value)}"
        raise BadRow(f"wrong type of '{field}'", detail)
    return _json(value, field)


def _json(value: Any, field: str) -> str:
    try:
        return _whole(json.dumps(value, ensure_ascii=False, allow_nan=False), "prompt", field)
    except (TypeError, ValueError) as error:  # a date, bytes: columns of Parquet have more types
        raise BadRow(f"wrong type of '{field}'", f"it is no JSON value: {error}") from None


def _notes(
    row: Mapping[str, Any], written: Mapping[str, str | _Messages], fields: Mapping[str, str]
) -> list[str]:
    notes: list[str] = []
    for part, field in fields.items():
        if part not in ("pass_rate", "chosen_score", "rejected_score") and _has_float(
            row.get(field)
        ):
            notes.append(
                f"'{field}' holds numbers as floats, which are read as Python writes them: 5.0 for "
                "5, 1e-05 for 0.00001; to have them otherwise, store text or integers"
            )
    for field in ("tools", "functions"):
        if row.get(field) and field not in fields.values() and _turns(written):
            notes.append(
                f"'{field}' is not read, so conversations are without it; to read it: "
                f"task.tools_field={field}"
            )
    last = {"messages", "response", "chosen", "rejected"} & written.keys()
    asked = [turn for turn in _turns(written) if turn["role"] in ("user", "assistant")]
    if not last and len(asked) > 1:
        notes.append(
            "a prompt has several turns, of which judges, and rewards that do not name `messages`, "
            "read the last text of the user alone"
        )
    turns = _turns({part: written[part] for part in last})
    if any(is_imitated(t) and not (t["content"].strip() or t.get("tool_calls")) for t in turns):
        notes.append(
            "a turn of the assistant is empty, which teaches to say nothing; to leave it out, give "
            "it weight: 0"
        )
    return notes


def _turns(written: Mapping[str, str | _Messages]) -> _Messages:
    return [turn for part in written.values() if not isinstance(part, str) for turn in part]


def _has_float(value: Any) -> bool:
    """Return whether a value has numbers that have lost their text; JSON files keep it."""
    if isinstance(value, list):
        return any(map(_has_float, value))
    if isinstance(value, Mapping):
        return any(map(_has_float, value.values()))
    return type(value) is float


@dataclass(frozen=True)
class RowSource:
    name: str  # as the user named it
    rows: Iterable[tuple[str, Any]]  # where each row stands, and the row; read once


@option_class
class RowTaskSpec:
    """Options of reading and scoring rows."""

    num_held_out: int = 0
    """Different prompts to keep for evaluation, where no other rows are given for it."""
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
    """Field with the right answer, text or number, for the reward; null if there is none. A name
    with a dot is inside an object: `reward_model.ground_truth`."""
    response_field: str | None = None
    """Field with a response to imitate, a text or messages; null to imitate the answer."""
    chosen_field: str | None = None
    """Field with the better response of a pair, a text or messages; null if there are no pairs."""
    rejected_field: str | None = None
    """Field with the worse response of a pair."""
    label_field: str | None = None
    """Field that says whether the response is a good one, for `algorithm=kto`."""
    text_field: str | None = None
    """Field with a text to imitate as a whole, read instead of a prompt and a response."""
    tokens_field: str | None = None
    """Field with token ids, read instead of texts, for `algorithm=sft`. `labels` that are -100, or
    `completion_mask` and `assistant_masks` that are 0, say which are not imitated."""
    map: str | None = None
    """A function of yours, as `module:function` or `path.py:function`, that every row goes through
    before it is checked: it returns the row with other columns, or None to leave it out."""
    chosen_score_field: str | None = None
    """Field with a number for how good the better response is; null if there are none."""
    rejected_score_field: str | None = None
    """Field with a number for how good the worse response is."""
    pass_rate_field: str | None = None
    """Field with how often the problem is solved, from 0 to 1, for `task.order`; null if it is not
    known."""
    id_field: str | None = None
    """Field with a name of the row, which must not occur twice; null if rows have none."""
    reward: Reference | Sequence[Reference] | Mapping[str, Reference] = "exact_match"
    """`exact_match`, `math_verify`, `instructions`, `code_tests`, or your function, as a callable,
    `module:function` or `path.py:function`; several, as a list or by names, are parts of a sum."""
    reward_weights: Mapping[str, FiniteFloat] | None = None
    """Factors on named parts of the reward; 1 for a part that is left out."""
    reward_columns: tuple[str, ...] = ()
    """Fields to keep for rewards besides those that `reward` names; `*` for all."""
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
        source, first = _peeked(spec, source)
        spec, form = recognized(spec, source.name, first)
        self.spec = spec
        self.task_id = task_id
        self.correct_score = spec.correct_score
        self._name = source.name
        self.reward_weights = spec.reward_weights or {}
        self._columns = _columns(first)
        self.read_as = {"prompt": spec.prompt_field, "answer": spec.answer_field}
        self._verifiers: Mapping[str, VerifierSpec] = {}
        if spec.reward_field is None:
            here, read_as = spec.reward_in_process, self.read_as
            self._verifiers = reward_specs(
                spec.reward, self._columns, read_as=read_as, in_process=here
            )
            names = [name for name in self._verifiers if name]  # one function alone has none
            for part in self.reward_weights if names else ():
                if not any(part == name or part.startswith(f"{name}.") for name in names):
                    raise ConfigError(
                        f"'task.reward_weights': the reward has no part '{part}'"
                        f"{nearest(part, names)}\n    parts are: {', '.join(names)}"
                    )
        rows, self.report = self.read(source)
        self.report.check(spec.max_bad_fraction)
        if form:
            self.report.notes[form] = 0
        if held_out is not None:
            held_out, first = _peeked(spec, held_out)
            if lacks := sorted({*self._kept} - {*_columns(first)}):
                raise ConfigError(
                    f"'{held_out.name}' lacks {', '.join(lacks)}, which the reward reads of "
                    f"'{source.name}'\n    give held-out rows with the same columns"
                )
            evaluated, other = self.read(held_out)
            other.check(spec.max_bad_fraction)
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
        self._rewards = sorted(set(self._rows["reward"])) if spec.reward_field else []
        self.train = range(len(train))
        self.held_out = range(len(train), len(self._rows))

    @property
    def _kept(self) -> tuple[str, ...]:
        """Columns that are kept for rewards."""
        if {*ALL} <= {*self.spec.reward_columns}:
            return self._columns
        own = {name for one in self._verifiers.values() for name in one.columns}
        return tuple(name for name in self._columns if name in own | {*self.spec.reward_columns})

    def read(self, source: RowSource) -> tuple[Dataset, DataReport]:
        """Return the rows of a source that can be used, and a report on all."""
        spec = self.spec
        named = {part: getattr(spec, f"{part}_field") for part in PARTS}
        if spec.messages_field is not None:
            named["prompt"] = None
        asks_answer = any("answer" in (one.asks or ()) for one in self._verifiers.values())
        if not asks_answer and spec.answer_field not in self._columns:
            named["answer"] = None
        if spec.text_field is not None or spec.tokens_field is not None:
            named = {part: named[part] for part in ("text", "tokens", "id", "pass_rate")}
        given = {part: field for part, field in named.items() if field is not None}
        report = DataReport(source.name)
        verifier = spec.reward if isinstance(spec.reward, str) else ""
        return good_rows(source.rows, given, report, verifier, self._kept), report

    @override
    def verifiers(self) -> Mapping[str, VerifierSpec]:
        spec = self.spec
        compares = [one for one in by_name(spec.reward).values() if one in BUILT_IN]
        if (compares or spec.reward_field) and spec.answer_field is None:
            which = f"'{compares[0]}'" if spec.reward_field is None else f"of '{spec.reward_field}'"
            raise ConfigError(
                f"reward {which} compares with the answer, but '{self._name}' is read without one\n"
                "    set answer_field, or another reward; to answer no held-out problems: "
                "evaluation.num_prompts=0"
            )
        if spec.reward_field is None:
            return self._verifiers
        names = self._rewards
        return {
            "": VerifierSpec(
                factory="penstock.workers.data.row_task:make_row_verifier",
                arguments={"rewards": names},
                asks=frozenset({"prompt", "response", "answer"}),
                columns=("reward",),
                in_process=names == ["exact_match"],
            )
        }

    @override
    def column_names(self) -> Sequence[str]:
        return self._columns

    @override
    def columns(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        found: dict[str, Any] = json.loads(row["columns"]) if "columns" in row else {}
        return {**found, "reward": row["reward"]} if "reward" in row else found

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
        # Imported here, as it brings torch, which reading rows does without.
        from ...dataflow.runtime.call_context import current_step

        said: dict[str, Outcome] = {}
        for name, (spec, reward) in self._here.items():
            facts = response_facts(spec, self, index, response)
            (one,) = reward.answers(current_step(), [facts], caught=USER_ERRORS)
            said[name] = Outcome.of(one)
        found = joined(said, self.reward_weights)
        if found.error is not None or found.timed_out:
            raise ValueError(found.error or "it ran out of time")
        return found.score

    @cached_property
    def _here(self) -> dict[str, tuple[VerifierSpec, RewardFunction]]:
        made = self.verifiers()
        if any(one.reads_tokens for one in made.values()):
            raise ConfigError(
                "a reward that reads tokens scores responses of a policy alone\n    take "
                "`response` instead of `response_token_ids`, and no `tokenizer`"
            )
        return {n: (spec, imported(spec.factory)(**spec.arguments)) for n, spec in made.items()}

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        row = self._rows[index]
        call = (row["prompt"], response, row.get("answer"))
        own = {name for one in self._verifiers.values() for name in one.columns}
        if own and "columns" in row:
            named = {n: value for n, value in self.columns(index).items() if n in own}
            call = (*call, named)
        return (*call, row["reward"]) if "reward" in row else call

    @override
    def is_good(self, index: int) -> bool | None:
        return self._rows[index].get("label")

    @override
    def tokens(self, index: int) -> tuple[list[int], list[bool]] | None:
        row = self._rows[index]
        return (row["tokens"], row["trained"]) if "tokens" in row else None

    @override
    def pass_rate(self, index: int) -> float | None:
        given = self._rows[index].get("pass_rate")
        return None if given is None else float(given)

    @override
    def where(self, index: int) -> str:
        return self._rows[index]["where"]


def make_row_verifier(rewards: Sequence[str], **given: Any) -> RewardFunction:
    """A reward that is told which of these built-in ones to use, in a process of its own."""
    for name in rewards:
        warm_up(name, BUILT_IN[name], None)

    def verify(prompt: str, response: str, answer: str | None, reward: str) -> float | None:
        return BUILT_IN[reward](prompt, response, answer)

    return make_reward(verify, columns=("reward",), **given)


def _check_spec(spec: RowTaskSpec, name: str) -> None:
    if (spec.chosen_field is None) != (spec.rejected_field is None):
        given = "chosen_field" if spec.rejected_field is None else "rejected_field"
        raise ConfigError(
            f"'{name}': only {given} is given, but a pair has a better and a worse response\n"
            "    give chosen_field and rejected_field together"
        )
    asks = ("messages_field", "prompt_field", "chosen_field", "text_field", "tokens_field")
    if all(getattr(spec, field) is None for field in asks):
        raise ConfigError(
            f"'{name}': prompt_field is null, and nothing else says what is asked\n"
            "    give prompt_field, messages_field, or chosen_field and rejected_field"
        )
    if spec.label_field is not None and spec.response_field is None:
        raise ConfigError(
            f"'{name}': label_field says whether a response is good, and there is none\n"
            "    give response_field, the field that it is about"
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


def _peeked(spec: RowTaskSpec, source: RowSource) -> tuple[RowSource, list[Any]]:
    """Return the rows as `task.map` makes them, and the first of them."""
    rows = remade(spec.map, source.rows)
    first = list(islice(rows, _PEEKED))
    return RowSource(source.name, chain(first, rows)), [row for _, row in first]


def _columns(rows: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(n) for row in rows if isinstance(row, Mapping) for n in row))


def _held_out_rows(spec: RowTaskSpec, name: str, rows: Dataset) -> list[int]:
    prompts = whole_prompts(rows)
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
    evaluated = set(whole_prompts(held_out))
    own = set(held_out["where"])  # no other rows have these: they begin with the path
    left: list[int] = []
    for index, (prompt, where) in enumerate(zip(whole_prompts(rows), rows["where"], strict=True)):
        if prompt not in evaluated:
            left.append(index)
        elif where not in own:
            report.drop(where, "prompt is held out")
    return rows.select(left)


def whole_prompts(rows: Dataset) -> list[str]:
    """Return what tells problems apart: the conversation, the prompt, or else the whole text."""
    if not len(rows):
        return []
    asked = zip(rows["messages"], rows["prompt"], strict=True)
    prompts = [messages or prompt for messages, prompt in asked]
    if all(prompts):
        return prompts
    rest = rows["tokens"] if "tokens" in rows.column_names else rows["response"]
    return [str(one) for one in rest]
