"""Which model, precision and device a run settles for, and what is refused on the way."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import penstock.launch.placement.models as module
import pytest
import torch
import yaml
from huggingface_hub import constants
from penstock.configs.schema import WorkloadConfig
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, dumped, resolve, resolved, run_config
from penstock.launch.stages.prepare import model_folders, prepare
from penstock.launch.stages.report import about_model
from penstock.planner.inputs.calls import Lengths
from penstock.planner.plan.plan import one_group_plan
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec

from .hub_stub import Hub, commit_of, hub_at

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL = ["task.num_train=256", "task.num_held_out=8", "evaluation.num_prompts=0"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as people publish them, with what a run has no use for."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    spec = TorchPolicySpec(model=ModelSpec(architecture=ARCHITECTURE), end_ids=(2,))
    spec.build(WorkerContext("role")).save_pretrained(folder)
    TokenizerSpec(kind="char").build().save(folder)
    for name in ("modeling_tiny.py", "pytorch_model.bin", "onnx/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"of no use")
    return folder


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with hub_at(tmp_path / "cache", monkeypatch) as hub:
        hub.models["org/tiny"] = {"main": saved}
        yield hub


@pytest.fixture
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without instructions for it, whatever this one has."""
    monkeypatch.setattr(module, "has_fast_bfloat16", _never)


def _never(device: str) -> bool:
    del device
    return False


def composed(*words: str) -> dict[str, Any]:
    made = compose("run", [*words, *SMALL])
    made.pop("resume")
    return made


def prepared(*words: str) -> Run:
    return prepare(resolved(composed(*words)))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        prepared(*words)
    return str(error.value)


@pytest.mark.slow
def test_a_model_of_a_hub_is_its_snapshot(hub: Hub, saved: Path) -> None:
    config = run_config(composed("model=org/tiny"))
    job = prepare(resolve(config))
    model = job.model
    assert model.revision == commit_of(saved)
    assert model.folder is not None
    assert Path(model.folder).name == commit_of(saved)
    assert sorted(hub.served) == sorted(
        file.name for pattern in ("*.json", "*.safetensors") for file in saved.glob(pattern)
    )
    assert model_folders(job) == {model.folder}
    written = dumped(job)["model"]
    assert (written["hub"], written["revision"], written["folder"]) == (
        "org/tiny",
        commit_of(saved),
        None,
    )


