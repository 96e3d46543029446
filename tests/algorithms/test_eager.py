"""A step function called by hand and the same function run as a graph end with the same bits.

All of `configs/algorithm`, for five steps, which every algorithm must also get through.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.eager import run_eagerly
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.lora import LoraSpec

from . import runs
from .configured import NAMES, configured
from .eager import check_eager_equals_graph


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_eager_equals_graph_bitwise_over_five_steps(name: str) -> None:
    check_eager_equals_graph(configured(name))


@pytest.mark.slow
def test_adapters_and_activations_computed_again_change_nothing_of_that() -> None:
    run = configured("reference_grpo")
    saving: dict[str, Any] = {"lora": LoraSpec(rank=2), "activation_checkpointing": True}
    workers = {
        role: dataclasses.replace(spec, **saving) if isinstance(spec, TorchPolicySpec) else spec
        for role, spec in run.workers.items()
    }
    assert workers != run.workers
    check_eager_equals_graph(dataclasses.replace(run, workers=workers))


def test_a_parameter_nobody_provides_is_named() -> None:
    run = runs.make("grpo")
    with pytest.raises(ConfigError) as raised:
        next(run_eagerly(run.step, run.sources, 1, workers={}, cfg=run.cfg))
    assert str(raised.value) == (
        "'grpo_step' has a parameter 'actor' that is not provided; give it as a source, a worker "
        "or a keyword"
    )
