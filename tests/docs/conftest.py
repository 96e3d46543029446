"""A folder in which the commands of the pages find what the pages call the reader's own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
from datasets import Dataset
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.main import main
from penstock.workers.data.reasoning_task import ReasoningTask, ReasoningTaskSpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec

from ..workers.data.chat_tokenizers import CHATML, chat_folder, chat_tokenizer
from .pages import DOCS, ROOT, blocks

MODULES = Path(__file__).parent / "reader"
THE_PLAN = "the-plan.json"
NUM_ROWS = 1200
NUM_TRAIN = 600


DATA_SET = """\
---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
"""What says that a folder is a data set with a configuration and two splits."""


def _rows(folder: Path) -> None:
    """Files of rows, as docs/data.md has them."""
    sums = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(NUM_ROWS)]
    chats = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        for row in sums
    ]
    for name, rows in {
        "problems.jsonl": sums,
        "chats.jsonl": [{"messages": messages} for messages in chats],
        "pairs.jsonl": [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "0"} for row in sums
        ],
        "labelled.jsonl": [
            {"prompt": row["prompt"], "completion": row["answer"], "label": n % 2 == 0}
            for n, row in enumerate(sums)
        ],
        "rated.jsonl": [{**row, "rate": n / NUM_ROWS} for n, row in enumerate(sums)],
    }.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    verl = [
        {"prompt": chat[:1], "reward_model": {"style": "rule", "ground_truth": chat[1]["content"]}}
        for chat in chats
    ]
    Dataset.from_list(verl).to_parquet(folder / "verl.parquet")
    (folder / "sums").mkdir()
    (folder / "sums" / "README.md").write_text(DATA_SET)
    for name in ("train", "test"):
        rows = [{**row, "prompt": f"{name} {row['prompt']}"} for row in sums]
        asked = ({"question": row["prompt"], **row} for row in rows)
        text = "".join(json.dumps(row) + "\n" for row in asked)
        (folder / "sums" / f"{name}.jsonl").write_text(text)
        Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")


def chat_model(folder: Path) -> None:
    """A chat model of a few thousand weights."""
    tokenizer = chat_tokenizer(folder, CHATML)
    spec = ModelSpec(
        architecture={
            "model_type": "qwen2",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "eos_token_id": tokenizer.eos_id,
        }
    )
    policy = TorchPolicySpec(model=spec, end_ids=tokenizer.end.ids)
    policy.build(WorkerContext("actor")).save_pretrained(folder)
    chat_folder(folder, CHATML)


def _modules(folder: Path) -> None:
    """The reader's modules, the examples, and what the pages say to put in a file."""
    for path in (*MODULES.glob("*.py"), *(ROOT / "examples").glob("*.py")):
        shutil.copy(path, folder)
    for page in DOCS.glob("*.md"):
        for block in blocks(page):
            text = "\n".join(block.lines)
            if named := re.fullmatch(r"# (\w+\.(?:py|yaml))", block.lines[0]):
                (folder / named[1]).write_text(text)
            elif "gym.register(" in text:
                (folder / "corridor.py").write_text(text)


PLAN = [
    *("plan", "algorithm=grpo", "model=tiny", "engine=torch", "rollout=torch", "cluster=cpu"),
    *("cluster.devices_per_node=1", "workload.prompt=null", "workload.response=null"),
    f"output={THE_PLAN}",
]


@pytest.fixture(scope="module")
def few_problems() -> Iterator[None]:
    """Tasks of reasoning-gym with fewer problems than they are shipped with, each made once."""
    made: dict[str, ReasoningTask] = {}

    def build(spec: ReasoningTaskSpec) -> ReasoningTask:
        key = repr(spec)
        if key not in made:
            made[key] = ReasoningTask(replace(spec, num_train=min(spec.num_train, NUM_TRAIN)))
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReasoningTaskSpec, "build", build)
        yield


@pytest.fixture(scope="module")
def reader(few_problems: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of somebody who has done what the pages say.

    It is on the path of modules until the end, when those that came from it are forgotten, and the
    environments that these registered.
    """
    del few_problems
    folder = tmp_path_factory.mktemp("reader")
    _rows(folder)
    chat_model(folder / "my-model")
    _modules(folder)
    (folder / "token").write_text("0123456789abcdef" * 4)  # as `openssl rand -hex 32` writes it
    before, environments = set(sys.modules), set(gymnasium.registry)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        assert main(PLAN) == 0
        yield folder
    for name in set(gymnasium.registry) - environments:
        del gymnasium.registry[name]
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def page(reader: Path, request: pytest.FixtureRequest) -> Path:
    """The folder for a command of a page: what another page's commands planned is not there."""
    name = request.node.callspec.params["command"].where.partition(":")[0]
    at = reader / "page"
    if not at.exists() or at.read_text() != name:
        at.write_text(name)
        shutil.copy(reader / THE_PLAN, reader / "plan.json")
    return reader
