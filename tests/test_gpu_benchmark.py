"""`benchmarks/gpu.py`: what was measured is kept, what was not is open by name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMANDS = ("paths", "runs", "plan", "agents")
"""Stages that are whole runs, which tests of their own show."""
MEASURED = BENCHMARKS / "results" / "gpu_h200_2026-11-28.json"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def measured(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the script measure three things; the stages that were measured, in order."""
    done: list[str] = []

    def good(_: Any) -> Iterator[Any]:
        done.append("good")
        yield script.Figure(name="fast", value=0.5, goal=0.35)
        yield script.Figure(name="lean", value=3.0, unit="GB", goal=2.0, most=True)
        yield script.Figure(name="remote", open="there is no other machine")

    def bad(_: Any) -> Iterator[Any]:
        done.append("bad")
        yield script.Figure(name="first", value=1234.0, unit="tokens/s")
        raise RuntimeError("out of memory")

    stages = {"good": script.Stage(good, 60), "bad": script.Stage(bad, 60)}
    monkeypatch.setattr(script, "STAGES", stages)
    monkeypatch.setattr(torch, "set_num_threads", ignored)
    return done


def ignored(num_threads: int) -> None:
    """The tests of this process go on with the threads that they had."""


def call(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", *words])
    return script.main()


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_ended(
    script: Any,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "gpu.json"
    assert call(script, monkeypatch, "--json", str(file)) == 1
    assert measured == ["good", "bad"]
    stages = json.loads(file.read_text())["stages"]
    assert stages["good"]["is_complete"]
    assert [one["is_met"] for one in stages["good"]["figures"]] == [True, False, None]
    assert [one["name"] for one in stages["bad"]["figures"]] == ["first"]
    assert stages["bad"]["failed"] == "RuntimeError: out of memory"
    assert call(script, monkeypatch, "--json", str(file)) == 1
    assert measured == ["good", "bad", "bad"]
    call(script, monkeypatch, "--json", str(file), "--stage", "good", "--again")
    assert measured == ["good", "bad", "bad", "good"]
    said = capsys.readouterr().out.splitlines()
    table = said[said.index(next(line for line in said if line.startswith("stage "))) + 2 :]
    words = [" ".join(line.split()) for line in table[:7]]
    assert words[:5] == [
        "good fast 0.5 >= 0.35 met",
        "good lean 3 GB <= 2 missed",
        "bad first 1,234 tokens/s",
        "good remote open there is no other machine",
        "bad (the stage) open RuntimeError: out of memory",
    ]
    assert words[5].startswith("- decoding with vLLM, share of the bandwidth open 0.6 needs vLLM")


def test_results_of_another_device_are_not_mixed(
    script: Any, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"is_tiny": False, "device": "NVIDIA H200", "stages": {}}))
    with pytest.raises(SystemExit, match=r"gpu\.json is of .*H200.*\n    give another --json FILE"):
        call(script, monkeypatch, "--json", str(file))
    assert measured == []


def test_what_decoding_reads_is_weights_and_the_cache(script: Any) -> None:
    generate = importlib.import_module("gpu_generate")
    case = importlib.import_module("gpu_case")
    bench = case.Bench(case.scale(tiny=True))
    shape = bench.shape("tiny")
    # 2 layers, keys and values, 2 heads of 16 numbers of 2 bytes
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    read = generate._bytes_read(shape, rows=3, prompt=10, tokens=4)
    assert read == 4 * (shape.active_params() * 2 + 3 * 12 * 256)


