"""The registry of task kinds, and helpers over any task."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.file_task import FileTaskSpec
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.task import register_task, task_kinds, task_spec


@dataclass(frozen=True, kw_only=True)
class EchoTaskSpec:
    words: int = 3


def test_kinds_make_specs() -> None:
    assert task_spec("reasoning_gym", name="gcd", seed=3) == ReasoningTaskSpec(name="gcd", seed=3)
    assert task_spec("file", path="a.jsonl") == FileTaskSpec(path="a.jsonl")


def test_a_kind_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "echo_task", sys.modules[__name__])
    monkeypatch.setattr("penstock.workers.data.task._KINDS", {})
    register_task("echo", "echo_task:EchoTaskSpec")
    assert task_kinds() == ("echo",)
    assert task_spec("echo", words=5) == EchoTaskSpec(words=5)


def test_errors() -> None:
    with pytest.raises(ConfigError) as kind:
        task_spec("reasoning_gim")
    assert str(kind.value) == (
        "there is no task kind 'reasoning_gim'; did you mean 'reasoning_gym'?\n"
        "    task kinds are: board_game, file, gymnasium, library_game, reasoning_gym"
    )
    with pytest.raises(ConfigError) as option:
        task_spec("reasoning_gym", nam="gcd")
    assert str(option.value) == (
        "a 'reasoning_gym' task has no option 'nam'; did you mean 'name'?\n"
        "    its options are: name, config, seed, num_train, num_held_out, prompt_template, "
        "strip_spaces, allow_eval"
    )
    with pytest.raises(ConfigError, match="a 'file' task cannot be made: .*'path'"):
        task_spec("file")


def test_importing_is_free() -> None:
    code = (
        "import sys, penstock.workers.data.task, penstock.workers.data.reasoning_task, "
        "penstock.workers.verifiers.verifiers, penstock.workers.data.rows_file\n"
        "print([m for m in ('torch', 'reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])\n"
        "import penstock.workers.data.file_task, penstock.workers.rewards.rule_reward\n"
        "print([m for m in ('reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n[]\n", done.stderr
