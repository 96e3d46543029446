"""Every place agrees on what ends a response, and on its text without that."""

from __future__ import annotations

import ast
import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import CallKey, call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.agents.worker import AgentSpec, AgentWorker
from penstock.workers.data.chat import ChatOptions, encode_conversation
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sample_log import ExampleFileSpec, SampleLogSpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import ResponseEnd, TokenizerSpec
from penstock.workers.rewards.judge import JudgeSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.rollout.generation_engine import Responses
from penstock.workers.rollout.response_sampler import ResponseSampler

from ..echo_task import EchoSpec
from ..gemma_folder import END, gemma_folder
from ..rewards.test_judge import Server
from ..rewards.test_judge import server as server  # a fixture

ROOT = Path(__file__).parents[3]
CONTEXT = WorkerContext("worker")
TOKENIZER = TokenizerSpec(alphabet="0123456789#+=abcdefghijklmnopqrstuvwxyz.\n").ending(
    ResponseEnd((5,))  # "#" is the second id of the model's generation_config.json
)
BUILT = TOKENIZER.build()

ENDINGS: dict[str, tuple[list[int], Sampling]] = {
    "end of sequence": ([BUILT.eos_id], Sampling()),
    "second id": ([5], Sampling()),
    "string over two tokens": (BUILT.encode("=="), Sampling(stop=("==",))),
    "string after one that came too early": (BUILT.encode("=="), Sampling(stop=("==", "2"))),
    "id of the sampling": (BUILT.encode("z"), Sampling(stop_token_ids=(BUILT.encode("z")[0],))),
    "cut off": ([], Sampling(stop=("==",))),
}


def responses(ending: str) -> tuple[TokenizerSpec, torch.Tensor, torch.Tensor, Responses]:
    """Return the tokenizer of such a run, and "42" with the ending as it was sampled."""
    end, sampling = ENDINGS[ending]
    said = BUILT.encode("42")
    least = 3 if "early" in ending else 0
    sampling = replace(
        sampling, max_new_tokens=len(said + end) + 2 * bool(end), min_new_tokens=least
    )
    forced = [*said, *end, *BUILT.encode("77")]
    prompt = torch.tensor([BUILT.encode("6+=")])
    uniform = torch.full((1, sampling.max_new_tokens), 0.5, dtype=torch.float64)
    sampler = ResponseSampler(
        prompt,
        uniform,
        replace(sampling, temperature=0.0),
        end_ids=BUILT.end.ids,
        vocab_size=BUILT.vocab_size,
        tokenizer=TOKENIZER,
    )
    row, live = torch.tensor([0]), torch.tensor([True])
    while bool(live[0]):
        token = forced[int(sampler.longest_now(row)) - prompt.shape[1]]
        logits = torch.nn.functional.one_hot(torch.tensor([token]), BUILT.vocab_size).float()
        live = sampler.sample(logits, row, live)[1]
    found = sampler.responses(row)
    tokens = torch.cat([prompt, found.token], 1)
    mask = (tokens >= 0) & (torch.arange(tokens.shape[1]) >= prompt.shape[1])
    return TOKENIZER.sampled_by(sampling), tokens, mask, found


@pytest.fixture
def task(tmp_path: Path) -> FileTaskSpec:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "6+=", "answer": "42"}\n')
    return FileTaskSpec(path=str(path))


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_scored_judged_shown_and_answered_is_without_what_ended_it(
    ending: str, task: FileTaskSpec, tmp_path: Path, server: Server
) -> None:
    spec, tokens, mask, found = responses(ending)
    assert bool(found.finished[0]) == (ending != "cut off")
    assert found.token[0, : int(found.length[0])].tolist() == [
        *BUILT.encode("42"),
        *ENDINGS[ending][0],
    ]
    problem = torch.tensor([0])
    rule = RuleRewardSpec(task=task, tokenizer=spec, verifier="exact_match").build(CONTEXT)
    score = rule.score(tokens, mask, problem)
    assert score.tolist() == [1.0]
    judge = JudgeSpec(
        task=task, tokenizer=spec, url=server.url, model="m", template="<{response}>"
    ).build(CONTEXT)
    assert judge.score(tokens, mask, problem).tolist() == [1.0]
    assert server.requests[0]["messages"][-1]["content"] == "<42>"
    ExampleFileSpec(path=str(tmp_path / "examples"), tokenizer=spec).build(CONTEXT).observe(
        tokens, mask, problem, score=score
    )
    (example,) = json.loads((tmp_path / "examples").read_text())["examples"]
    assert (example["prompt"], example["response"]) == ("6+=", "42")
    log = SampleLogSpec(
        folder=str(tmp_path / "samples"),
        tokenizer=spec,
        versions_per_step=1,
        max_rows=1,
        keep_steps=None,
        max_bytes=1 << 20,
    ).build(CONTEXT)
    with call_scope(0, 0, 0):
        log.record(tokens, mask, finished=found.finished)
    log.close()
    (file,) = (tmp_path / "samples").iterdir()
    sample = json.loads(gzip.decompress(file.read_bytes()))
    assert (sample["response"], sample["finished"]) == ("42", ending != "cut off")
    echo = EchoSpec()
    template = str(getattr(echo.build(), "chat_template"))  # noqa: B009
    agent: Any = AgentSpec(
        task=echo, tokenizer=replace(spec, chat_template=template), chat=ChatOptions()
    ).build(CONTEXT)
    assert isinstance(agent, AgentWorker)
    floor: Any = SimpleNamespace(speak=None)
    exchange = agent._exchange(None, floor, CallKey(0, 0))  # pyright: ignore[reportPrivateUsage]
    reply = exchange.reply_of(0, found.token[0, : int(found.length[0])], bool(found.finished[0]))
    assert (reply.text, reply.content, reply.finished) == ("42", "42", ending != "cut off")


