"""Model folders and architectures that cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import SMALL, Refused
from .damage import BAD, Damage, change, cut, flip, folder, remove, write

pytestmark = pytest.mark.slow

LINES = """\
hiden_size=3
hidden_size=0
hidden_size=-3
hidden_size=33
hidden_size=abc
hidden_size=1.5
hidden_size=null
hidden_size=1000000000000
num_attention_heads=0
num_attention_heads=-1
num_attention_heads=3
num_key_value_heads=0
num_key_value_heads=3
num_key_value_heads=false
head_dim=7
num_hidden_layers=0
num_hidden_layers=-1
num_hidden_layers=100000000
intermediate_size=0
hidden_act=nope
hidden_act=3
max_position_embeddings=0
max_position_embeddings=1
vocab_size=1
vocab_size=0
vocab_size=x
rms_norm_eps=nan
rms_norm_eps=x
tie_word_embeddings=3
model_type=bogus
model_type=[1]
model_type=''
model_type=null
model_type=bert
bogus.deeper=1
"""


@pytest.mark.parametrize("line", LINES.splitlines())
def test_architecture(line: str, refused: Refused) -> None:
    refused(["run", *SMALL, f"model.architecture.{line}"])


Tensors = dict[str, torch.Tensor]
_NORM = "model.norm.weight"


def weights(edit: Callable[[Tensors], object]) -> Damage:
    def damage(top: Path) -> None:
        tensors = load_file(top / "model.safetensors")
        edit(tensors)
        save_file(tensors, top / "model.safetensors", {"format": "pt"})

    return damage


def filled(value: float) -> Damage:
    return weights(lambda t: t.update({_NORM: torch.full_like(t[_NORM], value)}))


_WORDS = {"type": "WordLevel", "unk_token": "<unk>"}

DAMAGES: dict[str, Damage] = {
    "no config.json": remove("config.json"),
    "an adapter alone": lambda m: (m / "config.json").rename(m / "adapter_config.json"),
    "config.json is a folder": folder("config.json"),
    "config.json is cut": cut("config.json"),
    **{f"config.json {bad}": write("config.json", BAD[bad]) for bad in BAD},
    "no type": write("config.json", b"{}"),
    "unknown type": change("config.json", model_type="bogus"),
    "no heads": change("config.json", num_attention_heads=0),
    "no layers": change("config.json", num_hidden_layers=0),
    "another width": change("config.json", hidden_size=32),
    "another depth": change("config.json", num_hidden_layers=2),
    "a text as width": change("config.json", hidden_size="16"),
    "unknown activation": change("config.json", hidden_act="nope"),
    "quantized": change("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
    "own code": change("config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    "generation config is cut": cut("generation_config.json"),
    "generation config is bad": write("generation_config.json", b"[1]"),
    "generation config is impossible": change("generation_config.json", temperature=-1.0),
    "no weights": remove("model.safetensors"),
    "weights are a folder": folder("model.safetensors"),
    "weights are cut": cut("model.safetensors"),
    "weights are empty": write("model.safetensors", b""),
    "weights are text": write("model.safetensors", b"weights" * 100),
    "a huge header": write("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "a pickle": lambda top: (top / "model.safetensors").rename(top / "pytorch_model.bin"),
    "an index of nothing": write("model.safetensors.index.json", b'{"weight_map": {"a": "b"}}'),
    "an index that is bad": write("model.safetensors.index.json", b"[1]"),
    "an index that leads out": write(
        "model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": "../../x"}}'
    ),
    "a tensor is missing": weights(lambda t: t.pop(_NORM)),
    "a tensor too many": weights(lambda t: t.update(extra=torch.ones(3))),
    "a misspelt tensor": weights(lambda t: t.update({"model.nrm.weight": t.pop(_NORM)})),
    "another shape": weights(lambda t: t.update({_NORM: torch.ones(3)})),
    "integers": weights(lambda t: t.update({_NORM: torch.ones(16, dtype=torch.int32)})),
    "nan": filled(float("nan")),
    "infinity": filled(float("inf")),
    "huge": filled(1e38),
    "no tokenizer": remove("tokenizer.json"),
    "tokenizer is a folder": folder("tokenizer.json"),
    "tokenizer is cut": cut("tokenizer.json"),
    "tokenizer is flipped": flip("tokenizer.json"),
    **{f"tokenizer {bad}": write("tokenizer.json", BAD[bad]) for bad in BAD},
    "tokenizer config is cut": cut("tokenizer_config.json"),
    "tokenizer config is a list": write("tokenizer_config.json", b"[1]"),
    "tokenizer's longest text is a text": change("tokenizer_config.json", model_max_length=" "),
    "tokenizer without its unknown token": change("tokenizer.json", model={**_WORDS, "vocab": {}}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_folder(name: str, stopped: Path, tmp_path: Path, refused: Refused) -> None:
    shutil.copytree(stopped / "stages" / "sft" / "models" / "actor", tmp_path / "m")
    DAMAGES[name](tmp_path / "m")
    refused(["run", *SMALL, "model=folder", "model.folder=m"])
