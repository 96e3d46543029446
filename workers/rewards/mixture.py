"""Several rewards as one `Reward`: a weighted sum, and constraints that all must hold.

Each part scores every response. The score is the sum of the parts' scores times their weights;
where a part's score is below its `at_least`, the response violates a constraint and gets
`violation_score` instead. A response that a part has no score for has none, unless that part's
options name one (`unscored`). With `output: passed` the mixture says only whether all constraints
hold, 1 or 0: a mixture of judges as constrained algorithms ask for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from pydantic import SkipValidation

from ...algorithms.ops.rewards import constrained_score, weighted_sum
from ...algorithms.roles.language import Reward
from ...algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.errors import ConfigError, PenstockError, WorkerError, nearest
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import FiniteFloat, option_class
from ...dataflow.runtime.call_context import current_step
from ...dataflow.runtime.worker_protocol import WorkerContext, close_workers, drain_metrics, is_spec
from ..data.sample_files import write_parts
from ..data.task import Task, TaskSpec
from ..engines.torch_engine.specs import TorchRewardModelSpec
from ..isolation.child import USER_ERRORS
from ..models.spec import ModelSpec
from ..models.tokenizer import TokenizerSpec
from ..rollout.scores import (
    LARGEST,
    MissingScores,
    check_unscored,
    filled_in,
    mean_score,
    score_metrics,
)
from ..verifiers.verifiers import blame, import_user_module
from .own_text import OwnText
from .registry import PART_KINDS, check_verifiers

_LEARNED = "reward_model"
_FILLED_IN = ("task", "tokenizer", "task_fingerprint", "samples_folder")  # that the launcher gives
_MAKES = "it must be a function of the part's options that returns a Reward or its spec"


@option_class
class MixturePart:
    """One reward of a mixture."""

    worker: str
    """`rule`, `exact`, `math`, `instructions`, `code`, `judge`; `reward_model` with
    `options: {folder: PATH}`; or `module:factory`."""
    weight: Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)] = 1.0
    """Factor on its score."""
    at_least: Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)] | None = None
    """Least score that passes; None if this part is no constraint."""
    options: Mapping[str, Any] | None = None
    """Fields of that worker's spec."""

    def __post_init__(self) -> None:
        if not isinstance(self.worker, str):  # pyright: ignore[reportUnnecessaryIsInstance] - YAML
            raise ValueError(f"worker is {self.worker!r:.80}; expected a text")


