"""What is generated in docs/algorithms: pictures, calls, flags, metrics and tables of sizes.

A page is written by hand but for the parts between `<!-- generated: PART -->` and `<!-- end -->`,
which this script rewrites. An algorithm without a page gets one to be filled in. A test compares
what is committed with what the code says.

    python benchmarks/algorithm_pages.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from algorithm_functions import MODULES, function_page, function_table, loss_table
from algorithm_sizes import CONFIGS, NAMES, RELATIVES, Algorithm, algorithm, difference
from penstock.algorithms import controllers, losses
from penstock.algorithms.controllers import KLController, Multiplier
from penstock.algorithms.losses import preference
from penstock.algorithms.ops.rollout_correction import RolloutCorrection
from penstock.algorithms.roles.environment import ActorCritic, QNetwork, Replay
from penstock.algorithms.roles.language import ValueModel
from penstock.configs.validate import fields_of, key_docs
from penstock.dataflow.graph.axes import Spec
from penstock.dataflow.graph.graph import Constant, Graph, Node, TableArgument
from penstock.dataflow.render.svg import to_svg
from penstock.launch.cli.key_reference import as_yaml
from torch import Tensor

DOCS = Path(__file__).parents[1] / "docs" / "algorithms"
FAMILIES: dict[str, list[str]] = {
    "Policy gradient without a critic": [
        "reinforce", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "grpo",
        "reference_grpo", "dr_grpo", "dapo", "gspo", "cispo", "lite_ppo", "kimi", "p3o", "rebel",
        "cgpo", "crraft",
    ],
    "With a critic": [
        "ppo", "adaptive_ppo", "safe_rlhf", "ma_rlhf", "pf_ppo", "decoupled_ppo",
        "vtrace_ppo", "salsa", "ensemble_ppo", "process_ppo", "a_lol",
    ],
    "Preferences and supervision": [
        "sft", "dpo", "dpo_norm", "ipo", "kto", "online_dpo", "codpo", "reward_modelling",
        "margin_modelling", "cost_modelling", "distillation", "gkd", "sampled_distillation",
    ],
    "Conversations": ["agent_grpo", "agent_ppo", "archer", "refuel"],
    "Environments": ["env_ppo", "a2c", "impala", "mappo", "self_play", "population", "dqn"],
}  # fmt: skip

_OF_CALLS: dict[tuple[type, str], list[str]] = {
    (Multiplier, "update"): ["multiplier", "recent_cost"],
    (KLController, "follow"): ["kl_coef", "observed_kl"],
    (ActorCritic, "inherit"): ["fitness", "replaced"],
    (QNetwork, "train"): ["epsilon"],
    (QNetwork, "follow"): ["followed"],
    (ValueModel, "follow"): ["followed"],
    (Replay, "add"): ["stored"],
}
"""What calls report beside their losses, by contract and method."""

_BLOCK = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_NEW_PAGE = """# {title}

To be written: what it is, its formula, its paper.

<!-- generated: graph -->
<!-- end -->

<!-- generated: run -->
<!-- end -->

<!-- generated: flags -->
<!-- end -->

<!-- generated: metrics -->
<!-- end -->
"""


@cache
def loaded(name: str) -> Algorithm:
    """One of the shipped algorithms."""
    return algorithm(name)


def files() -> dict[Path, str]:
    """Every file of docs/algorithms that is generated, wholly or in parts, as it should be."""
    made = {DOCS / "functions.md": function_page(), DOCS / "index.md": _filled("index", _INDEX)}
    for name in NAMES:
        made[DOCS / f"{name}.md"] = _filled(name, _PAGE)
        made[DOCS / "graphs" / f"{name}.svg"] = to_svg(loaded(name).graph) + "\n"
    return made


def _filled(name: str, parts: Mapping[str, Callable[[str], str]]) -> str:
    page = DOCS / f"{name}.md"
    text = page.read_text() if page.exists() else _NEW_PAGE.format(title=name)
    return _BLOCK.sub(
        lambda found: f"<!-- generated: {found[1]} -->\n{parts[found[1]](name)}\n<!-- end -->",
        text,
    )


def _graph(name: str) -> str:
    graph = loaded(name).graph
    roles = [
        f"`{role}` ({contract.__name__}{', trained' if graph.trains_per_step.get(role) else ''})"
        for role, contract in graph.roles.items()
    ]
    calls = [f"`{call}`" for call in loaded(name).calls]
    return "\n".join(
        [
            f"![The graph of {name}](graphs/{name}.svg)",
            "",
            f"Roles: {', '.join(roles)}.",
            f"Calls of a step: {', '.join(calls)}.",
        ]
    )


def _run(name: str) -> str:
    made = loaded(name)
    stages = ", ".join(f"[`{stage}`]({_page_of(stage)})" for stage in made.before)
    first = f"It runs after {stages}: see [stages](../configuration.md#stages)." if stages else ""
    yaml = (CONFIGS / f"{name}.yaml").read_text().strip()
    code = made.file.name if made.file.parent.name != "papers" else f"papers/{made.file.name}"
    words = re.search(rf"`(algorithm={name} [^`]+)`", made.about)  # where it needs more than that
    return "\n".join(
        [
            f"    penstock run {words[1] if words else f'algorithm={name}'}",
            "",
            f"The step is in [`algorithms/{code}`](../../algorithms/{code}). {first}".strip(),
            f"`configs/algorithm/{name}.yaml`:",
            "",
            "```yaml",
            yaml,
            "```",
        ]
    )


def _page_of(stage: str) -> str:
    """A stage's page: its name may say which of several of a kind it is."""
    return f"{max((n for n in NAMES if stage.startswith(n)), key=len)}.md"


