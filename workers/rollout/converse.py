"""A policy's call to `converse`: what every engine that generates does with it."""

from __future__ import annotations

from contextlib import closing

from torch import Tensor

from ...algorithms.roles.agents import Agent, Conversations
from ...algorithms.roles.language import Sampling
from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.runtime.call_context import current_step
from ...dataflow.runtime.worker_protocol import WorkerContext, drain_metrics
from .generation_engine import GenerationEngine
from .reports import report_lag
from .responses import check_prompts


def converse(
    engine: GenerationEngine,
    context: WorkerContext,
    prompt: Tensor,
    prompt_id: Tensor,
    agent: Agent,
    sampling: Sampling,
    max_turns: int,
    branch: bool,
    metrics: dict[str, Metric],
) -> Conversations:
    """Answer a role's call to `converse`.

    Args:
        engine: Samples the turns.
        context: The role's.
        prompt: i64[P, T], right padded with -1.
        prompt_id: i64[P].
        agent: Holds the conversations.
        sampling: See `Policy.converse`.
        max_turns: Most turns of a conversation.
        branch: See `Policy.converse`.
        metrics: What the agent reports is added to it, and how old the tokens' weights are.

    Raises:
        ConfigError: If the engine cannot sample so, or several processes share the model.
        ValueError: If a prompt cannot be answered.
        WorkerError: If the model's logits are not finite.
    """
    at = f"'{context.role}.converse'"
    check_turns(at, sampling, max_turns, branch=branch)
    if context.tensor_parallel > 1:
        raise ConfigError(
            f"{at}: {context.tensor_parallel} processes share the model, and the other side of a "
            "conversation answers in one\n    set tensor_parallel=1 for its group"
        )
    check_prompts(
        prompt, sampling, num_positions=engine.num_positions, vocab_size=engine.vocab_size
    )
    engine.check(sampling)
    found = engine.turns(sampling, len(prompt) * sampling.num_samples * agent.max_pieces)
    if found is None:
        raise ConfigError(
            f"'{context.role}.converse': {engine.name} samples whole responses, and no turns of "
            "conversations\n    give the engine a method `turns`, or choose another: rollout=vllm"
        )
    with closing(found) as turns:
        roll = agent.hold(
            turns, prompt.cpu(), prompt_id.cpu(), sampling, max_turns=max_turns, branch=branch
        )
        shown = turns.num_reused + turns.num_read
        if shown:
            reused = Metric.mean(float(turns.num_reused), float(shown))
            add_metrics(metrics, {"prefix_reused": reused})
    bad = ~roll.behavior_logprob.isfinite().all(1)
    if bool(bad.any()):
        raise WorkerError(
            f"step {current_step()}: the logits of '{context.role}' are not finite in "
            f"{int(bad.sum())} of {len(bad)} conversations\n    its weights have run away: go on "
            "from the last checkpoint with a lower optimizer.lr, or in dtype float32"
        )
    add_metrics(metrics, drain_metrics(agent))
    report_lag(metrics, roll)
    return roll


def check_turns(at: str, sampling: Sampling, max_turns: int, *, branch: bool) -> None:
    """Refuse settings with which no conversation can be held.

    Args:
        at: Name of the call, for messages.
        sampling: How turns are sampled.
        max_turns: Most turns.
        branch: Whether conversations come in pairs.

    Raises:
        ConfigError: Naming what is wrong.
    """
    if not sampling.max_total_tokens:
        raise ConfigError(
            f"{at}: sampling.max_total_tokens is 0, and a conversation needs an end\n    set it to "
            "the tokens of the longest conversation, its prompt included: task.max_total_tokens"
        )
    if sampling.stop:
        raise ConfigError(
            f"{at}: sampling.stop is {sampling.stop!r}; a turn ends with a token\n    leave it "
            "out, and give sampling.stop_token_ids if a turn is to end with more than one"
        )
    if branch and sampling.num_samples % 2:
        raise ConfigError(
            f"{at}: sampling.num_samples is {sampling.num_samples}, and conversations that branch "
            "come in pairs\n    make it even"
        )
    if max_turns < 1:
        raise ConfigError(f"{at}: max_turns is {max_turns}\n    set it to 1 or more")