@pytest.mark.parametrize(
    ("tokens", "strings", "said"),
    [
        ("ab==", ("==",), "ab"),
        ("ab==c", ("==",), "ab==c"),  # the last token did not complete it
        ("ab=", ("=", "b="), "a"),  # the longer one began earlier
        ("==", ("==",), ""),
        ("", ("==",), ""),
    ],
)
def test_a_string_counts_where_the_last_token_completes_it(
    tokens: str, strings: tuple[str, ...], said: str
) -> None:
    end = ResponseEnd((2,), strings)
    assert end.said(BUILT.encode(tokens), BUILT.decode) == said


def test_bytes_that_were_no_whole_character_are_no_text_before_the_end() -> None:
    tokenizer = TokenizerSpec(kind="byte").sampled_by(Sampling(stop=("é",))).build()
    assert tokenizer.said(tokenizer.encode("aé")) == "a"
    assert tokenizer.said(tokenizer.encode("aé")[:-1]).startswith("a")


# --- a model in the manner of Gemma


def test_the_ids_of_generation_config_end_a_response_without_a_word(
    tmp_path: Path, task: FileTaskSpec
) -> None:
    spec = gemma_folder(tmp_path)
    tokenizer = spec.build()
    assert tokenizer.end.ids == (tokenizer.eos_id, tokenizer.encode(END)[0])
    policy = TorchPolicySpec(model=ModelSpec(folder=str(tmp_path)), end_ids=tokenizer.end.ids)
    sampling = Sampling(num_samples=64, max_new_tokens=6)
    with call_scope(0, 0, 0):
        roll = policy.build(CONTEXT).generate(
            torch.tensor([tokenizer.encode("6+=")]), torch.tensor([0]), sampling
        )
    texts = tokenizer.decode_responses(roll.tokens, roll.mask)
    assert {*texts} <= {"a" * n for n in range(7)}
    lengths = roll.mask.sum(1).tolist()
    assert len({*lengths}) > 2, "some are short"
    ended = [length == len(text) + 1 for length, text in zip(lengths, texts, strict=True)]
    assert roll.finished.tolist() == ended
    answer = replace(task, path=str(tmp_path / "a.jsonl"))
    Path(answer.path).write_text('{"prompt": "6+=", "answer": "a"}\n')
    rule = RuleRewardSpec(task=answer, tokenizer=spec).build(CONTEXT)
    score = rule.score(roll.tokens, roll.mask, roll.prompt_id)
    assert score.tolist() == [float(text == "a") for text in texts]
    assert 0 < score.sum() < 64


@pytest.mark.parametrize("named", [True, False], ids=["named", "special token of the template"])
def test_imitated_turns_end_with_the_templates_end_and_not_the_line_feed(
    tmp_path: Path, named: bool
) -> None:
    spec = gemma_folder(tmp_path, **({} if named else {"eos_token_id": 2}))
    tokenizer = spec.build()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b"}]
    row = encode_conversation(tokenizer, [*talk, *talk], first=1, variables={})
    assert [tokenizer.decode(row.ids[a:b]) for a, b in row.spans] == [f"a b{END}"] * 2


@pytest.mark.parametrize("wrong", ["x", [1, "x"], -1, 1.5, True])
def test_a_generation_config_that_names_no_token_is_refused(tmp_path: Path, wrong: Any) -> None:
    spec = gemma_folder(tmp_path, eos_token_id=wrong)
    with pytest.raises(ConfigError, match="expected the id of a token that ends a response"):
        spec.build()


# --- one place


@pytest.mark.slow
def test_the_rule_is_asked_for_nowhere_but_in_workers_models() -> None:
    """Whoever asks for the end of sequence decides about ends without knowing all of them."""
    allowed = {"launch/stages/worker_specs.py"}  # the config of an architecture without a folder
    found: list[str] = []
    for package in ("dataflow", "algorithms", "planner", "workers", "configs", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("workers/models/"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                words = {
                    getattr(node, "id", None),
                    getattr(node, "attr", None),
                    getattr(node, "arg", None),
                    getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
                }
                if words & {"eos_token_id", "eos_id"} and name not in allowed:
                    found.append(f"{name}:{getattr(node, 'lineno', '?')}")
    assert not found
