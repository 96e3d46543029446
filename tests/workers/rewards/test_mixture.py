"""Several rewards as one: weights, constraints, metrics of every part, and named rules."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from penstock.algorithms.roles import Reward
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.role import Metric
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.mixture import MixturePart, MixtureSpec, RewardMixture
from penstock.workers.rewards.registry import check_verifiers
from penstock.workers.rewards.rule_reward import (
    CodeRewardSpec,
    ExactRewardSpec,
    InstructionRewardSpec,
    RuleRewardSpec,
)
from penstock.workers.rollout.scores import WINDOW
from torch import Tensor

from .responses import CONTEXT, rows


class Fixed(Reward):
    def __init__(self, *scores: float) -> None:
        self.scores = torch.tensor(scores)
        self.metrics: dict[str, Metric] = {}
        self.closed = False

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        self.metrics["reward/oddity"] = Metric.mean(1.0, 4.0)
        return self.scores

    def close(self) -> None:
        self.closed = True


def length_reward(weight: float = 1.0) -> Reward:
    return Fixed(weight, weight, weight)


def exits() -> Reward:
    sys.exit(0)


def fails() -> Reward:
    raise KeyError("key")


def file_task(folder: Path, answer: Any) -> FileTaskSpec:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    row = {"prompt": "go", "answer": text, "response": "imitate me"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return FileTaskSpec(path=str(folder / "rows.jsonl"), response_field="response")


def mixed(
    rewards: Mapping[str, Reward], parts: Mapping[str, MixturePart], **options: Any
) -> RewardMixture:
    spec = MixtureSpec(task=cast("Any", None), tokenizer=TokenizerSpec(), parts=parts, **options)
    return RewardMixture(spec, rewards)


def test_the_sum_is_weighted_and_constraints_gate_it() -> None:
    good, safe = Fixed(1, 2, -3), Fixed(0.2, 0.5, 0.9)
    parts = {
        "good": MixturePart(worker="exact", weight=2),
        "safe": MixturePart(worker="exact", weight=10, at_least=0.5),
    }
    mixture = mixed({"good": good, "safe": safe}, parts, violation_score=-1.0)
    assert mixture.score(*rows("a", "b", "c")).tolist() == pytest.approx([-1.0, 9.0, 3.0])
    metrics = {name: metric.value for name, metric in drain_metrics(mixture).items()}
    assert metrics == pytest.approx(
        {
            "reward/good/mean": 0.0,
            "reward/good/oddity": 0.25,
            "reward/safe/mean": 1.6 / 3,
            "reward/safe/oddity": 0.25,
            "reward/safe/passed": 2 / 3,
            "reward/mean": 11 / 3,
            "reward/mean_square": 91 / 3,
            "reward/equal_groups": 0.0,
            "reward/passed": 2 / 3,
            "reward/unscored": 0.0,
        }
    )
    only = mixed({"good": good, "safe": safe}, parts, output="passed")
    assert only.score(*rows("a", "b", "c")).tolist() == [0, 1, 1]
    unsure = mixed({"safe": Fixed(float("nan"), 0.1)}, {"safe": parts["safe"]})
    assert unsure.score(*rows("a", "b")).isnan().tolist() == [True, False]
    mixture.close()
    assert good.closed
    assert safe.closed


@pytest.mark.parametrize("unscored", [None, 0.0])
def test_parts_that_never_score_the_same_responses_end_the_run(unscored: float | None) -> None:
    """Each part scores half of the responses, which is enough of each, but the mixture none."""
    nan, half = float("nan"), WINDOW // 2
    rewards = {"odd": Fixed(*[1.0, nan] * half), "even": Fixed(*[nan, 1.0] * half)}
    parts = {name: MixturePart(worker="exact", weight=1.0) for name in rewards}
    mixture = mixed(rewards, parts, unscored=unscored)
    message = "gave 0 of the last 64 (?s:.*)that lack scores are: odd, even"
    with pytest.raises(WorkerError, match=message):
        mixture.score(*rows(*["a"] * WINDOW))


def test_a_mixture_is_built_from_names_and_fields(tmp_path: Path) -> None:
    task = file_task(tmp_path, [{"id": "punctuation:no_comma"}, {"id": "format:no_whitespace"}])
    spec = MixtureSpec(
        task=task,
        tokenizer=TokenizerSpec(),
        parts={
            "keeps": {"worker": "instructions", "weight": 2, "at_least": 0.5},
            "own": {"worker": f"{__name__}:length_reward", "options": {"weight": 0.25}},
        },
    )
    with closing(pickle.loads(pickle.dumps(spec)).build(CONTEXT)) as mixture:
        found = mixture.score(*rows("one", "one two", "one, two")).tolist()
    assert found == pytest.approx([2.25, 1.25, 0.0])
    assert drain_metrics(mixture)["reward/keeps/errors"].value == 0


def test_rules_by_name_read_the_task_s_answers(tmp_path: Path) -> None:
    """The answer, not the response to imitate, which the row has as well."""
    task = file_task(tmp_path, ["assert f(1) == 2"])
    spec = CodeRewardSpec(task=task, tokenizer=TokenizerSpec(), num_processes=1, scale=10.0)
    with closing(spec.build(CONTEXT)) as reward:
        program = "f = lambda x: x + 1"
        assert reward.score(*rows(program, "f = 3")).tolist() == [10.0, 0.0]
    metrics = drain_metrics(reward)
    assert (metrics["reward/mean"].value, metrics["reward/correct"].value) == (5.0, 0.5)
    exact = ExactRewardSpec(task=file_task(tmp_path, "7"), tokenizer=TokenizerSpec()).build(CONTEXT)
    assert exact.score(*rows("7", "8", "imitate me")).tolist() == [1.0, 0.0, 0.0]


def test_options_of_a_rule_s_verifier_are_checked(tmp_path: Path) -> None:
    given: dict[str, Any] = {"task": file_task(tmp_path, "7"), "tokenizer": TokenizerSpec()}
    wrong: Any = InstructionRewardSpec(**given, verifier_options={"moode": "loose"})
    with pytest.raises(ConfigError, match="reward 'instructions' takes .*'moode'"):
        wrong.build(CONTEXT)
    unknown: Any = RuleRewardSpec(**given, verifier="exact_mach")
    with pytest.raises(
        ConfigError, match="there is no reward 'exact_mach'; did you mean 'exact_mat"
    ):
        unknown.build(CONTEXT)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"weight": 1}, "part 'a' has no worker; its fields are worker, weight"),
        ({"worker": "exact", "wait": 1}, "part 'a' has no field 'wait'; did you"),
        ({"worker": "exect"}, "part 'a': there is no reward 'exect'; did you mean"),
        ({"worker": "judge", "options": {"uri": "x"}},
         r"part 'a': a 'judge' reward has no option 'uri'; did you mean 'url'\?"),
        ({"worker": "judge"}, "a judge needs an address and a model"),
        ({"worker": "exact", "weight": float("nan")}, "weight is nan"),
        ({"worker": "exact", "weight": 1e300},
         "weight is 1e.300; expected at least -3.40282e.38 and at most 3.40282e.38"),
        ({"worker": "exact", "options": {"scale": -1e300}}, "scale is -1e.300; expected at least"),
        ({"worker": "rule", "options": {"foo": 1}},
         "no option 'foo'; its options are .*verifier.*unscored"),
    ],
)  # fmt: skip
def test_parts_that_cannot_work(part: dict[str, Any], message: str) -> None:
    given: Any = {"task": None, "tokenizer": None}
    with pytest.raises(ValueError, match=message):
        MixtureSpec(**given, parts={"a": part})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"a mixture needs parts, such as parts=\{right: \{worker"),
        ({"parts": {}}, "a mixture needs parts"),
        ({"parts": {"a": {"worker": "exact"}}, "output": "passed"}, "needs a part with at_least"),
        ({"parts": {"a": {"worker": "exact"}}, "violation_score": 1e39}, "score is 1e.39"),
    ],
)
def test_mixtures_that_cannot_work(options: dict[str, Any], message: str) -> None:
    given: Any = {"task": None, "tokenizer": None, **options}
    with pytest.raises(ValueError, match=message):
        MixtureSpec(**given)


def test_parts_that_are_no_reward_or_have_no_folder(tmp_path: Path) -> None:
    task: Any = {"task": file_task(tmp_path, "7"), "tokenizer": TokenizerSpec()}
    with pytest.raises(ConfigError, match="'builtins:dict' made a dict, which is no Reward"):
        MixtureSpec(**task, parts={"a": {"worker": "builtins:dict"}}).build(CONTEXT)
    with pytest.raises(ConfigError, match="set parts.a.options.folder to where it was saved"):
        MixtureSpec(**task, parts={"a": {"worker": "reward_model"}}).build(CONTEXT)


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        ("{here}:exits", "'{here}:exits' fails at {file}: it calls sys.exit(0), which is for "),
        ("{here}:fails", "'{here}:fails' fails at {file}: KeyError: 'key'"),
        ("{here}:none", "{here} has no 'none'"),
        ("builtins:dict", "'builtins:dict' made a dict, which is no Reward"),
        ("{folder}/a.py:f", "importing {folder}/a.py fails at a.py:2: it calls sys.exit('bye'), "),
        ("no_such:f", "importing no_such fails ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_parts_whose_code_fails(tmp_path: Path, worker: str, problem: str) -> None:
    (tmp_path / "a.py").write_text("import sys\nsys.exit('bye')\n")
    names = {"here": __name__, "folder": str(tmp_path)}
    spec = MixtureSpec(
        task=file_task(tmp_path, "7"),
        tokenizer=TokenizerSpec(),
        parts={"a": {"worker": worker.format(**names)}},
    )
    with pytest.raises(ConfigError) as caught:
        spec.build(CONTEXT)
    first, second = str(caught.value).split("\n")
    told = re.sub(r"test_mixture\.py:\d+", "{file}", first)
    expected = f"part 'a' of the mixture: {problem}".replace("{here}", __name__)
    assert told.startswith(expected.replace("{folder}", str(tmp_path)))
    assert second in (
        "    it must be a function of the part's options that returns a Reward or its spec",
        "    fix the module; it is imported before the run starts",
    )


def test_scores_that_float32_cannot_hold_are_refused() -> None:
    large = Fixed(1.0, 2.0)
    large.scores = torch.tensor([1.0, -1e300], dtype=torch.float64)
    table = rows("a", "b")
    with pytest.raises(WorkerError) as caught:
        mixed({"a": large}, {"a": MixturePart(worker="exact")}).score(*table)
    assert str(caught.value) == (
        "a score of part 'a' of the mixture is -1e+300 for row 1, which float32 cannot hold: its "
        "largest number is 3.40282e+38\n"
        "    bound what the rewards return, or lower the parts' weights"
    )
    fits = mixed({"a": Fixed(3e38, 1)}, {"a": MixturePart(worker="exact", weight=2)})
    with pytest.raises(WorkerError, match="^the weighted sum of the mixture is inf for row 0, "):
        fits.score(*table)


def test_a_function_in_the_place_of_a_factory_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def right(prompt, response, answer):\n    return 1.0\n")
    parts = {"a": {"worker": f"{tmp_path}/mine.py:right"}}
    with pytest.raises(ConfigError, match=r"worker: rule, options: \{verifier: '.*mine.py:right'"):
        check_verifiers("mixture", {"parts": parts})
