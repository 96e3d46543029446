"""Random plans whose calls of one role differ in layout or devices, launched by `penstock run`.

A plan gives every call of a model a group of devices and a layout of its own there, whatever its
engine runs. A call in another layout than training reads a view in the processes that train; one on
other devices reads a copy. Two steps are compared with those of one process of the torch engine, as
in `plans_launched.py`: the change of every parameter of every trained role.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from subprocess import TimeoutExpired

import torch
from bench import parser, report, table
from penstock.planner.inputs.calls import CallKind
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.workers.engines.registry import ENGINES
from plans_launched import BOUND, MODEL, RUN, STEPS, penstock
from safetensors.torch import load_file

ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "ppo": (
        "algorithm=ppo", "algorithm.per_step.prompts=8", "~algorithm.before.sft",
        "~algorithm.before.reward_modelling", "algorithm.roles.reward.worker=rule",
    ),
    "grpo": (
        "algorithm=grpo", "algorithm.per_step.prompts=8", "~algorithm.before.sft",
        "algorithm.cfg.correction={mode: token_truncate, cap: 2.0}",
    ),
}  # fmt: skip
CALLS: Mapping[str, Mapping[str, CallKind]] = {
    "ppo": {
        "actor.train": "train", "critic.train": "train", "actor.generate": "generate",
        "critic.value": "forward", "ref.logprob": "forward",
    },
    "grpo": {"actor.train": "train", "actor.generate": "generate", "actor.logprob": "forward"},
}  # fmt: skip
DEVICES = ((2,), (2,), (4,), (1, 1), (2, 1), (2, 2))
"""Devices of each group of a plan."""


@dataclass(frozen=True)
class Drawn:
    """A plan, and what runs it."""

    algorithm: str
    engine: str
    plan: Plan

    @property
    def words(self) -> list[str]:
        return [*ALGORITHMS[self.algorithm], *STEPS, *MODEL]

    @property
    def differs(self) -> list[str]:
        """Calls that evaluate, in another layout or on other devices than their role trains."""
        calls, nodes, layouts = CALLS[self.algorithm], self.plan.nodes, self.plan.layouts
        found: list[str] = []
        for name, kind in calls.items():
            home = f"{name.split('.')[0]}.train"
            if kind == "forward" and home in calls:
                how = "layout" if layouts[name] != layouts[home] else ""
                how = "devices" if nodes[name] != nodes[home] else how
                found += [f"{name}: {how}"] if how else []
        return found


def drawn(random: Random) -> Drawn:
    """A plan in which at least one call that evaluates differs from its role's training."""
    algorithm, engine = random.choice(list(CALLS)), random.choice(["torch", "fsdp", "megatron"])
    while True:
        sizes = random.choice(DEVICES)
        groups: list[GroupPlan] = []
        for at in range(len(sizes)):
            devices = tuple(range(sum(sizes[:at]), sum(sizes[: at + 1])))
            groups.append(GroupPlan(name="ab"[at], devices=devices))
        nodes: dict[str, str] = {}
        layouts: dict[str, Layout] = {}
        for name, kind in CALLS[algorithm].items():
            group = random.choice(groups)
            runs = "torch" if kind == "generate" else engine
            nodes[name] = group.name
            layouts[name] = random.choice(list(_layouts(runs, kind, len(group.devices))))
        plan = Plan(groups=tuple(groups), nodes=nodes, layouts=layouts)
        found = Drawn(algorithm, engine, plan)
        # Where the torch engine generates in the worker that trains, both are one worker's calls.
        together = engine != "torch" or nodes["actor.generate"] == nodes["actor.train"]
        if found.differs and together and {*nodes.values()} == {g.name for g in groups}:
            return found


