"""Which device megatron-core is adapted to is a matter of the role's, not of the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.engines.megatron_engine import groups

TRAINED = """
import torch

torch.set_num_threads(1)
torch.cuda.is_available = lambda: True  # as on a machine with GPUs

from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import EOS, architecture, make_batch, make_policy

optimizer = OptimizerSpec(lr=1e-3)
model = ModelSpec(architecture=architecture("llama"))
spec = MegatronPolicySpec(model=model, end_ids=(EOS,), optimizer=optimizer)
there = spec.build(WorkerContext("actor", seed=7))
here = make_policy("llama", optimizer=optimizer)
there.load_weights(here.export_weights())
batch = make_batch(here)
for policy in (here, there):
    with call_scope(0, 0):
        policy.train(ClippedPolicyLoss(), batch)
torch.testing.assert_close(there.export_weights(), here.export_weights(), atol=1e-5, rtol=0)
print("trained alike")
"""


@pytest.mark.nightly
def test_a_model_on_the_cpu_of_a_machine_with_gpus_is_trained_there() -> None:
    models = str(Path(__file__).parents[2])  # where `torch_models` is
    done = subprocess.run(
        [sys.executable, "-c", TRAINED], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "PYTHONPATH": models},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["trained alike"], done.stderr


def test_roles_on_two_kinds_of_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_PREPARED_FOR", ["cpu"])
    groups.prepare_megatron("cpu")
    with pytest.raises(ConfigError) as caught:
        groups.prepare_megatron("cuda:0")
    assert str(caught.value) == (
        "a Megatron role is on 'cuda:0', and another of this process on 'cpu'\n"
        "    put all Megatron roles of a group on one kind of device"
    )
