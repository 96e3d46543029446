"""Scores of responses: their metrics, and what happens where there is none.

No score is not the score 0. In a column of scores it is nan: statistics over scores leave such a
row out, and its advantage is 0, unless the user names a value.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Metric, Role
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec

_LOG = logging.getLogger("penstock.reward")
LARGEST = torch.finfo(torch.float32).max  # reward, and option that rewards are computed with
WINDOW = 64  # fewest responses after which a run ends if nearly all lack a score
_FEWEST = 0.05  # Share of the responses of a window that must have a score
_OPTION = (
    "; if there is no score to give, name a score for such responses in the reward's options: "
    "unscored=0, or unscored=nan to train on the others alone"
)
_NAN = ("could not say", "`score` returned nan for it")
_OWN = "have it return a number, not nan, for responses that are to be learned from"


def check_unscored(value: float | None) -> None:
    """Refuse an option `unscored` that float32 cannot hold; nan is a value like None."""
    if value is not None and not math.isnan(value) and not abs(value) <= LARGEST:
        raise ValueError(f"unscored is {value}; expected a number within float32, null or nan")


def filled_in(scores: Tensor, unscored: float | None) -> Tensor:
    """Return the scores, with nan replaced by `unscored` unless that is None."""
    return scores if unscored is None else torch.where(scores.isnan(), unscored, scores)


def score_metrics(scores: Tensor, prompt_id: Tensor) -> dict[str, Metric]:
    """Metrics of a call's scores, to be added over chunks and ranks.

    - `reward/mean`, `reward/mean_square`: the standard deviation is the root of mean_square -
      mean^2.
    - `reward/equal_groups`: of the groups with at least two responses, the share in which all have
      the same score, so that comparing them says nothing; absent if there is no such group.
    """
    known = ~scores.isnan()
    exact = scores[known].double()
    found = {"reward/mean": mean_score(exact), "reward/mean_square": mean_score(exact.square())}
    ids = prompt_id.to(exact.device)[known]
    group, sizes = torch.unique(ids, return_inverse=True, return_counts=True)[1:]
    compared = sizes > 1
    if bool(compared.any()):
        empty = exact.new_zeros(len(sizes))
        lowest = empty.scatter_reduce(0, group, exact, "amin", include_self=False)
        highest = empty.scatter_reduce(0, group, exact, "amax", include_self=False)
        num_equal = float((lowest == highest)[compared].sum())
        found["reward/equal_groups"] = Metric.mean(num_equal, float(compared.sum()))
    return found


def mean_score(scores: Tensor) -> Metric:
    """Return the mean of the scores that are known; rows without a score (nan) do not count."""
    exact = scores[~scores.isnan()].double()
    return Metric.mean(float(exact.sum()), float(len(exact)))


class MissingScores:
    """Counts what one worker could not score, and ends the run if that is nearly everything."""

    def __init__(
        self, who: str, unscored: float | None, advice: str, *, has_option: bool = True
    ) -> None:
        self._who, self._unscored = who, unscored
        self._advice = f"{advice}{_OPTION if has_option else ''}"
        self._counts = "; reward/unscored counts them" if has_option else ""
        self._rows = self._scored = 0
        self._reasons: Counter[str] = Counter()
        self.first: str | None = None
        self.works = False

    def check(self, failures: Sequence[tuple[str, str] | None]) -> None:
        """Count responses that have a score, and those that have none."""
        found = [failure for failure in failures if failure is not None]
        if found and self.first is None:
            kind, what = next((one for one in found if one[0] == "failed"), found[0])
            self.first = what.rstrip()
            becomes = "Such responses are not trained on, and never correct"
            if self._unscored is not None and not math.isnan(self._unscored):
                becomes = f"Such responses get {self._unscored:g}, and are never correct"
            said = f"{becomes}{self._counts}"
            _LOG.warning("%s %s on a response. %s. It was:\n%s", self._who, kind, said, self.first)
        self._rows += len(failures)
        self._scored += len(failures) - len(found)
        self._reasons.update(kind for kind, _ in found)
        self.works = self.works or self._scored > 0
        if self._rows < WINDOW:
            return
        enough = self.works if self._unscored is not None else self._scored >= _FEWEST * self._rows
        if not enough:
            kinds = ", ".join(f"{kind} on {count}" for kind, count in self._reasons.most_common())
            raise WorkerError(
                f"{self._who} gave {self._scored} of the last {self._rows} responses a score: it "
                f"{kinds}. There is nothing to learn from that. The first one:\n{self.first}\n"
                f"    {self._advice}"
            )
        self._rows = self._scored = 0
        self._reasons.clear()


@dataclass(frozen=True)
class CheckedRewardSpec:
    """Recipe for a reward of the user's own, which ends the run if it scores hardly anything."""

    name: str
    made: WorkerSpec | Role

    def build(self, context: WorkerContext) -> Role:
        """Make the reward, and have it look at the scores that it returns.

        One that scores by a method of ours does so itself, and knows `unscored`.
        """
        reward = self.made.build(context) if is_spec(self.made) else self.made
        score = getattr(reward, "score", None)
        if score is None or getattr(score, "__module__", "").startswith("penstock."):
            return reward
        missing = MissingScores(f"the reward '{self.name}'", None, _OWN, has_option=False)

        def checked(*given: Any, **named: Any) -> Any:
            found: Any = score(*given, **named)
            if isinstance(found, Tensor):  # what else it returns is refused where it is packed
                missing.check([_NAN if lacks else None for lacks in found.isnan().tolist()])
            return found

        vars(reward)["score"] = checked
        return reward
