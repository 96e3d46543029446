"""Signs that a run goes wrong: thresholds with their reasons, and remedies.

A false alarm costs more trust than silence, so every threshold is far from what a healthy run
shows; none is reported where a low entropy or a large KL is the price of a better policy, which
`RewardTrend` judges.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from ...dataflow.kinds import NodeKind
from ...dataflow.scheduler.schedule import Schedule
from ...workers.training.logprob_mismatch import MismatchLimits
from ..inputs.record import Stage
from .stage_result import needed_nodes, ranked_nodes

Row = Mapping[str, float]  # a step's metrics, `node/name` -> number

# Steps in a row that show a sign before it is reported, and without it before it has gone away: one
# step may be luck. Of equal groups there are many whenever a task is nearly solved.
SHORT, LONG = 3, 5
# Responses in those steps: where one in 100 is right, as many are all wrong in 8 of 100 cases.
FEWEST_RESPONSES = 256
# Share of groups with equal scores. With 16 responses a problem that is solved 98 times in 100 is
# in such a group 7 times in 10, so that a healthy run that is nearly done stays below.
EQUAL_GROUPS = 0.95
CUT_OFF, TURNS_CUT_OFF = 0.95, 0.9  # shares of responses, and of conversations with a cut-off turn
# Share of the entropy in the first steps, and nats per token. A policy at 0.1 nats takes its
# likeliest token 98 times in 100. Cui et al., "The Entropy Mechanism of RL for Reasoning Language
# Models", 2025, see training end where the entropy is used up.
LOW_ENTROPY_SHARE, LOW_ENTROPY_NATS = 0.1, 0.1
# Nats per token between the policy before and after a train call. PPO is usually stopped at 0.01
# to 0.03 (Schulman; Huang et al., "The 37 Implementation Details of PPO", 2022).
MOST_UPDATE_KL = 0.2
# Nats per token to the reference: always a sign, and where the reward does not rise. Gao et al.,
# "Scaling Laws for Reward Model Overoptimization", 2022, see rewards hacked from about 10 nats per
# response on, which for a response of 50 tokens is 0.2 per token.
MOST_REFERENCE_KL, MOST_KL_WITHOUT_GAIN = 2.0, 0.3
# Share of tokens whose update the clip stops. It is 0.1 to 0.2 in a healthy PPO run, counting also
# those that the clip would not have stopped (Huang et al., 2022).
MOST_CLIPPED = 0.3
# How many times as large a mismatch must have become, and the share of `mismatch.warn_above` below
# which it is rounding, whatever it does.
GROWTH, GROWN_SHARE = 4.0, 0.1
WINDOW = 10  # steps whose rewards are compared, the first with the latest
SOLVED = 0.9  # share of right responses from which on a low entropy is what was wanted


@dataclass(frozen=True)
class SignFacts:
    at: str = "algorithm"  # the key under which it is configured: "algorithm"
    # name of an option of its own config -> its whole key, for those it has
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    # its nodes, those first on which the policy's training depends most
    order: tuple[str, ...] = ()
    # those of them on which it depends at all; empty if that is not known
    needed: frozenset[str] = frozenset()
    compares_groups: bool = True  # whether the responses of a group are compared with each other
    # whether the clip bounds the ratio of single tokens; that of whole responses is bounded so
    # narrowly that it is meant to act
    judges_clip: bool = True
    fixed_length: bool = False  # whether every response is sampled to the same length
    mismatch_above: float | None = 0.01  # `mismatch.warn_above`

    def needs(self, node: str) -> bool:
        return node in self.needed or not self.needed

    def advice(self, *parts: str) -> str:
        """The parts whose keys exist, as one sentence; `{lr}` stands for an option's key."""
        keys = {"at": self.at, "lr": f"{self.at}.optimizer.lr", **self.options}
        known = [part for part in parts if set(re.findall(r"{(\w+)}", part)) <= set(keys)]
        return "; ".join(part.format_map(keys) for part in known)


