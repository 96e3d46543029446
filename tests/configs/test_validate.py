"""Golden messages of the configuration's boundary, and what it merges."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from penstock.algorithms.losses.actor_critic import ActorLoss
from penstock.configs.schema import RunConfig
from penstock.configs.validate import RENAMED, check_renamed, fields_of, key_docs, validated
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.cli.key_reference import key_reference

BASE: dict[str, Any] = {
    "algorithm": {"step": "a:b", "num_steps": 3, "per_step": {"prompts": 3}},
    "model": {"architecture": {"model_type": "qwen2"}, "tokenizer": "task"},
    "task": {"kind": "file", "path": "x"},
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part with defaults of its own."""

    size: int = 1
    """How big."""
    shape: Literal["round", "square"] = "round"
    """What it looks like."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole that wants its part otherwise."""

    part: Part = Part(size=5)
    """Its part."""
    other: Part | None = None
    """Another one, perhaps."""
    weights: dict[str, float] = None  # type: ignore[assignment]
    """A number by name."""

    def __post_init__(self) -> None:
        if self.part.size > 9:
            raise ValueError(f"part.size is {self.part.size}; make it 9 or less")


def refusal(data: dict[str, Any], kind: type = RunConfig, at: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        validated(kind, data, at)
    return str(caught.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    inner = data
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return data


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert refusal(changed("schedule.max_lagg", 1)) == (
        "there is no key 'schedule.max_lagg'; did you mean 'schedule.max_lag'?\n"
        "    schedule has: max_lag, order, streaming, segment_tokens, in_flight, deadline_s"
    )


def test_an_unknown_key_is_found_however_deep_it_stands() -> None:
    data = changed("algorithm.before", {"sft": {"optimizer": {"lrr": 1.0}}})
    assert refusal(data).startswith(
        "there is no key 'algorithm.before.sft.optimizer.lrr'; did you mean "
        "'algorithm.before.sft.optimizer.lr'?"
    )


def test_a_renamed_key_is_refused_with_its_new_name() -> None:
    data = changed("task.normalisation", {"rewards": True})
    assert refusal(data) == (
        "'task.normalisation' is now 'task.normalization'\n    rename it where it is written: on "
        "the command line, in a YAML file, or in config.yaml of a run that is resumed"
    )
    data |= {"agreement": {"every": 2}}
    data["algorithm"]["before"] = {"a": {"cfg": {"loss": {"normalise_advantages": False}}}}
    assert refusal(data).splitlines()[:3] == [
        "'algorithm.before.a.cfg.loss.normalise_advantages' is now "
        "'algorithm.before.a.cfg.loss.normalize_advantages'",
        "'task.normalisation' is now 'task.normalization'",
        "'agreement' is now 'mismatch'",
    ]
    data = changed("algorithm.roles", {"env": {"options": {"ring": 2}}})
    assert "'algorithm.roles.env.options.ring' is now 'algorithm.roles.env.opt" in refusal(data)
    old = {"options": {"verifier_options": {"allow_unconfined": True}}}
    data = changed("algorithm.roles", {"reward": old})
    assert "options.allow_unconfined' is now 'algorithm.roles.reward.opt" in refusal(data)
    check_renamed({"algorithm": {"roles": {"ring": {"worker": "env"}}}})  # a role may be called so
    assert "'model.architecture.memory' is now 'model.architecture.recurrent_units'" in refusal(
        changed("model", {"architecture": {"memory": 8}})
    )
    given = {"loss": {"normalise_advantages": False}}
    assert "now 'algorithm.cfg.loss.normalize_" in refusal(given, Whole, "algorithm.cfg")


@pytest.mark.slow
def test_no_key_is_renamed_to_one_that_is_not_there() -> None:
    keys = {row.split("`")[1] for row in key_reference().splitlines() if row.startswith("| `")}
    # Of an algorithm whose keys are on its own page, and of a verifier.
    keys |= {"normalize_advantages", "minimum"}
    assert {new.rpartition(".")[2] for new in RENAMED.values()} <= keys


def test_a_wrong_type_is_explained() -> None:
    assert refusal(changed("seed", "three")) == (
        "'seed': expected an integer, got the text 'three'\n"
        "    seed: All randomness of the run derives from it."
    )


@pytest.mark.parametrize(
    ("path", "value", "first_line"),
    [
        ("seed", True, "'seed': expected an integer, got true"),
        ("seed", 1.5, "'seed': expected an integer, got 1.5"),
        ("seed", -1, "'seed': expected at least 0, got -1"),
        ("seed", None, "'seed': expected an integer, got null"),
        ("runs", 3, "'runs': expected a text, got 3"),
        ("schedule", 3, "'schedule': expected a mapping of keys, got 3"),
        ("executor.kind", "rai", "'executor.kind': 'rai' is no executor; did you mean 'ray'?"),
        ("algorithm.optimizer.betas", [0.9, "x"],
         "'algorithm.optimizer.betas.1': expected a number, got the text 'x'"),
        ("schedule.max_lag", -1, "'schedule': Schedule.max_lag must be 0 to 1000, got -1"),
        ("model.architecture", {"a": 1}, "'model.architecture': needs a 'model_type', such as"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(path: str, value: Any, first_line: str) -> None:
    assert refusal(changed(path, value)).splitlines()[0].startswith(first_line)


def test_a_missing_key_is_named_with_its_meaning() -> None:
    data = copy.deepcopy(BASE)
    del data["algorithm"]["num_steps"]
    assert refusal(data) == "'algorithm.num_steps' is missing\n    Steps to take."


def test_every_fault_is_listed() -> None:
    data = changed("seed", "x")
    data["runs"] = 3
    assert refusal(data).count("expected") == 2


def test_an_integer_serves_where_a_number_is_wanted_and_nothing_else_is_converted() -> None:
    made = validated(RunConfig, changed("task.max_bad_fraction", 1))
    assert made.task.max_bad_fraction == 1.0
    assert "expected a number, got the text '0.5'" in refusal(
        changed("task.max_bad_fraction", "0.5")
    )


def test_a_partial_part_keeps_the_defaults_its_owner_gave_it() -> None:
    assert validated(Whole, {"part": {"shape": "square"}}).part == Part(size=5, shape="square")
    assert validated(Whole, {"other": {"shape": "square"}}).other == Part(size=1, shape="square")


def test_a_free_mapping_is_replaced_and_not_merged() -> None:
    assert validated(RunConfig, changed("executor.groups", {"a": 2})).executor.groups == {"a": 2}


def test_a_refusal_of_the_owner_itself_is_passed_on() -> None:
    said = refusal({"part": {"size": 12}}, Whole, "algorithm.cfg")
    assert said == "'algorithm.cfg': part.size is 12; make it 9 or less"


def test_every_key_has_a_doc() -> None:
    def undocumented(kind: Any) -> list[str]:
        known = fields_of(kind) or {}
        return [f"{kind.__name__}.{key}" for key in known if not key_docs(kind).get(key)] + [
            name for inner in known.values() for name in undocumented(inner)
        ]

    assert undocumented(RunConfig) == []


def test_docs_are_read_from_the_source_of_any_class() -> None:
    assert key_docs(Part) == {"size": "How big.", "shape": "What it looks like."}


def test_of_several_members_the_one_whose_key_is_given_is_meant() -> None:
    """A value that does not fit it must not make another of it, which would leave the key out."""
    with pytest.raises(ConfigError, match="'cfg.policy.eps_low': expected a number, got the text"):
        validated(ActorLoss, {"policy": {"eps_low": "a"}}, "cfg")
    with pytest.raises(ConfigError, match="'cfg.policy.ratio_level': expected one of 'token'"):
        validated(ActorLoss, {"policy": {"ratio_level": 3}}, "cfg")


ELSEWHERE = {
    "num_steps=3": "'num_steps'; did you mean 'algorithm.num_steps'?",
    "num_step=3": "'num_step'; did you mean 'algorithm.num_steps'?",
    "lora.rank=4": "'lora'; did you mean 'model.lora.rank'?",
    "model.rank=4": "'model.rank'; did you mean 'model.lora.rank'?",
    "algorithm.lr=1e-3": "'algorithm.lr'; did you mean 'algorithm.optimizer.lr'?",
    "learning_rate=1": "'learning_rate'; did you mean 'algorithm.optimizer.lr'?",
    "batch_size=1": "'batch_size'; did you mean 'algorithm.per_step'?",
    "max_new_tokens=3": "'max_new_tokens'; did you mean 'algorithm.cfg.sampling.max_new_tokens'?",
    "sft.num_steps=3": "'sft'; did you mean 'algorithm.before.sft.num_steps'?",
    "sampling.stop=[x]": "'sampling'; did you mean 'algorithm.cfg.sampling.stop'?",
    "algorithm.eps_low=1": "'algorithm.eps_low'; did you mean 'algorithm.cfg.loss.eps_low'?",
    "algorithm.eps_lo=1": "'algorithm.eps_lo'; did you mean 'algorithm.cfg.loss.eps_low'?",
    "epochs=2": "'epochs'; did you mean 'algorithm.cfg.epochs'?",
    "seeds=1": "'seeds'; did you mean 'seed'?",
    "bogus=1": "'bogus'",
    "executor.bogus=1": "'executor.bogus'",
}


@pytest.mark.parametrize("word", ELSEWHERE)
def test_a_key_of_another_section_is_found(word: str) -> None:
    made = compose("run", [word, "algorithm.cfg.sampling.max_new_tokens=4"][: 1 + ("max" in word)])
    del made["resume"]
    with pytest.raises(ConfigError) as raised:
        validated(RunConfig, made)
    assert str(raised.value).splitlines()[0] == f"there is no key {ELSEWHERE[word]}"


def test_a_text_that_no_path_can_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^'runs': a text holds the character 0"):
        validated(RunConfig, {"runs": "a\0b"})
