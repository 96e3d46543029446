"""Mixtures of experts in real processes on gloo, against the torch engine's transformers modules.

Two groups of processes are started, once: two that take on four layouts in turn, and, in `make
test-all`, four that take on three. Each test looks at a part of what they found.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from forked_ranks import is_night, night, run_groups
from megatron_models import (
    MIXTURES,
    OPTIMIZER,
    load_batch,
    mixture_optimizer,
    saved_state,
    tiny,
    torch_policy,
    train_pairs,
    train_policy,
    under,
    write_models,
)
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.cost.memory import resident_parts
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import shape_of
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from pydantic import TypeAdapter
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EP2, TP2, DP2, PP2 = "tp1ep2dp1pp1", "tp2ep1dp1pp1", "tp1ep1dp2pp1", "tp1ep1dp1pp2"
BOTH, STAGES, RANKS = "tp2ep2dp1pp1", "tp1ep2dp1pp2", "tp1ep2dp2pp1"
LAYOUTS = [EP2, TP2, DP2, PP2, *(night(layout) for layout in (BOTH, STAGES, RANKS))]
RANK = Path(__file__).parents[2] / "mixture_rank.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where the processes left what they found."""
    made = tmp_path_factory.mktemp("mixtures")
    write_models(made, MIXTURES)
    policy = torch_mixture(made, "qwen2_moe")
    train_policy(policy, load_batch(made), range(3))
    policy.save_state(made / "state-qwen2_moe-torch")
    two = [
        "1,2,1,1:learn+score+refusals",
        "2,1,1,1:learn",
        "1,1,2,1:learn+score+resume",
        "1,1,1,2:learn",
        "1,2,1,1:resume",
    ]
    four = ["2,2,1,1:learn", "1,2,1,2:learn+score", "1,2,2,1:learn+resume"]
    run_groups(made, RANK, (2, two), *([(4, four)] if is_night(request) else []))
    return made


def torch_mixture(folder: Path, family: str) -> PolicyWorker:
    model = ModelSpec(folder=str(folder / family))
    return torch_policy(model, optimizer=mixture_optimizer(family))


def lead(folder: Path, layout: str, part: str) -> dict[str, Tensor]:
    """What the process that answers for rank 0 found: the first of the last stage."""
    process = {PP2: 1, STAGES: 2}.get(layout, 0)
    return safetensors.torch.load_file(folder / f"{part}-{layout}-{process}.safetensors")


