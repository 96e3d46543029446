"""Functions that name what they read: here and in a pool, alone and several, for one or a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.launch.run_dir.samples import read_samples
from penstock.workers.data.mixture_task import MixtureTaskSpec
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sample_log import SampleLogSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.mixture import MixtureSpec
from penstock.workers.rewards.registry import check_verifiers
from penstock.workers.rewards.rule_reward import RuleReward, RuleRewardSpec
from penstock.workers.verifiers.reward_function import bind

from .responses import CONTEXT, rows, scores_of

MINE = '''
import asyncio, os, time

def by_column(response, difficulty, tags, missing="default", absent=3):
    """One row has no `missing`, and none has `absent`."""
    return difficulty * len(tags) + len(missing) + absent

def whole(prompt, messages, answer):
    return len(messages)

def conversation(messages, response):
    return 10 * len(messages) + len(messages[0]["content"])

def by_tokens(response_token_ids, tokenizer, step):
    said = tokenizer.decode(response_token_ids, skip_special_tokens=True)
    return 100 * step + 10 * len(response_token_ids) + len(said)

def everything(response, **others):
    return sum(map(ord, "".join(sorted(others)))) % 997

def shares(responses, difficulty):
    """Each response's place among those of the batch, which only the whole batch tells."""
    return [sorted(responses).index(one) / len(responses) for one in responses]

def as_text(response, difficulty):
    """The column that is read as the answer is a text, as `answer` is."""
    return float(difficulty == "2")

def parts(response):
    if response == "none":
        return None
    return {"long": len(response), "never": None, "a": response.count("a")}

def list_of_parts(responses):
    return [parts(one) for one in responses]

def short_list(responses):
    return [1.0]

async def awaited(response):
    await asyncio.sleep(60 if response == "late" else 0.01)
    if response == "raise":
        raise KeyError(response)
    return 1.0

async def awaited_batch(responses):
    return await asyncio.gather(*map(awaited, responses))

class Kept:
    """Says how often it was made and started in this process, and writes when it is closed."""
    made = 0
    def __init__(self, mark=""):
        Kept.made += 1
    async def start(self):
        self.loop, self.started = asyncio.get_running_loop(), 1
    async def __call__(self, response, mark):
        self.mark = mark
        assert asyncio.get_running_loop() is self.loop
        return 10 * Kept.made + self.started
    def close(self):
        with open(self.mark, "a") as file:
            file.write("closed\\n")

def trl(prompts, completions, completion_ids, answer, trainer_state, **columns):
    assert sorted(columns) == ["difficulty", "mark", "missing", "tags"], columns
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["tags"])
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    found = [float(text == str(gold)) for text, gold in zip(said, answer)]
    return [None if text == "none" else score for text, score in zip(said, found)]

def trl_shapes(prompts, completions):
    return [2 * isinstance(p, list) + isinstance(c, list) for p, c in zip(prompts, completions)]
