"""The documents about keys agree with the types that declare them."""

from __future__ import annotations

from pathlib import Path

from penstock.configs.references import groups
from penstock.launch.cli.key_reference import key_reference

DOCS = Path(__file__).parents[3] / "docs"


def test_the_committed_reference_is_up_to_date() -> None:
    committed = (DOCS / "configuration_keys.md").read_text()
    assert committed == key_reference(), (
        "run: python -m penstock.launch.cli.key_reference > docs/configuration_keys.md"
    )


def test_every_key_of_the_reference_has_a_meaning() -> None:
    rows = [line for line in key_reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if not row.removesuffix("|").rpartition("|")[2].strip()] == []


def test_what_environments_and_their_actors_take_is_in_the_reference() -> None:
    tables = {part.partition("\n")[0]: part for part in key_reference().split("\n## ")}
    for title, keys in {
        "task (kind: gymnasium)": ("id", "backend", "masked", "normalization", "group_size"),
        "`task.normalization`": ("observations", "symlog", "rewards", "discount", "clip"),
        "task (kind: board_game)": ("game", "group_size"),
        "task (kind: library_game)": ("id", "backend", "options", "max_turns", "group_size"),
        "`task.game`": ("height", "gravity"),
        "model.architecture (model_type: perceptron)": (
            "hidden_sizes",
            "recurrent_units",
            "value_bins",
        ),
        "algorithm.roles.ROLE.options (worker: q_network)": ("epsilon_start", "epsilon_calls"),
        "algorithm.roles.ROLE.options (worker: replay)": ("capacity",),
        "algorithm.roles.ROLE.options (worker: env)": ("num_overlapped",),
    }.items():
        assert all(f"\n| `{key}` |" in tables[title] for key in keys), title
    # What a run fills in is nobody's to set.
    assert "\n| `network` |" not in key_reference()


def test_every_group_and_option_is_in_the_guide() -> None:
    guide = (DOCS / "configuration.md").read_text()
    configs = Path(__file__).parents[3] / "configs"
    for group in groups():
        (row,) = [line for line in guide.splitlines() if line.startswith(f"| `{group}=` |")]
        missing = [o.stem for o in (configs / group).glob("*.yaml") if f"`{o.stem}`" not in row]
        assert missing == [], group
