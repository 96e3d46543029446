"""What is refused of a model folder before a weight is loaded, and what is taken."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.file_weights import model_source
from penstock.workers.models.spec import Head, ModelSpec
from penstock.workers.training.flat_parameters import read_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_models import architecture, make_policy

WEIGHT = "model.layers.0.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
CONTEXT = WorkerContext("critic", seed=3)
TOKENS = torch.arange(3, 9)[None]
AGAIN = "\n    copy the folder again, or give one that save_pretrained wrote"
WHOLE = "\n    copy or save them again, all of them, with the configuration they were made by"

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "policy"
    make_policy("qwen2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen2", "gpt2"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tensor]:
    """A model's folder, and its logits of `TOKENS`."""
    folder = tmp_path_factory.mktemp("plain") / "m"
    make_policy(request.param).save_pretrained(folder)
    return folder, ModelSpec(folder=str(folder)).causal_lm("cpu")(TOKENS).logits


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "m")


def edit(file: Path, change: Change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(folder: Path, name: Any = "lm_head") -> str:
    """What the look at a folder says, with the folder called M."""
    with pytest.raises(ConfigError) as error:
        Head(name).check(ModelSpec(folder=str(folder)))
    return str(error.value).replace(str(folder), "M")


def misfit(*lines: str) -> str:
    owner = "the 'qwen2' model that its config.json describes"
    return "\n    ".join([f"the weights in 'M' are not those of {owner}:", *lines]) + WHOLE


MISFITS: list[tuple[Change, list[str]]] = [
    (lambda t: t.pop(WEIGHT), [f"missing: {WEIGHT}"]),
    (lambda t: t.pop("lm_head.weight"), ["missing: lm_head.weight"]),
    (lambda t: t.update(foo=torch.zeros(3)), ["unexpected: foo"]),
    (lambda t: t.update({WEIGHT: torch.zeros(3, 3)}),
     [f"of another shape: {WEIGHT} [3, 3], expected [80, 48]"]),
    (lambda t: t.update({WEIGHT: t[WEIGHT].int()}),
     [f"of a type that is no floating point: {WEIGHT} int32"]),
    (lambda t: [t.clear(), t.update(x=torch.zeros(1))],
     ["missing: lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight "
      "and 24 more",
      "unexpected: x"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("change", "lines"), MISFITS)
def test_other_tensors_than_the_models_are_refused_by_name(
    folder: Path, change: Change, lines: list[str]
) -> None:
    edit(folder / "model.safetensors", change)
    assert refusal(folder) == misfit(*lines)
    with pytest.raises(ConfigError, match="are not those of"):
        ModelSpec(folder=str(folder)).causal_lm("cpu")
    with pytest.raises(ConfigError, match="are not those of"):
        model_source(ModelSpec(folder=str(folder)), Head("lm_head"))  # what divided engines read


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e25])
def test_weights_that_are_no_numbers_are_refused_when_they_are_loaded(
    folder: Path, bad: float
) -> None:
    edit(folder / "model.safetensors", lambda t: t[WEIGHT].view(-1)[:1].fill_(bad))
    spec = TorchPolicySpec(model=ModelSpec(folder=str(folder)), end_ids=(2,))
    with pytest.raises(ConfigError) as error:
        spec.build(WorkerContext("actor"))
    assert str(error.value) == (
        f"the weights that 'actor' starts from ('{folder}') are not finite, or beyond 1e12: "
        f"{WEIGHT}\n    give a model folder that was saved before its training "
        "diverged, or an ordinary initializer_range"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2", "gpt_neox", "mixtral"])
def test_what_save_pretrained_writes_is_taken(name: str, tmp_path: Path) -> None:
    policy = make_policy(name)
    policy.save_pretrained(tmp_path / "m")
    spec = TorchPolicySpec(model=ModelSpec(folder=str(tmp_path / "m")), end_ids=(2,))
    assert spec.build(WorkerContext("actor")).weights_sha256() == policy.weights_sha256()
    TorchValueSpec(model=spec.model).build(CONTEXT)


HARMLESS: list[Change] = [
    lambda t: t.update({name: tensor.double() for name, tensor in t.items()}),
    lambda t: t.update({name: tensor.half() for name, tensor in t.items()}),
    lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}),
]


@pytest.mark.parametrize("change", HARMLESS)
def test_other_precisions_and_what_old_checkpoints_carry_are_taken(
    folder: Path, change: Change
) -> None:
    edit(folder / "model.safetensors", change)
    ModelSpec(folder=str(folder)).causal_lm("cpu")


