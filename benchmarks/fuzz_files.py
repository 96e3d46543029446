"""Damaged files: every kind of file that a command reads, with bytes or values changed.

A `Scene` is a folder in which a command succeeds. A case copies it, changes one of the files and
runs the command again. What is changed and how follows from a `random.Random` alone.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from fuzz_case import Case, Commands
from fuzz_keys import small_words
from penstock.launch.cli.hydra_app import compose
from penstock.planner.cost.calibration import (
    CPU_DEFAULTS,
    Calibration,
    DtypeConstants,
    MeasuredCall,
)
from penstock.planner.inputs.cluster import ClusterSpec
from transformers import AutoModelForCausalLM

_ROWS = [{"prompt": f"{i % 10}+{i // 10}=", "answer": str(i % 10 + i // 10)} for i in range(64)]
_FILE_TASK = ("task=file", "task.answer_field=answer", "task.max_response_tokens=5")
_STEP = """\
from dataclasses import dataclass

from penstock.algorithms.grpo import GRPO, broadcast_over_tokens, group_advantage, train_policy
from penstock.algorithms.roles.language import PerSample, Policy, Prompts, Reward
from penstock.dataflow import op


@op(scope="row")
def halved(score: PerSample) -> PerSample:
    return score / 2


def step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GRPO):
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = halved(reward.score(roll.tokens, roll.mask, roll.prompt_id))
    advantage = group_advantage(score, roll.prompt_id)
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg)
"""
_ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 3, 10**6, 2**31, 2**63, 10**30, -0.0, 0.5, 1e300,
    float("nan"), float("inf"), "", " ", "x", "../x", "/proc", "cpu:99", "os:system", "\x1b[31m",
    "\ud800", "\x00", "x" * 3000, [], [None], ["a"], [[]], {}, {"a": 1}, {"": ""},
)  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """A folder in which a command succeeds.

    Attributes:
        name: For people.
        folder: What it holds.
        words: The command.
        files: Those that are damaged, relative to the folder.
        weights: What the run comes to whatever happens to them, if it comes to anything.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    files: tuple[str, ...]
    weights: str | None = None


def _words(*words: str) -> tuple[str, ...]:
    """A small GRPO run."""
    return ("run", *small_words("grpo"), *words)


def scenes(base: Path, commands: Commands) -> list[Scene]:
    """All of them, made in a folder by commands that are run."""
    made = base / "made"
    made.mkdir()
    whole = _words("evaluation.num_prompts=2", "algorithm.num_steps=2", "checkpoint_every=1")
    commands.files_after(whole, made)
    model = next(made.glob("runs/*/models/actor"))
    critic = base / "critic"
    critic.mkdir()
    commands.files_after(
        ("run", *small_words("reward_modelling"), "evaluation.num_prompts=0"), critic
    )
    scored = next(critic.glob("runs/*/models/*"))
    return [
        *_data_scenes(base),
        *_plan_scenes(base, made),
        *_model_scenes(base, model, scored),
        *_run_scenes(base, made),
        *_own_scenes(base),
    ]


def _scene_folder(base: Path, name: str, files: Mapping[str, str]) -> Path:
    folder = base / name
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    folder.mkdir(exist_ok=True)
    return folder


def _data_scenes(base: Path) -> list[Scene]:
    lines = "".join(json.dumps(row) + "\n" for row in _ROWS)
    folder = _scene_folder(base, "data", {"d.jsonl": lines})
    pq.write_table(pa.Table.from_pylist(_ROWS), folder / "d.parquet")
    small = [word for word in small_words("grpo") if word != "task.num_train=64"]
    return [
        Scene(file, folder, ("run", *small, *_FILE_TASK, f"task.path={file}"), (file,))
        for file in ("d.jsonl", "d.parquet")
    ]