def _layouts(engine: str, kind: CallKind, num_devices: int) -> Iterator[Layout]:
    sizes = [n for n in (1, 2, 4) if n <= num_devices]
    for tp, pp, dp, cp, zero in product(sizes, sizes, sizes, sizes, (0, 1, 2, 3)):
        shares = dp > 1 and kind != "generate"
        if tp * pp * dp * cp == num_devices and (zero == 0 or shares):
            layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, zero=zero)
            if (kind == "train" or zero != 1) and ENGINES[engine].why_not(layout, kind) is None:
                yield layout


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All models that the only run in a folder ended with."""
    return {
        f"{file.parent.name}/{name}": tensor
        for file in sorted(folder.glob("runs/*/models/*/model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def alone(words: Sequence[str], top: Path) -> tuple[dict[str, torch.Tensor], ...]:
    """What one process begins and ends with."""
    found: list[dict[str, torch.Tensor]] = []
    still = ("algorithm.optimizer.lr=0", "algorithm.optimizer.weight_decay=0")
    for more in (still, ()):
        folder = Path(tempfile.mkdtemp(dir=top))
        penstock(folder, "run", *words, *RUN[:2], *more)
        found.append(weights_of(folder))
    return tuple(found)


def launched(
    case: Drawn, expected: tuple[dict[str, torch.Tensor], ...], top: Path
) -> dict[str, object]:
    """Run a plan, and compare what it learned."""
    folder, began_s = Path(tempfile.mkdtemp(dir=top)), time.monotonic()
    (folder / "plan.json").write_text(case.plan.model_dump_json(exclude_defaults=True))
    rollout = "same" if case.engine == "torch" else "torch"
    told: dict[str, object] = {
        "algorithm": case.algorithm,
        "engine": case.engine,
        "devices": [len(group.devices) for group in case.plan.groups],
        "calls": {n: f"{case.plan.nodes[n]}: {layout}" for n, layout in case.plan.layouts.items()},
        "differs": case.differs,
    }
    words = [*case.words, f"engine={case.engine}", f"rollout={rollout}"]
    try:
        penstock(folder, "run", *words, *RUN, "placement=plan.json")
    except (RuntimeError, TimeoutExpired) as error:
        return {**told, "launched": False, "said": str(error)}
    first, last = expected
    found = weights_of(folder)
    assert found.keys() == last.keys(), found.keys() ^ last.keys()
    errors = {
        name: float((found[name] - last[name]).norm() / (last[name] - first[name]).norm())
        for name in last
        if bool((last[name] != first[name]).any())
    }
    worst = max(errors, key=lambda name: errors[name])
    return {
        **told,
        "launched": True,
        "equal": errors[worst] <= BOUND,
        "largest_error": errors[worst],
        "of": worst,
        "num_parameters": len(errors),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    """Launch random plans one after another."""
    options = parser(__doc__ or "")
    options.add_argument("--cases", type=int, default=20, help="how many (20)")
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    args = options.parse_args()
    random, found = Random(args.seed), list[dict[str, object]]()
    expected: dict[str, tuple[dict[str, torch.Tensor], ...]] = {}
    with tempfile.TemporaryDirectory(prefix="plans-apart-") as top:
        cases = list[Drawn]()
        while len(cases) < args.cases:
            case = drawn(random)
            if case in cases:
                continue
            cases.append(case)
            if case.algorithm not in expected:
                expected[case.algorithm] = alone(case.words, Path(top))
            found.append(launched(case, expected[case.algorithm], Path(top)))
            print(json.dumps(found[-1]), flush=True)
    rows = [
        [case.engine, str(r["devices"]), "; ".join(case.differs), r["launched"], r.get("equal"),
         r.get("largest_error")]
        for case, r in zip(cases, found, strict=True)
    ]  # fmt: skip
    print(table(["engine", "devices", "differs", "launched", "equal", "largest error"], rows))
    report(
        {
            "tried": len(found),
            "launched": sum(bool(row["launched"]) for row in found),
            "equal": sum(bool(row.get("equal")) for row in found),
            "bound": BOUND,
            "seed": args.seed,
            "engines": Counter(str(row["engine"]) for row in found),
            "plans": found,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
