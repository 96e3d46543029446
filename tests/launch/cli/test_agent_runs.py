"""Runs on conversations, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Penstock

pytestmark = pytest.mark.slow

WORDS = (
    "algorithm=agent_grpo",
    "task=calculator",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "algorithm.before.sft.num_steps=30",
    "algorithm.before.sft.per_step.demos=32",
    "algorithm.num_steps=3",
    "algorithm.per_step.prompts=8",
    "algorithm.cfg.sampling.num_samples=4",
    "executor.num_threads=1",
    "tracker=none",
)


def run(penstock: Penstock, name: str, *words: str) -> tuple[Path, dict[str, Any]]:
    given = (*WORDS, f"runs={name}", *words)
    if "executor=ray_split" in words:  # Ray leaves things behind in its process
        entry = [sys.executable, "-m", "penstock.launch.main", "run", *given]
        subprocess.run(entry, check=True, timeout=280, capture_output=True)
    else:
        said = penstock("run", *given)
        assert said.code == 0, said.err
    (folder,) = Path(name).iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


def test_a_run_that_was_stopped_ends_with_the_same_hash(penstock: Penstock) -> None:
    folder, plain = run(penstock, "plain")
    stopped, _ = run(penstock, "stopped", "algorithm.num_steps=2", "checkpoint_every=1")
    said = penstock("run", f"resume={stopped}", "algorithm.num_steps=3")
    assert said.code == 0, said.err
    again = json.loads((stopped / "summary.json").read_text())
    assert again["weights_sha256"] == plain["weights_sha256"]
    shown = penstock("samples", f"run={folder}", "limit=0").out
    assert "-- turn 0" in shown
    measured = penstock("eval", f"run={folder}")
    assert measured.code == 0, measured.err
    assert "8 held-out problems" in measured.out or "accuracy" in measured.out


@pytest.mark.nightly
def test_on_ray_apart_and_with_a_lag_too(penstock: Penstock) -> None:
    folder, here = run(penstock, "here", "schedule.max_lag=1")
    _, there = run(penstock, "there", "schedule.max_lag=1", "executor=ray_split")
    assert there["weights_sha256"] == here["weights_sha256"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor.converse/token_lag"] for line in lines] == [0, 1, 1]


@pytest.mark.parametrize("word", ["schedule.streaming=4", "schedule.segment_tokens=4"])
def test_what_conversations_cannot_is_refused(penstock: Penstock, word: str) -> None:
    said = penstock("run", *WORDS, word)
    assert said.code == 2
    assert "actor.converse" in said.err


@pytest.mark.parametrize(
    ("task", "length"), [("search", 128), ("table_questions", 512)], ids=["search", "tables"]
)
def test_questions_with_a_tool(penstock: Penstock, task: str, length: int) -> None:
    folder, _ = run(
        penstock,
        "tools",
        *(f"task={task}", f"model.architecture.max_position_embeddings={length}"),
        *("algorithm.before.sft.num_steps=2", "algorithm.before.sft.per_step.demos=8"),
        *("algorithm.num_steps=2", "evaluation.num_prompts=4", "task.expert_calls=1"),
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor.converse/ended/failed"] for line in lines] == [0, 0]
    shares = [[line[name] for name in line if "/ended/" in name] for line in lines]
    assert [sum(share) for share in shares] == pytest.approx([1, 1])


PROGRAM = """
from openai import OpenAI


def answer(base_url, api_key, prompt):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        said = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="gpt-5", messages=said)
        said.append({"role": "assistant", "content": first.choices[0].message.content})
        said.append({"role": "user", "content": "So?"})
        last = client.chat.completions.create(model="gpt-5", messages=said)
        other = [{"role": "user", "content": "Is it odd?"}]
        client.chat.completions.create(model="gpt-5", messages=other)
        return last.choices[0].message.content
"""


def test_a_program_that_uses_the_openai_package_is_trained(
    penstock: Penstock, tmp_path: Path
) -> None:
    pytest.importorskip("openai", reason="comes with the engines")
    (tmp_path / "mine.py").write_text(PROGRAM)
    sizes = [word for word in WORDS if word.startswith(("model.", "algorithm.", "executor.", "tr"))]
    said = penstock(
        *("run", "task=program", "task.task=chain_sum", "task.function=mine:answer"),
        *("task.max_response_tokens=6", "task.max_total_tokens=64", "runs=programs"),
        *("evaluation.num_prompts=4", "algorithm=agent_grpo", *sizes),
    )
    assert said.code == 0, said.err
    (folder,) = (tmp_path / "programs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor.converse/requests"] for line in lines] == [3, 3, 3]
    shown = penstock("samples", f"run={folder}", "limit=0").out
    assert "Is it odd?" in shown  # what was sent, and not the problem alone
    assert "conversation 1, row 0" in shown
    assert "conversation 1, row 1" in shown
    warmed_up = penstock("samples", f"run={folder}", "stage=sft")
    assert warmed_up.code == 2, "an earlier stage has no evaluations"
    assert "not reproducible: the other side of 'chain_sum by a program'" in said.err + said.out


def in_tokyo(hour: int, minute: int) -> dict[str, Any]:
    """A question, and how an expert has a server that knows time zones answer it."""
    zones = {"source_timezone": "UTC", "time": f"{hour:02}:{minute:02}"}
    call = {"name": "convert_time", "arguments": {**zones, "target_timezone": "Asia/Tokyo"}}
    answer = f"{(hour + 9) % 24:02}:{minute:02}"
    response = [
        {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "tool", "content": f'"datetime": "{answer}"'},
        {"role": "assistant", "content": answer},
    ]
    return {"prompt": f"{hour:02}:{minute:02}", "answer": answer, "response": response}


@pytest.mark.nightly
def test_a_server_of_the_package_index_is_trained_with(penstock: Penstock, tmp_path: Path) -> None:
    pytest.importorskip("mcp_server_time", reason="comes with the engines")
    rows = [in_tokyo(hour, minute) for hour in range(24) for minute in range(0, 60, 5)]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    (tmp_path / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clock = f"{{kind: mcp, command: [{sys.executable}, -m, mcp_server_time], deterministic: true}}"
    said = penstock(
        *("run", "task=tools", f"task.tools={{clock: {clock}}}", "runs=times"),
        "task.task={kind: file, path: times.jsonl, response_field: response, num_held_out: 8}",
        *("algorithm=agent_grpo", "algorithm.roles.agent.options.calls=hermes"),
        "task.tells_calls=true",
        *("task.max_response_tokens=160", "task.max_total_tokens=700", "task.max_turns=2"),
        *("model.architecture.max_position_embeddings=704", "evaluation.num_prompts=2"),
        *("model.architecture.hidden_size=64", "model.architecture.intermediate_size=128"),
        *("model.architecture.num_hidden_layers=2", "model.architecture.num_attention_heads=2"),
        *("model.architecture.num_key_value_heads=2", "executor.num_threads=1", "tracker=none"),
        *("algorithm.before.sft.num_steps=60", "algorithm.before.sft.per_step.demos=16"),
        *("algorithm.before.sft.optimizer.lr=5e-3", "algorithm.num_steps=2"),
        *("algorithm.per_step.prompts=2", "algorithm.cfg.sampling.num_samples=4"),
        "algorithm.cfg.sampling.temperature=0.3",
    )
    assert said.code == 0, said.err
    (folder,) = (tmp_path / "times").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["actor.converse/tool_calls"] for line in lines) > 0.5
    errors = sum(line.get("actor.converse/tool_errors", 0.0) for line in lines)
    assert sum(line["actor.converse/tool_calls"] for line in lines) > errors
