"""Examples of an evaluation, as text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.example_file import ExampleFileSpec
from penstock.workers.models.tokenizer import TokenizerSpec, pad_rows


def test_the_first_responses_are_kept_and_the_scores_returned(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="char", alphabet="0123456789+=")
    tokenizer = spec.build()
    file = tmp_path / "examples.json"
    said = [{"role": "user", "content": "10+2="}]
    worker = ExampleFileSpec(
        path=str(file), tokenizer=spec, num_examples=2, conversations={8: said}
    ).build(WorkerContext("observer"))
    prompts = [tokenizer.encode(text) for text in ("1+2=", "10+2=", "1+1=")]
    answers = [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("3", "13", "2")]
    tokens = pad_rows(p + a for p, a in zip(prompts, answers, strict=True))
    start = torch.tensor([len(p) for p in prompts])[:, None]
    mask = (torch.arange(tokens.shape[1]) >= start) & (tokens >= 0)
    score = torch.tensor([1.0, 0.0, 1.0])
    assert worker.observe(tokens, mask, torch.tensor([7, 8, 9]), score=score) is score
    assert json.loads(file.read_text()) == {
        "examples": [
            {"prompt_id": 7, "prompt": "1+2=", "response": "3", "score": 1.0},
            {"prompt_id": 8, "messages": said, "response": "13", "score": 0.0},
        ],
        "scores": {"7": [1.0], "8": [0.0], "9": [1.0]},
    }
