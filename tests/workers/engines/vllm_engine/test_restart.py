"""A vLLM replica that is killed between two tokens leaves no mark on what is learnt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec
from penstock.workers.executors.on_ray.executor import RayExecutor, connect_ray, shutdown_ray
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.weight_sync.channel import Transport

from ....algorithms import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 3
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32 dimensions, the fewest that vLLM has on CPUs."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    connect_ray()
    yield
    shutdown_ray()


@dataclass(frozen=True)
class MortalSpec:
    """Notes its process; if `kills`, replica 1 ends it once, three tokens into its second call."""

    spec: VllmPolicySpec
    folder: str
    kills: bool

    def build(self, context: WorkerContext) -> Role:
        policy, mark = self.spec.build(context), Path(self.folder) / "killed"
        with (Path(self.folder) / f"processes-{context.replica}").open("a") as told:
            print(os.getpid(), file=told)
        if self.kills and context.replica == 1 and not mark.exists():
            engine: Any = policy.vllm
            core, step, begin = engine._engine, engine._engine.step, engine.begin
            calls = tokens = 0

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls, tokens
                calls, tokens = calls + 1, 0
                return begin(*args, **kwargs)

            def mortal() -> Any:
                nonlocal tokens
                outputs = step()
                tokens += 1
                if (calls, tokens) == (2, 3):
                    mark.write_text(str(core.get_num_unfinished_requests()))
                    os.kill(os.getpid(), signal.SIGKILL)
                return outputs

            engine.begin, core.step = counted, mortal
        return policy


def finish(run: runs.Run, actor: WorkerSpec, transport: Transport) -> tuple[str, list[Any]]:
    """The hash of what was learnt, and every step's numbers and rows per node."""
    engine = Engine(
        run.graph,
        run.apart(2, num_chunks=2),
        workers={**run.workers, "actor": actor},
        executor=RayExecutor(num_threads=1, transport=transport),
        schedule=Schedule(),
    )
    with engine:
        steps = list(engine.run(run.sources, NUM_STEPS))
        found = [(step.metrics, step.num_rows) for step in steps]
        return engine.call("actor", "weights_sha256"), found


KILLS: tuple[tuple[bool, Transport], ...] = ((False, "object_store"), (True, "object_store"))


def test_a_replica_killed_while_it_generates_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.make("grpo")
    trainer: Any = run.workers["actor"]
    model = replace(trainer.model, architecture={**trainer.model.architecture, **WIDE})
    train = replace(trainer, model=model)
    rollout = VllmPolicySpec(model=model, end_ids=trainer.end_ids, max_decode_rows=16)
    plain, found = (
        finish(
            run,
            SplitPolicySpec(train=train, rollout=MortalSpec(rollout, str(tmp_path), kills)),
            transport,
        )
        for kills, transport in KILLS
    )
    assert int((tmp_path / "killed").read_text()) > 0  # responses were unfinished
    assert found == plain
    (told,) = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    assert told.startswith("rank 1 of group 'rollout' died: ")
    # The second run has the first one's engines, until it loses one of them.
    kept, lost = ((tmp_path / f"processes-{rank}").read_text().split() for rank in range(2))
    assert kept[0] == kept[1]
    assert len(kept) == 2
    assert lost[0] == lost[1] != lost[2]
    assert len(lost) == 3