'''


def task_of(folder: Path, reward: Any, **options: Any) -> FileTaskSpec:
    """A text with all columns, and a conversation that lacks one; answers are numbers."""
    (folder / "mine.py").write_text(MINE)
    mark = str(folder / "closed.txt")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    given: list[dict[str, Any]] = [
        {"prompt": "?", "answer": 5, "difficulty": 2, "tags": ["x", "y"], "missing": "four"},
        {"prompt": [*talk, {"role": "user", "content": "?"}], "answer": 6, "difficulty": 3},
    ]
    given[1]["tags"] = []
    lines = [json.dumps({**row, "mark": mark}) for row in given]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return FileTaskSpec(path=str(folder / "rows.jsonl"), reward=reward, **options)


def named(folder: Path, *names: str) -> dict[str, str]:
    return {name: f"{folder}/mine.py:{name}" for name in names}


def made(task: Any, **options: Any) -> RuleReward:
    every: dict[str, Any] = {"num_processes": 1, "time_limit_s": 20.0, **options}
    return RuleRewardSpec(task=task, tokenizer=TokenizerSpec(), **every).build(CONTEXT)


def scored(reward: RuleReward, problems: Sequence[int], *responses: str) -> list[float | None]:
    tokens, mask, ids = rows(*responses)
    found = reward.score(tokens, mask, ids.new_tensor(problems)).tolist()
    return [None if math.isnan(score) else score for score in found]


def means(reward: RuleReward) -> dict[str, float]:
    return {name: metric.value for name, metric in drain_metrics(reward).items()}


@pytest.mark.parametrize("here", [True, False])
def test_a_function_gets_what_its_parameters_name(tmp_path: Path, here: bool) -> None:
    names = ("by_column", "conversation", "by_tokens", "everything", "shares", "trl", "trl_shapes")
    task = task_of(tmp_path, named(tmp_path, *names), reward_in_process=here)
    with closing(made(task)) as reward, step_scope(4):
        scored(reward, [0], "5")
        first = means(reward)
        assert scored(reward, [1, 1], "6", "none") != [None, None]
        second = means(reward)
    others = ["prompt", "answer", "difficulty", "tags", "missing", "mark"]
    expected = sum(map(ord, "".join(sorted(others)))) % 997
    assert {name: first[f"reward/{name}/mean"] for name in names} == {
        "by_column": 2 * 2 + len("four") + 3,
        "conversation": 10 + len("?"),
        "by_tokens": 400 + 10 * 2 + 1,
        "everything": expected,
        "shares": 0.0,
        "trl": 1.0,
        "trl_shapes": 0.0,
    }
    assert second["reward/by_column/mean"] == 0 + len("default") + 3
    assert second["reward/conversation/mean"] == 30 + len("hi")
    assert second["reward/shares/mean"] == 0.25
    assert second["reward/trl/mean"] == 1.0  # the other could not say
    assert second["reward/trl_shapes/mean"] == 3.0


@pytest.mark.parametrize("here", [True, False])
def test_named_parts_are_weighed_and_logged(tmp_path: Path, here: bool) -> None:
    weights = {"long": 1.0, "a": -10.0}
    for name in ("parts", "list_of_parts"):
        mine = f"{tmp_path}/mine.py:{name}"
        task = task_of(tmp_path, mine, reward_weights=weights, reward_in_process=here)
        with closing(made(task)) as reward:
            assert scored(reward, [0, 0, 0], "aab", "none", "xyzw") == [3 - 20, None, 4]
            found = means(reward)
        assert (found["reward/long/mean"], found["reward/a/mean"]) == (3.5, 1.0)
        assert math.isnan(found["reward/never/mean"])
        assert found["reward/unscored"] == pytest.approx(1 / 3)
    both = task_of(tmp_path, named(tmp_path, "parts", "by_tokens"), reward_in_process=here)
    with closing(made(both, weights={"parts.long": 2.0, "by_tokens": 0.5})) as reward:
        assert scored(reward, [0], "b") == [2.0 + 0.5 * 21]
        assert means(reward)["reward/parts.long/mean"] == 1.0


def test_parts_add_up_alike_in_chunks(tmp_path: Path) -> None:
    """A part that some responses lack is a mean over those that have it, however rows are cut."""
    mine = f"{tmp_path}/mine.py:parts"
    with closing(made(task_of(tmp_path, mine, reward_in_process=True))) as reward:
        said = ["aa", "none", "b", "none", "none", "aab"]
        for cuts in ([6], [1, 5], [2, 3, 1]):
            at = 0
            for size in cuts:
                scored(reward, [0] * size, *said[at : at + size])
                at += size
            found = means(reward)
            assert (found["reward/long/mean"], found["reward/a/mean"]) == (2.0, 4 / 3)


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("name", ["awaited", "awaited_batch"])
def test_async_functions_are_awaited_together(tmp_path: Path, here: bool, name: str) -> None:
    task = task_of(tmp_path, f"{tmp_path}/mine.py:{name}", reward_in_process=here)
    said = ["late", "raise", *"abcdef"] if name == "awaited" else [*"abcdefgh"]
    with closing(made(task, time_limit_s=1.0)) as reward:
        found = scored(reward, [0] * len(said), *said)
    assert found == ([None, None] if name == "awaited" else [1.0, 1.0]) + [1.0] * 6
    assert reward.metrics["reward/timeouts"].total == (name == "awaited")
    assert ("KeyError: 'raise'" in (reward.first_error or "")) == (name == "awaited")


@pytest.mark.parametrize("here", [True, False])
def test_a_class_is_made_once_in_a_process_started_and_closed(tmp_path: Path, here: bool) -> None:
    task = task_of(tmp_path, f"{tmp_path}/mine.py:Kept", reward_in_process=here)
    with closing(made(task)) as reward:
        for _ in range(2):
            assert scored(reward, [0, 1], "a", "b") == [11.0, 11.0]
        assert not (tmp_path / "closed.txt").exists()
    assert (tmp_path / "closed.txt").read_text() == "closed\n"


def test_what_a_batch_function_returns_is_checked(tmp_path: Path) -> None:
    task = task_of(tmp_path, f"{tmp_path}/mine.py:short_list", reward_in_process=True)
    with closing(made(task)) as reward:
        assert scores_of(reward, "a", "b") == [None, None]
    assert reward.first_error == "the verifier returned 1 rewards for 2 responses"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'a b': 1}", "whose parts need names of letters, digits"),
        ("{1: 1}", "whose parts need names of letters, digits"),
        ("{'a': 'x'}", "'x', not a finite number"),
        ("{'a': float('inf')}", "inf, not a finite number"),
        ("{str(n): n for n in range(65)}", "and are at most 64"),
    ],
)
def test_parts_that_are_none_are_refused(tmp_path: Path, value: str, said: str) -> None:
    (tmp_path / "odd.py").write_text(f"def odd(response):\n    return {value}\n")
    task = task_of(tmp_path, f"{tmp_path}/odd.py:odd", reward_in_process=True)
    with closing(made(task)) as reward:
        assert scores_of(reward, "a") == [None]
    assert said in (reward.first_error or "")


def test_rows_keep_the_columns_that_are_asked_for_alone(tmp_path: Path) -> None:
    kept = {
        "by_tokens": set[str](),
        "by_column": {"difficulty", "tags", "missing"},
        "everything": {"difficulty", "tags", "missing", "mark"},
    }
    for name, columns in kept.items():
        task = task_of(tmp_path, f"{tmp_path}/mine.py:{name}").build()
        assert {*task.columns(0)} == columns
    plain = task_of(tmp_path, "exact_match")
    assert plain.build().columns(0) == {}
    # A rule's own function finds its columns in a task that was read without them.
    mine = f"{tmp_path}/mine.py:by_column"
    mixed = MixtureTaskSpec(tasks={"one": plain, "two": plain})
    for task in (plain, mixed):
        with closing(made(task, verifier=mine)) as reward:
            assert scored(reward, [0], "x") == [2 * 2 + 4 + 3]
    read = task_of(tmp_path, "exact_match", answer_field="difficulty")
    with closing(made(read, verifier=f"{tmp_path}/mine.py:as_text")) as reward:
        assert scored(reward, [0, 1], "x", "y") == [1.0, 0.0]


def test_a_mixture_asks_the_function_of_each_task(tmp_path: Path) -> None:
    tasks = {
        "parts": task_of(tmp_path, f"{tmp_path}/mine.py:parts"),
        "exact": task_of(tmp_path, "exact_match"),
        "batch": task_of(tmp_path, f"{tmp_path}/mine.py:shares", reward_in_process=True),
    }
    with closing(made(MixtureTaskSpec(tasks=tasks))) as reward:
        problems, said = [4, 0, 2, 4, 0], ["b", "aa", "5", "a", "none"]
        assert scored(reward, problems, *said) == [0.5, 2 + 2, 1.0, 0.0, None]
        assert means(reward)["reward/long/mean"] == 2.0


def test_samples_show_the_parts_of_a_score(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    parts = {
        "own": {"worker": "rule", "options": {"verifier": f"{tmp_path}/mine.py:parts"}},
        "exact": {"worker": "exact", "weight": 0.5},
    }
    spec = MixtureSpec(
        task=task_of(tmp_path, "exact_match"),
        tokenizer=TokenizerSpec(),
        parts=parts,
        samples_folder=str(folder),
    )
    tokens, mask, ids = rows("aab", "5", "none")
    log = SampleLogSpec(
        folder=str(folder),
        tokenizer=TokenizerSpec(),
        versions_per_step=1,
        max_rows=3,
        keep_steps=None,
        max_bytes=1 << 20,
    ).build(CONTEXT)
    with closing(spec.build(CONTEXT)) as reward, step_scope(3):
        score = reward.score(tokens, mask, ids)
        log.record(tokens, mask, prompt_id=ids, score=score)
    log.close()
    first, second, third = (one.parts for one in read_samples(tmp_path, [3]))
    own = {"reward/own": 5.0, "reward/exact": 0.0, "reward/own/long": 3.0, "reward/own/a": 2.0}
    assert first == {**own, "score": 5.0}
    assert (second["reward/exact"], second["score"]) == (1.0, 1.5)
    assert third == {"reward/exact": 0.0}
    assert [path.name for path in folder.iterdir()] == ["step-000003.jsonl.gz"]


def test_a_weight_of_a_part_that_never_comes_ends_the_run(tmp_path: Path) -> None:
    weights = {"log": 1.0}
    mine = f"{tmp_path}/mine.py:parts"
    task = task_of(tmp_path, mine, reward_weights=weights, reward_in_process=True)
    with closing(made(task)) as reward, pytest.raises(WorkerError) as caught:
        scored(reward, [0] * 64, *["aab"] * 64)
    assert str(caught.value) == (
        "weights of the reward name 'log', and none of 64 responses has such a part; did you mean "
        "'long'?\n    parts are: a, long, never"
    )
    several = {"parts.log": 1.0, "by_token": 1.0}  # the first is known once `parts` has answered
    with pytest.raises(ConfigError) as before:
        task_of(tmp_path, named(tmp_path, "parts", "by_tokens"), reward_weights=several).build()
    assert str(before.value) == (
        "'task.reward_weights': the reward has no part 'by_token'; did you mean 'by_tokens'?\n"
        "    parts are: parts, by_tokens"
    )


def test_evaluation_and_imitation_ask_the_same_function(tmp_path: Path) -> None:
    task = task_of(tmp_path, f"{tmp_path}/mine.py:parts", reward_weights={"a": 0.0}).build()
    assert (task.score(0, "aab"), task.score(0, "none")) == (3.0, None)
    asks = task_of(tmp_path, f"{tmp_path}/mine.py:by_tokens").build()
    with pytest.raises(ConfigError, match="reads tokens"):
        asks.score(0, "a")


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("prompt, response, answer, difficulty=None", None),
        ("town, response", None),
        ("response, price, *, strict=True", None),
        ("answer, response", None),
        ("question, completion, gold", None),
        ("p, r, ground_truth", None),
        ("_, response, _unused, *, strict=True", None),
        ("prompt, response, solution", None),
        ("*given", None),
        ("**given", None),
        ("responses, price", None),
        ("prompt, response, rent", "a parameter 'rent', which nothing gives"),
        ("response, twon", "a parameter 'twon', which nothing gives; did you mean 'town'?"),
        ("responses, prompts", "a parameter 'prompts', which nothing gives; did you mean 'prompt'"),
        ("completions, step", "a parameter 'step', which nothing gives"),
        ("prompt, answer", "none of it is the response"),
        ("prompt, reply, answer", "none of it is the response"),  # a column has this name
    ],
)
def test_a_signature_is_refused_before_a_run(
    tmp_path: Path, signature: str, said: str | None
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward({signature}):\n    return 1.0\n")
    row = {"prompt": "p", "solution": "a", "town": "x", "price": 1, "reply": "r"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    reward = f"{tmp_path}/mine.py:reward"
    spec = FileTaskSpec(path=str(tmp_path / "rows.jsonl"), reward=reward, answer_field="solution")
    if said is None:
        spec.build()
        return
    with pytest.raises(ConfigError) as caught:
        spec.build()
    assert said in str(caught.value)
    assert "prompt, solution, town, price, reply" in str(caught.value) or "none of it" in said


def test_what_a_message_says(tmp_path: Path) -> None:
    def f(response: str, dificulty: int) -> float:
        return 1.0

    with pytest.raises(ConfigError) as caught:
        bind("mine:f", f, ["difficulty", "prompt"])
    assert str(caught.value) == (
        "reward 'mine:f' has a parameter 'dificulty', which nothing gives; did you mean "
        "'difficulty'?\n    a parameter is one of prompt, messages, response, response_token_ids, "
        "answer, tokenizer, step, responses, or a column of the data: difficulty, prompt"
    )
    spec = task_of(tmp_path, [f"{tmp_path}/mine.py:parts"] * 2)
    with pytest.raises(ConfigError, match=r"two rewards are called 'parts'\n    name them apart"):
        spec.build()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "q", "answer": 1}\n')
    mine = f"{tmp_path}/mine.py:by_column"
    with pytest.raises(ConfigError, match="lacks difficulty, missing, tags, which the reward"):
        task_of(tmp_path, mine, held_out_path=str(held_out)).build()
    lacking = FileTaskSpec(path=str(held_out)).build()
    part: dict[str, Any] = {"worker": "trl", "options": {"verifier": mine}}
    for worker, options in {"rule": part["options"], "mixture": {"parts": {"own": part}}}.items():
        check_verifiers(worker, options)
        with pytest.raises(ConfigError, match="'difficulty', which nothing gives"):
            check_verifiers(worker, options, lacking)
