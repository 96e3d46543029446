"""Training that keeps less: the same gradients, bit for bit, with activations computed again."""

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 4}


def _batch() -> PolicyBatch:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 40, (6, 9), generator=random)
    tokens[1::2, :3] = tokens[::2, :3]
    mask = torch.arange(9).expand(6, 9) >= 3
    numbers = torch.randn(6, 9, generator=random)
    return PolicyBatch(
        tokens=tokens, mask=mask, behavior_logprob=numbers - 4, advantage=numbers.flip(0)
    )


def _trained(architecture: dict[str, object], *, again: bool) -> dict[str, torch.Tensor]:
    spec = TorchPolicySpec(
        model=ModelSpec(architecture=architecture),
        optimizer=OptimizerSpec(lr=1e-2),
        end_ids=(2,),
        activation_checkpointing=again,
    )
    worker = spec.build(WorkerContext("actor"))
    with call_scope(0, 0):
        worker.train(ClippedPolicyLoss(), _batch())
    return worker.export_weights()


@pytest.mark.parametrize("architecture", [QWEN, GPT2], ids=["own", "transformers"])
def test_computing_activations_again_changes_no_bit(architecture: dict[str, object]) -> None:
    plain, again = (_trained(architecture, again=again) for again in (False, True))
    assert plain.keys() == again.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, again[name]), name
