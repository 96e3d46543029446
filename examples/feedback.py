"""Data for post-training, made by the model that is to learn: answers, and who prefers which.

A model answers requests of `task=instructions` several times. The task's verifier says which
answers keep their instruction, and a judge, the same model asked about its own answers, how good
some of them are. A row of `train.jsonl` is a request with answers of both kinds:

- `demonstration`, `chosen`: answers that the verifier accepts; `rejected`: one that it does not;
- `judge_chosen`, `judge_rejected`: the answer that the judge likes best of those it has read, and
  another one, as Zephyr's pairs are made of UltraFeedback's scores;
- `checks`: what the verifier checks.

`held_out.jsonl` has the verifier's pairs for topics that are not trained on, and `feedback.json`
says how often the judge agrees with the verifier. `pipelines.py` uses them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from penstock.algorithms.roles import (
    PerSample,
    Policy,
    PromptId,
    Prompts,
    Reward,
    Rollout,
    Sampling,
    TokenIds,
    TokenMask,
)
from penstock.dataflow import run_eagerly
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.placement.machine import has_fast_bfloat16
from penstock.workers.data.chat import ChatOptions
from penstock.workers.data.instruction_task import InstructionTask, InstructionTaskSpec
from penstock.workers.data.sources import PromptSource
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec, pad_rows
from penstock.workers.rewards.rule_reward import RuleRewardSpec

CHAT = ChatOptions(wrap=True)
QUESTION = """Here is an answer:

{answer}

Which request does it answer? Repeat the request."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """How much is asked for."""

    model: str
    """The folder of the model that answers and judges."""
    num_prompts: int = 128
    """Requests to train on."""
    num_held_out: int = 64
    """Requests about other topics."""
    sampling: Sampling = Sampling(num_samples=8, temperature=0.8, max_new_tokens=40)
    """How they are answered."""
    num_judged: int = 4
    """Answers to each request that the judge reads."""
    prompts_at_once: int = 32
    """Requests answered at once."""
    seed: int = 0
    """Of the requests, the answers, and which of them make a pair."""


@dataclass(frozen=True)
class Answer:
    """One answer, and what is thought of it.

    Attributes:
        text: Without the token that ended it.
        is_right: Whether the verifier accepts it.
        liked: How much the judge likes it; None if it was not asked.
    """

    text: str
    is_right: bool
    liked: float | None


class SelfJudge(Reward):
    """A policy that is shown an answer and asked for the request: how likely is the right one?

    A model of 135M parameters is no good judge, however it is asked; see docs/pipelines.md.

    Args:
        policy: Who is asked.
        task: The requests.
        tokenizer: The policy's.
    """

    def __init__(self, policy: Policy, task: InstructionTask, tokenizer: Tokenizer) -> None:
        self._policy, self._task, self._tokenizer = policy, task, tokenizer

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """f32[rows]: the request's log-probability, to be compared among answers to it."""
        answers = self._tokenizer.decode_responses(tokens, mask)
        contents = [QUESTION.format(answer=answer) for answer in answers]
        asked = [self._tokenizer.render([{"role": "user", "content": c}]) for c in contents]
        questions = self._tokenizer.encode_many(asked)
        requests = self._tokenizer.encode_many(
            [self._task.prompt_text(index) for index in prompt_id.tolist()]
        )
        rows = pad_rows(q + r for q, r in zip(questions, requests, strict=True))
        starts = torch.tensor([len(question) for question in questions])[:, None]
        is_request = (torch.arange(rows.shape[1]) >= starts) & (rows >= 0)
        return self._policy.logprob(rows, is_request).sum(dim=1)


def answers_step(
    prompts: Prompts, actor: Policy, verifier: Reward, judge: Reward, cfg: Feedback
) -> tuple[Rollout, PerSample, PerSample]:
    """Answers, whether each is right, and how much the judge likes the first few of each request.

    Called eagerly it may look at what it computes, so the judge reads only some of the rows, and
    none of the held-out ones, whose indices come last.
    """
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = verifier.score(roll.tokens, roll.mask, roll.prompt_id)
    liked = torch.full_like(score, torch.nan)
    place = torch.arange(len(score)) % cfg.sampling.num_samples
    judged = roll.finished & (place < cfg.num_judged) & (roll.prompt_id < cfg.num_prompts)
    if judged.any():
        liked[judged] = judge.score(roll.tokens[judged], roll.mask[judged], roll.prompt_id[judged])
    return roll, score, liked


