"""Hostile adapters, templates, tokenizers, configurations of models, and rows."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_case import Case, Content
from fuzz_files import other_value
from fuzz_ground import (
    ADAPTER,
    KINDS,
    Ground,
    adapter_words,
    as_json,
    chat_words,
    kind,
    model_words,
)


def _adapter(ground: Ground, what: str, config: Content, **expected: Any) -> Case:
    """Return a run that goes on from an adapter with another adapter_config.json."""
    files: dict[str, Content] = {"a/adapter_config.json": config}
    return Case(adapter_words(), ground.adapter, files, f"adapter_config.json: {what}", **expected)


@kind("adapter: another alpha than the configuration's")
def _(ground: Ground, chance: random.Random) -> Case:
    alpha = chance.choice((4, 8, 16))
    case = _adapter(ground, f"lora_alpha {alpha}", as_json({**ADAPTER, "lora_alpha": alpha}))
    words = (*case.words, f"model.lora.alpha={chance.choice((2, 32, 64))}")
    return Case(words, case.scene, case.files, case.what, must_refuse=True)


@kind("adapter: alpha left out")
def _(ground: Ground, chance: random.Random) -> Case:
    alpha = chance.choice((1, 2, 8))
    config = as_json({**ADAPTER, "lora_alpha": alpha})
    return _adapter(ground, f"lora_alpha {alpha}", config, other_weights=ground.default)


@kind("adapter: no configuration, or none that can be read")
def _(ground: Ground, chance: random.Random) -> Case:
    garbage = chance.choice((None, b"", b"null", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"r"'))
    return _adapter(ground, f"{garbage!r:.20}", garbage, must_refuse=True)


def _register_adapter_options() -> None:
    options: dict[str, Sequence[Any]] = {
        "use_dora": (True,),
        "bias": ("all", "lora_only"),
        "peft_type": ("IA3", "PREFIX_TUNING", 3),
        "modules_to_save": (["lm_head"], ["embed_tokens"]),
        "fan_in_fan_out": (True,),
        "r": (3, 64, -1, "x", 10**6),
        "lora_alpha": (float("nan"), float("inf"), "x", [], -(10**30)),
        "rank_pattern": ({"q_proj": 1}, {".*": 7}),
        "target_modules": (["k_proj"], ["nope"], 5),
    }
    for name, values in options.items():

        def make(
            ground: Ground, chance: random.Random, name: str = name, values: Sequence[Any] = values
        ) -> Case:
            value = chance.choice(values)
            config = as_json({**ADAPTER, name: value})
            return _adapter(ground, f"{name} {value!r:.30}", config, must_refuse=True)

        KINDS[f"adapter: {name}"] = make


_register_adapter_options()


@kind("adapter: options that change what it computes")
def _(ground: Ground, chance: random.Random) -> Case:
    more: Mapping[str, Any] = chance.choice(
        ({"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}, {"alpha_pattern": {"v_proj": 2}})
    )
    config = as_json({**ADAPTER, **more, "lora_alpha": 32})
    return _adapter(ground, f"{more}", config, other_weights=ground.default)


@kind("adapter: values of its configuration")
def _(ground: Ground, chance: random.Random) -> Case:
    config: dict[str, Any] = json.loads(json.dumps(ADAPTER))
    what = other_value(config, chance)
    return _adapter(ground, what, as_json(config))


@kind("adapter: keys that fit no model")
def _(ground: Ground, chance: random.Random) -> Case:
    words = chance.choice(
        (
            ("model.lora.rank=2", "model.lora.target_modules=[lm_head]"),
            ("model.lora.rank=2", "model.lora.target_modules=[layers.9.q_proj]"),
            ("model.lora.alpha=5",),
            (f"model.lora.rank={chance.choice((1000, 10**6))}",),
        )
    )
    return Case(model_words(*words), ground.model, what=f"{words}", must_refuse=True)


def _template(ground: Ground, what: str, template: str, **expected: Any) -> Case:
    config = ground.text("tokenizer_config.json")
    files: dict[str, Content] = {
        "m/tokenizer_config.json": as_json({**config, "chat_template": template})
    }
    return Case(chat_words(), ground.model, files, f"template: {what}", **expected)


_GOOD = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


_ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ '%1000000000d' % 5 }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ '{:>1000000000}'.format(5) }}",
    "{% set n = namespace(s='xx') %}{% for a in range(40) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}{{ n.s }}",
    "{% for a in range(10000) %}{{ 'x' * 10000 }}{% endfor %}",
    "{{ [0] * 10**10 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ range(10**9) | list }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ lipsum(n=100000) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
)
_BROKEN = (
    "{% for",
    "{{ nope.x.y }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{{",
    "{% include 'x' %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[9].content }}",
)


@kind("template: without a bound")
def _(ground: Ground, chance: random.Random) -> Case:
    template = chance.choice(_ENDLESS)
    return _template(ground, template[:60], template + _GOOD, must_refuse=True)


@kind("template: a random number")
def _(ground: Ground, chance: random.Random) -> Case:
    values = chance.choice(("[1, 2, 3]", "range(1000)", "'abc'"))
    word = f"{{{{ {values} | random }}}}"
    return _template(ground, word, word + _GOOD, must_refuse=True)


@kind("template: a clock")
def _(ground: Ground, chance: random.Random) -> Case:
    """Try a template that fails if its clock shows the present time."""
    form = chance.choice(("%d %b %Y", "%H:%M:%S", "%Y-%m-%d"))
    now = time.strftime("%Y")
    word = f"{{% if strftime_now('%Y') == '{now}' %}}{{{{ 1 / 0 }}}}{{% endif %}}"
    word += f"{{{{ strftime_now('{form}') }}}}"
    return _template(ground, form, word + _GOOD, must_succeed=True)


@kind("template: broken, or of another type")
def _(ground: Ground, chance: random.Random) -> Case:
    template = chance.choice(_BROKEN)
    return _template(ground, template, template + _GOOD)


@kind("tokenizer: out of proportion")
def _(ground: Ground, chance: random.Random) -> Case:
    data = ground.text("tokenizer.json")
    what = chance.choice(("normalizer", "id", "twice", "beyond"))
    vocabulary = data["model"]["vocab"]
    if what == "normalizer":
        data["normalizer"] = {
            "type": "Replace",
            "pattern": {"String": "1"},
            "content": "y" * 100_000,
        }
    elif what == "id":
        vocabulary[min(vocabulary)] = 2**31
    elif what == "twice":
        one, two = sorted(vocabulary)[:2]
        vocabulary[one] = vocabulary[two]
    else:
        vocabulary["1"] = len(vocabulary) + 1000
    files: dict[str, Content] = {"m/tokenizer.json": as_json(data)}
    words = model_words() if chance.randrange(2) else chat_words()
    return Case(words, ground.model, files, f"tokenizer: {what}", must_refuse=True)


@kind("model: configuration that reaches a loader")
def _(ground: Ground, chance: random.Random) -> Case:
    more: dict[str, Any] = chance.choice(
        (
            {"_attn_implementation": "org/kernel"},
            {"_attn_implementation": "flash_attention_2"},
            {"_attn_implementation": 5},
            {"attn_implementation": "org/kernel@main"},
            {"output_attentions": True},
            {"output_hidden_states": True},
            {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            {"quantization_config": {"quant_method": "nope"}},
            {"return_dict": False},
            {"torchscript": True},
            {"dtype": "os.system"},
            {"_experts_implementation": "org/kernel"},
        )
    )
    config = ground.text("config.json") | more
    files: dict[str, Content] = {
        "m/config.json": as_json(config),
        "m/evil.py": b"import pathlib; pathlib.Path('../evil').write_text('x')\n",
    }
    return Case(model_words(), ground.model, files, f"config.json: {more}")


@kind("rows: values of keys beside them")
def _(ground: Ground, chance: random.Random) -> Case:
    words = chance.choice(
        (
            ("task.chat_template_kwargs={self: 1}",),
            ("task.chat_template_kwargs={messages: []}",),
            ("task.chat_template_kwargs={chat_template: '{{ 1 / 0 }}'}",),
            (f"engine.options.micro_batch_tokens={10**30}",),
            ("task.num_held_out=100000000000",),
            ("task.max_response_tokens=100000000000",),
        )
    )
    return Case(chat_words(*words), ground.model, what=f"{words}", num_hostile=1, must_refuse=True)


@kind("rows: Parquet")
def _(ground: Ground, chance: random.Random) -> Case:
    column = chance.choice(
        (
            pa.array([timedelta(seconds=5)] * 8),
            pa.array([b"\xff"] * 8),
            pa.array([None] * 8),
            pa.array([{"a": 1}] * 8),
            pa.array([float("nan")] * 8),
            pa.array([[1, 2]] * 8),
            pa.array(["x" * 100_000] * 8),
        )
    )
    name = chance.choice(("prompt", "answer"))
    other = pa.array([f"{i}" for i in range(8)])
    columns = {"prompt": other, "answer": other} | {name: column}
    made = io.BytesIO()
    pq.write_table(pa.table(columns), made)
    files: dict[str, Content] = {"d.parquet": made.getvalue()}
    return Case(model_words("task.path=d.parquet"), ground.model, files, f"{name}: {column.type}")


@kind("rows: JSON lines")
def _(ground: Ground, chance: random.Random) -> Case:
    name = chance.choice(("d.jsonl", "chat.jsonl"))
    lines = (ground.model / name).read_text().splitlines()
    for at in chance.sample(range(len(lines)), chance.choice((1, len(lines)))):
        row = json.loads(lines[at])
        other_value(row, chance)
        lines[at] = json.dumps(row)
    files: dict[str, Content] = {name: "\n".join(lines).encode()}
    words = chat_words() if name == "chat.jsonl" else model_words()
    return Case(words, ground.model, files, f"{name} changed")
