"""Forms of rows: what their columns hold, tokens instead of texts, rows that a function remakes.

Data sets of TRL, verl and OpenRLHF are read without a key: their columns say which form they have.
A row may also go through a function of the user's first (`task.map`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ...dataflow.errors import ConfigError, nearest, one_process
from ..isolation.child import USER_ERRORS
from ..verifiers.verifiers import blame, import_user_module
from .task import BadRow, json_type

Spec = TypeVar("Spec")  # options with a field for each part of a row, such as `RowTaskSpec`
Form = dict[str, str | None]  # part of a row -> its column

_PROMPTS = ("prompt", "question", "context_messages", "input")
_RESPONSES = ("completion", "response", "output")
_WITHOUT_ANSWER = ("messages", "response", "chosen", "text", "tokens")
_NAMED = (*_WITHOUT_ANSWER, "prompt", "answer", "rejected")
BOOLEANS = (True, False)  # equal to 1 and 0


def recognized(spec: Spec, name: str, first: Sequence[Any]) -> tuple[Spec, str]:
    """Choose the fields of a form by the columns of the first rows, where no key names one.

    Returns the options, and in words what was chosen by itself; "" if nothing was.

    Raises:
        ConfigError: If the columns are those of several forms.
    """
    rows = [row for row in first if isinstance(row, Mapping)]
    values: dict[str, Any] = {}
    for row in rows:
        values = {**row, **values}
    options: Any = spec
    default = {one.name: one.default for one in fields(options)}
    keys = [f"{part}_field" for part in _NAMED]
    given = [key for key in keys if getattr(options, key) != default[key]]
    if not rows or (not given and {"prompt", "answer"} <= values.keys()):
        return spec, ""
    if given:  # columns that only other forms have are not missed
        found: Form = {}
        without = any(f"{part}_field" in given for part in _WITHOUT_ANSWER)
        if without and "answer_field" not in given and "answer" not in values:
            found["answer_field"] = None
        if "chosen_field" in given and "prompt_field" not in given and "prompt" not in values:
            found["prompt_field"] = None
        return replace(options, **found), ""
    forms = [{f"{part}_field": column for part, column in one.items()} for one in _forms(values)]
    words = [
        " ".join(f"task.{key}={c or 'null'}" for key, c in form.items() if c != default[key])
        for form in forms
    ]
    if len(forms) > 1:
        raise ConfigError(
            f"'{name}' has the columns {', '.join(values)}, which {len(forms)} forms of rows have"
            f"\n    say which to read: {', or '.join(words)}"
        )
    if not forms:
        return spec, ""
    return replace(options, **forms[0]), f"{name}: read by its columns: {words[0]}"


def _forms(values: Mapping[str, Any]) -> list[Form]:
    """Forms that rows of these columns have, by names and an example of their values."""
    if "input_ids" in values:
        return [{"tokens": "input_ids", "answer": None}]
    prompt = next((column for column in _PROMPTS if column in values), None)
    if prompt == "input" and "instruction" in values:  # Alpaca's input is a context
        prompt = None
    response = next((column for column in _RESPONSES if column in values), None)
    forms: list[Form] = []
    if "messages" in values:
        forms.append({"messages": "messages"})
    if {"chosen", "rejected"} <= values.keys():
        # Beside a text, whole conversations hold their prompt: UltraFeedback.
        whole = isinstance(values["chosen"], list) and isinstance(values.get(prompt or ""), str)
        pairs: Form = {"chosen": "chosen", "rejected": "rejected"}
        forms.append({"prompt": None if whole else prompt, **pairs})
    if prompt and response:
        labelled: Form = {"label": "label"} if values.get("label") in BOOLEANS else {}
        forms.append({"prompt": prompt, "response": response, **labelled})
    truth = values.get("reward_model")  # as verl has it
    if prompt and isinstance(truth, Mapping) and truth.get("ground_truth") is not None:
        forms.append({"prompt": prompt, "answer": "reward_model.ground_truth"})
    if "text" in values and prompt is None:
        forms.append({"text": "text"})
    if not forms and prompt:
        forms.append({"prompt": prompt})
    tools = values.get("tools")
    for form in forms:
        form.setdefault("answer", "answer" if "answer" in values and "text" not in form else None)
        if isinstance(tools, list) or (isinstance(tools, str) and tools[:1] == "["):
            form["tools"] = "tools"
    return forms


def at(row: Mapping[str, Any], field: str) -> Any:
    """Return the value of a column, or of `column.key` inside an object; BadRow without one."""
    found: Any = row
    for name in (field,) if field in row else field.split("."):
        if not isinstance(found, Mapping) or name not in found:
            has = ", ".join(map(str, row)) or "nothing"
            raise BadRow(f"missing field '{field}'", f"it has {has}")
        found = found[name]
    return found


def tokenized(row: Mapping[str, Any], field: str) -> tuple[list[int], list[bool]]:
    """Tokens of a row in TRL's columns, and which of them are trained on.

    Those are the ones that `labels` repeats instead of saying -100, or that `completion_mask` and
    `assistant_masks` both have a 1 for; without such columns all but the first.
    """
    columns = ("labels", "completion_mask", "assistant_masks", "attention_mask")
    given = {name: row[name] for name in columns if row.get(name) is not None}
    ids: Any = row.get(field)
    given[field] = ids
    for name, value in given.items():
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            detail = f"expected a list of whole numbers, got {json_type(value)}"
            raise BadRow(f"wrong type of '{name}'", detail)
        if isinstance(ids, list) and len(value) != len(ids):
            detail = f"it has {len(value)} numbers for {len(ids)} tokens"
            raise BadRow(f"wrong length of '{name}'", detail)
    labels = given.pop("labels", ids)
    if any(label not in (own, -100) for label, own in zip(labels, ids, strict=True)):
        raise BadRow("wrong value of 'labels'", "a label is neither its own token nor -100")
    real = given.pop("attention_mask", [1] * len(ids))  # 0 on padding, which is no part of the row
    masks = [given[name] for name in columns if name in given]
    kept = [label != -100 and all(marks) for label, *marks in zip(labels, *masks, strict=True)]
    kept[:1] = [False]  # nothing stands before the first token that could say it
    ids = [token for token, is_real in zip(ids, real, strict=True) if is_real]
    kept = [mark for mark, is_real in zip(kept, real, strict=True) if is_real]
    if not any(kept):
        raise BadRow("nothing to imitate", f"no token of '{field}' is to be trained on")
    return ids, kept


def remade(reference: str | None, rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Rows as `task.map` makes them; those for which it returns None are left out."""
    if reference is None:
        yield from rows
        return
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        place = str(Path(place).expanduser().resolve())
    module = import_user_module(f"'task.map' {reference}", place) if place else None
    make: Any = getattr(module, name, None)
    if not callable(make):
        raise ConfigError(
            f"'task.map': there is no function '{reference}'{nearest(name, vars(module or object))}"
            "\n    give module:function or path.py:function, a function of a row that returns a row"
        )
    for where, row in rows:
        made = row
        if isinstance(row, Mapping):
            try:
                with one_process():
                    made = make(dict(row))
            except USER_ERRORS as error:
                made = BadRow("task.map fails", blame(error))
        if made is not None:
            yield where, made
