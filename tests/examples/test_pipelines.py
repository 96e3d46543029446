"""The pipelines run from nothing, data included, with a tiny chat model and few requests."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.workers.data.chat import ChatOptions
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sources import DemonstrationSource
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec

from ..workers.data.chat_tokenizers import CHATML, chat_folder, chat_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = {"sft": 3, "reward_modelling": 2, "dpo": 4, "ppo": 5}
SIZES = (
    "model.dtype=float32",  # in which small steps show
    "task.max_response_tokens=400",  # random bytes are no UTF-8, and their text is longer
    "algorithm.cfg.sampling.max_new_tokens=8",
    "algorithm.cfg.sampling.num_samples=2",
    "algorithm.per_step.prompts=2",
    f"algorithm.num_steps={STEPS['ppo']}",
    "algorithm.before.sft.per_step.demos=2",
    f"algorithm.before.sft.num_steps={STEPS['sft']}",
    "algorithm.before.dpo.per_step.pairs=2",
    f"algorithm.before.dpo.num_steps={STEPS['dpo']}",
    "algorithm.before.reward_modelling.per_step.pairs=2",
    f"algorithm.before.reward_modelling.num_steps={STEPS['reward_modelling']}",
    "algorithm.before.reward_modelling.optimizer.warmup_calls=0",
)


@pytest.fixture
def pipelines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[ModuleType]:
    """The example's module; it and what it imports from there are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    before = set(sys.modules)
    yield import_module("pipelines")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of bytes with SmolLM2's chat template, from random weights."""
    folder = tmp_path / "model"
    tokenizer = chat_tokenizer(folder, CHATML)
    spec = ModelSpec(
        architecture={
            "model_type": "llama",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "eos_token_id": tokenizer.eos_id,
        }
    )
    policy = TorchPolicySpec(model=spec, end_ids=tokenizer.end.ids)
    policy.build(WorkerContext("actor")).save_pretrained(folder)
    chat_folder(folder, CHATML)
    return folder


def command(monkeypatch: pytest.MonkeyPatch, pipeline: str, model: Path, *words: str) -> None:
    sizes = ("--prompts=40", "--held-out=40", "--samples=24", "--evaluated=8", f"--model={model}")
    monkeypatch.setattr(sys, "argv", ["pipelines.py", pipeline, *sizes, *SIZES, *words])


@pytest.mark.slow
def test_tulu_3_s_stages_follow_each_other_from_data_made_here(
    pipelines: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(monkeypatch, "tulu3", model)
    pipelines.main()
    (run,) = Path("runs/pipelines/tulu3").glob("*-seed0")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stages"] == ["sft", "reward_modelling", "dpo", "ppo"]
    homes = {name: run / "stages" / name for name in STEPS} | {"ppo": run}
    for name, home in homes.items():
        assert len(read_metrics(home / "metrics.jsonl")) == STEPS[name]
    trained = [homes[name] / "models" / "actor" for name in ("sft", "dpo", "ppo")]
    weights = {(f / "model.safetensors").read_bytes() for f in (model, *trained)}
    assert len(weights) == 4
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("tulu3: accuracy on 8"))
    said = [line.split()[0] for line in lines[first + 1 :]]
    assert said == ["before", "sft", "dpo", "ppo", "in", "reward"]


@pytest.mark.usefixtures("pipelines")
def test_what_a_pair_is_made_of() -> None:
    feedback = import_module("feedback")
    right, wrong = feedback.Answer("good", True, -1.0), feedback.Answer("bad", False, -3.0)
    unread = feedback.Answer("unread", False, None)
    rng = random.Random(0)
    assert feedback.preferences([wrong, right, unread], rng) == [
        {"demonstration": "good", "chosen": "good", "rejected": "bad"}
    ]
    assert feedback.preferences([wrong, unread], rng) == []
    assert feedback.judged_pairs([wrong, right, unread], rng) == [(right, wrong)]
    assert feedback.judged_pairs([wrong, unread], rng) == []
    assert feedback.agreements([wrong, right, unread]) == [1.0]


@pytest.mark.usefixtures("pipelines")
def test_normalized_scores_of_demonstrations_are_0_on_average(model: Path, tmp_path: Path) -> None:
    recipe = import_module("normalized_reward").NormalizedReward
    rows = tmp_path / "rows.jsonl"
    texts = ("a cat", "two dogs!", "3")
    rows.write_text("".join(json.dumps({"prompt": t, "answer": t[::-1]}) + "\n" for t in texts))
    task = FileTaskSpec(path=str(rows))
    tokenizer = TokenizerSpec(kind="folder", folder=str(model))
    scores = {}
    for chat in (False, True):
        spec = recipe(model=ModelSpec(folder=str(model)), task=task, tokenizer=tokenizer, chat=chat)
        reward = spec.build(WorkerContext("reward"))
        options = ChatOptions(wrap=chat)
        source = DemonstrationSource(
            task.build(), tokenizer.build(), batch_size=3, seed=1, chat=options
        )
        demos = source.batch(0)
        scores[chat] = reward.score(demos.tokens, demos.mask, torch.zeros(3).long())
        assert abs(float(scores[chat].mean())) < 1e-5
        assert float(scores[chat].std()) > 0
        assert reward.metrics["reward/demonstration_mean"].value == pytest.approx(reward.mean)
    assert scores[True].tolist() != scores[False].tolist()
