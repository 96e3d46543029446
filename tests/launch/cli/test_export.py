"""A run's model as a folder for others: what it holds, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from penstock.launch.cli import checkpoints as export
from penstock.launch.run_dir.checkpoint import CheckpointStore, checkpoints_in
from penstock.workers.training.checkpoint_files import box_key
from penstock.workers.training.flat_parameters import read_tensors, tensors_sha256, write_tensors
from torch import Tensor

from ...docs.pages import DOCS, blocks, commands
from ..conftest import Penstock
from ..run_dir.drafts import written
from .test_eval import TINY, json_of, only_run

WORDS = (*TINY, "algorithm.num_steps=4", "checkpoint_every=2", "evaluation.num_prompts=8")
STOP = "algorithm.cfg.sampling.stop=['=+']"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints of steps 2 and 4."""
    from penstock.launch.main import main

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("finished")
        patch.chdir(folder)
        assert (
            main(["run", *WORDS, STOP, "evaluation.every=2", "evaluation.keep_best=accuracy"]) == 0
        )
        return folder / only_run("runs")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / "a-run"))


def sha256(folder: Path) -> str:
    """Hash of a folder's weights as transformers loads them."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return tensors_sha256(dict(model.named_parameters()))


@pytest.mark.slow
def test_the_folder_loads_with_transformers_and_has_the_runs_weights(
    penstock: Penstock, run: Path
) -> None:
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    said = penstock("export", f"run={run}", "output=model")
    assert said.code == 0, said.err
    digest = json_of(run / "summary.json")["weights_sha256"]
    assert said.out == (f"wrote model: actor of a-run after 4 steps\nweights_sha256: {digest}\n")
    assert sha256(Path("model")) == digest
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained("model")
    ids = tokenizer("1+2=")["input_ids"]
    assert tokenizer.decode(ids).replace(" ", "") == "1+2="
    generation = transformers.GenerationConfig.from_pretrained("model")
    assert (generation.eos_token_id, generation.do_sample) == (tokenizer.eos_token_id, True)
    assert (generation.top_k, generation.min_p) == (0, 0.0), "transformers' own top_k is 50"
    assert generation.stop_strings == ["=+"]
    _, front, card = Path("model/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "transformers", "tags": ["penstock", "grpo"]}
    for line in (
        "# a-run, step 4",
        "| algorithm | grpo |",
        "| steps | 4 of 4 |",
        f"| weights_sha256 | {digest} |",
        "| in training | step 1 | step 4 |",
        "| on held-out problems | after 0 steps | after 4 steps |",
    ):
        assert line in card.splitlines()
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()} == before
    assert not list(Path().glob(".model*")), "no draft is left"


@pytest.mark.nightly
def test_lm_eval_finds_the_accuracy_of_the_folder(penstock: Penstock, run: Path) -> None:
    """With the page's own file and command, on ten rows; the model is right in six of them."""
    assert penstock("export", f"run={run}", "output=my-model").code == 0
    generation = json_of(Path("my-model/generation_config.json"))
    del generation["stop_strings"]
    Path("my-model/generation_config.json").write_text(json.dumps(generation))
    prompts = [f"{number}+2=" for number in range(10)]
    says = transformers.pipeline("text-generation", model="my-model", dtype="float32")
    told: Any = says(prompts, do_sample=False, max_new_tokens=5, return_full_text=False)
    answers = [said[0]["generated_text"].strip() for said in told]
    rows = [
        {"prompt": prompt, "answer": answer if number < 6 else "none"}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = DOCS / "evaluation.md"
    (task,) = (block for block in blocks(page) if block.lines[0] == "task: sums")
    Path("sums.yaml").write_text("\n".join(task.lines))
    (command,) = (found for found in commands(page) if found.words[0] == "lm_eval")
    words = [sys.executable, "-m", *command.words, "--output_path", "found"]
    subprocess.run(words, check=True, timeout=300, capture_output=True)
    (found,) = Path("found").rglob("results_*.json")
    assert json_of(found)["results"]["sums"]["exact_match,none"] == 0.6
    Path("others.jsonl").write_text('{"prompt": "7+8=", "answer": "15"}\n')
    ours = penstock(
        *("eval", "model=folder", "model.folder=my-model", "task=file", "task.path=others.jsonl"),
        *("task.held_out_path=sums.jsonl", "task.max_response_tokens=5"),
    )
    assert "accuracy 60.0%" in ours.out, ours.err


def test_a_run_without_adapters_has_none_to_export(penstock: Penstock, run: Path) -> None:
    said = penstock("export", f"run={run}", "adapter=true", "output=model")
    assert (said.code, said.err) == (
        2,
        "penstock: 'adapter' is true, but 'actor' was trained without one (model.lora.rank)\n"
        "    leave it out: the whole model is written\n",
    )
    assert not list(Path().glob("*model*")), "nothing is left"


def test_a_step_that_is_kept_is_exported(penstock: Penstock, run: Path) -> None:
    Path("two").mkdir()
    said = penstock("export", f"run={run}", "step=2", "output=two")
    assert said.code == 0, said.err
    assert said.out.endswith(f"weights_sha256: {sha256(Path('two'))}\n")
    assert sha256(Path("two")) != json_of(run / "summary.json")["weights_sha256"]
    said = penstock("export", f"run={run}", "step=best")
    assert said.out.startswith("wrote a-run-step-2: "), said.err + said.out
    assert sha256(Path("a-run-step-2")) == sha256(Path("two"))


def test_a_run_that_goes_on_is_exported(penstock: Penstock, run: Path) -> None:
    """What a run is writing, or has set aside, is left alone."""
    (run / "summary.json").unlink()
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000006.writing")
    assert penstock("export", f"run={run}", "output=model").code == 0
    assert sorted(file.name for file in checkpoints.iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006.writing",
    ]


def test_a_checkpoint_that_goes_while_it_is_read(
    penstock: Penstock, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run rotates it away after it was found and before it is read."""
    target = export.target_folder

    def rotated(given: str) -> Path:
        shutil.rmtree(checkpoints_in(run / "checkpoints")[2])
        return target(given)

    monkeypatch.setattr(export, "target_folder", rotated)
    said = penstock("export", f"run={run}", "step=2", "output=model")
    assert said.code == 2
    assert said.err == (
        "penstock: the checkpoint of step 2 was removed while it was read: run 'a-run' goes on, "
        "and keeps its newest 2\n    try again with the newest one: leave step out\n"
    )
    assert not Path("model").exists()
    assert not list(Path().glob(".model*"))


def test_a_checkpoint_in_the_files_of_several_processes_is_exported(
    penstock: Penstock, run: Path
) -> None:
    """As FSDP and Megatron write them: every process has a part of each parameter."""
    store = CheckpointStore(run / "checkpoints", keep=3)
    whole = run / "checkpoints" / "step-00000004"
    with written(store, 6) as folder:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        state = folder / "actor"
        weights = read_tensors(state / "weights.safetensors")
        (state / "weights.safetensors").unlink()
        parts: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for name, weight in weights.items():
            middle, rest = len(weight) // 2, [(0, size) for size in weight.shape[1:]]
            parts[0][box_key(name, ((0, middle), *rest))] = weight[:middle]
            parts[1][box_key(name, ((middle, len(weight)), *rest))] = weight[middle:]
        names = [f"weights-{process:05d}.safetensors" for process in range(2)]
        for name, part in zip(names, parts, strict=True):
            write_tensors(state / name, part)
        about = {**json_of(state / "state.json"), "format": 2, "weights": names, "optimizer": []}
        (state / "state.json").write_text(json.dumps(about))
    said = penstock("export", f"run={run}", "step=6", "output=model")
    assert said.code == 0, said.err
    assert sha256(Path("model")) == json_of(run / "summary.json")["weights_sha256"]


# --- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "'run' has no value yet\n    give it: run=..."),
        (("run=nowhere",),
         "'nowhere' is not the folder of a run: it has no run.json\n    give a folder that "
         "`penstock run` made, such as runs/20261121-031454-grpo-seed0"),
        (("run=runs/a-run", "step=3"),
         "run 'a-run' keeps no checkpoint of step 3\n    checkpoints are there of steps: 2, 4"),
        (("run=runs/a-run", "role=acter"),
         "'role': run 'a-run' trains no 'acter'; did you mean 'actor'?\n    it trains: actor"),
        (("run=runs/a-run", "output=runs"),
         "'output': 'runs' is not empty\n    give a folder that is not there yet, or remove it"),
        (("run=runs/a-run", "output=runs/a-run/config.yaml"),
         "'output': 'runs/a-run/config.yaml' is no folder\n    give a folder that is not there "
         "yet, or remove it"),
        (("run=runs/a-run", "output=no/where"),
         "'output': 'no/where' cannot be written: there is no such folder"),
        (("run=runs/a-run", "push=org/name"),
         "'push' is org/name, but the environment has no HF_TOKEN\n    set it to a token that "
         "may write there; it is never shown"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(
    penstock: Penstock,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said = penstock("export", *words)
    assert (said.code, said.err) == (2, f"penstock: {expected}\n")
    assert run.is_dir()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_if_it_was_asked_for(penstock: Penstock, run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    (folder / "actor" / "state.json").write_text("{}")
    said = penstock("export", f"run={run}", "step=4", "output=model")
    assert said.code == 2
    assert said.err.startswith(
        f"penstock: checkpoint '{folder}' cannot be used: file 'actor/state.json' has 2 bytes"
    )
    said = penstock("export", f"run={run}", "output=model")
    assert said.out.startswith("wrote model: actor of a-run after 2 steps\n"), (
        "the newest whole one"
    )


# --- the hub


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload of small files needs."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        server: Any = self.server
        content = self.rfile.read(length)
        server.asked.append((self.path, self.headers.get("Authorization"), content))
        if server.refuses:
            self._answer(403, {"error": f"no right: {self.headers.get('Authorization')}"})
        elif self.path == "/api/repos/create":
            self._answer(200, {"url": f"{server.address}/org/name"})
        elif "/preupload/" in self.path:
            asked = json.loads(content)["files"]
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked
            ]
            self._answer(200, {"files": files})
        else:
            told = {"commitUrl": f"{server.address}/org/name/commit/1", "commitOid": "1" * 40}
            self._answer(200, {**told, "success": True})

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("Authorization"), b""))
        self._answer(200, {"id": "org/name", "sha": "0" * 40, "siblings": [], "private": True})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """A hub on this machine; `asked` is what it was asked: path, authorization, content."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.refuses = [], False
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_folder_is_uploaded_with_the_token_of_the_environment(
    penstock: Penstock, run: Path, hub: Any
) -> None:
    said = penstock("export", f"run={run}", "output=model", "push=org/name")
    assert said.code == 0, said.err
    assert said.out.endswith(f"uploaded to {hub.address}/org/name\n")
    assert "secret" not in said.out + said.err
    assert {who for _, who, _ in hub.asked} == {"Bearer hf_secretsecret"}
    path, _, created = hub.asked[0]
    assert path == "/api/repos/create"
    assert json.loads(created)["visibility"] == "private"
    (commit,) = [content for path, _, content in hub.asked if "/commit/" in path]
    sent = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in map(json.loads, commit.splitlines())
        if line["key"] == "file"
    }
    assert sent == {file.name: file.read_bytes() for file in Path("model").iterdir()}


def test_a_hub_that_refuses_leaves_the_folder(penstock: Penstock, run: Path, hub: Any) -> None:
    hub.refuses = True
    said = penstock("export", f"run={run}", "output=model", "push=org/name")
    assert said.code == 1
    assert said.err.startswith(
        f"penstock: 'model' is written, but {hub.address} did not take it as 'org/name': "
    )
    assert "secret" not in said.out + said.err
    assert Path("model/model.safetensors").is_file()


# --- while a run goes on

WATCHED = """
import penstock

class Watched(penstock.StageObserver):
    def on_step(self, step):
        with open("steps.txt", "a") as file:
            print(step.result.step, step.values["actor.train/lr"], file=file)
        return "seen enough" if step.result.step == 3 else None
"""


@pytest.mark.slow
def test_a_run_pushes_its_checkpoints_and_ends_as_a_callback_says(
    penstock: Penstock, hub: Any
) -> None:
    Path("own.py").write_text(WATCHED)
    words = (*WORDS, "algorithm.num_steps=9", "name=tried", "callbacks=[own:Watched]")
    said = penstock("run", *words, "push.folder=best", "push.hub=org/name")
    assert said.code == 0, said.err
    home = Path(only_run("runs"))
    assert home.name.endswith("-tried-seed0")
    summary = json_of(home / "summary.json")
    assert summary["num_steps"] == len(Path("steps.txt").read_text().splitlines()) == 4
    assert summary["stopped"] == "stopped after 4 of 9 steps: seen enough"
    assert sha256(Path("best")) == summary["weights_sha256"]
    pushed = [content for path, _, content in hub.asked if "/commit/" in path]
    assert [b"step 2" in pushed[0], b"step 4" in pushed[-1]] == [True, True]
    assert not list(Path().glob(".best*")), "no draft is left"


def test_a_push_that_would_replace_something_else_is_refused(penstock: Penstock) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    said = penstock("run", *WORDS, "push.folder=mine")
    assert (said.code, said.err) == (
        2,
        "penstock: 'push.folder': 'mine' is no folder of a model, and a push would replace it\n"
        "    give one that is not there yet, or remove it\n",
    )
    Path("own.py").write_text("Watched = print")
    said = penstock("run", *WORDS, "callbacks=[own:Watched]")
    assert said.code == 2
    assert said.err.startswith("penstock: 'callbacks': 'own:Watched' is no class derived from")
