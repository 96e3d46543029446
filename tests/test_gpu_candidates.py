"""`benchmarks/gpu_candidates.py`: replacements compute the same, and a failure stops no other."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    found = importlib.import_module("gpu_candidates")
    plainly, found.functions.Compiled.plainly = found.functions.Compiled.plainly, True
    yield found
    found.functions.Compiled.plainly = plainly
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def figures(script: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the ladder on the tiny model, with one candidate that fails."""

    def broken(policy: Any) -> list[Any]:
        raise RuntimeError("no such kernel")

    file = tmp_path_factory.mktemp("candidates") / "found.json"
    sizes = script.scale(tiny=True)
    ladder = script.Ladder(sizes, sizes.large, script.Results(file, 300.0))
    candidates = list(script.CANDIDATES)
    candidates.insert(2, script.Candidate("S0", "does not work", broken))
    ladder.climb(candidates, alone=True)
    return json.loads(file.read_text())[f"train {sizes.large}"]


def test_candidates_give_the_same_gradients_and_log_probabilities(figures: dict[str, Any]) -> None:
    measured = {name: one for name, one in figures.items() if "failed" not in one}
    assert list(measured) == [
        "as it is",
        *("S2 alone", "S3 alone", "S2+S3", "S1 alone", "S2+S3+S1", "S5a alone"),
        *("S2+S3+S1+S5a", "S4 alone", "S2+S3+S1+S5a+S4", "S2+S3+S1+S5a+S4+S5b"),
        "S2+S3+S1+S5a+S4+S5b+S6",
    ]
    assert measured["as it is"]["gradient_error"] == 0.0
    errors = [one["gradient_error"] for one in measured.values()]
    assert 0.0 < max(errors) < 0.02  # of bfloat16, whose numbers are 1/256 apart
    assert max(one["worst_gradient_error"] for one in measured.values()) < 0.06
    assert max(one["logprob_error"] for one in measured.values()) < 0.02


def test_fewer_tokens_and_micro_batches_are_computed_where_a_candidate_says_so(
    figures: dict[str, Any],
) -> None:
    now, shared, large = (figures[f"{name} alone"] for name in ("S2", "S1", "S5a"))
    assert shared["packed_tokens"] < now["packed_tokens"]
    assert large["micro_batches"] == 1 < now["micro_batches"]


def test_a_failure_is_noted_and_left_out_of_those_that_follow(figures: dict[str, Any]) -> None:
    failed = {name: one["failed"] for name, one in figures.items() if "failed" in one}
    assert failed == {"S0 alone": "RuntimeError: no such kernel"}


def test_micro_batches_of_distinct_tokens_count_a_prompt_once(script: Any) -> None:
    sizes = script.scale(tiny=True)
    batch = script.batch_of(sizes, 4)
    rows = torch.arange(len(batch.tokens))
    parts = list(script.distinct_micro_batches(batch, rows, "row", 64, sort_by_length=False))
    assert torch.equal(torch.cat(parts), rows)
    distinct = []
    for part in parts:
        texts = {tuple(batch.tokens[row, : sizes.prompt].tolist()) for row in part}
        distinct.append(int(batch.mask[part].sum()) + sizes.prompt * len(texts))
    assert max(distinct) <= 64
    plain = script.ORIGINAL_MICRO_BATCHES(batch, rows, "row", 64, sort_by_length=False)
    assert len(parts) < len(list(plain))


def test_logits_in_pieces_give_the_gradient_of_all_at_once(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = script.functions
    draw = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, 16, generator=draw) for size in (24, 50))
    target, entry = torch.randint(50, (30,), generator=draw), torch.arange(30) % 24
    upstream = torch.randn(30, generator=draw)

    def gradients(kind: Any, pieces: int) -> list[torch.Tensor]:
        def bounds(weight: torch.Tensor) -> tuple[int, int]:
            return 24 // pieces, 24

        monkeypatch.setattr(functions.token_logprobs, "_bounds", bounds)
        given = [one.clone().requires_grad_() for one in (states, weight)]
        logprob, _ = kind.apply(*given, None, target, entry, 0.7, False)
        return list(torch.autograd.grad(logprob @ upstream, given))

    expected = gradients(functions.token_logprobs._TokenLogprob, 1)
    for keeps in (False, True):
        monkeypatch.setattr(functions.TokenLogprob, "keeps_logits", keeps)
        for pieces in (1, 4):
            for found, there in zip(
                gradients(functions.TokenLogprob, pieces), expected, strict=True
            ):
                torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="this candidate computes no entropies"):
        functions.TokenLogprob.apply(states, weight, None, target, entry, 0.7, True)


def test_sampling_in_two_passes_takes_the_same_tokens(script: Any) -> None:
    found = script.probes.sampling(script.scale(tiny=True), script.policy_of)
    assert found["other_tokens"] == 0
    assert found["logprob_error"] < 1e-5


def test_a_process_of_probes_that_dies_is_a_failure_of_its_first(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.sys, "executable", shutil.which("false"))
    results = script.Results(None, 300.0)
    script._probes(["a", "b"], results, [])
    dead = "its process ended with code 1 before it was measured"
    assert [one["failed"] for one in results.data["probes"].values()] == [dead, dead]
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(hangs))
    monkeypatch.setattr(script, "LONGEST_PROBE_S", 0.1)
    found = script._apart(["a"], 0.2, [])
    assert found == {"a": {"failed": "its process took more than 0 s"}}


@pytest.mark.nightly
def test_all_of_it_runs_compiled_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_candidates.py"), "--tiny"]
    command += ["--json", str(file), "--limit-s", "280"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    found = json.loads(file.read_text())
    assert len(found["probes"]) == 5
    assert found["end"]["seconds"]["not_measured"] == []