class RewardTrend:
    """Judges whether the policy gets better: by its reward, or by its episodes' return.

    Metrics of nodes that come first in the order count more.
    """

    def __init__(self, order: tuple[str, ...]) -> None:
        self._rank = {node: rank for rank, node in enumerate(order)}
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._solved = False

    def add(self, values: Row) -> None:
        found = [
            (self._rank.get(node, len(self._rank)), node, value)
            for (node, _, metric), value in ((n.partition("/"), v) for n, v in values.items())
            if metric in ("reward/mean", "episode_return") and not math.isnan(value)
        ]
        if not found:
            return
        _, node, value = min(found)
        self._latest.append(value)
        if len(self._first) < WINDOW:
            self._first.append(value)
        self._solved = values.get(f"{node}/reward/correct", 0.0) >= SOLVED

    @property
    def improves(self) -> bool:
        """True if it is solved, or the latest steps are clearly better than the first ones."""
        half = len(self._first) if len(self._first) == WINDOW else len(self._first) // 2
        if self._solved or half < 2:
            return self._solved
        early, late = self._first[:half], list(self._latest)[-half:]
        error = math.sqrt((statistics.variance(early) + statistics.variance(late)) / half)
        return statistics.fmean(late) - statistics.fmean(early) > 2 * error


class Point(NamedTuple):
    """A metric of a node in one step, and the steps before it."""

    signs: Signs
    node: str
    metric: str
    values: Row

    @property
    def facts(self) -> SignFacts:
        return self.signs.facts

    @property
    def value(self) -> float:
        return self.values[f"{self.node}/{self.metric}"]

    def other(self, metric: str) -> float:
        """Another metric of the node; nan if it has none."""
        return self.values.get(f"{self.node}/{metric}", math.nan)


@dataclass(frozen=True)
class Rule:
    kind: str  # its name
    metrics: tuple[str, ...]  # those that show it, without their node
    # what is seen in one step; None if nothing is
    look: Callable[[Point], str | None]
    means: str  # what it usually means
    # what to change; those that name an option are left out where there is none
    parts: tuple[str, ...]
    num_steps: int = SHORT  # steps in a row that must show it
    num_responses: float = 0.0  # responses that must have been made in them
    # a kind that says more of the same node; while that is there this is not told of
    unless: str = ""


def _constant(at: Point) -> str | None:
    mean, square = at.value, at.other("reward/mean_square")
    # The variance of equal numbers is not 0 but a rounding error of their square.
    if at.facts.needs(at.node) and square - mean * mean <= 1e-12 * square:
        return f"every response has the same score, {mean:.4g}"
    return None


def _equal_groups(at: Point) -> str | None:
    judged = at.facts.compares_groups and at.facts.needs(at.node)
    if not judged or not at.value >= EQUAL_GROUPS:
        return None
    mean = at.other("reward/mean")
    return f"in {at.value:.0%} of the groups all scores are equal (mean of all scores {mean:.4g})"


def _cut_off(at: Point) -> str | None:
    of_turns, length = f"{at.node}/turns" in at.values, at.other("response_length")
    if at.facts.fixed_length or not at.value >= (TURNS_CUT_OFF if of_turns else CUT_OFF):
        return None
    if of_turns:
        return f"{at.value:.0%} of the conversations were cut off, or had a turn that was"
    known = f"{at.node}/response_length" in at.values
    after = f", after {length:.4g} tokens on average" if known else ""
    return f"{at.value:.0%} of the responses were cut off{after}"


def _entropy(at: Point) -> str | None:
    """The policy has become certain, and is not better for it.

    Of language models: that of continuous actions is of densities, and has no such lower end.
    """
    if not any(other.endswith("/response_length") for other in at.values):
        return None
    first = at.signs.first[at.node, at.metric]
    if len(first) < SHORT:
        first.append(at.value)
        return None
    before = statistics.fmean(first)
    low = min(LOW_ENTROPY_NATS, LOW_ENTROPY_SHARE * before)
    if before < LOW_ENTROPY_NATS or not at.value <= low or at.signs.trend.improves:
        return None
    return f"the entropy is {at.value:.3g} nats per token, and was {before:.3g} in the first steps"


def _update_kl(at: Point) -> str | None:
    if not at.value > MOST_UPDATE_KL:
        return None
    return f"a step moves the policy by {at.value:.3g} nats per token from what sampled"


def _reference_kl(at: Point) -> str | None:
    value = at.value
    if at.metric == "mean":
        lengths = [v for name, v in at.values.items() if name.endswith("/response_length")]
        if not at.node.startswith("response_kl") or len(lengths) != 1 or not lengths[0] > 0:
            return None
        value /= lengths[0]
    without_gain = value > MOST_KL_WITHOUT_GAIN and not at.signs.trend.improves
    if value > MOST_REFERENCE_KL or without_gain:
        return f"the policy is {value:.3g} nats per token from the reference"
    return None


def _clipped(at: Point) -> str | None:
    share = at.value + at.values.get(f"{at.node}/clip_fraction_high", 0.0)
    if not at.facts.judges_clip or not share > MOST_CLIPPED:
        return None
    return f"the clip stops the update of {share:.0%} of the tokens"