def test_a_tied_head_may_stand_in_the_file_too(tmp_path: Path) -> None:
    make_policy("qwen2-tied").save_pretrained(tmp_path)
    table = "model.embed_tokens.weight"
    edit(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": t[table].clone()}))
    ModelSpec(folder=str(tmp_path)).causal_lm("cpu")


def test_a_scalar_head_needs_the_backbone_alone_and_seeds_its_own(folder: Path) -> None:
    edit(folder / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    spec = TorchValueSpec(model=ModelSpec(folder=str(folder)), zero_init_head=False)
    first, second = (spec.build(CONTEXT).weights_sha256() for _ in range(2))
    assert first == second


def test_a_value_model_is_no_policy(tmp_path: Path) -> None:
    spec = ModelSpec(architecture=architecture("qwen2"))
    TorchValueSpec(model=spec).build(CONTEXT).save_pretrained(tmp_path)
    TorchRewardModelSpec(model=ModelSpec(folder=str(tmp_path))).build(CONTEXT)
    assert refusal(tmp_path) == misfit("missing: lm_head.weight")


HEADS: list[tuple[Change, str]] = [
    (lambda t: t.pop("value_head.bias"), "missing: value_head.bias"),
    (lambda t: t["value_head.weight"].fill_(torch.nan), "not finite: value_head.weight"),
    (
        lambda t: t.update({"value_head.weight": torch.zeros(1, 5)}),
        "of another shape: value_head.weight [1, 5], expected [1, 48]",
    ),
    (
        lambda t: t.update({"value_head.bias": torch.zeros(1, dtype=torch.int64)}),
        "of a type that is no floating point: value_head.bias int64",
    ),
]


@pytest.mark.parametrize(("change", "line"), HEADS)
def test_a_head_that_does_not_fit(tmp_path: Path, change: Change, line: str) -> None:
    spec = ModelSpec(architecture=architecture("qwen2"))
    TorchValueSpec(model=spec).build(CONTEXT).save_pretrained(tmp_path)
    edit(tmp_path / "head.safetensors", change)
    assert refusal(tmp_path, "value_head") == (
        f"the weights in 'M/head.safetensors' are not those of a value_head:\n    {line}{WHOLE}"
    )


def config(**changes: Any) -> Callable[[str], bytes]:
    return lambda text: json.dumps({**json.loads(text), **changes}).encode()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", None, "model folder 'M' has no config.json\n    give a local folder"),
        ("config.json", b"", "'M/config.json' is not JSON: Expecting value"),
        ("config.json", b"[]", "'M/config.json' holds list; expected an object, {...}" + AGAIN),
        ("config.json", b"\xff\xfe{", "'M/config.json' is not JSON: 'utf-16-le' codec can't"),
        ("config.json", b"[" * 99999, "'M/config.json' is not JSON: it is nested too deeply"),
        ("config.json", b"{}", "'M/config.json': 'model_type' is None, which transformers does"),
        ("config.json", config(model_type="qwen22"),
         "'M/config.json': 'model_type' is 'qwen22', which transformers does not know; did you "
         "mean 'qwen2'?\n    give the model_type of a causal language model, such as qwen2 or "
         "llama; code of a folder's own is never run"),
        ("config.json", b'{"model_type": "t5"}',
         "'M/config.json': 'model_type' is 't5', of which transformers makes no causal language "
         "model: "),
        ("config.json", config(quantization_config={"quant_method": "gptq"}),
         "model folder 'M' holds quantized weights (quantization_config in config.json), which "
         "cannot be trained\n    give the model as it was before, in 16 or 32 bits"),
        ("adapter_config.json", b"{}",
         "model folder 'M' holds an adapter beside the model (adapter_config.json)\n    move the "
         "adapter's files out of it; to go on from it, give their folder as "),
        ("config.json", config(num_attention_heads=0),
         "'M/config.json': 'num_attention_heads' is 0; expected an integer from 1 to 16384"),
        ("config.json", config(hidden_size=50),
         misfit()[: -len(WHOLE)] + "\n    of another shape: "),
        ("generation_config.json", b"", "'M/generation_config.json' is not JSON: Expecting value"),
        ("generation_config.json", b"[]", "'M/generation_config.json' holds list; expected an"),
        ("generation_config.json", b'{"temperature": 0.7}',
         "'M/generation_config.json' cannot be saved with the trained model: GenerationConfig is "
         "invalid: - `temperature`: "),
        ("model.safetensors", None,
         "model folder 'M' has no weights: expected model.safetensors or "
         "model.safetensors.index.json\n    give a folder that save_pretrained wrote"),
        ("model.safetensors", b"", "'M/model.safetensors' is no whole safetensors file: Error"),
        ("model.safetensors", b"\xff" * 64, "'M/model.safetensors' is no whole safetensors file"),
    ],
)  # fmt: skip
def test_broken_files(
    folder: Path, file: str, change: bytes | Callable[[str], bytes] | None, message: str
) -> None:
    whole = folder / file
    if change is None:
        whole.unlink()
    else:
        whole.write_bytes(change if isinstance(change, bytes) else change(whole.read_text()))
    assert refusal(folder)[: len(message)] == message


