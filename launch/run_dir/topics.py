"""Topics that people follow in a run, and a title in words for every metric.

The overview of `penstock watch` has a chart for each topic that its runs have, in this order; its
curves and `penstock runs plot` take their titles from here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# A topic, the unit of its axis, a pattern of metrics that belong to it, and what their line is
# called besides. NODE is any node, whose role is named unless it is a usual one; `*` is any text.
_LINES = (
    ("Reward", "", "NODE/reward/mean", ""),
    ("Reward", "", "reward/mean", ""),
    ("Reward", "", "NODE/reward/*/mean", "*"),
    ("Accuracy", "", "evaluation/accuracy", "held out"),
    ("Accuracy", "", "evaluation/loss/accuracy", "held out, of pairs"),
    ("Accuracy", "", "evaluation/*/accuracy", "held out, *"),
    ("Accuracy", "", "NODE/reward/correct", "right responses"),
    ("Accuracy", "", "NODE/accuracy", "right pairs"),
    ("Return", "per episode", "NODE/episode_return", ""),
    ("Return", "per episode", "evaluation/*/return", "held out, *"),
    ("Games won", "", "NODE/first_wins", "by first"),
    ("Games won", "", "NODE/second_wins", "by second"),
    ("KL to the reference", "nats per response", "NODE/ref_kl_k1_per_sequence", ""),
    ("KL to the reference", "nats per response", "response_kl/mean", ""),
    ("KL to the teacher", "nats per token", "NODE/reverse_kl", "from the student"),
    ("KL to the teacher", "nats per token", "NODE/forward_kl", "from the teacher"),
    ("KL between versions", "nats", "NODE/approx_kl_k3", "policy"),
    ("KL between versions", "nats", "NODE/rollout_k3", "rollout engine and trainer"),
    ("Entropy", "nats", "NODE/entropy", ""),
    ("Response length", "tokens", "NODE/response_length", ""),
    ("Episode length", "steps", "NODE/episode_length", ""),
    ("Share cut off", "", "NODE/truncated", ""),
    ("Share cut off", "", "NODE/cut_off", ""),
    ("Throughput", "per second", "run/samples_per_s", "samples"),
    ("Throughput", "per second", "run/env_steps_per_s", "environment steps"),
    ("Loss", "", "NODE/loss", ""),
    ("Loss", "", "evaluation/loss", "held out"),
    ("Loss", "", "evaluation/*/loss", "held out, *"),
    ("Gradient norm", "", "NODE/grad_norm", ""),
)
_UNITS = {title: unit for title, unit, _, _ in _LINES}
_NODE = r"(?P<node>(?!evaluation/)[^/]+)"
_PATTERNS = [
    re.compile(re.escape(pattern).replace("NODE", _NODE).replace(r"\*", "(?P<rest>.+)"))
    for _, _, pattern, _ in _LINES
]
_USUAL_ROLES = frozenset({"actor", "reward", "env", "run"})
_WORDS = {"lr": "learning rate", "kl": "KL", "ess": "effective sample size"}
_ENDINGS = {"_per_s": " per second", "_s": ", seconds", "_bytes": ", bytes"}


def by_topic(metrics: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the topics that some metrics have: title -> metric -> what its line is called."""
    found: list[tuple[int, bool, list[str], str]] = []
    for metric in metrics:
        matches = ((i, pattern.fullmatch(metric)) for i, pattern in enumerate(_PATTERNS))
        for place, match in ((place, match) for place, match in matches if match):
            parts = match.groupdict()
            role = (parts.get("node") or "run").partition(".")[0]
            label = _LINES[place][3].replace("*", parts.get("rest") or "")
            is_usual = role in _USUAL_ROLES
            label = label if is_usual else ", ".join(filter(None, (role, label)))
            found.append((place, not is_usual, metric.split("/"), label))
            break
    topics: dict[str, dict[str, str]] = {}
    for place, _, names, label in sorted(found):
        topics.setdefault(_LINES[place][0], {})["/".join(names)] = label
    for lines in topics.values():
        number = Counter(lines.values())
        for metric, label in lines.items():
            if number[label] > 1:  # two calls of one role
                lines[metric] = ", ".join(filter(None, (label, metric.partition("/")[0])))
    return topics


def titles(metrics: Iterable[str]) -> dict[str, str]:
    """Return a title in words for each metric."""
    names = list(metrics)
    found = {metric: _words(metric) for metric in names}
    for title, lines in by_topic(names).items():
        found |= {
            metric: f"{title}: {label}" if label else title for metric, label in lines.items()
        }
    return found


def with_unit(title: str) -> str:
    """Return a title of `titles` with the unit of its topic, if that has one."""
    unit = _UNITS.get(title.partition(":")[0])
    return f"{title} ({unit})" if unit else title


def _words(metric: str) -> str:
    node, _, name = metric.partition("/")
    if name in ("", "mean") and "." not in node:  # a column that a step returns
        node, name = "", node
    ending = next((ending for ending in _ENDINGS if name.endswith(ending)), "")
    name = name.removesuffix(ending).replace("/", ": ")
    text = " ".join(_WORDS.get(word, word) for word in name.split("_")) + _ENDINGS.get(ending, "")
    return f"{text[:1].upper()}{text[1:]}" + (f", {node}" if node and node != "run" else "")