def _mismatch(at: Point) -> str | None:
    limit, value = at.facts.mismatch_above, at.value
    if limit is None or at.values.get("run/lag_max", 0.0) > 0:
        return None  # staleness is in it
    first, latest = at.signs.first[at.node, at.metric], at.signs.latest[at.node, at.metric]
    (first if len(first) < LONG else latest).append(value)
    if not value <= limit:
        return (
            f"what sampled for it disagrees by {value:.3g} nats per token on the same weights; "
            f"mismatch.warn_above is {limit:g}"
        )
    if len(latest) < LONG:
        return None
    was, now = statistics.median(first), statistics.median(latest)
    if not now > was or not now >= max(GROWTH * was, GROWN_SHARE * limit):
        return None  # also where both are 0, and so is the limit
    return (
        f"what sampled for it disagrees by {now:.3g} nats per token on the same weights, and "
        f"did by {was:.3g} in the first steps"
    )


_LOWER_LR = "lower {lr}"
RULES: tuple[Rule, ...] = (
    Rule(
        "reward_constant",
        ("reward/mean",),
        _constant,
        "scores that do not differ teach nothing: all responses are wrong, or all are right, or "
        "the reward does not see what they say",
        (
            "read some responses (penstock samples)",
            "if all are wrong, warm up longer or take easier problems (task.pass_rates)",
            "if all are right, take harder ones",
            "if they are all the same, raise {temperature}",
        ),
        num_responses=FEWEST_RESPONSES,
    ),
    Rule(
        "groups_equal",
        ("reward/equal_groups",),
        _equal_groups,
        "a group teaches by the differences in it: most of what is sampled teaches nothing",
        (
            "take problems that are solved now and then (task.pass_rates)",
            "raise {num_samples}",
            "raise {temperature}",
            "let algorithm=dapo sample until groups differ",
        ),
        num_steps=LONG,
        num_responses=FEWEST_RESPONSES,
        unless="reward_constant",
    ),
    Rule(
        "cut_off",
        ("truncated",),
        _cut_off,
        "they have no room to end, or the model does not know how: its end-of-sequence token or "
        "its chat template is not the one it was trained with",
        (
            "raise task.max_response_tokens",
            "set task.chat=true for a model that was trained on conversations",
            "name what ends a response in {stop}, or the token that does in {stop_token_ids} or in "
            "the model's generation_config.json; evaluations end with it as well",
        ),
        num_responses=FEWEST_RESPONSES / 8,
    ),
    Rule(
        "entropy_collapse",
        ("entropy",),
        _entropy,
        "the policy always says the same, so nothing else is tried, and its reward does not rise "
        "for it",
        (
            _LOWER_LR,
            "set {entropy_coef} above 0 (0.001 to 0.01)",
            "raise {eps_high} above {eps_low} (0.28)",
            "raise {temperature}",
        ),
    ),
    Rule(
        "kl_blow_up",
        ("approx_kl_k3",),
        _update_kl,
        "updates are so large that what is learned from a step's responses is not true of the "
        "policy it makes",
        (
            _LOWER_LR,
            "lower {epochs}",
            "lower {num_minibatches}",
            "lower {at}.optimizer.max_grad_norm",
        ),
    ),
    Rule(
        "kl_blow_up",
        ("ref_kl_k3_per_token", "mean"),
        _reference_kl,
        "the policy has left the language it started from, usually to please the reward in ways "
        "that were not meant",
        (
            _LOWER_LR,
            "raise {kl_coef}",
            "read the responses with the highest reward (penstock samples)",
        ),
    ),
    Rule(
        "clip_fraction_high",
        ("clip_fraction_low",),
        _clipped,
        "updates run into the clip: most of what would be learned is thrown away",
        (_LOWER_LR, "lower {epochs}", "lower {num_minibatches}", "lower {max_lag}"),
    ),
    Rule(
        "mismatch",
        ("rollout_k3",),
        _mismatch,
        "the gradient is that of another policy than the one that sampled: kernels or precisions "
        "differ, or the copy that samples is not what is trained",
        (
            "set {correction}.mode=token_truncate",
            "set model.dtype=float32",
            "end such runs with mismatch.stop_above",
        ),
        num_steps=1,
    ),
)


KINDS: tuple[str, ...] = tuple(dict.fromkeys(rule.kind for rule in RULES))  # all kinds of signs


