"""Reward models with a tokenizer and a chat template of their own, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec, pad_rows
from penstock.workers.rewards.mixture import MixtureSpec
from penstock.workers.rewards.own_text import OwnText
from penstock.workers.rewards.process_reward import TorchProcessRewardSpec
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as tokenizer_decoders
from torch import Tensor
from torch_models import BASE

from .responses import CONTEXT

POLICY = TokenizerSpec()
MARKS = ["<|start|>", "<|end|>", "<step>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ASKED: list[Any] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+2?"}],
    "What is 1+2+3, and why?",
]
RESPONSES = ["It is 3.", "6: because\n1+2 is 3,\nand 3+3 is 6.\n"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of a conversation and a text, and a tokenizer of another library."""
    home = tmp_path_factory.mktemp("own")
    lines = [json.dumps({"prompt": asked, "answer": "3"}) for asked in ASKED]
    (home / "task.jsonl").write_text("\n".join(lines))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = tokenizer_decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|eos|>", *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([str(asked) for asked in ASKED] + RESPONSES, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|eos|>", pad_token="<pad>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(str(home / "tokenizer"))
    transformers.AutoConfig.for_model("qwen2", **BASE).save_pretrained(home / "tokenizer")
    return home


def model_folder(home: Path, kind: str, **fields: Any) -> tuple[Path, Any, Any]:
    """A random model of transformers and the tokenizer, and the folder that has both."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(str(home / "tokenizer"))
    config = transformers.AutoConfig.for_model(
        "qwen2", **{**BASE, "vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1, **fields}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: Any = getattr(transformers, kind).from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
    folder = home / f"{kind}-{len(fields)}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return folder, model.eval(), tokenizer


def own_text(home: Path, folder: Path) -> OwnText:
    task = FileTaskSpec(path=str(home / "task.jsonl"))
    return OwnText(folder=str(folder), task=task, tokenizer=POLICY)


def policy_rows() -> tuple[Tensor, Tensor, Tensor]:
    policy = POLICY.build()
    tokens = pad_rows([4, *policy.encode_response(text)] for text in RESPONSES)
    mask = (tokens >= 0) & (torch.arange(tokens.shape[1]) > 0)
    return tokens, mask, torch.arange(len(RESPONSES))


def conversation(index: int, response: str) -> list[Any]:
    asked = ASKED[index]
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return [*before, {"role": "assistant", "content": response}]


@pytest.mark.slow
def test_a_classifier_reads_its_own_tokens(home: Path) -> None:
    folder, model, tokenizer = model_folder(
        home, "AutoModelForSequenceClassification", num_labels=1
    )
    own = own_text(home, folder)
    assert own.differs
    spec = TorchRewardModelSpec(model=ModelSpec(folder=str(folder)), own_text=own)
    found = spec.build(CONTEXT).score(*policy_rows())
    for index, response in enumerate(RESPONSES):
        ids = tokenizer.apply_chat_template(
            conversation(index, response), return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            expected = model(**ids).logits[0]
        torch.testing.assert_close(found[index : index + 1], expected, atol=1e-5, rtol=0)
    part = {"worker": "reward_model", "options": {"folder": str(folder)}}
    mixture = MixtureSpec(task=own.task, tokenizer=POLICY, parts={"model": part}).build(CONTEXT)
    assert torch.equal(mixture.score(*policy_rows()), found)
    plain = TorchRewardModelSpec(model=spec.model, own_text=own, chat=False).build(CONTEXT)
    with torch.no_grad():
        ids = tokenizer(f"{ASKED[1]}{RESPONSES[1]}<|eos|>", return_tensors="pt")
        alone = model(**{n: ids[n] for n in ("input_ids", "attention_mask")}).logits[0]
    torch.testing.assert_close(plain.score(*policy_rows())[1:], alone, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_row_that_is_too_long_has_no_score(home: Path) -> None:
    folder, _, _ = model_folder(
        home, "AutoModelForSequenceClassification", num_labels=1, max_position_embeddings=50
    )
    spec = TorchRewardModelSpec(
        model=ModelSpec(folder=str(folder)), own_text=own_text(home, folder)
    )
    assert spec.build(CONTEXT).score(*policy_rows()).isnan().tolist() == [False, True]


def test_the_same_tokenizer_and_template_leave_tokens_as_they_are(
    home: Path, tmp_path: Path
) -> None:
    here = TokenizerSpec(kind="folder", folder=str(home / "tokenizer"))
    own = own_text(home, home / "tokenizer")
    assert own.differs
    assert not OwnText(folder=own.folder, task=own.task, tokenizer=here).differs
    assert not own_text(home, tmp_path).differs  # it has none of its own
    built = here.build()
    built.backend.chat_template = "{{ messages }}"
    built.save(tmp_path)
    assert OwnText(folder=str(tmp_path), task=own.task, tokenizer=here).differs


STEPS = [["It is 3."], ["6: because", "1+2 is 3,", "and 3+3 is 6."]]


def tagged(steps: list[str], tag: str) -> str:
    return "".join(f"{step}{tag}" for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AutoModelForTokenClassification", "AutoModelForCausalLM"])
def test_steps_are_scored_at_their_tags_as_transformers_scores_them(home: Path, kind: str) -> None:
    """By a token classifier of two labels, and by the words that a language model says."""
    causal = kind == "AutoModelForCausalLM"
    folder, model, tokenizer = model_folder(home, kind, **({} if causal else {"num_labels": 2}))
    spec = TorchProcessRewardSpec(
        model=ModelSpec(folder=str(folder)),
        tokenizer=POLICY,
        own_text=own_text(home, folder),
        step_tag="<step>",
        words=["+", "-"] if causal else [],
    )
    worker = spec.build(CONTEXT)
    tokens, mask, prompt_id = policy_rows()
    found = worker.score_steps(tokens, mask, prompt_id)
    assert found.step_end.sum(1).tolist() == [1, 4]  # the end of the response is a step as well
    tag = tokenizer.convert_tokens_to_ids("<step>")
    right, wrong = (tokenizer.encode(word)[-1] for word in "+-")
    for index, steps in enumerate([STEPS[0], [*STEPS[1], ""]]):
        ids = tokenizer.apply_chat_template(
            conversation(index, tagged(steps, "<step>")), return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            logits = model(**ids).logits[0, ids["input_ids"][0] == tag]
        pair = logits[:, [wrong, right]] if causal else logits
        expected = pair.softmax(-1)[:, 1]
        own = found.step_score[index, found.step_end[index]]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)
    assert drain_metrics(worker)["steps/mean"].value == 2.5


def test_a_tag_that_a_response_writes_itself_ends_no_step(home: Path) -> None:
    own = own_text(home, home / "tokenizer")
    policy = POLICY.build()
    row = [4, *policy.encode("1<step>2"), policy.eos_id]
    tokens = torch.tensor([row])
    mask = torch.tensor([[False, *[True] * (len(row) - 1)]])
    ends = torch.zeros_like(mask)
    ends[0, -1] = True
    (ids,), (reads,) = (
        one.tolist()
        for one in own.steps(tokens, mask, ends, torch.tensor([1]), close="\n", tag="<step>")
    )
    text = TokenizerSpec(kind="folder", folder=own.folder).build().decode(ids)
    assert text.count("<step>") == 1
    assert text.endswith("12<step><|end|>\n")
    assert sum(reads) == 1