def _plan_scenes(base: Path, made: Path) -> list[Scene]:
    run = next(made.glob("runs/*"))
    whole = {
        **json.loads((run / "plan.json").read_text()),
        "default_group": "all",
        "groups": [{"name": "all", "num_ranks": 1, "device": "cpu"}],
        "nodes": {"actor": "all"},
        "max_lag": 0,
    }
    links = compose("plan", ["cluster=cpu"])["cluster"]
    nodes = {key: links[key] for key in ("num_nodes", "devices_per_node", "device", "within")}
    cluster = ClusterSpec.model_validate_json(
        json.dumps({"name": "measured", "node_groups": [nodes], "between": links["between"]})
    )
    constants = CPU_DEFAULTS.replaced(matmul_efficiency=0.5, source="measured")
    found = DtypeConstants(constants=constants, matmul_efficiency={64: 0.2, 256: 0.6})
    calibration = Calibration(
        cluster=cluster,
        constants=constants,
        dtypes={"float32": found},
        num_threads=1,
        executor="ray",
        machine="2 x some processor",
        date="2026-11-21",
        calls=(
            MeasuredCall(name="train", width=64, dtype="float32", measured_s=2.0, predicted_s=2.5),
        ),
    )
    folder = _scene_folder(base, "plans", {"plan.json": json.dumps(whole, indent=1)})
    (folder / "c.json").write_text(calibration.model_dump_json())
    plan = ("plan", "model=tiny", "cluster=measured", "plan.deadline_s=2")
    return [
        Scene("plan.json", folder, _words("placement=plan.json"), ("plan.json",)),
        Scene("calibration of a plan", folder, (*plan, "plan.calibration=c.json"), ("c.json",)),
        Scene("calibration of a run", folder, _words("calibration=c.json"), ("c.json",)),
    ]


def _model_scenes(base: Path, model: Path, scored: Path) -> list[Scene]:
    folder = base / "models"
    shutil.copytree(model, folder / "m")
    shutil.copytree(model, folder / "parts")
    shutil.copytree(scored, folder / "scored")
    network = AutoModelForCausalLM.from_pretrained(model)
    (folder / "parts" / "model.safetensors").unlink()
    network.save_pretrained(folder / "parts", max_shard_size="8KB")
    network.generation_config.save_pretrained(folder / "m")

    def files(name: str) -> tuple[str, ...]:
        return tuple(sorted(f"{name}/{path.name}" for path in (folder / name).iterdir()))

    small = [word for word in small_words("grpo") if not word.startswith("model.")]
    words = ("run", *small, "algorithm.roles.actor.start=model", "model=folder")
    sft = [word for word in words if "before" not in word]
    reward = [f"algorithm.roles.reward.{key}" for key in ("worker=reward_model", "start=scored")]
    return [
        Scene("model folder", folder, (*sft, "model.folder=m"), files("m")),
        Scene("model of parts", folder, (*sft, "model.folder=parts"), files("parts")),
        Scene("reward model", folder, _words(*reward), files("scored")),
    ]


def _run_scenes(base: Path, made: Path) -> list[Scene]:
    """A run that was stopped half way, with a finished stage before it."""
    top = base / "stopped"
    run = top / "runs" / "stopped"
    shutil.copytree(next(made.glob("runs/*")), run)
    weights = json.loads((run / "summary.json").read_text())["weights_sha256"]
    (run / "summary.json").unlink()
    shutil.rmtree(run / "models")
    shutil.rmtree(max(run.glob("checkpoints/step-*")))
    files = tuple(str(p.relative_to(top)) for p in sorted(run.rglob("*")) if p.is_file())
    return [Scene("run folder", top, ("run", "resume=runs/stopped"), files, weights)]


def _own_scenes(base: Path) -> list[Scene]:
    composed = compose("run", [*small_words("grpo")])
    options = {
        f"yaml/{section}/mine.yaml": yaml.safe_dump(composed[section], sort_keys=False)
        for section in ("task", "model", "schedule", "executor")
    }
    folder = _scene_folder(base, "own", {"mine.py": _STEP, **options})
    chosen = [f"{name.split('/')[1]}=mine" for name in options]
    small = [w for w in small_words("grpo") if not w.startswith(("task.", "model."))]
    return [
        Scene("YAML", folder, ("run", *small, *chosen, "--config-dir", "yaml"), tuple(options)),
        Scene("step", folder, _words("algorithm.step=mine:step"), ("mine.py",)),
    ]


def _flip(content: bytearray, chance: random.Random) -> str:
    at, bit = chance.randrange(len(content)), chance.randrange(8)
    content[at] ^= 1 << bit
    return f"bit {bit} of byte {at} flipped"


