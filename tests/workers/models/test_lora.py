"""Adapters of a folder are used as their adapter_config.json says, or refused by name."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_device import CountedOps
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.lora import AdaptedModel, LoraSpec, check_lora
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.flat_parameters import read_tensors
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

from ..engines.torch_engine.test_lora import QWEN

MODEL = ModelSpec(architecture=QWEN)
TOKENS = torch.randint(3, 40, (6, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(9).expand(6, 9) >= 3
MADE: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 8},
    "rslora": {"lora_alpha": 32, "use_rslora": True},
    "alpha-pattern": {"lora_alpha": 32, "alpha_pattern": {"q_proj": 4}},
    "rank-pattern": {"lora_alpha": 16, "rank_pattern": {"layers.1.self_attn.v_proj": 2}},
    "full-names": {"lora_alpha": 8, "target_modules": ["model.layers.1.self_attn.k_proj"]},
}
"""Settings of adapters of rank 4, as peft trains them."""


def _logprob(logits: Tensor) -> Tensor:
    found = torch.log_softmax(logits[:, :-1].float(), -1)
    found = found.gather(2, TOKENS[:, 1:, None]).squeeze(2)
    return torch.where(MASK[:, 1:], found, 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Make a folder of adapters that peft wrote, and return the logits of peft with each."""
    from peft import LoraConfig, PeftModel, get_peft_model

    home, expected = tmp_path_factory.mktemp("adapters"), dict[str, Tensor]()
    MODEL.causal_lm("cpu").save_pretrained(home / "base")
    auto: Any = transformers.AutoModelForCausalLM
    random = torch.Generator().manual_seed(1)
    for name, settings in MADE.items():
        given: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], **settings}
        config = LoraConfig(r=4, task_type="CAUSAL_LM", **given)
        model: Any = get_peft_model(auto.from_pretrained(home / "base"), config)
        for part, weight in model.named_parameters():
            if "lora_" in part:
                weight.data.copy_(torch.randn(weight.shape, generator=random) * 0.3)
        model.save_pretrained(home / name)
        read: Any = PeftModel.from_pretrained(auto.from_pretrained(home / "base"), home / name)
        with torch.no_grad():
            expected[name] = _logprob(read(input_ids=TOKENS).logits)
    return home, expected


def _policy(lora: LoraSpec, **options: Any) -> PolicyWorker:
    spec = TorchPolicySpec(model=options.pop("model", MODEL), end_ids=(2,), lora=lora, **options)
    return spec.build(WorkerContext("actor"))


