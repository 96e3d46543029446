"""Show that a change of the code changes no weights: record them before it, compare them after it.

    python benchmarks/same_bits.py --record before.json
    (the change)
    python benchmarks/same_bits.py --compare before.json --json benchmarks/results/same_bits.json

The cases are the default run of seed 0 (`make run`) and one short run per algorithm YAML, which
starts from the model that the default run left, so that rewards differ and gradients are not zero;
then the default algorithm with each engine on Ray. Each case is a whole `penstock run` and gives
the hash of all trained weights and the accuracy or returns before and after. A case that is only in
one of the two sides counts as a difference.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from bench import parser, report, table
from penstock import configs
from penstock.launch.main import main as penstock

CONFIGS = Path(str(configs.__file__)).parent
MAIN = "make run"
ROWS = {"prompts": 16, "pairs": 16, "demos": 16, "rows": 8}
"""Rows of each kind in a step of a short run."""
SHORT = (
    "tracker=none",
    "executor.num_threads=1",
    "task.num_train=400",
    "task.num_held_out=32",
    "evaluation.num_prompts=32",
    "checkpoint_every=2",
)
ENVIRONMENTS = {
    "env_ppo": ("task=cartpole", "model=mlp"),
    "a2c": ("task=cartpole", "model=mlp"),
    "impala": ("task=cartpole", "model=mlp"),
    "dqn": ("task=cartpole", "model=mlp", "algorithm.num_steps=40"),
    "population": ("task=cartpole", "model=mlp", "algorithm.per_step.rows=16"),
    "mappo": ("task=cover", "model=mlp", "algorithm.per_step.rows=12"),
    "self_play": ("task=tic_tac_toe", "model=mlp"),
}
OTHER_SIZES = {"dapo": ("algorithm.per_step.prompts=48",)}
"""What the rows of `ROWS` do not fit."""
ENGINES = {
    "grpo on Ray": ("executor=ray",),
    "grpo one step off": ("executor=ray_split", "schedule=one_step_off"),
    "grpo FSDP": ("engine=fsdp", "rollout=torch", "executor=ray_split"),
    "grpo Megatron vLLM": (
        "engine=megatron",
        "rollout=vllm",
        "executor=ray_split",
        "rollout.options={max_decode_rows: 32}",
    ),
}
KEPT = ("accuracy_before_rl", "accuracy_after_rl", "episode_return_before", "episode_return_after")


def run(words: list[str], folder: Path) -> dict[str, Any]:
    """The hash and scores of one run; of one that failed, that it did."""
    if penstock(["run", *words, f"runs={folder}"]) != 0:
        return {"weights_sha256": "failed"}
    (summary,) = folder.glob("*/summary.json")
    said = json.loads(summary.read_text())
    return {"weights_sha256": said["weights_sha256"], **{key: said.get(key) for key in KEPT}}


def short_words(algorithm: str, model: Path) -> list[str]:
    """The command line of an algorithm's short run."""
    where = ENVIRONMENTS.get(algorithm, ("model=folder", f"model.folder={model}"))
    base = [f"algorithm={algorithm}", *where[:2]]
    base += [] if algorithm in ENVIRONMENTS else ["model.dtype=float32"]  # on any machine
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        penstock(["run", *base, "--cfg", "job"])
    composed = yaml.safe_load(text.getvalue())["algorithm"]
    warm_up = composed["optimizer"].get("warmup_calls", 0)
    words = [*base, "algorithm.num_steps=4", *SHORT[:2]]
    words += [] if algorithm in ENVIRONMENTS else SHORT[2:]
    words += ["algorithm.optimizer.warmup_calls=0"] if warm_up else []
    words += [f"algorithm.per_step.{kind}={ROWS[kind]}" for kind in composed["per_step"]]
    for name, stage in composed.get("before", {}).items():
        words.append(f"algorithm.before.{name}.num_steps=4")
        words += [
            f"algorithm.before.{name}.per_step.{kind}={ROWS[kind]}" for kind in stage["per_step"]
        ]
        words.append(f"algorithm.before.{name}.optimizer.warmup_calls=0")
    given = {
        word.partition("=")[0]: word
        for word in (*words, *where[2:], *OTHER_SIZES.get(algorithm, ()))
    }
    return list(given.values())


def measured(only: list[str]) -> dict[str, Any]:
    """Case -> hash and scores."""
    algorithms = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
    algorithms.remove("own")  # it has no step of its own
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        found = {MAIN: run(["seed=0"], root / "main")}
        (model,) = (root / "main").glob("*/models/actor")
        cases = {name: short_words(name, model) for name in algorithms}
        for name, words in ENGINES.items():
            cases[name] = [*short_words("grpo", model), *words]
        for number, (name, words) in enumerate(cases.items()):
            if not only or name in only:
                print(f"{name}: penstock run {' '.join(words)}", file=sys.stderr)
                found[name] = run(words, root / str(number))
    return found


def main() -> None:
    """Record or compare."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--record", type=Path, metavar="FILE", help="where to write the hashes")
    arguments.add_argument("--compare", type=Path, metavar="FILE", help="hashes to compare with")
    arguments.add_argument("--only", nargs="*", default=[], metavar="CASE", help="these cases")
    given = arguments.parse_args()
    now = measured(given.only)
    failed = [name for name, case in now.items() if case["weights_sha256"] == "failed"]
    if failed:
        raise SystemExit(f"these runs failed: {', '.join(failed)}")
    if given.record is not None:
        given.record.write_text(json.dumps(now, indent=2) + "\n")
        return
    before: dict[str, Any] = json.loads(given.compare.read_text()) if given.compare else now
    if given.only:
        before = {name: case for name, case in before.items() if name in now}
    names = list(dict.fromkeys([*before, *now]))
    same = {name: before.get(name) == now.get(name) for name in names}
    rows = [
        (
            name,
            (now.get(name) or before[name])["weights_sha256"][:16],
            "same" if same[name] else "DIFFERENT",
        )
        for name in names
    ]
    print(table(["case", "weights", "compared"], rows))
    report({"cases": now, "same": same}, given.json)
    if not all(same.values()):
        raise SystemExit(f"{sum(not s for s in same.values())} of {len(names)} cases differ")


if __name__ == "__main__":
    main()
