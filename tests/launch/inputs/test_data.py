"""The kinds of task, and one of one's own in a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from penstock.configs.schema import ModelConfig, TaskConfig
from penstock.dataflow.errors import ConfigError
from penstock.launch.inputs.data import TASKS, load_data, task_spec_of
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.row_sources import FileTaskSpec

from ...workers.data.chat_tokenizers import CHATML, chat_folder
from ..conftest import Penstock


def section(kind: str, **options: Any) -> TaskConfig:
    return TaskConfig.model_validate({"kind": kind, **options})


def refusal(kind: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        task_spec_of(section(kind, **options))
    return str(caught.value)


def test_kinds_make_specs() -> None:
    made = task_spec_of(section("reasoning_gym", name="gcd", seed=3))
    assert made == ReasoningTaskSpec(name="gcd", seed=3)
    made = task_spec_of(section("file", path="a.jsonl", max_bad_fraction=0.5))
    assert made == FileTaskSpec(path="a.jsonl", max_bad_fraction=0.5)


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_is_one(kind: str) -> None:
    assert callable(TASKS[kind].build)


def test_what_is_no_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("reasoning_gim") == (
        "'task.kind': there is no task kind 'reasoning_gim'; did you mean 'reasoning_gym'?\n"
        "    task kinds are: reasoning_gym, file, hf, instructions, calculator, maze, "
        "twenty_questions, search, table_questions, gymnasium_text, verifiers, openenv, tools, "
        "program, mixture, gymnasium, board_game, library_game, or module:name for your own"
    )
    assert refusal("reasoning_gym", nam="gcd") == (
        "a 'reasoning_gym' task has no option 'nam'; did you mean 'name'?\n"
        "    its options are: name, config, seed, num_train, num_held_out, prompt_template, "
        "strip_spaces, allow_eval"
    )
    assert refusal("file", path="p", name="gcd").startswith(
        "a 'file' task has no option 'name'; 'task.kind' alone keeps the keys of task=chain_sum"
    )
    assert refusal("file").startswith("'task.path' is missing\n    ")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert refusal("parities:NO_KIND") == (
        "'task.kind': 'parities:NO_KIND' is no kind of task\n    give a dataclass whose fields are "
        "the task's options, with a method build() that returns a Task"
    )
    assert refusal("parities:ParitySpec", num_train=0) == (
        "'task': num_train is 0; expected at least 1"
    )


@pytest.mark.slow
def test_one_of_ones_own_is_trained_on(penstock: Penstock, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("parities.py"), tmp_path)
    words = (
        *("task=own", "task.kind=parities:ParitySpec", "task.num_train=20", "tracker=none"),
        *("model.architecture.hidden_size=16", "model.architecture.intermediate_size=32"),
        *("model.architecture.num_hidden_layers=1", "model.architecture.num_attention_heads=2"),
        *("model.architecture.num_key_value_heads=1", "evaluation.num_prompts=8"),
        *("algorithm.num_steps=1", "algorithm.per_step.prompts=4"),
        *("algorithm.before.sft.num_steps=2", "algorithm.before.sft.per_step.demos=8"),
    )
    said = penstock("run", *words)
    assert said.code == 0, said.err
    (run,) = Path("runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["task"], summary["num_held_out"]) == ("parity", 8)
    assert "num_train: 20" in (run / "config.yaml").read_text()


@pytest.mark.slow
def test_conversations_are_trained_on_and_shown_as_such(penstock: Penstock, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", CHATML)
    words = (
        *("task=instructions", "task.num_train=20", "task.max_response_tokens=8", "tracker=none"),
        f"model.tokenizer={{kind:folder,folder:{folder}}}",
        *("model.architecture.hidden_size=16", "model.architecture.intermediate_size=32"),
        *("model.architecture.num_hidden_layers=1", "model.architecture.num_attention_heads=2"),
        "model.architecture.num_key_value_heads=1",
        "model.architecture.max_position_embeddings=512",
        *("evaluation.num_prompts=4", "evaluation.num_examples=1", "algorithm=grpo"),
        *("algorithm.num_steps=1", "algorithm.per_step.prompts=2", "~algorithm.before"),
    )
    said = penstock("run", *words)
    assert said.code == 0, said.err
    (run,) = Path("runs").iterdir()
    example, _ = json.loads((run / "summary.json").read_text())["examples_after"]  # of two suites
    (message,) = example["messages"]
    assert message["role"] == "user"
    assert f"user: {message['content']!r}\n    assistant before training: " in said.err
    assert "<|im_start|>" not in said.err.split("assistant before training: ")[0]


@pytest.mark.parametrize("tokenizer", ["task", {"kind": "byte"}])
def test_a_task_brings_a_chat_template_for_a_tokenizer_without_one(tokenizer: Any) -> None:
    given = section("calculator", num_train=4, num_held_out=2)
    data = load_data(given, ModelConfig.model_validate({"tokenizer": tokenizer}))
    assert data.tokenizer.has_template
    ids, other = data.prompts.encode([0, 1])
    assert isinstance(ids, list)
    assert isinstance(other, list)
    assert data.tokenizer.decode(ids) == f"{data.task.prompt_text(0)}\n"


def test_a_chat_template_of_ones_own_goes_before_that_of_the_task() -> None:
    own = "{% for m in messages %}<{{ m.content }}>{{ eos_token }}{% endfor %}"
    given = section(
        "calculator", num_train=4, num_held_out=2, chat_template_kwargs={"chat_template": own}
    )
    data = load_data(given, ModelConfig.model_validate({"tokenizer": {"kind": "char"}}))
    (ids,) = data.prompts.encode([0])
    assert isinstance(ids, list)
    assert data.tokenizer.decode(ids) == f"<{data.task.prompt_text(0)}><eos>"
    assert ids[-1] == data.tokenizer.eos_id


def test_a_tokenizer_of_a_folder_keeps_its_chat_template(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "tokenizer", CHATML)
    chosen = {"tokenizer": {"kind": "folder", "folder": str(folder)}}
    data = load_data(section("calculator", num_train=4), ModelConfig.model_validate(chosen))
    (ids,) = data.prompts.encode([0])
    assert isinstance(ids, list)
    assert "<|im_start|>user" in data.tokenizer.decode(ids)


def test_keys_of_prompts_are_refused_for_environments() -> None:
    given = section("gymnasium", id="CartPole-v1", order="priority")
    with pytest.raises(ConfigError) as caught:
        load_data(given, ModelConfig(tokenizer="task"))
    assert str(caught.value) == (
        "'task.order' is for prompts, and an environment or a game has none\n"
        "    leave it out, or choose a task with prompts"
    )
