"""The user's own modules and the models, compared on resuming; memory and processor time."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import penstock
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.provenance import (
    Origins,
    ProcessUsage,
    changed_files,
    check_models,
    origins_now,
)
from penstock.launch.run_dir.run_folder import create_run, record_of


def begun_with(folder: Path) -> Origins:
    return origins_now([str(folder)], "a processor")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(8_000_000))
    return folder


@pytest.mark.slow
def test_an_imported_module_is_recorded_and_libraries_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("origins_mine.py").write_text("from package_of_mine import part\n")
    Path("package_of_mine").mkdir()
    Path("package_of_mine/part.py").write_text("")
    importlib.import_module("origins_mine")
    try:
        before = origins_now([], "a processor")
        assert {"origins_mine.py", "package_of_mine/part.py"} < set(before.files)
        assert str(Path(__file__).resolve()) in before.files
        libraries = (json, pytest, torch, penstock, sys.modules[Origins.__module__])
        assert before.files.keys().isdisjoint(str(module.__file__) for module in libraries)
        Path("package_of_mine/part.py").write_text("CHANGED = True\n")
        assert changed_files(before, origins_now([], "a processor")) == ["package_of_mine/part.py"]
    finally:
        for name in ("origins_mine", "package_of_mine", "package_of_mine.part"):
            del sys.modules[name]


def test_a_module_that_is_not_imported_again_is_compared_where_it_lies(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    before = Origins({str(script): empty})
    assert changed_files(before, Origins()) == []
    assert changed_files(before, Origins({"other/start.py": empty})) == []
    assert changed_files(before, Origins({"other/start.py": "0" * 64})) == [str(script)]
    assert changed_files(before, Origins({str(script): "0" * 64})) == [str(script)]
    script.unlink()
    assert changed_files(before, Origins()) == [str(script)]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 4_000_000, 7_999_999])
def test_other_weights_of_the_same_size_are_refused(model: Path, at: int) -> None:
    before = begun_with(model)
    check_models("20261121-031454-grpo-seed0", before, begun_with(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"\x01" * min(1_000_000, 8_000_000 - at))
    now = begun_with(model)
    with pytest.raises(ConfigError) as refused:
        check_models("20261121-031454-grpo-seed0", before, now)
    assert re.sub(r"\b[0-9a-f]{16}\b", "HASH", str(refused.value)) == (
        f"run '20261121-031454-grpo-seed0' was started from another model in '{model}': the hash "
        "of its files was HASH and is HASH now\n"
        "    bring the folder back as it was when the run began, or start a new run"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_another_tokenizer_or_a_further_file_is_refused(model: Path, name: str) -> None:
    before = begun_with(model)
    (model / name).write_text('{"changed": true}')
    with pytest.raises(ConfigError, match="another model"):
        check_models("run", before, begun_with(model))


def test_what_no_model_is_read_from_makes_no_difference(model: Path) -> None:
    before = begun_with(model)
    (model / "README.md").write_text("about this model")
    (model / "model.safetensors").touch()
    assert before.models == begun_with(model).models


def test_a_run_keeps_its_origins_and_one_without_is_resumed_as_ever(
    tmp_path: Path, model: Path
) -> None:
    origins = Origins({"mine.py": "0" * 64}, begun_with(model).models)
    folder = create_run(tmp_path / "runs", name="it", seed=0, config="", data="", origins=origins)
    assert record_of(folder).origins == origins
    about = json.loads(folder.about.read_text())
    del about["files"], about["models"]
    folder.about.write_text(json.dumps(about))
    older = record_of(folder)
    assert older.fault is None
    assert changed_files(older.origins, origins) == []
    check_models(folder.id, older.origins, origins)


@pytest.mark.slow
def test_a_peak_in_this_process_is_kept_after_it_is_gone() -> None:
    """In a process of its own: the children that other tests have left end when they like."""
    code = (
        "import torch\n"
        "from penstock.launch.run_dir.provenance import ProcessUsage\n"
        "with ProcessUsage(every_s=0.01) as memory:\n"
        "    before = memory.sample()\n"
        "    block = torch.ones(16 * 2**20)\n"  # 64 MiB
        "    memory.sample()\n"
        "    del block\n"
        "print(memory.peak_bytes - before)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) > 48 * 2**20


def test_children_are_counted() -> None:
    with ProcessUsage(every_s=0.01) as memory:
        before = memory.sample()
        code = "x = bytearray(64 << 20); x[::4096] = b'1' * len(x[::4096]); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while memory.peak_bytes - before < 48 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate(b"\n", timeout=30)
    assert memory.peak_bytes - before > 48 * 2**20


def test_a_sample_that_hangs_holds_up_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    going_on, hangs = threading.Event(), threading.Event()

    class Hangs(ProcessUsage):
        def sample(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                hangs.set()
                going_on.wait(30)
            return 0

    monkeypatch.setattr("penstock.dataflow.runtime.worker_protocol.CLOSE_S", 0.05)
    with Hangs(every_s=0.01):
        assert hangs.wait(30)
    going_on.set()
    assert "taking a sample of memory has not ended in 0.05 s" in caplog.text


@pytest.mark.slow
def test_the_time_of_children_that_have_ended_is_kept() -> None:
    with ProcessUsage(every_s=0.01) as usage:
        own_s = usage.cpu_s
        code = "import time\nwhile time.process_time() < 0.6: pass\ninput()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while usage.cpu_s - own_s < 0.6 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate(b"\n", timeout=30)
    assert usage.cpu_s - own_s >= 0.6