@option_class
class MixtureSpec:
    """Recipe for a `RewardMixture`; a `WorkerSpec`."""

    task: SkipValidation[TaskSpec]
    """Source of prompts and answers."""
    tokenizer: SkipValidation[TokenizerSpec]
    """The policy's tokenizer."""
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name -> a `MixturePart` or its fields; the name is the metrics'."""
    output: Literal["sum", "passed"] = "sum"
    """The weighted sum, or 1 where all constraints hold and 0 elsewhere."""
    violation_score: Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)] = 0.0
    """Score of a response that violates a constraint, in place of the sum."""
    unscored: float | None = None
    """Score of a response that a part cannot score; null leaves it out of training."""
    task_fingerprint: str | None = None
    """`fingerprint` of the task the prompts come from."""
    samples_folder: str | None = None
    """Folder of the run's samples, which show the parts of a score; null if none are kept."""

    def __post_init__(self) -> None:
        check_unscored(self.unscored)
        parts = self.checked()
        if not parts:
            raise ValueError(
                "a mixture needs parts, such as "
                "parts={right: {worker: rule, weight: 1}, short: {worker: rule, weight: 0.5, "
                "options: {verifier: 'rewards.py:brevity'}}}"
            )
        if self.output == "passed" and all(part.at_least is None for part in parts.values()):
            raise ValueError("output 'passed' needs a part with at_least, which is a constraint")

    def checked(self) -> dict[str, MixturePart]:
        parts = {name: _part(name, given) for name, given in self.parts.items()}
        for name, part in parts.items():
            if ":" not in part.worker and part.worker != _LEARNED:
                _check(name, part)
        return parts

    def build(self, context: WorkerContext) -> RewardMixture:
        parts = self.checked()
        made: dict[str, Reward] = {}
        try:
            for name, part in parts.items():
                made[name] = self._made(name, part, context)
        except BaseException:
            close_workers(made.values())
            raise
        return RewardMixture(self, made, context.role)

    def _made(self, name: str, part: MixturePart, context: WorkerContext) -> Reward:
        options = dict(part.options or {})
        if part.worker == _LEARNED:
            folder = options.pop("folder", None)
            if not isinstance(folder, str):
                raise ConfigError(
                    f"part '{name}' of the mixture is a reward model without a folder\n"
                    f"    set parts.{name}.options.folder to where it was saved"
                )
            text = OwnText(folder=folder, **{n: getattr(self, n) for n in _FILLED_IN[:3]})
            options["own_text"] = text if text.differs else None
            return TorchRewardModelSpec(model=ModelSpec(folder=folder), **options).build(context)
        if ":" not in part.worker:
            kind = PART_KINDS[part.worker]
            own = {one.name for one in fields(kind)}
            shared = {name: getattr(self, name) for name in _FILLED_IN if name in own}
            return kind(**options, **shared).build(replace(context, role=f"{context.role}/{name}"))
        what = f"part '{name}' of the mixture"
        make = _factory(name, part)
        try:
            built = make(**options)
            built = built.build(context) if is_spec(built) else built
        except PenstockError:
            raise
        except USER_ERRORS as error:
            raise ConfigError(
                f"{what}: '{part.worker}' fails {blame(error)}\n    {_MAKES}"
            ) from error
        if not isinstance(built, Reward):
            raise ConfigError(
                f"{what}: '{part.worker}' made a {type(built).__name__}, which is no Reward\n"
                f"    {_MAKES}"
            )
        return built

    def check_verifiers(self, task: Task | None = None) -> None:
        """Load the verifiers and factories of its parts; raises as `registry.check_verifiers`."""
        for name, part in self.checked().items():
            if ":" in part.worker:
                _factory(name, part)
            check_verifiers(part.worker, part.options or {}, task)


def _part(name: str, given: Any) -> MixturePart:
    if isinstance(given, MixturePart):
        return given
    known = [field.name for field in fields(MixturePart)]
    if not isinstance(given, Mapping) or "worker" not in given:
        raise ValueError(f"part '{name}' has no worker; its fields are {', '.join(known)}")
    for key in given:
        if key not in known:
            raise ValueError(
                f"part '{name}' has no field '{key}'{nearest(str(key), known)}; "
                f"its fields are {', '.join(known)}"
            )
    return MixturePart(**{str(key): value for key, value in given.items()})


def _check(name: str, part: MixturePart) -> None:
    if part.worker not in PART_KINDS:
        raise ValueError(
            f"part '{name}': there is no reward '{part.worker}'{nearest(part.worker, PART_KINDS)}; "
            f"rewards are {', '.join(PART_KINDS)}, {_LEARNED}, or module:factory"
        )
    kind = PART_KINDS[part.worker]
    given = part.options or {}
    own = [field.name for field in fields(kind)]
    settable = [name for name in own if name not in _FILLED_IN]
    for key in given:
        if key not in own:
            raise ValueError(
                f"part '{name}': a '{part.worker}' reward has no option '{key}'"
                f"{nearest(str(key), own)}; its options are {', '.join(settable)}"
            )
    kind(task=None, tokenizer=None, **given)  # refuses values out of range


