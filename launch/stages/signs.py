"""Signs that a run goes wrong: thresholds with their reasons, and remedies.

A false alarm costs more trust than silence, so every threshold is far from what a healthy run
shows; none is reported where a low entropy or a large KL is the price of a better policy, which
`RewardTrend` judges.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ...configs.schema import MismatchConfig
from ...dataflow.kinds import NodeKind
from ...dataflow.scheduler.schedule import Schedule
from ..inputs.record import Stage, load_step, step_cfg
from .headline import needed_nodes, ranked_nodes

Row = Mapping[str, float]
"""A step's metrics, `node/name` -> number."""

SHORT = 3
"""Steps in a row that show a sign before it is reported, and without it before it has gone away:
one step may be luck."""
LONG = 5
"""The same of equal groups, of which there are many whenever a task is nearly solved."""
FEWEST_RESPONSES = 256
"""Responses in those steps: where one in 100 is right, as many are all wrong in 8 of 100 cases."""
EQUAL_GROUPS = 0.95
"""Share of groups with equal scores. With 16 responses a problem that is solved 98 times in 100 is
in such a group 7 times in 10, so that a healthy run that is nearly done stays below."""
CUT_OFF, TURNS_CUT_OFF = 0.95, 0.9
"""Share of responses that were cut off, and of conversations with a turn that was."""
LOW_ENTROPY_SHARE, LOW_ENTROPY_NATS = 0.1, 0.1
"""Share of the entropy in the first steps, and nats per token. A policy at 0.1 nats takes its
likeliest token 98 times in 100. Cui et al., "The Entropy Mechanism of RL for Reasoning Language
Models", 2025, see training end where the entropy is used up."""
MOST_UPDATE_KL = 0.2
"""Nats per token between the policy before and after a train call. PPO is usually stopped at 0.01
to 0.03 (Schulman; Huang et al., "The 37 Implementation Details of PPO", 2022)."""
MOST_REFERENCE_KL, MOST_KL_WITHOUT_GAIN = 2.0, 0.3
"""Nats per token to the reference: always a sign, and where the reward does not rise. Gao et al.,
"Scaling Laws for Reward Model Overoptimization", 2022, see rewards hacked from about 10 nats per
response on, which for a response of 50 tokens is 0.2 per token."""
MOST_CLIPPED = 0.3
"""Share of tokens whose update the clip stops. It is 0.1 to 0.2 in a healthy PPO run, counting also
those that the clip would not have stopped (Huang et al., 2022)."""
GROWTH, GROWN_SHARE = 4.0, 0.1
"""How many times as large a mismatch must have become, and the share of `mismatch.warn_above` below
which it is rounding, whatever it does."""
WINDOW = 10
"""Steps whose rewards are compared, the first with the latest."""
SOLVED = 0.9
"""Share of right responses from which on a low entropy is what was wanted."""


@dataclass(frozen=True)
class SignFacts:
    """Facts about a stage before its first step.

    Attributes:
        at: The key under which it is configured: "algorithm".
        options: Name of an option of its own config -> its whole key, for those it has.
        order: Its nodes, those first on which the policy's training depends most.
        needed: Those of them on which it depends at all; empty if that is not known.
        compares_groups: Whether the responses of a group are compared with each other.
        judges_clip: Whether the clip bounds the ratio of single tokens; that of whole responses is
            bounded so narrowly that it is meant to act.
        fixed_length: Whether every response is sampled to the same length.
        mismatch_above: `mismatch.warn_above`.
    """

    at: str = "algorithm"
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    order: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()
    compares_groups: bool = True
    judges_clip: bool = True
    fixed_length: bool = False
    mismatch_above: float | None = 0.01

    def needs(self, node: str) -> bool:
        """Return whether the policy's training depends on a node, as far as that is known."""
        return node in self.needed or not self.needed

    def advice(self, *parts: str) -> str:
        """The parts whose keys exist, as one sentence; `{lr}` stands for an option's key."""
        keys = {"at": self.at, "lr": f"{self.at}.optimizer.lr", **self.options}
        said = [part.format_map(keys) for part in parts if _names(part) <= set(keys)]
        return "; ".join(said)


def _names(text: str) -> set[str]:
    return {part.partition("}")[0] for part in text.split("{")[1:]}


class RewardTrend:
    """Judges whether the policy gets better: by its reward, or by its episodes' return.

    Args:
        order: Nodes, those first whose metrics count more.
    """

    def __init__(self, order: tuple[str, ...]) -> None:
        self._rank = {node: rank for rank, node in enumerate(order)}
        self._first: list[float] = []
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._solved = False

    def add(self, values: Row) -> None:
        """Note a step."""
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