class Batches:
    """A source of some requests, so many at once.

    Args:
        prompts: All requests.
        problems: Which of them, as indices of the task.
        size: How many at once.
    """

    def __init__(self, prompts: PromptSource, problems: Sequence[int], size: int) -> None:
        self._prompts, self._problems, self._size = prompts, problems, size

    @property
    def num_steps(self) -> int:
        """Steps until all are asked."""
        return -(-len(self._problems) // self._size)

    def batch(self, step: int) -> Prompts:
        """The requests of a step."""
        return self._prompts.asked(self._problems[step * self._size :][: self._size])


def answered(cfg: Feedback) -> Iterator[tuple[InstructionTask, int, list[Answer]]]:
    """The task, a request of it, and the answers that ended by themselves; one after another."""
    spec = InstructionTaskSpec(
        num_train=cfg.num_prompts, num_held_out=cfg.num_held_out, num_unseen=0, seed=cfg.seed
    )
    task, tokenizer_spec = spec.build(), TokenizerSpec(kind="folder", folder=cfg.model)
    tokenizer = tokenizer_spec.build()
    prompts = PromptSource(task, tokenizer, batch_size=1, seed=cfg.seed, chat=CHAT)
    dtype = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    model = ModelSpec(folder=cfg.model, dtype=dtype)
    actor = TorchPolicySpec(model=model, end_ids=tokenizer.end.ids)
    policy = actor.build(WorkerContext("actor", cfg.seed))
    workers = {
        "actor": policy,
        "verifier": RuleRewardSpec(task=spec, tokenizer=tokenizer_spec),
        "judge": SelfJudge(policy, task, tokenizer),
    }
    source = Batches(prompts, [*task.train, *task.held_out], cfg.prompts_at_once)
    found = run_eagerly(
        answers_step, {"prompts": source}, source.num_steps, workers=workers, seed=cfg.seed, cfg=cfg
    )
    for step, (roll, score, liked) in enumerate(found):
        print(f"answers: {step + 1}/{source.num_steps} batches", flush=True)
        texts = tokenizer.decode_responses(roll.tokens, roll.mask)
        by_problem: dict[int, list[Answer]] = {index: [] for index in roll.prompt_id.tolist()}
        for row, index in enumerate(roll.prompt_id.tolist()):
            if roll.finished[row] and texts[row].strip():
                like = None if liked[row].isnan() else float(liked[row])
                by_problem[index].append(Answer(texts[row], bool(score[row] == 1), like))
        for index, answers in by_problem.items():
            yield task, index, answers


def preferences(answers: Sequence[Answer], rng: random.Random) -> list[dict[str, str]]:
    """The verifier's pairs of a right and a wrong answer, each with a demonstration."""
    right = [answer.text for answer in answers if answer.is_right]
    wrong = [answer.text for answer in answers if not answer.is_right]
    return [
        {"demonstration": rng.choice(right), "chosen": chosen, "rejected": rejected}
        for chosen, rejected in zip(right, wrong, strict=False)
    ]


def judged_pairs(answers: Sequence[Answer], rng: random.Random) -> list[tuple[Answer, Answer]]:
    """The answer that the judge likes best, with each of the others in turn."""
    judged = [answer for answer in answers if answer.liked is not None]
    if not judged:
        return []
    best = max(judged, key=lambda answer: answer.liked or 0.0)
    others = [answer for answer in judged if answer.text != best.text]
    return [(best, other) for other in rng.sample(others, len(others))]


def agreements(answers: Sequence[Answer]) -> list[float]:
    """Of each right answer beside a wrong one: 1 if the judge likes the right one more, else 0."""
    judged = [answer for answer in answers if answer.liked is not None]
    right, wrong = ([a for a in judged if a.is_right is kind] for kind in (True, False))
    return [float((a.liked or 0.0) > (b.liked or 0.0)) for a in right for b in wrong]


def make_feedback(folder: Path, cfg: Feedback) -> dict[str, Any]:
    """Write the files; returns what `feedback.json` says."""
    rng = random.Random(cfg.seed)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    every: list[Answer] = []
    agreed: list[float] = []
    pairs: list[tuple[Answer, Answer]] = []
    for task, index, answers in answered(cfg):
        every += answers
        agreed += agreements(answers)
        about = {"prompt": task.prompt_text(index), "checks": task.reward_answer(index)}
        preferred = preferences(answers, rng)
        if index in task.held_out:
            rows["held_out"] += [about | row for row in preferred]
            continue
        for row, pair in zip(preferred, judged_pairs(answers, rng), strict=False):
            pairs.append(pair)
            by_judge = {"judge_chosen": pair[0].text, "judge_rejected": pair[1].text}
            rows["train"].append(about | row | by_judge)
    folder.mkdir(parents=True, exist_ok=True)
    for name, these in rows.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in these)
        (folder / f"{name}.jsonl").write_text(lines)
    told = [a.is_right for a, b in pairs if a.is_right is not b.is_right]
    found = {
        "asked": asdict(cfg),
        "num_answers": len(every),
        "accuracy": _mean([answer.is_right for answer in every]),
        "num_rows": {name: len(these) for name, these in rows.items()},
        "judge_agrees": _mean(agreed),
        "num_compared": len(agreed),
        "judge_pairs_right": _mean(told),
        "judge_pairs_told_apart": len(told),
    }
    (folder / "feedback.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
