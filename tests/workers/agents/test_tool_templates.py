"""Tools are shown to a model, and its calls are read, whatever its chat template writes."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import ToolCall
from penstock.workers.agents.tasks.calculator import CalculatorTaskSpec
from penstock.workers.agents.tasks.tools_and_programs import ToolTaskSpec
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.data.chat import TURNS, ChatOptions, PromptEncoder
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.task import Task, TaskSpec
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}"
)
"""A template in the manner of Mistral and Gemma: no system messages, no tools."""
SCHEMAS = "{% if tools %}<system>{{ tools | tojson }}{{ eos_token }}{% endif %}"
CALLS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "CALL{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERMES = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>"
)
LLAMA = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
PYTHONIC = (
    "[{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]"
)
TOOLS = {"mine": {"kind": "functions", "functions": ["tool_functions:add"], "quick": True}}
PROBLEMS = ReasoningTaskSpec(name="chain_sum", num_train=4, num_held_out=2)
CALL = ToolCall("add", {"a": 1, "b": 2})


def spec_of(template: str, **options: Any) -> tuple[AgentSpec, Task, Tokenizer]:
    tokenizer = TokenizerSpec(kind="byte", chat_template=template)
    task = ToolTaskSpec(task=PROBLEMS, tools=TOOLS)
    return AgentSpec(task=task, tokenizer=tokenizer, **options), task.build(), tokenizer.build()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (STRICT, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (TURNS, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (
            SCHEMAS + CALLS.replace("CALL", HERMES),
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        ),
        (SCHEMAS + CALLS.replace("CALL", LLAMA), '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        (SCHEMAS + CALLS.replace("CALL", PYTHONIC), "[add(a=1, b=2)]"),
    ],
)
def test_tools_are_shown_and_calls_are_read(template: str, said: str) -> None:
    spec, task, tokenizer = spec_of(template)
    prompts, renderer, parse = spec.ways(task, tokenizer)
    (row,) = prompts.encode([0])
    assert isinstance(row, list)
    text = tokenizer.decode(row)
    assert text.count('"add"') == 1
    assert parse(said)[1] == (CALL,)
    messages = prompts.messages(0) or []
    shown = [{"role": "tool", "name": "add", "content": f"{n}!"} for n in (3, 4)]
    after = tokenizer.decode(renderer.after(messages, shown, prompts.tools(0), finished=True))
    assert "3!" in after
    assert "4!" in after
    assert after.count("<tool_response>") == (0 if SCHEMAS in template else 2)


@pytest.mark.parametrize(
    ("template", "calls", "says"),
    [
        (SCHEMAS + CALLS, "auto", "how it writes calls is not known"),
        (SCHEMAS + CHATML, "auto", "how it writes calls is not known"),
        (CHATML, "pythonic", "shows no tools, so they are written"),
        (TURNS, "brackets", "shows no tools, so they are written"),
    ],
)
def test_calls_that_could_not_be_read_are_refused_at_the_start(
    template: str, calls: Any, says: str
) -> None:
    spec, task, tokenizer = spec_of(template, calls=calls)
    with pytest.raises(ConfigError, match=says):
        spec.ways(task, tokenizer)
    named, task, tokenizer = spec_of(SCHEMAS + CALLS, calls="hermes")
    named.ways(task, tokenizer)


def test_calls_of_demonstrations_are_written_where_the_template_has_none() -> None:
    tokenizer = TokenizerSpec(kind="byte", chat_template=CHATML).build()
    function = {"name": "add", "arguments": {"a": 1}}
    reply = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    _, task, _ = spec_of(CHATML)
    encoded = PromptEncoder(task, tokenizer, ChatOptions()).with_reply(0, reply)
    trained = [tokenizer.decode(encoded.ids[slice(*span)]) for span in encoded.spans]
    assert trained == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><eos>',
        "three<eos>",
    ]


def test_a_task_may_teach_calls_in_another_way() -> None:
    tokenizer = TokenizerSpec(kind="byte", chat_template=CHATML)
    task = ToolTaskSpec(task=PROBLEMS, tools=TOOLS, tells_calls=True)
    spec = AgentSpec(task=task, tokenizer=tokenizer, calls="brackets")
    prompts, _, parse = spec.ways(task.build(), tokenizer.build())
    assert not prompts.has_tools
    assert parse("[add 1]")[1] == (ToolCall("add", {"text": "1"}),)


@pytest.mark.parametrize("template", [CHATML, TURNS])
def test_a_task_that_tells_how_to_call_gets_no_schemas(template: str) -> None:
    spec: TaskSpec = CalculatorTaskSpec(num_train=4, num_held_out=1)
    tokenizer = TokenizerSpec(kind="byte", chat_template=template).build()
    prompts = PromptEncoder(spec.build(), tokenizer, ChatOptions())
    (row,) = prompts.encode([0])
    assert isinstance(row, list)
    assert "calculator" not in tokenizer.decode(row)
    assert not prompts.has_tools
    shows = TokenizerSpec(kind="byte", chat_template=SCHEMAS + template).build()
    (row,) = PromptEncoder(spec.build(), shows, ChatOptions()).encode([0])
    assert isinstance(row, list)
    assert "calculator" in shows.decode(row)
