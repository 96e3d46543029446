"""A run of half an hour with deaths, scale-ups and evaluations: what it holds must not grow.

One `penstock run` on Ray, of a small model, which is evaluated and saved again and again. Every so
often a process of a rank is killed, never the controller, whose memory is what is looked at, and
`penstock scale` has replicas join or leave. Every few seconds are noted: resident memory and open
files of the controller, of a rank and of Ray's own processes, the number of ranks, and what Ray's
object store holds. The medians of the last sixth are compared with those of the second sixth: by
then everything has been done once.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from bench import parser, report, table
from chaos import rank_processes, steps_of

WORDS = (
    "tracker=none",
    "executor=ray",
    "executor.num_threads=1",
    "executor.groups={train: 1, rollout: 2, reward: 1}",
    "executor.nodes={actor.generate: rollout, reward: reward}",
    "schedule=streaming",
    "schedule.streaming=4",
    "schedule.max_lag=1",
    "algorithm=grpo",
    "algorithm.num_steps=1000000",
    "algorithm.per_step.prompts=8",
    "algorithm.before.sft.num_steps=2",
    "checkpoint_every=10",
    "evaluation.num_prompts=8",
    "evaluation.every=20",
    "recovery.max_restarts=1000",
    "task.num_train=200",
    "task.num_held_out=16",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
)
SAMPLE_S = 5.0
START_S, STOP_S = 300.0, 120.0
MOST_REPLICAS = 4


def object_store(controller: psutil.Process) -> int:
    """Bytes that Ray's object store holds, as the run's own Ray says."""
    for process in controller.children(recursive=True):  # its address, and the token it asks for
        if "raylet" in process.name():
            os.environ |= {k: v for k, v in process.environ().items() if k.startswith("RAY_")}
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    for process in controller.children(recursive=True):
        for word in process.cmdline():
            if word.startswith("--gcs-address="):
                port = word.rpartition(":")[2]
                state = get_state_from_address(f"127.0.0.1:{port}")
                return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)
    return 0


def sample(controller: psutil.Process) -> dict[str, float]:
    """What the run holds at this moment: its controller, a rank in the mean, Ray's own processes.

    Replicas join and leave, so sums over ranks say nothing about growth.
    """
    ranks = {one.pid for some in rank_processes(controller).values() for one in some}
    held: dict[str, list[tuple[int, int]]] = {"controller": [], "rank": [], "ray": []}
    for process in [controller, *controller.children(recursive=True)]:
        kind = "rank" if process.pid in ranks else "ray"
        try:
            found = process.memory_info().rss, process.num_fds()
        except psutil.Error:  # it has just ended
            continue
        held["controller" if process is controller else kind].append(found)
    sums = {kind: [float(sum(part)) for part in zip(*some, strict=True)]
            for kind, some in held.items()}  # fmt: skip
    sums["rank"] = [part / len(ranks) for part in sums["rank"]]
    both = {f"{kind}_{name}": some[place] for kind, some in sums.items() if some
            for place, name in enumerate(("bytes", "files"))}  # fmt: skip
    return {**both, "ranks": len(ranks), "object_store_bytes": object_store(controller)}


def disturb(controller: psutil.Process, folder: Path, draw: random.Random, said: Any) -> str:
    """Kill a rank, or have replicas join or leave; says what was done."""
    if draw.random() < 0.5:
        ranks = rank_processes(controller)
        kind = draw.choice(sorted(ranks)) if ranks else ""
        if kind:
            os.kill(draw.choice(ranks[kind]).pid, signal.SIGKILL)
        return f"killed a {kind}"
    number = draw.randint(1, MOST_REPLICAS)
    (run,) = folder.glob("*/config.yaml")
    words = ["scale", f"run={run.parent}", f"rollout={number}"]
    command = [sys.executable, "-m", "penstock.launch.main", *words]
    subprocess.run(command, check=True, timeout=START_S, stdout=said, stderr=said)
    return f"rollout={number}"


def soak(folder: Path, minutes: float, every_s: float, seed: int) -> dict[str, Any]:
    """Let a run go on for so long, and note what it holds."""
    draw, samples, done = random.Random(seed), list[dict[str, float]](), list[list[Any]]()
    command = [sys.executable, "-m", "penstock.launch.main", "run", *WORDS, f"runs={folder}"]
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        controller = psutil.Process(run.pid)
        try:
            end_s = time.monotonic() + START_S
            while not steps_of(folder, 0) and run.poll() is None and time.monotonic() < end_s:
                time.sleep(SAMPLE_S)
            since_s = next_s = time.monotonic()
            while run.poll() is None and (now_s := time.monotonic()) < since_s + 60 * minutes:
                step = steps_of(folder, 0)
                samples.append({"at_s": now_s - since_s, "step": step, **sample(controller)})
                if now_s >= next_s:
                    done.append([round(now_s - since_s), step,
                                 disturb(controller, folder, draw, said)])  # fmt: skip
                    print(*done[-1], flush=True)
                    next_s = now_s + draw.uniform(0.5, 1.5) * every_s
                time.sleep(SAMPLE_S)
            went_on = run.poll() is None
            run.send_signal(signal.SIGTERM)
            run.wait(STOP_S)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    told = (folder / "said").read_text()
    return {"went_on": went_on, "minutes": minutes, "steps": steps_of(folder, 0), "done": done,
            "samples": samples, "said": "" if went_on else told[-4000:]}  # fmt: skip


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Quantity -> its median in the second and in the last sixth, and by what it grew."""
    sixth = max(len(samples) // 6, 1)
    found: dict[str, dict[str, float]] = {}
    for key in samples[-1].keys() - {"at_s", "step"}:
        early, late = (
            statistics.median(one[key] for one in some if key in one)
            for some in (samples[sixth : 2 * sixth], samples[-sixth:])
        )
        share = (late - early) / early if early else 0.0
        found[key] = {"early": early, "late": late, "growth": round(share, 4)}
    return found


def main() -> None:
    """Soak, and print what has grown."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--every-s", type=float, default=45.0, help="between two disturbances")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as name:
        found = soak(Path(name), args.minutes, args.every_s, args.seed)
    found["growth"] = growth(found["samples"])
    rows = [[key, *one.values()] for key, one in sorted(found["growth"].items())]
    print(table(["", "second sixth", "last sixth", "growth"], rows))
    print(f"went on: {found['went_on']}, {found['steps']} steps, {len(found['done'])} disturbances")
    print(found["said"])
    report(found, args.json)


if __name__ == "__main__":
    main()