@pytest.mark.slow
def test_a_run_goes_on_with_its_snapshot_and_precision(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(composed("model=org/tiny", "model.dtype=bfloat16"))
    written = yaml.safe_dump(dumped(prepare(resolve(config))))
    hub.models["org/tiny"]["main"] = shutil.copytree(saved, tmp_path / "newer")
    assert prepared("model=org/tiny").model.revision == commit_of(tmp_path / "newer")
    monkeypatch.setattr(module, "has_fast_bfloat16", _never)
    again = prepare(resolve(run_config(yaml.safe_load(written)))).model
    assert (again.revision, again.dtype) == (commit_of(saved), "bfloat16")


@pytest.mark.slow
def test_a_role_may_start_from_a_model_of_a_hub(hub: Hub, saved: Path) -> None:
    words = [
        "algorithm=reference_grpo",
        "model=org/tiny",
        "algorithm.roles.ref.start=org/tiny@main",
    ]
    config = run_config(composed(*words))
    job = prepare(resolve(config))
    folder = job.main.roles["ref"].start
    assert folder is not None
    assert Path(folder).name == commit_of(saved)
    assert model_folders(job) == {folder}  # the run's model is the same one
    written = dumped(job)
    assert written["algorithm"]["roles"]["ref"]["start"] == f"org/tiny@{commit_of(saved)}"
    again = prepare(resolve(run_config(yaml.safe_load(yaml.safe_dump(written)))))
    assert again.main.roles["ref"].start == folder
    assert refusal("algorithm=reference_grpo", "algorithm.roles.ref.start=org/none").startswith(
        f"'algorithm.roles.ref.start': 'org/none' is not at {hub.url}, or it is private\n"
    )


@pytest.mark.slow
def test_what_is_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared("model=org/tiny")
    asked = len(hub.served)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prepared("model=org/tiny").model.hub == "org/tiny"
    assert len(hub.served) == asked


@pytest.mark.slow
def test_weights_are_fetched_when_all_else_is_right(hub: Hub) -> None:
    refusal("model=org/tiny", "+model.tokenizer.kind=folder", "+model.tokenizer.folder=/nowhere")
    assert "config.json" in hub.served
    assert "model.safetensors" not in hub.served


@pytest.mark.slow
def test_refusals_of_a_hub(hub: Hub, saved: Path) -> None:
    hub.gated.add("org/gated")
    assert refusal("model=org/none") == (
        f"'model.hub': 'org/none' is not at {hub.url}, or it is private\n    look at its spelling; "
        "for a private model set HF_TOKEN to a token that may read it"
    )
    assert refusal("model=org/gated") == (
        f"'model.hub': 'org/gated' is given by {hub.url} to those alone who have asked for it\n    "
        "ask for access on its page, and set HF_TOKEN to a token of yours"
    )
    assert refusal("model=org/tiny", "model.revision=v9") == (
        f"'model.hub': 'org/tiny' has no revision 'v9' at {hub.url}\n    give a branch, a tag or a "
        "commit of it, or leave the revision out"
    )
    hub.models["org/own"] = {"main": shutil.copytree(saved, saved.with_name("own"))}
    config = saved.with_name("own") / "config.json"
    config.write_text(config.read_text().replace('"qwen2"', '"mine"'))
    assert "code of a folder's own is never run" in refusal("model=org/own")
    assert "model.safetensors" not in hub.served


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refusal("model=org/tiny") == (
        f"'model.hub': 'org/tiny' is not in the cache ({cache}), and HF_HUB_OFFLINE is set\n    "
        "unset it to download the model, or give a local folder: model=PATH"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert refusal("model=org/tiny", "model.revision=v1") == (
        f"'model.hub': 'org/tiny' (revision 'v1') is not in the cache ({cache}), and "
        "http://127.0.0.1:9 cannot be reached\n    try again, set HF_ENDPOINT to a mirror, or give "
        "a local folder: model=PATH"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.revision=v1"],
         "'model.revision' is set, but only models of a hub have revisions\n    leave it out, or "
         "choose model=org/name"),
        (["model.hub=org/tiny"],
         "'model' has 'hub' and 'architecture', and is one thing only\n    choose "
         "model=org/name, model=PATH or an option of model=, which set nothing else"),
        (["model=hub", "model.hub=tiny"], "'model.hub': expected 'org/name', got 'tiny'"),
        (["model=smollm2-135m", "model.package=smollm2"],
         "'model.package': there is no model 'smollm2'; did you mean 'smollm2-135m'?\n    models "
         "in packages are: smollm2-135m"),
        (["model=./nowhere"],
         "'model.folder': 'nowhere' does not exist\n    give a local folder that save_pretrained "
         "wrote, or a model of a hub: model=org/name"),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str) -> None:
    assert refusal(*words) == message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model with 'blanks', and = more", "models/tiny"])
def test_the_path_of_a_folder_is_a_model(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, name)
    assert prepared(f"model={name}").model.folder == name


@pytest.mark.slow
def test_the_precision_of_trained_weights_follows_the_device(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert prepared(f"model={saved}").model.dtype == "bfloat16"
    assert prepared(f"model={saved}", "model.dtype=float32").model.dtype == "float32"
    assert prepared().model.dtype == "float32"  # random weights, whatever is fast


@pytest.mark.slow
@pytest.mark.usefixtures("slow_bfloat16")
def test_elsewhere_trained_weights_are_computed_in_float32(saved: Path) -> None:
    assert prepared(f"model={saved}").model.dtype == "float32"
    assert prepared(f"model={saved}", "model.dtype=bfloat16").model.dtype == "bfloat16"


@pytest.mark.slow
def test_the_device_is_the_best_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(*words: str) -> str:
        return resolved(composed(*words)).executor.device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device() == "cuda"
    assert device("executor.device=cpu") == "cpu"
    assert device("model=mlp") == "cpu"
    plan = tmp_path / "plan.json"
    plan.write_text(one_group_plan(device="cpu").model_dump_json())
    assert device(f"placement={plan}") == "cpu"  # what it was made for


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model=org/tiny"], "org/tiny at COMMIT, float32 on cpu, computed by Penstock (qwen2)"),
        ([], "random weights, float32 on cpu, computed by Penstock (qwen2)"),
        (["model.architecture.sliding_window=4", "model.architecture.use_sliding_window=true",
          "model.architecture.max_window_layers=0"],
         "random weights, float32 on cpu, computed through transformers (qwen2)"),
        (["engine=fsdp", "rollout=torch", "model.dtype=bfloat16"],
         "random weights, bfloat16 on cpu, computed through transformers (qwen2)"),
    ],
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.usefixtures("slow_bfloat16")
def test_a_run_says_what_computes_its_model(hub: Hub, words: list[str], line: str) -> None:
    commit = commit_of(hub.models["org/tiny"]["main"])[:12]
    assert about_model(prepared(*words)) == f"model: {line.replace('COMMIT', commit)}"


AVERAGE = """
from penstock.algorithms.roles import Policy, Prompts, Reward, Sampling, TrainMetrics
from penstock.algorithms.grpo import GRPO, grpo_step


def average_step(
    prompts: Prompts, slow: Policy, actor: Policy, reward: Reward, cfg: GRPO
) -> tuple[TrainMetrics, TrainMetrics]:
    return grpo_step(prompts, actor, reward, cfg), slow.follow(actor, share=SHARE)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("share", "dtype"), [("0.1", "float32"), ("1.0", "bfloat16")])
def test_weights_that_are_averaged_are_float32(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"average_{dtype}"
    (tmp_path / f"{name}.py").write_text(AVERAGE.replace("SHARE", share))
    step = ["algorithm=own", f"algorithm.step={name}:average_step", "algorithm.per_step.prompts=4"]
    assert prepared(f"model={saved}", *step).model.dtype == dtype


@pytest.mark.parametrize(
    ("words", "num_tokens"),
    [(["algorithm=grpo", "algorithm.cfg.sampling.max_new_tokens=7"], 7), (["algorithm=sft"], 20)],
)
def test_responses_are_planned_as_long_as_they_may_be(words: list[str], num_tokens: int) -> None:
    inputs = module.PlanInputs(prepared(*words, "task.max_response_tokens=20"))
    assert inputs.workload(WorkloadConfig()).response == Lengths.constant(num_tokens)


def test_texts_and_packs_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abc"}\n{"text": "cab"}\n')
    sft = ["algorithm=sft", "algorithm.per_step.demos=1", "task=file", f"task.path={path}"]
    made = compose("run", [*sft, "task.pack_tokens=30"])
    made.pop("resume")
    workload = module.PlanInputs(prepare(resolved(made))).workload(WorkloadConfig())
    assert (workload.prompt.tokens, workload.response) == ((1,), Lengths.constant(30))
