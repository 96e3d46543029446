"""A step of SmolLM2 in float32: every engine changes every parameter as the torch engine does.

What is compared is the change of each parameter by one optimizer step, not the weights: Adam moves
those by the learning rate whatever the gradient, so all of them would be close.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
from forked_ranks import run_groups
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from smollm2_models import recipe, take_step, write_case

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

RANK = Path(__file__).parents[1] / "smollm2_rank.py"
LAYOUTS = ["megatron-1-2", "megatron-3-1", "fsdp-2-1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes left what they found."""
    made = tmp_path_factory.mktemp("smollm2")
    write_case(made)
    policy = TorchPolicySpec(**recipe(made)).build(WorkerContext("actor", seed=7))
    safetensors.torch.save_file(policy.export_weights(), made / "before.safetensors")
    take_step(policy, made)
    safetensors.torch.save_file(policy.export_weights(), made / "after.safetensors")
    del policy
    run_groups(
        made,
        RANK,
        (2, ["megatron,1,2:step", "megatron,1,2:stale"]),
        (2, ["fsdp,2,1:step", "fsdp,2,1:stale"]),
        (3, ["megatron,3,1:step", "megatron,3,1:stale"]),
    )
    return made


def found(folder: Path, layout: str, case: str) -> dict[str, float]:
    return json.loads((folder / f"{layout}-{case}.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_changes_as_in_the_torch_engine(folder: Path, layout: str) -> None:
    apart = found(folder, layout, "step")
    assert len(apart) == 272
    assert not {name: value for name, value in apart.items() if not value < 1e-3}  # nan, too


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stale_slice_on_one_process_is_found(folder: Path, layout: str) -> None:
    assert max(found(folder, layout, "stale").values()) > 0.1
