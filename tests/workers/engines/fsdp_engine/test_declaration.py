"""What FSDP's processes hold where they share rows."""

from __future__ import annotations

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.cost.memory import transient_parts
from penstock.planner.inputs.calls import Call
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.inputs.workload import Lengths
from penstock.workers.engines.fsdp_engine.declaration import FSDP
from penstock.workers.engines.fsdp_engine.mesh import check_division

MODEL = ModelShape(
    name="tiny",
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_key_heads=2,
    head_dim=8,
    intermediate_size=96,
    vocab_size=256,
)
MEMORY = FSDP.planned.memory


def call(kind: str, *, trained: bool = True) -> Call:
    """64 rows of 32 + 96 tokens."""
    return Call(
        name=f"actor.{kind}",
        role="actor",
        kind="train" if kind == "train" else "forward",
        model=MODEL,
        head="vocabulary",
        trained=trained,
        num_sequences=64,
        prompt=Lengths.constant(32),
        response=Lengths.constant(96),
    )


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("shared", "alone"),
    [
        (Layout(cp=2, dp=2, zero=3), Layout(dp=4, zero=3)),
        (Layout(cp=2, dp=2, zero=2), Layout(dp=4, zero=2)),
        # With stage 0 those divide the weights that share rows; the others hold the same.
        (Layout(cp=2, dp=2), Layout(dp=2, zero=3)),
    ],
)
def test_weights_are_divided_over_all_that_share_rows(
    shared: Layout, alone: Layout, trained: bool
) -> None:
    kind = "train" if trained else "forward"
    one = call(kind, trained=trained)
    assert MEMORY.resident(one, shared) == MEMORY.resident(one, alone)
    found, expected = MEMORY.transient(one, shared), MEMORY.transient(one, alone)
    assert (found.weights, found.gradients) == (expected.weights, expected.gradients)


@pytest.mark.parametrize(
    ("kind", "again", "layers"), [("train", False, 4), ("train", True, 1), ("forward", False, 1)]
)
def test_activations_are_those_of_a_part_of_the_tokens_and_of_all_keys(
    kind: str, again: bool, layers: int
) -> None:
    one = call(kind)
    layout = Layout(cp=2, zero=3, checkpointing=again, micro_batch=2)
    found, cut = MEMORY.transient(one, layout), transient_parts(one, layout)
    keys = 2 * MODEL.num_key_heads * MODEL.head_dim * MODEL.dtype_bytes
    assert found.activations - cut.activations == layers * 128 * keys
    assert found.logits == cut.logits
    whole = transient_parts(one, layout.model_copy(update={"cp": 1}))
    assert cut.activations * 2 == whole.activations


@pytest.mark.parametrize(
    ("stages", "shards", "share_rows", "message"),
    [
        (
            1,
            3,
            1,
            "'actor' has shards=3, which does not divide the 4 processes that share its model\n"
            "    set executor.tensor_parallel to a multiple of shards",
        ),
        (
            1,
            4,
            3,
            "'actor' has context_parallel=3, which does not divide the 4 processes that share its "
            "model\n    set executor.tensor_parallel to a multiple of it",
        ),
        (
            1,
            2,
            4,
            "'actor' has context_parallel=4, which does not divide its 2 shards\n"
            "    set engine.options.shards to a multiple of it",
        ),
        (
            2,
            4,
            2,
            "'actor' is on a group of 2 pipeline stages, which engine=fsdp does not have\n"
            "    set executor.pipeline_parallel to 1, or engine=megatron",
        ),
    ],
)
def test_processes_that_cannot_be_divided_so(
    stages: int, shards: int, share_rows: int, message: str
) -> None:
    context = WorkerContext("actor", tensor_parallel=4, pipeline_parallel=stages)
    with pytest.raises(ConfigError) as refused:
        check_division(context, shards, share_rows)
    assert str(refused.value) == message


def test_processes_that_can_be_divided_so() -> None:
    check_division(WorkerContext("actor", tensor_parallel=4), 4, 2)
