"""Distillation learns: a tiny student comes closer to a tiny trained teacher on `chain_sum`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from penstock.algorithms.distillation import Distillation, distillation_step, gkd_step
from penstock.algorithms.losses import DistillationLoss
from penstock.algorithms.papers.sampled_distillation import (
    SampledDistillation,
    sampled_distillation_step,
)
from penstock.algorithms.roles import Policy, Prompts, Sampling
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.eager import run_eagerly
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.sources import DemonstrationSource, PromptSource
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec

from . import runs

SAMPLING = Sampling(num_samples=4, max_new_tokens=6)
STEPS = {
    "reverse": (distillation_step, Distillation(sampling=SAMPLING)),
    "few_words": (distillation_step, Distillation(sampling=SAMPLING, num_words=4)),
    "forward": (distillation_step, Distillation(sampling=SAMPLING, loss=DistillationLoss(beta=0))),
    "gkd": (gkd_step, Distillation(sampling=SAMPLING, loss=DistillationLoss(beta=0.5))),
    "sampled": (sampled_distillation_step, SampledDistillation(sampling=SAMPLING)),
}


def policy(lr: float | None) -> Any:
    """A policy from the same random weights; frozen without a learning rate."""
    optimizer = None if lr is None else OptimizerSpec(lr=lr)
    eos = runs.TOKENIZER.build().eos_id
    spec = TorchPolicySpec(model=runs.model(), end_ids=(eos,), optimizer=optimizer)
    return build_role("actor", spec, WorkerContext("actor"))


@pytest.fixture(scope="module")
def teacher() -> Any:
    made = policy(3e-3)
    demos = DemonstrationSource(runs.TASK.build(), runs.TOKENIZER.build(), batch_size=32, seed=0)
    list(run_eagerly(sft_step, {"demos": demos}, 40, workers={"actor": made}, cfg=SFT()))
    return made


def reverse_kl(student: Policy, teacher: Policy) -> float:
    """KL(student || teacher) per token of the student's own responses, over the vocabulary."""
    prompts: Prompts = PromptSource(
        runs.TASK.build(), runs.TOKENIZER.build(), batch_size=32, seed=9
    ).batch(0)
    with call_scope(1000, 0):
        roll = student.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
    mine, told = (
        student.top_words(roll.tokens, roll.mask, num_words=99),
        teacher.top_words(roll.tokens, roll.mask, num_words=99),
    )
    every = torch.zeros_like(told.logprob).scatter(2, told.words.clamp(min=0), told.logprob)
    told_of_mine = every.gather(2, mine.words.clamp(min=0))
    kl = (mine.logprob.exp() * (mine.logprob - told_of_mine)).sum(-1)
    return float(kl[roll.mask].mean())


@pytest.mark.parametrize("name", STEPS)
def test_a_student_comes_closer_to_its_teacher(name: str, teacher: Any) -> None:
    step, cfg = STEPS[name]
    student = policy(3e-3)
    before = reverse_kl(student, teacher)
    task, tokenizer = runs.TASK.build(), runs.TOKENIZER.build()
    sources: dict[str, Any] = {"prompts": PromptSource(task, tokenizer, batch_size=16, seed=1)}
    if name == "gkd":
        sources["demos"] = DemonstrationSource(task, tokenizer, batch_size=16, seed=1)
    workers = {"actor": student, "teacher": teacher}
    list(run_eagerly(step, sources, 15, workers=workers, cfg=cfg))
    after = reverse_kl(student, teacher)
    assert before > 1.0
    assert after < 0.6 * before


def test_what_is_recorded() -> None:
    """Distillation reads no log-probabilities of the sampler, so it may take other samples."""
    cut = replace(SAMPLING, top_p=0.9)
    graph = build(gkd_step, cfg=Distillation(sampling=cut))
    assert [node.name for node in graph.nodes if node.kind.value != "source"] == [
        "actor.generate",
        "with_demonstrations",
        "teacher.top_words",
        "actor.train",
    ]
    assert graph.trains_per_step == {"actor": 1}
    assert str(graph["teacher.top_words"].outputs[0].spec) == "i64[sample, token~, word]"