def test_keys_of_others_in_a_folders_config_are_left_alone(folder: Path) -> None:
    file = folder / "config.json"
    file.write_bytes(config(their_own=[1], rope_theta=1e6)(file.read_text()))
    Head("lm_head").check(ModelSpec(folder=str(folder)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        *({"_attn_implementation": how} for how in ("org/kernel", "eager", "flash_attention_2", 5)),
        {"_attn_implementation": {"": "org/kernel"}},
        {"attn_implementation": "org/kernel"},
        {"_experts_implementation": "org/kernel"},
        {"experts_implementation": "org/kernel"},
        {"use_kernels": True, "kernel_config": {"a": "org/kernel"}},
        {"output_attentions": True},
        {"output_hidden_states": True, "return_dict": False},
        {"use_return_dict": False},
        {"auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "org/name--x.Y"}},
        {"auto_map": 5, "trust_remote_code": True, "custom_pipelines": {"a": {"impl": "x.Y"}}},
        {"_name_or_path": "/etc/passwd", "_commit_hash": 5},
        {"transformers_weights": "../other.safetensors"},
        {"distributed_config": {"a": 1}, "fusion_config": {"a": True}, "tp_plan": "auto"},
        {"gradient_checkpointing": True, "pruned_heads": {"0": [1]}, "torchscript": True},
    ],
)
def test_a_folder_does_not_choose_how_it_is_loaded_and_computed(
    plain: tuple[Path, Tensor], field: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever it says there, the model is the same, and an export does not hand it on."""
    folder, expected = plain
    file = shutil.copytree(folder, tmp_path / "m") / "config.json"
    file.write_bytes(config(**field)(file.read_text()))
    spec = ModelSpec(folder=str(file.parent))
    model = spec.causal_lm("cpu")
    assert torch.equal(model(TOKENS).logits, expected)
    assert spec.backbone("cpu")(TOKENS).last_hidden_state.shape[:2] == TOKENS.shape
    model.save_pretrained(tmp_path / "exported")
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert all(exported.get(key) != value for key, value in field.items())


def test_a_file_that_is_larger_than_memory_is_said_to_be(folder: Path) -> None:
    size = 1 << 32
    header = json.dumps({"a": {"dtype": "F32", "shape": [size >> 2], "data_offsets": [0, size]}})
    header += " " * (-len(header) % 8)
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header.encode())
        stream.truncate(8 + len(header) + size)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + (size >> 1)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        for read in (lambda: ModelSpec(folder=str(folder)).check(scalar_head=False),
                     lambda: read_tensors(file)):  # fmt: skip
            with pytest.raises(ConfigError, match=r"of 4\.0 GiB does not fit into memory: "):
                read()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_truncated_file_and_a_pickle(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(folder) == (
        "'M/model.safetensors' is no whole safetensors file: Error while deserializing header: "
        f"incomplete metadata, file not fully covered{AGAIN}"
    )
    file.rename(folder / "pytorch_model.bin")
    assert "; pytorch_model.bin is a pickle, which is never read\n" in refusal(folder)


def test_a_folder_of_several_files_must_hold_what_its_index_says(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    where = {name: file for file, part in files.items() for name in part}

    def say(weight_map: Any) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    say(where)
    Head("lm_head").check(ModelSpec(folder=str(folder)))
    say({**where, "foo": "a.safetensors"})
    assert refusal(folder) == f"the files of 'M' do not hold what {INDEX} says: foo{AGAIN}"
    say({name: file for name, file in where.items() if name != WEIGHT})
    assert refusal(folder) == f"the files of 'M' do not hold what {INDEX} says: {WEIGHT}{AGAIN}"
    for unusable in ({}, 3, dict.fromkeys(names, "../a.safetensors"), dict.fromkeys(names, 1)):
        say(unusable)
        assert refusal(folder) == (
            f"'M/{INDEX}' has no usable weight_map; expected tensor names and, for each, the name "
            f"of a file beside it{AGAIN}"
        )
    say(where)
    save_file({names[-1]: tensors[names[-1]], **load_file(folder / "a.safetensors")},
              folder / "a.safetensors")  # fmt: skip
    assert refusal(folder) == (
        f"'{names[-1]}' stands in two files of 'M': a.safetensors and b.safetensors{AGAIN}"
    )
    (folder / "b.safetensors").unlink()
    assert refusal(folder) == (
        f"model folder 'M' lacks 1 of the 2 files that its {INDEX} names: b.safetensors{AGAIN}"
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    ["special_tokens_map.json", "generation_config.json", "model.safetensors", "config.json"],
)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    said = f"'M/{name}': it is a {kind} where a file belongs\n    remove it, or put a file in its"
    assert refusal(folder).startswith(said)


def test_the_files_of_a_cache_are_links(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(blob)
    Head("lm_head").check(ModelSpec(folder=str(folder)))


@pytest.mark.timeout(20)
def test_the_weights_of_an_adapter_are_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="it is a FIFO where a file belongs"):
        read_tensors(tmp_path / "adapter_model.safetensors")
