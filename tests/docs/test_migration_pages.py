"""The pages for people who come from other trainers name keys and options that exist."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from penstock.algorithms.roles import Sampling
from penstock.launch.main import COMMANDS
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, DOCS = ROOT / "configs", ROOT / "docs"
PAGES = ("from_trl.md", "from_verl.md")

_ROW = re.compile(r"\| `([a-z_.]+)` \| (.*?) \|")
_SPAN = re.compile(r"`([^`]+)`")

OPTIONS = {
    "engine.options": (TorchPolicySpec, FsdpPolicySpec, MegatronPolicySpec),
    "rollout.options": (VllmPolicySpec,),
    "evaluation.sampling": (Sampling,),
}
"""Keys that hold the fields of a class, which no table of keys lists."""
NAMED = ("algorithm.roles", "evaluation.suites")
"""Keys that hold names, each with a section of its own."""


def known_keys() -> set[tuple[str, ...]]:
    """All keys in parts, those of other commands below "penstock"; "*" stands for any name."""
    found: set[str] = {"resume"}
    empty: set[str] = set()
    for part in (DOCS / "configuration_keys.md").read_text().split("\n## ")[1:]:
        title = part.partition("\n")[0].strip("`")
        above = "" if title == "The run" else title.partition(" ")[0]
        for key, default in _ROW.findall(part):
            name = ".".join(filter(None, (above, "*" if above in NAMED else "", key)))
            found.add(name)
            if default == "`{}`":
                empty.add(name)
    for page in (DOCS / "algorithms").glob("*.md"):
        flags = page.read_text().partition("\n## Flags")[2].partition("\n## ")[0]
        found |= {f"algorithm.cfg.{key}" for key, _ in _ROW.findall(flags)}
    for file in (CONFIGS / "algorithm").glob("*.yaml"):
        tables = yaml.safe_load(file.read_text()).get("per_step", {})
        found |= {f"algorithm.per_step.{table}" for table in tables}
    for name, classes in OPTIONS.items():
        found |= {f"{name}.{field.name}" for kind in classes for field in fields(kind)}
    holding = {key.rpartition(".")[0] for key in found}
    found |= holding | {f"{name}.*" for name in empty - holding}
    return {tuple(key.split(".")) for key in found}


def second_column(page: str) -> list[str]:
    """What the tables of a page say of Penstock, after the one that compares behavior."""
    text = (DOCS / page).read_text().partition("\n## ")[2]
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| ")]
    return [row[2].strip() for row in rows if row[2].strip() != "Penstock"]


KNOWN = known_keys()


def problem(word: str) -> str | None:
    """What is wrong with `key`, `key=value` or `group=option`; None if it exists."""
    key, _, value = word.removeprefix("~").partition("=")
    folder = CONFIGS / key
    if folder.is_dir() and value and not value.isupper():
        return None if (folder / f"{value}.yaml").exists() else f"{key} has no option {value}"
    parts = key.split(".")
    for known in KNOWN:
        same = len(known) == len(parts)
        if same and all(a in (b, "*") for a, b in zip(known, parts, strict=True)):
            return None
    return f"no key {key}"


@pytest.mark.parametrize("page", PAGES)
def test_every_key_of_a_table_exists(page: str) -> None:
    cells = second_column(page)
    spans = list(chain.from_iterable(_SPAN.findall(cell) for cell in cells))
    words: list[str] = []
    for span in spans:
        if span.startswith("penstock "):
            _, command, *keys = span.split()
            assert command in COMMANDS
            words += [f"penstock.{key}" for key in keys]
        else:
            words += span.split()
    assert [found for word in words if (found := problem(word))] == []
    assert len(spans) > 80


@pytest.mark.parametrize("page", PAGES)
def test_a_cell_without_a_key_says_why(page: str) -> None:
    told = {cell for cell in second_column(page) if not _SPAN.search(cell)}
    assert told == {"not there", "decided by the plan"} or told == {"not there"}


def test_a_key_that_does_not_exist_is_found() -> None:
    assert problem("algorithm.cfg.loss.eps_high") is None
    assert problem("algorithm.cfg.loss.epsilon") == "no key algorithm.cfg.loss.epsilon"
    assert problem("engine.options.micro_batch_size") == "no key engine.options.micro_batch_size"
    assert problem("algorithm=grppo") == "algorithm has no option grppo"


# --- the other side: every argument of theirs has a row

ARGUMENTS = json.loads((Path(__file__).parent / "arguments.json").read_text())
"""Trainer, configuration or section -> names of its arguments."""

SAME_AS = {
    "actor_rollout_ref.ref.": "actor_rollout_ref.actor.",
    "critic.fsdp.": "actor_rollout_ref.actor.fsdp_config.",
    "critic.model.": "actor_rollout_ref.model.",
    "critic.": "actor_rollout_ref.actor.",
    "reward.reward_model.rollout.": "actor_rollout_ref.rollout.",
    "reward_model.rollout.": "actor_rollout_ref.rollout.",
    "reward.reward_model.": "reward_model.",
    "reward.": "",
}
"""Sections of verl whose keys are explained once, as the page's introduction says."""


def first_column(page: str) -> set[str]:
    """What the tables of a page say of the other trainer, also below their section's name."""
    sections: list[str] = []
    found: set[str] = set()
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("## "):
            sections = _SPAN.findall(line)
        elif line.startswith("| "):
            for span in _SPAN.findall(re.split(r"(?<!\\)\|", line)[1]):
                name = span.partition("=")[0]
                found |= {name, *(f"{section}.{name}" for section in sections)}
    return found


def test_every_argument_of_trl_has_a_row() -> None:
    named = {word for span in first_column("from_trl.md") for word in re.findall(r"\w+", span)}
    every = {name for names in ARGUMENTS["trl 1.16.0"].values() for name in names}
    assert every - named == set()
    assert len(every) > 200


def test_every_key_of_verl_has_a_row() -> None:
    named = first_column("from_verl.md")

    def has_row(key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[:end]) in named for end in range(1, len(parts) + 1))

    keys = [f"{at}.{name}" for at, names in ARGUMENTS["verl 0.9.1"].items() for name in names]
    same = {
        key: [key, *(b + key[len(a) :] for a, b in SAME_AS.items() if key.startswith(a))]
        for key in keys
    }
    assert [key for key, those in same.items() if not any(map(has_row, those))] == []
    assert len(keys) > 600


def test_the_list_is_that_of_the_installed_trl() -> None:
    trl: Any = pytest.importorskip("trl", minversion="1.16.0")
    from transformers import TrainingArguments

    shared = {field.name for field in fields(TrainingArguments)}
    for name, known in ARGUMENTS["trl 1.16.0"].items():
        if name.endswith("Trainer"):
            there = set(inspect.signature(getattr(trl, name).__init__).parameters) - {"self"}
        elif name == "TrainingArguments":
            there = shared
        else:
            there = {f.name for f in fields(getattr(trl, name)) if f.init} - shared
        assert there == set(known), name
