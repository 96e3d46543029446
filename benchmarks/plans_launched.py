"""Small plans that are really launched: each trains two steps as one process does.

`penstock plan output=` writes the plan with the layouts that are pinned, `penstock run placement=`
follows it on this machine's cores, and what every parameter has changed by is compared with the
change in a run of one process of the torch engine, in float32. Comparing weights would show
nothing: they hardly move in two steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from bench import parser, report, table
from safetensors.torch import load_file

BOUND = 1e-3
"""Of the norm of a parameter's change: how far another layout's change may be from it."""

MODEL = ("model=tiny", "model.architecture.vocab_size=32", "model.dtype=float32")
EXPERTS = (
    *MODEL, "model.architecture.model_type=mixtral", "+model.architecture.num_local_experts=4",
    "+model.architecture.num_experts_per_tok=2", "model.architecture.tie_word_embeddings=false",
)  # fmt: skip
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "sft": ("algorithm=sft", "algorithm.per_step.demos=16"),
    "dpo": ("algorithm=dpo", "algorithm.per_step.pairs=16", "~algorithm.before.sft"),
    "grpo": ("algorithm=grpo", "algorithm.per_step.prompts=8", "~algorithm.before.sft"),
}
STEPS = (
    "algorithm.num_steps=2", "task.num_train=128", "task.num_held_out=8",
)  # fmt: skip
RUN = ("evaluation.num_prompts=0", "tracker=none", "executor=ray", "executor.num_threads=1")


@dataclass(frozen=True)
class Case:
    """A plan to launch.

    Attributes:
        name: What it has that one process has not.
        algorithm: A key of `ALGORITHMS`.
        devices: How many it is for.
        engine: What trains.
        pins: Fixed parts of the plan, below `plan.pins`.
        rollout: What generates.
        model: Its words.
    """

    name: str
    algorithm: str
    devices: int
    engine: str
    pins: tuple[str, ...]
    rollout: str = "same"
    model: tuple[str, ...] = MODEL

    @property
    def words(self) -> list[str]:
        """What a plan and a run are both given."""
        return [
            *ALGORITHMS[self.algorithm], *STEPS, *self.model, f"engine={self.engine}",
            f"rollout={self.rollout}",
        ]  # fmt: skip


def _layout(node: str, **sizes: int | bool) -> str:
    fields = ", ".join(f"{name}: {json.dumps(value)}" for name, value in sizes.items())
    return f"layouts.{node}={{{fields}}}"


def _train(**sizes: int | bool) -> tuple[str, ...]:
    return (_layout("actor.train", **sizes),)


CASES = (
    Case("dp2", "sft", 2, "torch", _train(dp=2)),
    Case("recompute", "sft", 2, "torch", _train(dp=2, checkpointing=True)),
    Case("tp2", "sft", 2, "megatron", _train(tp=2)),
    Case("pp2", "sft", 2, "megatron", _train(pp=2)),
    Case("zero1", "sft", 2, "megatron", _train(dp=2, zero=1)),
    Case("tp2 recompute", "sft", 2, "megatron", _train(tp=2, checkpointing=True)),
    Case("tp2 pp2", "dpo", 4, "megatron", _train(tp=2, pp=2)),
    Case("ep2", "sft", 2, "megatron", _train(dp=2, ep=2), model=EXPERTS),
    Case("ep2 tp2", "sft", 4, "megatron", _train(dp=2, ep=2, tp=2), model=EXPERTS),
    Case("zero3", "sft", 2, "fsdp", _train(dp=2, zero=3)),
    Case("zero2", "sft", 2, "fsdp", _train(dp=2, zero=2)),
    Case("zero3 recompute", "sft", 2, "fsdp", _train(dp=2, zero=3, checkpointing=True)),
    Case("tp2 by FSDP", "sft", 2, "fsdp", _train(tp=2)),
    Case("cp2", "sft", 2, "fsdp", _train(cp=2)),
    Case("cp2 zero3", "dpo", 4, "fsdp", _train(cp=2, dp=2, zero=3)),
    Case("zero3 tp2", "dpo", 4, "fsdp", _train(dp=2, zero=3, tp=2)),
    Case(
        "offload", "dpo", 2, "torch",
        (*_train(dp=2), _layout("ref.logprob", dp=2, offload=True)),
    ),
    Case(
        "offload zero3", "dpo", 2, "fsdp",
        (*_train(dp=2, zero=3), _layout("ref.logprob", dp=2, zero=3, offload=True)),
    ),
    Case(
        "offload tp2", "dpo", 2, "megatron",
        (*_train(tp=2), _layout("ref.logprob", tp=2, offload=True)),
    ),
    Case("ref apart", "dpo", 2, "torch", ("apart=[[actor, ref]]",)),
    Case(
        "colocated zero3", "grpo", 2, "fsdp",
        ("together=[[actor, actor.generate]]", *_train(dp=2, zero=3)), "torch",
    ),
    Case("split tp2", "grpo", 3, "megatron",
         ("num_devices.actor=2", "apart=[[actor, actor.generate]]", *_train(tp=2)), "torch"),
)  # fmt: skip


def penstock(folder: Path, *words: str, deadline_s: float = 300) -> str:
    """Run a command in a folder; its output."""
    command = [sys.executable, "-m", "penstock.launch.main", *words]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip()[-1500:])
    return ran.stdout


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The policy that the only run in a folder ended with."""
    (found,) = folder.glob("runs/*/models/actor/model.safetensors")
    return load_file(found)


