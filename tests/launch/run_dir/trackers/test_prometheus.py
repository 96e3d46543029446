"""The address for Prometheus: what is scraped is what was logged last, by whoever has the token."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.shipped_trackers import PrometheusTracker
from penstock.launch.run_dir.step_logs import read_metrics

from .logged import ODD, bits, info

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not there")


def scraped(url: str) -> dict[tuple[str, ...], float]:
    """What Prometheus' own parser finds: name, stage and metric -> value."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def address(said: str) -> str:
    (line,) = (line for line in said.splitlines() if "Prometheus" in line)
    return line.rpartition(" ")[2]


def test_the_last_numbers_of_every_stage_are_scraped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = PrometheusTracker()
    tracker.start(info(tmp_path))
    url = address(capsys.readouterr().err)
    try:
        tracker.rewind(0, "sft")
        tracker.log(0, "sft", {"loss": 3.0})
        tracker.rewind(0, "grpo")
        tracker.log(0, "grpo", {f"m{i}": value for i, value in enumerate(ODD)})
        tracker.log(1, "grpo", {"m0": math.inf, 'a"\\\nb': math.nan, "low": -math.inf})
        name = "20261121-031454-grpo-seed0"
        found = scraped(url)
        steps = {key: value for key, value in found.items() if key[0] == "penstock_step"}
        assert steps == {("penstock_step", name, "sft"): 0, ("penstock_step", name, "grpo"): 1}
        numbers = {key[2:]: value for key, value in found.items() if key not in steps}
        assert math.isnan(numbers.pop(("grpo", 'a"\\\nb')))
        expected = {("sft", "loss"): 3.0, ("grpo", "low"): -math.inf, ("grpo", "m0"): math.inf}
        expected |= {("grpo", f"m{i}"): value for i, value in enumerate(ODD) if i}
        assert bits({"/".join(k): v for k, v in numbers.items()}) == bits(
            {"/".join(k): v for k, v in expected.items()}
        )
        for wrong in (url.replace("/metrics", "x/metrics"), url[:-1], url.rpartition("/")[0] + "/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                scraped(wrong)
    finally:
        tracker.finish({})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].partition("/")[0])))


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as raised:
        make()
    return str(raised.value)


def test_a_chosen_token_is_read_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    assert refusal(lambda: PrometheusTracker(token_file=str(file))) == (
        "'token_file' of tracker 'prometheus': expected at least 16 letters and digits in "
        f"'{file}', got 5 characters\n    openssl rand -hex 32 > {file}"
    )
    assert refusal(lambda: PrometheusTracker(port=70000)) == (
        "'port' of tracker 'prometheus': expected a whole number from 0 to 65535, got 70000"
    )
    port: Any = 9400.0
    assert refusal(lambda: PrometheusTracker(port=port)).endswith("65535, got 9400.0")
    file.write_text("0123456789abcdef\n")
    tracker = PrometheusTracker(token_file=str(file))
    tracker.start(info(tmp_path))
    tracker.finish(None)
    assert address(capsys.readouterr().err).endswith("/0123456789abcdef/metrics")
    assert read_metrics(tmp_path / "metrics.jsonl") == []
