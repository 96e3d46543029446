"""Folders in which commands succeed: made once, then copied for each case of `fuzz_surfaces.py`.

What is made here is made by commands of the code that is tried, so it has the forms of that code:
a model's folder with a chat template, an adapter of peft's form with its run, finished and stopped
runs, an archive, configurations of one's own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzz_case import Case, Commands
from fuzz_keys import small_words
from safetensors.torch import save_file

_NUM_ROWS = 32
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADAPTER = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": 2,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}
"""The adapter_config.json of the ground's adapter."""


@dataclass(frozen=True)
class Ground:
    """Folders that cases start from, and the weights that runs in them come to.

    Attributes:
        model: A folder with `m` (a model), `d.jsonl` and `chat.jsonl` (rows of texts and messages).
        adapter: The same with `a` (an adapter of `m`).
        runs: A folder with `runs/one`, `runs/two` (finished), `runs/stopped`, and `one.tar`.
        plain: Weights that a run from the adapter comes to when its alpha is `ADAPTER`'s.
        default: Weights that it comes to with another alpha; "" if that is refused.
    """

    model: Path
    adapter: Path
    runs: Path
    plain: str
    default: str

    def text(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the model's folder."""
        return json.loads((self.model / "m" / name).read_text())


def model_words(*words: str) -> tuple[str, ...]:
    """Return the words of a run of one GRPO step from the folder's model, on its rows."""
    small = small_words("grpo")
    kept = [w for w in small if "before" not in w and not w.startswith(("model.", "task."))]
    return (
        *("run", *kept, "~algorithm.before", "algorithm.roles.actor.start=model", "model=folder"),
        *("model.folder=m", "task=file", "task.path=d.jsonl", "task.max_response_tokens=4"),
        *("task.reward=reward.py:varied", "task.reward_in_process=true", *words),
    )


def chat_words(*words: str) -> tuple[str, ...]:
    """Return the words of `model_words` with rows of messages."""
    return model_words("task.path=chat.jsonl", *words)


def adapter_words(*words: str) -> tuple[str, ...]:
    """Return the words of `model_words` for a run that goes on from the adapter."""
    return model_words("model.lora.rank=2", "model.lora.folder=a", _TARGETS, *words)


_REWARD = "def varied(prompt, response, answer):\n    return float(sum(map(ord, response)) % 7)\n"
"""A reward that differs between responses, so that a step changes weights."""
_BYTES = "model.tokenizer.kind=byte"
_TARGETS = "model.lora.target_modules=[q_proj,v_proj]"


def ground(base: Path, commands: Commands) -> Ground:
    """Make it all in a folder; takes about ten commands."""
    runs, model, adapter = base / "runs-scene", base / "model-scene", base / "adapter-scene"
    for folder in (runs, model, adapter):
        folder.mkdir(parents=True)
    _make_runs(runs, commands)
    trained = next((runs / "runs" / "one").glob("models/actor"))
    _write_rows(model)
    shutil.copytree(trained, model / "m")
    config = json.loads((model / "m" / "tokenizer_config.json").read_text())
    config["chat_template"] = _TEMPLATE
    (model / "m" / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copytree(model, adapter, dirs_exist_ok=True)
    _write_adapter(adapter / "a", json.loads((model / "m" / "config.json").read_text()))
    plain = _weights(adapter, adapter_words("model.lora.alpha=8", "runs=made"), commands)
    try:
        default = _weights(adapter, adapter_words("model.lora.alpha=32", "runs=made"), commands)
    except RuntimeError:  # the folder has another alpha, so it is refused
        default = ""
    return Ground(model, adapter, runs, plain, default)


def _make_runs(top: Path, commands: Commands) -> None:
    words = ("algorithm.num_steps=2", "checkpoint_every=1", "evaluation.num_prompts=2", _BYTES)
    for name in ("one", "two"):
        small = [w for w in small_words("grpo") if not w.startswith("evaluation.")]
        commands.files_after(("run", *small, *words, f"runs={name}"), top)
        (made,) = (top / name).iterdir()
        (top / "runs").mkdir(exist_ok=True)
        made.rename(top / "runs" / name)
        (top / name).rmdir()
    commands.files_after(("runs", "export", "one", "one.tar"), top)
    stopped = top / "runs" / "stopped"
    shutil.copytree(top / "runs" / "one", stopped)
    (stopped / "summary.json").unlink()
    shutil.rmtree(max(stopped.glob("checkpoints/step-*")))


def _write_rows(folder: Path) -> None:
    rows = [(f"{i % 8}+{i // 8}=", str(i % 8 + i // 8)) for i in range(_NUM_ROWS)]
    plain = [{"prompt": prompt, "answer": answer} for prompt, answer in rows]
    chat = [
        {"prompt": [{"role": "user", "content": prompt}], "answer": answer}
        for prompt, answer in rows
    ]
    (folder / "reward.py").write_text(_REWARD)
    for name, written in (("d.jsonl", plain), ("chat.jsonl", chat)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in written))


def _write_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    width = config["hidden_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    outs = {name: number * head for name, number in heads.items()}
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in outs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (2, width)), ("lora_B", (out, 2))):
                made = torch.randn(shape, generator=generator) * 0.3
                tensors[f"{at}.{part}.weight"] = made
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER, indent=1))


def _weights(folder: Path, words: tuple[str, ...], commands: Commands) -> str:
    """Return the hash of the weights of a run into `made`, and remove the run."""
    commands.files_after(words, folder)
    (summary,) = (folder / "made").glob("*/summary.json")
    found: str = json.loads(summary.read_text())["weights_sha256"]
    shutil.rmtree(folder / "made")
    return found


def link(target: str) -> Callable[[Path], None]:
    """Return a function that makes a symbolic link to a target."""

    def place(path: Path) -> None:
        path.symlink_to(target)

    return place


def fifo(path: Path) -> None:
    """Make a pipe that nothing writes to."""
    os.mkfifo(path)


def sparse(size_bytes: int, begin: bytes = b"") -> Callable[[Path], None]:
    """Return a function that makes a file with a hole."""

    def place(path: Path) -> None:
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(size_bytes)

    return place


Make = Callable[[Ground, random.Random], Case]
KINDS: dict[str, Make] = {}
"""Functions that make cases, by the name of their kind."""


def kind(name: str) -> Callable[[Make], Make]:
    """Register a kind."""

    def keep(make: Make) -> Make:
        KINDS[name] = make
        return make

    return keep


def as_json(value: Any) -> bytes:
    """Return a value as the bytes of a JSON file."""
    return json.dumps(value).encode()