def test_peaks_of_an_h200_are_within_6_percent_of_what_is_predicted(script: Any) -> None:
    compute, case = importlib.import_module("gpu_compute"), importlib.import_module("gpu_case")
    sizes = case.scale(tiny=False)
    bench = case.Bench(sizes)
    stages = json.loads(MEASURED.read_text())["stages"]
    peaks = {
        one["name"]: one["details"].get("measured_gib") for one in stages["logprobs"]["figures"]
    }
    for one in stages["kernels"]["figures"]:
        peaks[one["name"].replace("train MFU", "memory of training")] = one["details"].get(
            "peak_gib"
        )
    lengths = case.batch_of(sizes, sizes.prompts).mask.sum(1).tolist()
    calls = {
        f"memory of training, {name}": compute._call(
            "train", bench.shape(name), sizes.prompt, lengths
        )
        for name in sizes.models
    }
    for length in sizes.long:
        name = f"memory of log-probabilities of {length} tokens, {sizes.large}"
        sampled = [length - sizes.prompt]
        calls[name] = compute._call("forward", bench.shape(sizes.large), sizes.prompt, sampled)
    assert len(calls) == 5
    for name, call in calls.items():
        assert compute._memory(name, call, peaks[name], 16_384).value < 0.06


def test_what_is_computed_is_counted_apart_from_what_is_distinct(script: Any) -> None:
    """A model of two layers, and a prompt of 8 tokens that four of five rows could share."""
    case = importlib.import_module("gpu_case")
    packing = importlib.import_module("penstock.workers.engines.torch_engine.packing")
    shape = case.Bench(case.scale(tiny=True)).shape("tiny")
    tokens = torch.ones(5, 12, dtype=torch.int64)
    reads = torch.arange(12).expand(5, 12) >= 7
    pack = packing.pack_rows(tokens, reads)
    assert len(pack.tokens) == 64  # 60, and spare ones
    assert len(pack.read) == 32  # 25, likewise
    shared = packing.pack_rows(tokens, reads, torch.full((5,), 8))
    assert len(shared.tokens) == 32  # 8 and 5 times 4, likewise
    products, head = 2 * 2 * shape.active_layer_params, 8 * shape.embedding_params
    # A row of 12 sees 72 pairs; a prompt of 8 sees 32, and 4 tokens after it 8 each and then 8.
    pairs, fewer = 5 * 72 + 4**2 / 2, 32 + 5 * (4 * 8 + 8) + 4**2 / 2
    for found, count, seen in ((pack, 64, pairs), (shared, 32, fewer)):
        attention = 4 * 2 * shape.num_heads * shape.head_dim * seen
        expected = 3 * (products * count + attention) + head * len(found.read)
        assert case.computed_flops(shape, [found]) == expected


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_open_with_its_last_words(script: Any) -> None:
    commands, case = (importlib.import_module(name) for name in ("gpu_commands", "gpu_case"))
    words = ["-c", "import time; print('half', flush=True); time.sleep(60)"]
    failed, took_s = commands._command(words, 1.5)
    assert failed == "it took more than 2 s; it said last: half\n"
    assert took_s == 1.5
    spent = case.Bench(case.scale(tiny=True), limit_s=case.LEFT_S)
    assert spent.left_s == 1.0


@pytest.mark.nightly
def test_every_stage_runs_on_a_cpu(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--json", str(file)]
    names = [name for name in script.STAGES if name not in COMMANDS]
    command += ["--stage", *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    stages = json.loads(file.read_text())["stages"]
    assert list(stages) == names
    assert all(stage["is_complete"] for stage in stages.values())
    bits = [f for f in stages["determinism"]["figures"] if f["name"].startswith("same bits")]
    assert [one["value"] for one in bits] == [1.0] * 6
    plain = stages["weights"]["figures"][0]
    assert plain["value"] > 0
    assert plain["details"]["share_of_copying"] > 0


@pytest.mark.slow
def test_a_stage_has_a_process_of_its_own_and_no_longer_than_it_may(
    script: Any, tmp_path: Path
) -> None:
    file = tmp_path / "gpu.json"
    words = ["--tiny", "--json", str(file)]
    results = script.Results(file, tiny=True)
    script.run_apart("inventory", words, results, 0.01)
    assert results.data["stages"]["inventory"]["failed"] == "it took more than 0 s"
    script.run_apart("inventory", words, results, 200.0)
    assert results.has("inventory")
    names = [one["name"] for one in results.data["stages"]["inventory"]["figures"]]
    assert names == [
        "versions",
        "products in bfloat16",
        "copies in device memory",
        "reads of device memory",
    ]