@dataclass
class Past:
    """The earlier steps, as rules need them.

    Attributes:
        facts: What is known of the stage.
        progress: Whether the policy gets better.
        first: Metric -> its values in the first steps.
        latest: Metric -> its values in the latest.
    """

    facts: SignFacts
    progress: RewardTrend
    first: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    latest: dict[str, deque[float]] = field(default_factory=dict[str, "deque[float]"])


@dataclass(frozen=True)
class Rule:
    """How one kind of sign is found, and what is told of it.

    Attributes:
        kind: Its name.
        metrics: Those that show it, without their node.
        look: What is seen in one step; None if nothing is.
        means: What it usually means.
        parts: What to change; those that name an option are left out where there is none.
        num_steps: Steps in a row that must show it.
        num_responses: Responses that must have been made in them.
        unless: A kind that says more of the same node; while that is there this is not told of.
    """

    kind: str
    metrics: tuple[str, ...]
    look: Callable[[Past, str, Row, str], str | None]
    means: str
    parts: tuple[str, ...]
    num_steps: int = SHORT
    num_responses: float = 0.0
    unless: str = ""

    def remedy(self, facts: SignFacts) -> str:
        """Advise what to change, with the keys that the stage has."""
        return facts.advice(*self.parts)


def _constant(past: Past, node: str, values: Row, metric: str) -> str | None:
    if past.facts.needs(node) and _all_equal(node, values):
        return f"every response has the same score, {values[f'{node}/{metric}']:.4g}"
    return None


def _all_equal(node: str, values: Row) -> bool:
    mean, square = (values.get(f"{node}/reward/{n}", math.nan) for n in ("mean", "mean_square"))
    # The variance of equal numbers is not 0 but a rounding error of their square.
    return square - mean * mean <= 1e-12 * square


def _equal_groups(past: Past, node: str, values: Row, metric: str) -> str | None:
    """Hardly a group has responses with different scores."""
    share = values[f"{node}/{metric}"]
    judged = past.facts.compares_groups and past.facts.needs(node)
    if not judged or not share >= EQUAL_GROUPS:
        return None
    mean = values.get(f"{node}/reward/mean", math.nan)
    return f"in {share:.0%} of the groups all scores are equal (mean of all scores {mean:.4g})"


def _cut_off(past: Past, node: str, values: Row, metric: str) -> str | None:
    share, of_turns = values[f"{node}/{metric}"], f"{node}/turns" in values
    if past.facts.fixed_length or not share >= (TURNS_CUT_OFF if of_turns else CUT_OFF):
        return None
    if of_turns:
        return f"{share:.0%} of the conversations were cut off, or had a turn that was"
    length = values.get(f"{node}/response_length")
    after = "" if length is None else f", after {length:.4g} tokens on average"
    return f"{share:.0%} of the responses were cut off{after}"


def _entropy(past: Past, node: str, values: Row, metric: str) -> str | None:
    """The policy has become certain, and is not better for it.

    Of language models: that of continuous actions is of densities, and has no such lower end.
    """
    if not any(other.endswith("/response_length") for other in values):
        return None
    name = f"{node}/{metric}"
    value, first = values[name], past.first.setdefault(name, [])
    if len(first) < SHORT:
        first.append(value)
        return None
    before = statistics.fmean(first)
    if before < LOW_ENTROPY_NATS or not value <= min(LOW_ENTROPY_NATS, LOW_ENTROPY_SHARE * before):
        return None
    if past.progress.improves:
        return None
    return f"the entropy is {value:.3g} nats per token, and was {before:.3g} in the first steps"


def _update_kl(past: Past, node: str, values: Row, metric: str) -> str | None:
    """A train call moves the policy far from what sampled."""
    value = values[f"{node}/{metric}"]
    if not value > MOST_UPDATE_KL:
        return None
    return f"a step moves the policy by {value:.3g} nats per token from what sampled"


def _reference_kl(past: Past, node: str, values: Row, metric: str) -> str | None:
    value = values[f"{node}/{metric}"]
    if metric == "mean":
        lengths = [v for name, v in values.items() if name.endswith("/response_length")]
        if not node.startswith("response_kl") or len(lengths) != 1 or not lengths[0] > 0:
            return None
        value /= lengths[0]
    if value > MOST_REFERENCE_KL or (value > MOST_KL_WITHOUT_GAIN and not past.progress.improves):
        return f"the policy is {value:.3g} nats per token from the reference"
    return None


def _clipped(past: Past, node: str, values: Row, metric: str) -> str | None:
    share = values[f"{node}/{metric}"] + values.get(f"{node}/clip_fraction_high", 0.0)
    if not past.facts.judges_clip or not share > MOST_CLIPPED:
        return None
    return f"the clip stops the update of {share:.0%} of the tokens"