def _flags(name: str) -> str:
    made = loaded(name)
    rows = [
        f"| `{key}` | {default} | {here if here != default else ''} | {meaning} |"
        for key, default, here, meaning in _options(type(made.cfg)(), made.cfg)
    ]
    return "\n".join(
        [
            "Each is a key `algorithm.cfg.KEY`; the third column is what the YAML file sets.",
            "",
            "| key | default | here | meaning |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _options(default: Any, here: Any, at: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, default, value here and meaning of every option, nested ones with dotted keys."""
    kind = type(here)
    hints = typing.get_type_hints(kind)
    for key in fields_of(kind) or {}:
        given, usual, path = getattr(here, key), getattr(default, key), f"{at}{key}"
        meaning = _meaning(kind, key, hints[key])
        if RolloutCorrection in typing.get_args(hints[key]) and not _takes_correction(here):
            meaning = "This algorithm takes none: any value but `null` is refused."
        if fields_of(type(given)) is None:
            yield path, f"`{as_yaml(usual)}`", f"`{as_yaml(given)}`", meaning
        else:
            yield from _options(usual, given, f"{path}.")


def _takes_correction(cfg: Any) -> bool:
    try:
        dataclasses.replace(cfg, correction=RolloutCorrection())
    except ValueError:
        return False
    return True


def _meaning(kind: type, key: str, hint: Any) -> str:
    words = key_docs(kind).get(key, "")
    choices = [f"`{value}`" for value in _choices(hint)]
    if choices and not all(choice.strip("`") in words for choice in choices):
        words = f"{words} One of {', '.join(choices)}."
    if RolloutCorrection in typing.get_args(hint):
        words = f"{words} Its options: [corrections](index.md#corrections)."
    return _cell(words)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _choices(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


def _metrics(name: str) -> str:
    graph = loaded(name).graph
    rows = [
        f"| `{node.name}/{metric}` | {_cell(_meanings(graph, node)[metric])} |"
        for node in graph.nodes
        for metric in metric_names(graph, node)
    ]
    rows += [f"| `{metric}` | {meaning} |" for metric, meaning in _means(graph)]
    return "\n".join(
        [
            "Besides [what every run logs](index.md#metrics):",
            "",
            "| metric | meaning |",
            "|---|---|",
            *rows,
        ]
    )


def _means(graph: Graph) -> Iterator[tuple[str, str]]:
    """Columns that the step returns, which are logged as means over their rows."""
    for ref in graph.reported:
        node = graph[ref.node]
        asked: Any = node.function
        if node.role is not None:
            asked = getattr(graph.roles[node.role], node.method or "")
        line = re.split(r"(?<=\.)\s", (asked.__doc__ or "").strip())[0]
        column = "mean" if node.output_table is None else ref.column
        yield f"{ref.node}/{column}", f"Mean of: {_cell(line)}"


def metric_names(graph: Graph, node: Node) -> list[str]:
    """What a call reports: its loss, found by computing it on two short rows, and itself."""
    if node.role is None:
        return []
    own = _OF_CALLS.get((graph.roles[node.role], node.method or ""), [])
    return [*_loss_metrics(node), *own]


def _loss_metrics(node: Node) -> list[str]:
    arguments = dict(node.arguments)
    loss, batch = arguments.get("loss"), arguments.get("batch")
    if not isinstance(loss, Constant) or not isinstance(batch, TableArgument):
        return []
    columns = batch.table(**{name: _column(name, spec) for name, spec in _specs(batch.table)})
    zeros = torch.zeros(2, 3)
    entropy = zeros if loss.value.needs_entropy else None
    output = SimpleNamespace(
        logprob=zeros,
        entropy=entropy,
        word_logprob=torch.zeros(2, 3, 2),
        value=zeros,
        value_logits=None,
        score=zeros[:, 0],
    )
    return list(loss.value(output, columns, loss.value.totals(columns)).metrics)


def _specs(table: type) -> Iterator[tuple[str, Spec]]:
    hints = typing.get_type_hints(table, include_extras=True)
    for field in dataclasses.fields(table):
        hint = hints[field.name]
        if typing.get_origin(hint) is not typing.Annotated:  # a column or None
            hint = typing.get_args(hint)[0]
        yield field.name, next(m for m in hint.__metadata__ if isinstance(m, Spec))


def _column(name: str, spec: Spec) -> Tensor:
    if name == "chosen":
        return torch.tensor([True, False])
    kinds = {"i64": torch.int64, "bool": torch.bool, "f32": torch.float32}
    shape = (2, 3, 2)[: len(spec.axes)]
    value = 1 if spec.dtype.value == "bool" else 0
    return torch.full(shape, value, dtype=kinds[spec.dtype.value])


def _meanings(graph: Graph, node: Node) -> dict[str, str]:
    """Metric -> meaning, from lists in docstrings: of modules, of the loss, of the method."""
    found: dict[str, str] = {}
    loss = dict(node.arguments).get("loss")
    own = inspect.getdoc(type(loss.value)) if isinstance(loss, Constant) else None
    asked = getattr(graph.roles[node.role or ""], node.method or "")
    modules = (losses, preference, controllers)
    for text in (*(module.__doc__ for module in modules), own, inspect.getdoc(asked)):
        flat = re.sub(r"\n  +", " ", text or "")
        for line in re.findall(r"^- (.*)$", flat, re.MULTILINE):
            for names, meaning in re.findall(r"(`\w+`(?:, `\w+`)*): (.*?)(?:\.$|; (?=`)|$)", line):
                for name in re.findall(r"\w+", names):
                    found[name] = meaning[0].upper() + meaning[1:] + "."
    return found


def _table_of_algorithms(name: str) -> str:
    del name
    lines: list[str] = []
    placed = {name for names in FAMILIES.values() for name in names}
    families = FAMILIES | {"Others": [name for name in NAMES if name not in placed]}
    for family, listed in families.items():
        names = [name for name in listed if name in NAMES]
        if not names:
            continue
        lines += ["", f"**{family}**", "", "| algorithm | lines | roles | calls of a step |"]
        lines += ["|---|---|---|---|", *map(_algorithm_row, names)]
    return "\n".join(lines).strip()


def _algorithm_row(name: str) -> str:
    made = loaded(name)
    size = made.num_lines or f"0, [`{made.file.stem}`]({made.file.stem}.md)'s step"
    roles = ", ".join(f"`{role}`" for role in made.graph.roles)
    calls = ", ".join(f"`{call}`" for call in made.calls)
    return f"| [{name}]({name}.md) | {size} | {roles} | {calls} |"


def _table_of_differences(name: str) -> str:
    del name
    lines = ["| from | to | step | step and options |", "|---|---|---|---|"]
    for one, other in sorted((near, far) for far, near in RELATIVES.items() if far in NAMES):
        step, both = difference(loaded(one), loaded(other))
        shown = f"`{one}` | [`{other}`]({other}.md)"
        if (one, other) in CALLED_OUT:
            shown = f"**{shown.replace(' | ', '** | **')}**"
        lines.append(f"| {shown} | {step} | {both} |")
    return "\n".join(lines)


CALLED_OUT = {("grpo", "rloo"), ("ppo", "remax"), ("ppo", "safe_rlhf")}
"""Differences that other code has been compared by."""


def _corrections(name: str) -> str:
    del name
    rows = [
        f"| `correction.{key}` | {default} | {meaning} |"
        for key, default, _, meaning in _options(RolloutCorrection(), RolloutCorrection())
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


_PAGE: dict[str, Callable[[str], str]] = {
    "graph": _graph,
    "run": _run,
    "flags": _flags,
    "metrics": _metrics,
}
_INDEX: dict[str, Callable[[str], str]] = {
    "algorithms": _table_of_algorithms,
    "differences": _table_of_differences,
    "corrections": _corrections,
    "loss_classes": lambda _: loss_table(),
    **{module: lambda _, module=module: function_table(module) for module in MODULES},
}


def main() -> None:
    """Write what has changed."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(DOCS)}")


if __name__ == "__main__":
    main()