@dataclass(frozen=True)
class BadSign:
    kind: str  # one of `KINDS`
    node: str  # the node whose metric shows it
    first_step: int  # the first of the steps in a row that show it
    step: int  # the last one so far
    seen: str  # what was seen, with numbers
    means: str  # what it usually means
    remedy: str  # what to change, with keys

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.step}"
        when = steps if self.first_step < self.step else f"step {self.step}"
        return f"{when}, {self.node}: {self.seen}\n    {self.means}\n    remedy: {self.remedy}"


class Signs:
    """Finds signs of trouble in the steps of one stage, in order.

    Example:
        >>> signs = Signs(SignFacts())
        >>> for step in range(8):
        ...     for sign in signs.look(step, {"actor.generate/truncated": 1.0, **counts}):
        ...         print(sign)
    """

    def __init__(self, facts: SignFacts) -> None:
        self.facts, self.trend = facts, RewardTrend(facts.order)
        # node and metric -> its values in the first steps, and in the latest
        self.first = defaultdict[tuple[str, str], list[float]](list)
        self.latest = defaultdict[tuple[str, str], deque[float]](lambda: deque(maxlen=LONG))
        self._seen: dict[tuple[str, str], _Stretch] = {}

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take up what the rows of `metrics.jsonl` of earlier steps showed and reported."""
        for row in rows:
            values = {name: math.nan if v is None else float(v) for name, v in row.items()}
            self.look(int(row["step"]), values)

    def look(self, step: int, values: Row) -> list[BadSign]:
        """Return the signs that one more step makes certain."""
        self.trend.add(values)
        # how many rows a step made, by its own metrics; nan where they do not say
        rows = values.get("run/samples_per_s", math.nan) * values.get("run/step_time_s", math.nan)
        found: list[BadSign] = []
        for rule in RULES:
            for name in values:
                node, _, metric = name.partition("/")
                if metric not in rule.metrics:
                    continue
                seen = rule.look(Point(self, node, metric, values))
                stretch = self._seen.setdefault((rule.kind, name), _Stretch())
                stretch.add(step, seen is not None, rows)
                if stretch.is_due(rule) and not self._is_there(rule.unless, node):
                    stretch.told = True
                    told = rule.means, self.facts.advice(*rule.parts)
                    found.append(BadSign(rule.kind, node, stretch.first, step, seen or "", *told))
        return found

    def _is_there(self, kind: str, node: str) -> bool:
        return any(
            stretch.num_steps
            for (other, name), stretch in self._seen.items()
            if other == kind and name.partition("/")[0] == node
        )


@dataclass
class _Stretch:
    """Stretch of steps in which a sign has been present, or absent."""

    first: int = 0
    num_steps: int = 0
    num_away: int = 0
    num_responses: float = 0.0
    told: bool = False

    def add(self, step: int, there: bool, responses: float) -> None:
        if there:
            self.first = self.first if self.num_steps else step
            self.num_steps, self.num_away = self.num_steps + 1, 0
            self.num_responses += responses
        else:
            self.num_steps, self.num_responses = 0, 0.0
            self.num_away += 1
            self.told = self.told and self.num_away < SHORT

    def is_due(self, rule: Rule) -> bool:
        enough = not self.num_responses < rule.num_responses  # nan where it is not known
        return not self.told and self.num_steps >= rule.num_steps and enough


def facts_of(stage: Stage, mismatch: MismatchLimits, schedule: Schedule) -> SignFacts:
    needed = needed_nodes(stage)
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, key, value in _options(stage.cfg, f"{stage.at}.cfg"):
        if name not in values:
            keys[name], values[name] = key, value
    for name in ("epochs", "num_minibatches"):
        if values.get(name) == 1:  # which cannot be lowered
            del keys[name]
    if schedule.max_lag:
        keys["max_lag"] = "schedule.max_lag"
    return SignFacts(
        at=stage.at,
        options=keys,
        order=tuple(ranked_nodes(stage)),
        needed=needed,
        compares_groups=any(
            node.kind is NodeKind.OP and node.scope == "group" and node.name in needed
            for node in stage.graph.nodes
        ),
        judges_clip=values.get("ratio_level", "token") == "token",
        fixed_length=values.get("min_new_tokens", 0) >= values.get("max_new_tokens", 1),
        mismatch_above=mismatch.warn_above,
    )


def _options(value: Any, at: str) -> Iterator[tuple[str, str, Any]]:
    if not is_dataclass(value):
        return
    own = [(field.name, getattr(value, field.name)) for field in fields(value)]
    yield from ((name, f"{at}.{name}", inner) for name, inner in own)
    for name, inner in own:
        yield from _options(inner, f"{at}.{name}")
