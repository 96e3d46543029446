"""Our side of the conversations of `agents.py`: the task, its environments, and a model for it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agents_case import (
    CHAT_TEMPLATE,
    GROUP,
    MAX_TOTAL_TOKENS,
    MEAN_MORE_WORDS,
    NUM_GROUPS,
    TOOL,
    LookUps,
    answer,
    calls,
    question,
    words,
)
from penstock.algorithms.roles import Prompts
from penstock.workers.agents.environment import Environment, Reply, ToolCall, TurnResult
from penstock.workers.agents.tasks.generated_task import GeneratedSpec, GeneratedTask
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import Tokenizer, pad_rows
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import get_json_schema

__all__ = ["Answers", "LookUpSpec", "NumberedQuestions", "chain_folder"]

END, PAD = "<|im_end|>", "<|endoftext|>"
LOGIT = 20.0  # of what the chain allows; all else is as unlikely
VOCABULARY = 1024


class Answers:
    """`LookUps` as an `Environment`.

    Args:
        num_turns: Turns of a conversation.
        longest_s: Longest wait in seconds; None for that of the update.
    """

    def __init__(self, num_turns: int, longest_s: float | None) -> None:
        self._last, self._longest_s = num_turns - 1, longest_s
        self._side = LookUps()

    async def reset(self, problem: int, seed: int) -> None:
        """See `Environment.reset`."""
        del seed
        self._side.reset(problem, self._longest_s)

    async def step(self, reply: Reply) -> TurnResult:
        """See `Environment.step`."""
        if reply.turn == self._last or not reply.calls:
            return TurnResult(reward=self._side.get_reward(), done=True)
        (call,) = reply.calls
        if not isinstance(call, ToolCall):
            raise RuntimeError(f"{call.text!r} is no call: {call.why}")
        said = await self._side.look_up(**call.arguments)
        return TurnResult([{"role": "tool", "name": TOOL, "content": said}])

    async def close(self) -> None:
        """See `Environment.close`."""


@dataclass(frozen=True, kw_only=True)
class LookUpSpec(GeneratedSpec):
    """See `Answers`."""

    num_turns: int
    longest_s: float | None = None
    num_held_out: int = 0

    def build(self) -> LookUpTask:
        """Make the task."""
        return LookUpTask(self)


class LookUpTask(GeneratedTask[int]):
    """Numbered questions, answered with a tool."""

    def __init__(self, spec: LookUpSpec) -> None:
        self._spec = spec
        super().__init__("look_up", spec)

    def make(self, number: int, rng: random.Random) -> int:
        """Its number."""
        del rng
        return number

    def prompt_of(self, problem: int) -> str:
        """The question."""
        return question(problem)[0]["content"]

    def begin(self, index: int) -> Any:
        """An environment whose methods are coroutines."""
        del index
        return Answers(self._spec.num_turns, self._spec.longest_s)

    def environment(self, problem: int) -> Environment:
        return self.begin(problem)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tool, as TRL describes it."""
        return [get_json_schema(LookUps().look_up)]


class NumberedQuestions:
    """The questions of each update in order.

    Args:
        task: The questions.
        tokenizer: Encodes them.
        num_prompts: Of an update.
    """

    def __init__(self, task: LookUpTask, tokenizer: Tokenizer, num_prompts: int) -> None:
        self._task, self._tokenizer, self._num_prompts = task, tokenizer, num_prompts

    def batch(self, step: int) -> Prompts:
        """See `Source.batch`."""
        numbers = range(step * self._num_prompts, (step + 1) * self._num_prompts)
        tools = self._task.schemas()
        texts = [self._tokenizer.render(question(number), tools=tools) for number in numbers]
        rows = self._tokenizer.encode_many(texts)
        return Prompts(prompt=pad_rows(rows), prompt_id=torch.tensor(numbers))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Pieces of the template's own words; each word and call of the chain is a token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    schema = json.dumps(get_json_schema(LookUps().look_up))
    corpus = [CHAT_TEMPLATE, schema, question(0)[0]["content"], answer("a", 0)]
    backend.train_from_iterator(corpus, trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in [*words(), *calls()]])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def chain_folder(folder: Path, *, hidden: int, layers: int) -> None:
    """Save a model whose turns are words and a call, and its tokenizer.

    After the line feed that begins a turn come a word of each of 8 groups, then further words of
    the last group, about `MEAN_MORE_WORDS`, a call, and the end of the turn. The embedding
    marks in one of the first dimensions where in that chain a token stands, and the head reads it.
    All other weights are random and computed in full.

    Args:
        folder: Where to.
        hidden: Width of the model.
        layers: Its layers.
    """
    tokenizer = _tokenizer()
    ids: dict[str, int] = tokenizer.get_vocab()
    groups = [[ids[text] for text in words()[i * GROUP :][:GROUP]] for i in range(NUM_GROUPS)]
    called = [ids[text] for text in calls()]
    size = -(-len(tokenizer) // 64) * 64
    architecture = {
        "model_type": "qwen2",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": MAX_TOTAL_TOKENS,
        "tie_word_embeddings": False,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }
    torch.manual_seed(0)
    model: Any = ModelSpec(architecture=architecture).causal_lm("cpu")
    begin, last, call = 0, NUM_GROUPS, NUM_GROUPS + 1
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, : call + 1] = 0
        for layer in model.model.layers:  # nothing else may write into the marked dimensions
            layer.self_attn.o_proj.weight[: call + 1] = 0
            layer.mlp.down_proj.weight[: call + 1] = 0
        embedding[ids["Ċ"], begin] = 1  # the line feed
        for number, group in enumerate(groups):
            embedding[group, number + 1] = 1
        embedding[called, call] = 1
        some = torch.cat([torch.randint(size, (64, 256)), torch.tensor([groups[-1]] * 64)], 1)
        share = float(model.model(some).last_hidden_state[:, -GROUP:, last].mean())
        head[:, : call + 1] = -LOGIT / share
        for number, group in enumerate(groups):
            head[group, number] = LOGIT / share
        head[groups[-1], last] = LOGIT / share
        rarely = math.log(GROUP / MEAN_MORE_WORDS / len(called))
        head[called, last] = (LOGIT + rarely) / share
        head[ids[END], call] = LOGIT / share
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