def assert_metrics(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The loss within 1e-5, every metric within 1e-4 of itself."""
    assert got.keys() == expected.keys()
    torch.testing.assert_close(got["loss"], expected["loss"], atol=1e-5, rtol=0)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=2e-6, rtol=1e-4, msg=name)


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    """What the torch engine says and learns, by family."""
    batch = load_batch(folder)
    found: dict[str, dict[str, Any]] = {}
    for family in MIXTURES:
        policy = torch_mixture(folder, family)
        before = policy.export_weights()
        logprob = policy.logprob(batch["tokens"], batch["mask"])
        metrics = train_policy(policy, batch, range(3))
        state = folder / f"torch-{family}"
        policy.save_state(state)
        found[family] = {
            "before": before,
            "logprob": logprob,
            "metric": metrics,
            "after": policy.export_weights(),
            "moments": saved_state(state, "optimizer"),
        }
    return found


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_says_and_learns_what_transformers_does(
    folder: Path, expected: dict[str, dict[str, Any]], layout: str, family: str
):
    # Three calls of two steps each; the last family computes activations again.
    found, wanted = under(lead(folder, layout, "learn"), family), expected[family]
    torch.testing.assert_close(found["logprob"], wanted["logprob"], atol=1e-5, rtol=0)
    before, after = under(found, "before"), under(found, "after")
    assert before.keys() == wanted["before"].keys()
    for name, weight in wanted["before"].items():
        assert torch.equal(before[name], weight), name
    assert_metrics(under(found, "metric"), wanted["metric"])
    torch.testing.assert_close(after, wanted["after"], atol=1e-5, rtol=0)
    # The first moment is a sum of gradients.
    moments = saved_state(folder / f"state-{family}-{layout}", "optimizer")
    assert moments.keys() == wanted["moments"].keys()
    summed = under(wanted["moments"], "first")
    apart = {name: moments[f"first/{name}"] - moment for name, moment in summed.items()}
    assert norm(apart) <= 1e-5 * norm(summed)
    for name, moment in summed.items():
        assert float(moment.norm()) > 0, name
        assert float(apart[name].norm()) <= 1e-4 * float(moment.norm()), name


@pytest.mark.parametrize("layout", [EP2, DP2, night(STAGES)])
def test_a_reward_model_of_experts_learns_too(folder: Path, layout: str):
    model = ModelSpec(folder=str(folder / "mixtral"))
    reward = TorchRewardModelSpec(model=model, optimizer=OPTIMIZER).build(
        WorkerContext("reward", seed=7)
    )
    metrics = train_pairs(reward, load_batch(folder))
    found = lead(folder, layout, "score")
    assert_metrics(under(found, "metric"), metrics)
    torch.testing.assert_close(under(found, "after"), reward.export_weights(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        *[("torch", DP2), (EP2, DP2), ("torch", EP2), (DP2, EP2)],
        *(night(saved, RANKS) for saved in ("torch", EP2)),
    ],
)
def test_a_state_goes_on_with_experts_divided_otherwise(folder: Path, saved: str, layout: str):
    state = folder / f"state-qwen2_moe-{saved}"
    for kind in ("weights", "optimizer"):
        before = saved_state(state, kind)
        after = saved_state(folder / f"again-{saved}-{layout}", kind)
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]), name
    policy = torch_mixture(folder, "qwen2_moe")
    policy.load_state(state)
    metrics = train_policy(policy, load_batch(folder), range(3, 4))
    found = lead(folder, layout, "resume")
    assert_metrics(under(found, f"{saved}/metric"), metrics)
    torch.testing.assert_close(
        under(found, f"{saved}/after"), policy.export_weights(), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", [EP2, night(BOTH), night(STAGES)])
def test_a_saved_folder_is_hugging_faces(folder: Path, layout: str, family: str):
    auto: Any = transformers.AutoModelForCausalLM
    saved = folder / f"policy-{family}-{layout}"
    loaded, info = auto.from_pretrained(saved, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    after = under(lead(folder, layout, "learn"), f"{family}/after")
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(parameters[name], weight), name
    again = torch_policy(ModelSpec(folder=str(saved))).export_weights()
    assert all(torch.equal(again[name], weight) for name, weight in after.items())


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_sent_to_others_is_no_more_than_they_lack(folder: Path, layout: str, family: str):
    path = folder / f"layout-{family}-{layout}.json"
    source = TypeAdapter(Sharding).validate_json(path.read_bytes())
    for process in source.devices:
        file = folder / f"learn-{layout}-{process}.safetensors"
        stored, described = safetensors.torch.load_file(file)[f"{family}/stored"].tolist()
        assert stored == described
    shapes = {param.name: param.shape for param in source.params}
    # To every process, as a torch engine beside them holds the model, and to one that has nothing.
    plan = plan_transfer(source, unsharded(shapes, [*source.devices, 99]))
    for device in plan.devices:
        assert device.received_bytes == device.needed_bytes - device.kept_bytes
        if device.device in source.devices:
            assert device.kept_bytes == source.bytes_on[device.device]
    assert plan.devices[-1].received_bytes == plan.devices[-1].needed_bytes


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_holds_what_the_planner_says(folder: Path, layout: str, family: str):
    tp, ep, dp, pp = (int(size) for size in re.findall(r"\d", layout))
    zero = 0 if family == "qwen3_moe" else 1
    config = ModelSpec(architecture=tiny(family)).config
    shape = shape_of(config.to_dict(), dtype="float32")
    planned = Layout.model_validate({"tp": tp, "pp": pp, "dp": dp * ep, "ep": ep, "zero": zero})
    call = Call(
        name="actor.train",
        role="actor",
        kind="train",
        model=shape,
        head="vocabulary",
        trained=True,
        num_sequences=24,
        prompt=Lengths.constant(19),
        response=Lengths.constant(20),
    )
    files = sorted(folder.glob(f"learn-{layout}-*.safetensors"))
    assert len(files) == tp * ep * dp * pp
    held = [int(safetensors.torch.load_file(file)[f"{family}/held"].sum()) for file in files]
    # Parameters begin at multiples of 64 bytes, and the last rank's run of a state is shorter.
    assert max(held) == pytest.approx(resident_parts(call, planned).total, rel=0.01)


REFUSALS = {
    "dense": "PlanError: layout 'dp2 ep2' divides experts, and model 'qwen2' has none; take ep=1",
    "three": "PlanError: layout: ep=2 does not divide 3 experts (model 'mixtral')",
    "places": "ConfigError: 'actor' has expert_parallel=3, which does not divide the 2 processes "
    "that share its model\n    set executor.tensor_parallel to a multiple of expert_parallel",
    "sparse": "ConfigError: the Megatron engine cannot compute a qwen3_moe model with "
    "decoder_sparse_step=2; train it with engine=torch",
    "only": "ConfigError: the Megatron engine cannot compute a qwen2_moe model with "
    "mlp_only_layers=[1]; train it with engine=torch",
    "noise": "ConfigError: the Megatron engine cannot compute a mixtral model with "
    "router_jitter_noise=0.1; train it with engine=torch",
    "window": "ConfigError: the Megatron engine cannot compute a mixtral model with "
    "sliding_window=8; train it with engine=torch",
}


@pytest.mark.parametrize("process", [0, 1])
def test_what_it_says_of_mixtures_it_cannot_have(folder: Path, process: int):
    assert json.loads((folder / f"refusals-{process}.json").read_text()) == REFUSALS
