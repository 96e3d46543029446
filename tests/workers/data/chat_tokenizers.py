"""Tokenizers with chat templates: SmolLM2's, one that knows tools, and one that is strict."""

from __future__ import annotations

from pathlib import Path

from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's own."""

WITH_TOOLS = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "</tools>{% endif %}{% for message in messages %}{% if message.role == 'tool' %}"
    "[result]{{ message.content | tojson }}{% elif message.role in ('user', 'system') %}"
    "[{{ message.role }}]{{ message.content | trim }}{% elif message.role == 'assistant' %}"
    "[model]{% generation %}{% if message.tool_calls %}{{ message.tool_calls | tojson }}"
    "{% endif %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[model]{% if not thinking %}[no thoughts]{% endif %}{% endif %}"
)
"""In the manner of Qwen: tools, results, a variable `thinking`, and marks of what is generated."""

STRICT = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant') }}"
    "{% endif %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""In the manner of Mistral: it raises, has no generation prompt, and leaves tools out silently."""


def chat_folder(folder: Path, template: str | None) -> Path:
    """A tokenizer of bytes, saved with a template and with ChatML's special tokens."""
    backend = TokenizerSpec(kind="byte").build().backend
    backend.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # pyright: ignore[reportArgumentType]
    backend.split_special_tokens = False
    backend.eos_token = "<|im_end|>"
    backend.chat_template = template
    backend.save_pretrained(str(folder))
    return folder


def chat_tokenizer(folder: Path, template: str | None) -> Tokenizer:
    """The same, loaded as a run loads it."""
    return TokenizerSpec(kind="folder", folder=str(chat_folder(folder, template))).build()