def _cut(content: bytearray, chance: random.Random) -> str:
    at = chance.randrange(len(content))
    del content[at:]
    return f"cut after {at} bytes"


def _insert(content: bytearray, chance: random.Random) -> str:
    at = chance.randrange(len(content) + 1)
    more = chance.choice((chance.randbytes(chance.randrange(1, 9)), b"\0", b"\xff", b"[" * 2000,
                          b'"', b"-", b"9" * 30, b"\n", b"\xed\xa0\x80"))  # fmt: skip
    content[at:at] = more
    return f"{more[:12]!r} ({len(more)} bytes) inserted at {at}"


def _take(content: bytearray, chance: random.Random) -> str:
    at, size = chance.randrange(len(content)), chance.randrange(1, 40)
    del content[at : at + size]
    return f"{size} bytes taken away at {at}"


def _swap(content: bytearray, chance: random.Random) -> str:
    size = chance.randrange(1, 1 + min(64, (len(content) + 1) // 2))
    one, two = (chance.randrange(max(1, len(content) - size)) for _ in range(2))
    first, second = content[one : one + size], content[two : two + size]
    content[one : one + len(second)] = second
    content[two : two + len(first)] = first
    return f"{size} bytes at {one} and {two} swapped"


def _blank(content: bytearray, chance: random.Random) -> str:
    at, size = chance.randrange(len(content)), chance.choice((1, 8, 64, 512))
    content[at : at + size] = bytes(len(content[at : at + size]))
    return f"{size} bytes at {at} zeroed"


_CHANGES: Sequence[Callable[[bytearray, random.Random], str]] = (
    _flip, _flip, _cut, _insert, _take, _swap, _blank,
)  # fmt: skip


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every container with every key or index in it."""
    if isinstance(data, dict):
        return [(data, key) for key in data] + [x for v in data.values() for x in _places(v)]
    if isinstance(data, list):
        return [(data, i) for i in range(len(data))] + [x for v in data for x in _places(v)]
    return []


def other_value(data: Any, chance: random.Random) -> str:
    """Another value, another key, or none, somewhere in plain data."""
    places = _places(data)
    if not places:
        return "unchanged"
    owner, key = chance.choice(places)
    action = chance.randrange(8)
    if action == 0:
        del owner[key]
        return f"{key!r:.40} taken away"
    if action == 1 and isinstance(owner, dict):
        owner[f"{key}x"] = owner.pop(key)
        return f"{key!r:.40} misspelt"
    owner[key] = chance.choice(_ODD)
    return f"{key!r:.40} set to {owner[key]!r:.40}"


def _other_json(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    lines = content.decode().splitlines(keepends=True)
    try:
        data = json.loads(content)
    except json.JSONDecodeError:  # one value a line
        at = chance.randrange(len(lines))
        data = json.loads(lines[at])
        what = other_value(data, chance)
        lines[at] = json.dumps(data) + "\n"
        return "".join(lines).encode(), f"line {at + 1}: {what}"
    what = other_value(data, chance)
    return json.dumps(data, indent=1).encode(), what


def _other_yaml(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    data = yaml.safe_load(content)
    what = other_value(data, chance)
    return yaml.safe_dump(data, sort_keys=False).encode(), what


def file_case(all_scenes: Sequence[Scene], chance: random.Random) -> Case:
    """A scene with one of its files damaged."""
    scene = chance.choice(all_scenes)
    name = chance.choice(scene.files)
    content = (scene.folder / name).read_bytes()
    if chance.randrange(40) == 0 or not content:
        what = f"{scene.name}: {name} is gone"
        return Case(scene.words, scene.folder, {name: None}, what, weights=scene.weights)
    whats: list[str] = []
    if name.endswith((".json", ".jsonl", ".yaml")) and chance.randrange(2):
        other = _other_yaml if name.endswith(".yaml") else _other_json
        content, what = other(content, chance)
        whats.append(what)
    else:
        changed = bytearray(content)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            if changed:
                whats.append(chance.choice(_CHANGES)(changed, chance))
        content = bytes(changed)
    what = f"{scene.name}: {name}: {'; '.join(whats)}"
    return Case(scene.words, scene.folder, {name: content}, what, weights=scene.weights)