def _mismatch(past: Past, node: str, values: Row, metric: str) -> str | None:
    limit = past.facts.mismatch_above
    if limit is None or values.get("run/lag_max", 0.0) > 0:
        return None  # staleness is in it
    name = f"{node}/{metric}"
    value = values[name]
    first, latest = past.first.setdefault(name, []), past.latest.setdefault(name, deque())
    (first if len(first) < LONG else latest).append(value)
    if len(latest) > LONG:
        latest.popleft()
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


KINDS: tuple[str, ...] = tuple(dict.fromkeys(rule.kind for rule in RULES))
"""All kinds of signs."""


@dataclass(frozen=True)
class BadSign:
    """One sign, at the step that made it certain.

    Attributes:
        kind: One of `KINDS`.
        node: The node whose metric shows it.
        first_step: The first of the steps in a row that show it.
        step: The last one so far.
        seen: What was seen, with numbers.
        means: What it usually means.
        remedy: What to change, with keys.
    """

    kind: str
    node: str
    first_step: int
    step: int
    seen: str
    means: str
    remedy: str

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.step}"
        when = steps if self.first_step < self.step else f"step {self.step}"
        return f"{when}, {self.node}: {self.seen}\n    {self.means}\n    remedy: {self.remedy}"


class Signs:
    """Finds signs of trouble in the steps of one stage, in order.

    Args:
        facts: What is known of the stage.

    Example:
        >>> signs = Signs(SignFacts())
        >>> for step in range(8):
        ...     for sign in signs.look(step, {"actor.generate/truncated": 1.0, **counts}):
        ...         print(sign)
    """

    def __init__(self, facts: SignFacts) -> None:
        self._past = Past(facts, RewardTrend(facts.order))
        self._seen: dict[tuple[str, str], _Stretch] = {}

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take up what the rows of `metrics.jsonl` of earlier steps showed and reported."""
        for row in rows:
            values = {name: math.nan if v is None else float(v) for name, v in row.items()}
            self.look(int(row["step"]), values)

    def look(self, step: int, values: Row) -> list[BadSign]:
        """Return the signs that one more step makes certain."""
        self._past.progress.add(values)
        found: list[BadSign] = []
        for rule in RULES:
            for name in values:
                node, _, metric = name.partition("/")
                if metric not in rule.metrics:
                    continue
                seen = rule.look(self._past, node, values, metric)
                stretch = self._seen.setdefault((rule.kind, name), _Stretch())
                stretch.add(step, seen is not None, _num_responses(values))
                if stretch.is_due(rule) and not self._is_there(rule.unless, node):
                    stretch.told = True
                    told = rule.means, rule.remedy(self._past.facts)
                    found.append(BadSign(rule.kind, node, stretch.first, step, seen or "", *told))
        return found

    def _is_there(self, kind: str, node: str) -> bool:
        return any(
            stretch.num_steps
            for (other, name), stretch in self._seen.items()
            if other == kind and name.partition("/")[0] == node
        )


def _num_responses(values: Row) -> float:
    """Return how many rows a step made, by its own metrics."""
    return values.get("run/samples_per_s", math.nan) * values.get("run/step_time_s", math.nan)


@dataclass
class _Stretch:
    """How long a sign has been present, or absent."""

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


def facts_of(stage: Stage, mismatch: MismatchConfig, schedule: Schedule) -> SignFacts:
    """Return what is known of a stage before its first step."""
    config = stage.config
    step = load_step(config.step, f"{stage.at}.step")
    cfg = step_cfg(step, config.cfg, f"{stage.at}.cfg").get("cfg")
    options: dict[str, tuple[str, Any]] = {}
    for name, key, value in _options(cfg, f"{stage.at}.cfg"):
        options.setdefault(name, (key, value))
    keys = {name: key for name, (key, value) in options.items() if not _is_least(name, value)}
    if schedule.max_lag:
        keys["max_lag"] = "schedule.max_lag"
    values = {name: value for name, (_, value) in options.items()}
    return SignFacts(
        at=stage.at,
        options=keys,
        order=tuple(ranked_nodes(stage)),
        needed=needed_nodes(stage),
        compares_groups=_compares_groups(stage),
        judges_clip=values.get("ratio_level", "token") == "token",
        fixed_length=values.get("min_new_tokens", 0) >= values.get("max_new_tokens", 1),
        mismatch_above=mismatch.warn_above,
    )


def _options(value: Any, at: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, whole key and value of every option of a config, outer ones first."""
    if not is_dataclass(value):
        return
    own = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for name, inner in own:
        yield name, f"{at}.{name}", inner
    for name, inner in own:
        yield from _options(inner, f"{at}.{name}")


def _is_least(name: str, value: Any) -> bool:
    return name in ("epochs", "num_minibatches") and value == 1


def _compares_groups(stage: Stage) -> bool:
    needed = needed_nodes(stage)
    return any(
        node.kind is NodeKind.OP and node.scope == "group" and node.name in needed
        for node in stage.graph.nodes
    )
