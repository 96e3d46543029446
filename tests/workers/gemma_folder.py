"""A folder like Gemma's: `<eos>` ends a sequence, the token `<end_of_turn>` a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec

END, LETTER = "<end_of_turn>", "a"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message.role + '\n' + "
    "message.content + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}


def gemma_folder(folder: Path, **generation: Any) -> TokenizerSpec:
    """Write a byte tokenizer with a template, and a model that says "a" or ends its turn."""
    backend = TokenizerSpec(kind="byte").build().backend
    backend.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", END]})  # pyright: ignore[reportArgumentType]
    backend.split_special_tokens = False
    backend.chat_template = TEMPLATE
    tokenizer = Tokenizer(backend)
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size}
    model: Any = ModelSpec(architecture=sizes).causal_lm("cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)
        ids = tokenizer.encode(LETTER + END)
        model.lm_head.weight[ids] = 2.0  # two words at logit 32, all others at 0
    model.save_pretrained(folder)
    tokenizer.save(folder)
    named = {"eos_token_id": [tokenizer.eos_id, ids[1]], **generation}
    (folder / "generation_config.json").write_text(json.dumps(named))
    return TokenizerSpec(kind="folder", folder=str(folder))