@dataclass
class Alone:
    """What one process of the torch engine begins and ends with, by algorithm and model."""

    top: Path

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], tuple[dict[str, torch.Tensor], ...]] = {}

    def both(self, case: Case) -> tuple[dict[str, torch.Tensor], ...]:
        """First and last weights."""
        key = (case.algorithm, case.model)
        if key not in self._known:
            found: list[dict[str, torch.Tensor]] = []
            for name, more in {
                "first": ("algorithm.optimizer.lr=0", "algorithm.optimizer.weight_decay=0"),
                "last": (),
            }.items():
                folder = Path(tempfile.mkdtemp(prefix=f"{case.algorithm}-{name}-", dir=self.top))
                words = [word for word in case.words if not word.startswith(("engine", "rollout"))]
                penstock(folder, "run", *words, *RUN[:2], *more)
                found.append(weights_of(folder))
            self._known[key] = tuple(found)
        return self._known[key]


def launched(case: Case, alone: Alone) -> dict[str, object]:
    """Plan a case, run it, and compare what it learned."""
    began_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"{case.name.replace(' ', '-')}-", dir=alone.top))
    pins = [f"plan.pins.{pin}" for pin in case.pins]
    try:
        first, last = alone.both(case)
        penstock(
            folder, "plan", *case.words, "cluster=cpu", f"cluster.devices_per_node={case.devices}",
            "workload.prompt=null", "workload.response=null", *pins, "output=plan.json",
        )  # fmt: skip
        penstock(folder, "run", *case.words, *RUN, "placement=plan.json")
        found = weights_of(folder)
        if found.keys() != last.keys():
            raise RuntimeError(f"other parameters: {sorted(found.keys() ^ last.keys())[:4]}")
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return {"name": case.name, "launched": False, "said": str(error)}
    errors = {
        name: float((found[name] - last[name]).norm() / (last[name] - first[name]).norm())
        for name in last
        if bool((last[name] != first[name]).any())
    }
    worst = max(errors, key=lambda name: errors[name])
    layouts = json.loads((folder / "plan.json").read_text())["layouts"]
    return {
        "name": case.name,
        "launched": True,
        "equal": errors[worst] <= BOUND,
        "largest_error": errors[worst],
        "of": worst,
        "num_parameters": len(errors),
        "layouts": layouts,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    """Launch the cases one after another."""
    options = parser(__doc__ or "")
    options.add_argument("--only", nargs="*", default=[], help="names of cases; all by default")
    args = options.parse_args()
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="plans-launched-") as top:
        alone = Alone(Path(top))
        for case in CASES:
            if not args.only or case.name in args.only:
                found.append(launched(case, alone))
                print(
                    json.dumps({k: v for k, v in found[-1].items() if k != "layouts"}), flush=True
                )
    rows = [[r["name"], r["launched"], r.get("equal"), r.get("largest_error")] for r in found]
    print(table(["plan", "launched", "equal", "largest error"], rows))
    report(
        {
            "tried": len(found),
            "launched": sum(bool(row["launched"]) for row in found),
            "equal": sum(bool(row.get("equal")) for row in found),
            "bound": BOUND,
            "plans": found,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
