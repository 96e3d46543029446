"""Two and four processes on gloo that divide a model, against one that has it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_groups
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec, TorchPolicySpec
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from tensor_parallel_rank import MODELS, spec
from torch_models import EOS, GPT2

RANK = Path(__file__).parents[2] / "tensor_parallel_rank.py"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes left what they found."""
    made = tmp_path_factory.mktemp("tensor_parallel")
    run_groups(made, RANK, (1, []), (2, []), (4, []))
    return made


def read(folder: Path, name: str, size: int, process: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"{name}-{size}-{process}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_processes_sample_and_evaluate_as_one(folder: Path, name: str, size: int):
    alone = read(folder, name, 1)
    for process in range(size):
        found = read(folder, name, size, process)
        for exact in ("tokens", "mask", "words", "some", "after"):
            assert torch.equal(found[exact], alone[exact]), exact
        for close in ("behavior", "logprob", "top", "score"):
            torch.testing.assert_close(found[close], alone[close], atol=1e-5, rtol=1e-5)
        assert (found["logprob"] - found["behavior"]).abs().max() < 1e-5
        # Norms and biases after sums are whole everywhere.
        assert found["held"] < 1.04 * alone["held"] / size + 400
    weights = read(folder, name, size)["weights"]
    assert weights.keys() == alone["weights"].keys()
    assert all(torch.equal(weights[key], alone["weights"][key]) for key in weights)
    assert not read(folder, name, size, 1)["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_depend_on_the_rows_beside_it(folder: Path, name: str):
    found = read(folder, name, 4)
    some, among = found["some"], found["tokens"][3:9]
    width = min(some.shape[1], among.shape[1])
    assert torch.equal(some[:, :width], among[:, :width])


TWO = WorkerContext("actor", tensor_parallel=2)


@pytest.mark.parametrize(
    ("recipe", "context", "said"),
    [
        (
            TorchPolicySpec(model=spec("qwen3"), end_ids=(EOS,), optimizer=OptimizerSpec()),
            TWO,
            "the torch engine trains a model whole in each process",
        ),
        (
            TorchGeneratorSpec(model=spec("qwen3"), end_ids=(EOS,), lora=LoraSpec(rank=2)),
            TWO,
            "has adapters on a model whole in each process",
        ),
        (
            TorchGeneratorSpec(model=spec("qwen3"), end_ids=(EOS,)),
            WorkerContext("actor", pipeline_parallel=2),
            "leave executor.tensor_parallel and executor.pipeline_parallel",
        ),
        (
            TorchGeneratorSpec(model=ModelSpec(architecture=GPT2), end_ids=(EOS,)),
            TWO,
            "not of this 'gpt2'",
        ),
    ],
)
def test_what_is_not_divided_is_refused(recipe: Any, context: WorkerContext, said: str):
    with pytest.raises(ConfigError, match=said):
        recipe.check_group(context)


def test_a_size_that_does_not_divide_is_refused_by_name():
    three = WorkerContext("actor", tensor_parallel=3)
    with pytest.raises(PlanError, match="tensor_parallel=3 does not divide the 64 words"):
        TorchGeneratorSpec(model=spec("qwen3"), end_ids=(EOS,)).check_group(three)