def _factory(name: str, part: MixturePart) -> Callable[..., Any]:
    what = f"part '{name}' of the mixture"
    module, _, factory = part.worker.rpartition(":")
    make = getattr(import_user_module(what, module), factory, None)
    if make is None:
        raise ConfigError(f"{what}: {module} has no '{factory}'\n    {_MAKES}")
    try:
        inspect.signature(make).bind(**(part.options or {}))
    except TypeError as error:
        raise ConfigError(
            f"{what}: '{part.worker}' takes {inspect.signature(make)}: {error}\n    {_MAKES}; a "
            "function that scores responses is "
            f"{{worker: rule, options: {{verifier: '{part.worker}'}}}}"
        ) from error
    except ValueError:  # it has no signature
        pass
    return make


class RewardMixture(Reward):
    """Combines the scores of its parts.

    Metrics are those of `score_metrics` of the result, `reward/unscored` (share of responses that a
    part has no score for), `reward/passed` (of the others, the share that violates nothing), per
    part NAME its mean score `reward/NAME/mean`, whatever else it reports under `reward/NAME/`, and
    for a constraint `reward/NAME/passed`.
    """

    def __init__(
        self, spec: MixtureSpec, rewards: Mapping[str, Reward], role: str = "reward"
    ) -> None:
        self.metrics: dict[str, Metric] = {}
        self._role = role
        self._spec, self._parts, self._rewards = spec, spec.checked(), dict(rewards)
        self._missing = MissingScores(
            "the mixture of rewards",
            spec.unscored,
            "set unscored=0 in the options of each part that scores only some responses",
        )

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        scores: dict[str, torch.Tensor] = {}
        rows = float(len(tokens))
        passed = torch.ones(len(tokens), device=tokens.device)
        for name, reward in self._rewards.items():
            scores[name] = _finite(
                f"a score of part '{name}'", reward.score(tokens, mask, prompt_id)
            )
            own = {"mean": mean_score(scores[name])}
            own |= {n.removeprefix("reward/"): m for n, m in drain_metrics(reward).items()}
            bound = self._parts[name].at_least
            if bound is not None:
                # A row without a score is neither correct nor wrong.
                keeps = torch.where(
                    scores[name].isnan(), torch.nan, (scores[name] >= bound).float()
                )
                passed = passed * keeps
                own["passed"] = mean_score(keeps)
            add_metrics(self.metrics, {f"reward/{name}/{n}": m for n, m in own.items()})
        if self._spec.output == "passed":
            result = passed
        else:
            weights = {n: part.weight for n, part in self._parts.items()}
            total = _finite("the weighted sum", weighted_sum(scores, weights))
            result = constrained_score(total, passed, violation_score=self._spec.violation_score)
        if self._spec.samples_folder is not None:
            known = {name: found.tolist() for name, found in scores.items()}
            parts = [
                {n: None if math.isnan(its[row]) else its[row] for n, its in known.items()}
                for row in range(len(tokens))
            ]
            folder = self._spec.samples_folder
            write_parts(folder, current_step(), self._role, tokens.tolist(), parts)
        lacks = result.isnan().tolist()
        which = ", ".join(name for name, score in scores.items() if score.isnan().any())
        failure = ("could not say", f"no score from a part; parts that lack scores are: {which}")
        self._missing.check([failure if lack else None for lack in lacks])
        result = filled_in(result, self._spec.unscored)
        add_metrics(self.metrics, score_metrics(result, prompt_id))
        own = {
            "reward/passed": mean_score(passed),
            "reward/unscored": Metric.mean(float(sum(lacks)), rows),
        }
        add_metrics(self.metrics, own)
        return result

    def close(self) -> None:
        close_workers(self._rewards.values())


def _finite(what: str, scores: torch.Tensor) -> torch.Tensor:
    found = scores.float()
    if found.isinf().any():
        row = int(found.isinf().nonzero()[0])
        raise WorkerError(
            f"{what} of the mixture is {float(scores[row]):g} for row {row}, which float32 cannot "
            f"hold: its largest number is {LARGEST:g}\n"
            "    bound what the rewards return, or lower the parts' weights"
        )
    return found