def _said(worker: PolicyWorker) -> Tensor:
    with call_scope(0, 0):
        return worker.logprob(TOKENS, MASK)[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_saved_adapter_says_what_peft_says_with_it(
    made: tuple[Path, dict[str, Tensor]], name: str, tmp_path: Path
) -> None:
    """The merged export, the adapter saved again and an engine's merged copy do, too."""
    home, expected = made
    lora = LoraSpec(folder=str(home / name))
    worker = _policy(lora)
    torch.testing.assert_close(_said(worker), expected[name], rtol=0, atol=1e-5)
    worker.save_pretrained(tmp_path)
    exported = ModelSpec(folder=str(tmp_path))
    for again, model in ((LoraSpec(), exported), (LoraSpec(folder=f"{tmp_path}/adapter"), MODEL)):
        said = _said(_policy(again, model=model))
        torch.testing.assert_close(said, expected[name], rtol=0, atol=1e-5)
    copy = AdaptedModel(MODEL.causal_lm("cpu"), lora, 0, "cpu", but="lm_head")
    merged = copy.merged_with(copy.adapters)
    whole = MODEL.causal_lm("cpu")
    whole.load_state_dict(merged, strict=False)
    with torch.no_grad():
        said = _logprob(whole(input_ids=TOKENS).logits)
    torch.testing.assert_close(said, expected[name], rtol=0, atol=1e-5)


def test_matrices_are_merged_one_at_a_time_on_the_device_of_an_engine() -> None:
    """The rest of the model, and what is not read yet, stays in host memory."""
    module = MODEL.causal_lm("cpu")
    adapted = AdaptedModel(module, LoraSpec(rank=2), 0, "meta", but="lm_head")
    with CountedOps() as seen:
        merged = adapted.merged_with(adapted.adapters)
    assert seen.counts["mm"] == 0
    assert dict(merged).keys() == {name for name, _ in MODEL.causal_lm("cpu").named_parameters()}
    for name, tensor in merged.items():
        assert tensor.device.type == ("meta" if "_proj.weight" in name else "cpu"), name


def test_an_adapter_of_a_bfloat16_model_is_merged_in_float32(tmp_path: Path) -> None:
    """In bfloat16 nearly all of a small update would be rounded away."""
    model = ModelSpec(architecture=QWEN, dtype="bfloat16")
    worker = _policy(LoraSpec(rank=2), model=model, optimizer=OptimizerSpec())
    for name, weight in worker.local_tensors().items():
        weight.fill_(1e-3 if ".lora_B." in name else 1e-2)
    worker.save_pretrained(tmp_path)
    saved = read_tensors(tmp_path / "model.safetensors")
    added = 16.0 * 2 * 1e-2 * 1e-3  # alpha / rank * B A
    for name, weight in model.causal_lm("cpu").named_parameters():
        expected = weight.float() + (added if "_proj.weight" in name else 0.0)
        torch.testing.assert_close(saved[name], expected, rtol=0, atol=1e-7)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_reference_begins_where_its_policy_begins(
    made: tuple[Path, dict[str, Tensor]], name: str
) -> None:
    lora = LoraSpec(folder=str(made[0] / name))
    policy = _policy(lora, optimizer=OptimizerSpec(lr=1e-2))
    reference = _policy(lora)
    before = _said(reference)
    assert torch.equal(_said(policy), before)
    batch = PolicyBatch(
        tokens=TOKENS, mask=MASK, behavior_logprob=torch.zeros(6, 9), advantage=torch.ones(6, 9)
    )
    with call_scope(0, 0):
        policy.train(ClippedPolicyLoss(), batch)
    assert torch.equal(_said(reference), before)
    assert not torch.equal(_said(policy), before)


@pytest.mark.parametrize("spec", [TorchValueSpec, TorchRewardModelSpec])
def test_a_scalar_model_saves_its_adapter_without_its_head(spec: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": MODEL, "optimizer": OptimizerSpec()}
    worker = spec(lora=LoraSpec(rank=2), **options).build(WorkerContext("critic"))
    worker.save_pretrained(tmp_path)
    saved = read_tensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    again = spec(lora=LoraSpec(folder=str(tmp_path / "adapter")), **options)
    assert len(again.build(WorkerContext("critic")).export_weights()) == len(saved) + 2


def test_settings_that_are_left_open_are_the_folders(made: tuple[Path, dict[str, Tensor]]) -> None:
    folder = str(made[0] / "rank-pattern")
    found = LoraSpec(folder=folder).resolved()
    assert replace(found, target_modules=()) == LoraSpec(
        rank=4,
        alpha=16,
        use_rslora=False,
        rank_pattern={"layers.1.self_attn.v_proj": 2},
        folder=folder,
    )
    assert set(found.target_modules) == {"q_proj", "v_proj"}
    assert found.resolved() == found
    assert pickle.loads(pickle.dumps(found)) == found
    assert LoraSpec(rank=4).resolved() == LoraSpec(rank=4, alpha=32.0, use_rslora=False)
    given = LoraSpec(rank=4, alpha=16.0, target_modules=("v_proj", "q_proj"), folder=folder)
    assert given.resolved() == replace(found, target_modules=given.resolved().target_modules)


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"rank": 8}, "'model.lora.rank' is 8, but ... with r=4"),
        ({"alpha": 32.0}, "'model.lora.alpha' is 32.0, but ... with lora_alpha=8"),
        ({"target_modules": ("k_proj",)},
         "'model.lora.target_modules' is [\"k_proj\"], but ... with target_modules="),
        ({"use_rslora": True}, "'model.lora.use_rslora' is true, but ... with use_rslora=false"),
        ({"rank_pattern": {"q_proj": 2}},
         "'model.lora.rank_pattern' is {\"q_proj\": 2}, but ... with rank_pattern={}"),
        ({"alpha_pattern": {"q_proj": 2.0}},
         "'model.lora.alpha_pattern' is {\"q_proj\": 2.0}, but ... with alpha_pattern={}"),
    ],
)  # fmt: skip
def test_a_setting_that_differs_from_the_folders_is_refused(
    made: tuple[Path, dict[str, Tensor]], given: dict[str, Any], saved: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        _policy(LoraSpec(folder=str(made[0] / "alpha"), **given))
    first, _, last = saved.partition(" ... ")
    assert str(refused.value).startswith(first)
    assert last in str(refused.value)
    assert f"\n    leave model.lora.{next(iter(given))} out" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_dora": True}, "'use_dora' is true, and such adapters are not trained here"),
        ({"bias": "lora_only"}, "'bias' is \"lora_only\", and such"),
        ({"modules_to_save": ["score"]}, "'modules_to_save' is [\"score\"], and such"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is true, and such"),
        ({"peft_type": "IA3"}, "'peft_type' is \"IA3\", and such"),
        ({"peft_type": None}, "'peft_type' is null, and such"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is \"pissa\", and such"),
        ({"layers_to_transform": [0]}, "'layers_to_transform' is [0], and such"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication' is [[0, 1]], and such"),
        ({"lora_bias": True}, "'lora_bias' is true, and such"),
        ({"use_later": 3}, "'use_later' is 3, and such"),
        ({"r": float("nan")}, "is not JSON: "),
        ({"r": 0}, "'r' is 0; expected an integer from 1 to 262144"),
        ({"r": None}, "'r' is null; expected an integer"),
        ({"r": True}, "'r' is true; expected an integer"),
        ({"r": 10**9}, "'r' is 1000000000; expected an integer"),
        ({"lora_alpha": float("nan")}, "is not JSON: "),
        ({"lora_alpha": float("inf")}, "is not JSON: "),
        ({"lora_alpha": 10**400}, "is not JSON: a number of 401 digits"),
        ({"lora_alpha": 10**12}, "'lora_alpha' is 1000000000000; expected a number above 0"),
        ({"lora_alpha": -1}, "'lora_alpha' is -1; expected"),
        ({"lora_alpha": "16"}, "'lora_alpha' is \"16\"; expected"),
        ({"target_modules": ".*q_proj"}, "'target_modules' is \".*q_proj\"; expected a list"),
        ({"target_modules": None}, "'target_modules' is null; expected a list"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "'alpha_pattern' is {\"(a+)+$\": 2}; expected ends"),
        ({"rank_pattern": [2]}, "'rank_pattern' is [2]; expected ends of names with a rank"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(
    made: tuple[Path, dict[str, Tensor]], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(made[0] / "alpha", tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        _policy(LoraSpec(folder=str(folder)))
    assert str(refused.value).startswith(f"'{file}'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "'model.lora.folder': 'HOME' has no adapter_config.json, which says how its"),
        ("{", "'HOME/adapter_config.json' is not JSON"),
        ("[1]", "'HOME/adapter_config.json' holds list; expected an object"),
    ],
)
def test_a_folder_without_settings_is_refused(
    made: tuple[Path, dict[str, Tensor]], tmp_path: Path, text: str | None, message: str
) -> None:
    folder = shutil.copytree(made[0] / "alpha", tmp_path / "adapter")
    (folder / "adapter_config.json").unlink()
    if text is not None:
        (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        _policy(LoraSpec(folder=str(folder)))
    assert str(refused.value).startswith(message.replace("HOME", str(folder)))
    with pytest.raises(ConfigError, match="'nowhere' is no folder"):
        LoraSpec(folder="nowhere").resolved()


def test_peft_writes_fan_in_fan_out_for_gpt2_where_it_is_right(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    gpt2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4}
    model = ModelSpec(architecture=gpt2)
    config = LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    adapted: Any = get_peft_model(model.causal_lm("cpu"), config)
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = _logprob(adapted(input_ids=TOKENS).logits)
    said = _said(_policy(LoraSpec(folder=str(tmp_path)), model=model))
    torch.testing.assert_close(said, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(rank=2, target_modules=("lm_head",)),
         "lora.target_modules: 'lm_head' is the model's head, which gets no adapter\n    leave "
         "it out"),
        (LoraSpec(rank=2, target_modules=("layers.9.self_attn.q_proj",)),
         "lora.target_modules: no linear map of the model has a name that ends in "
         "'layers.9.self_attn.q_proj'\n    names are such as model.layers.1.mlp.down_proj"),
        (LoraSpec(rank=2, target_modules=("layers.9.q_proj", "v_proj")),
         "lora.target_modules: no linear map of the model has a name that ends in "
         "'layers.9.q_proj'\n    names are such as model.layers.1.mlp.down_proj"),
        (LoraSpec(rank=2, target_modules=("embed_tokens",)),
         "lora.target_modules: no linear map of the model is called 'embed_tokens'\n    it has: "
         "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (LoraSpec(rank=4, target_modules=("q_prj",)),
         "lora.target_modules: no linear map of the model is called 'q_prj'; did you mean "
         "'q_proj'?\n    it has: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        (LoraSpec(rank=2, target_modules=("q_proj",), alpha_pattern={"v_proj": 2.0}),
         "lora.patterns: no linear map of the model is called 'v_proj'; did you mean 'q_proj'?\n "
         "   it has: q_proj"),
        (LoraSpec(rank=49),
         "'model.lora.rank' is 49, but no adapted map of the model has a higher rank than 48 "
         "([48, 48])\n    lower it; 16 is usual"),
        (LoraSpec(rank=2, rank_pattern={"q_proj": 100}),
         "'model.lora.rank' is 100, but no adapted map of the model has a higher rank than 48 "
         "([48, 48])\n    lower it; 16 is usual"),
    ],
)  # fmt: skip
def test_adapters_that_fit_nothing_are_refused(spec: LoraSpec, message: str) -> None:
    for look in (lambda: check_lora(spec, MODEL.causal_lm("cpu")), lambda: _policy(spec)):
        with pytest.raises(ConfigError) as refused:
            look()
        assert str(refused.value) == message


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 5.0},
        {"target_modules": ("q_proj",)},
        {"use_rslora": False},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2.0}},
    ],
)
def test_settings_without_adapters_are_refused(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ValueError, match=rf"lora.{name} is given, but lora.rank is 0"):
        LoraSpec(**given)


def test_the_alpha_that_older_runs_recorded_without_adapters_is_accepted() -> None:
    assert not LoraSpec(alpha=32.0)
