"""What accompanies the package: versions that go together, how to cite it, forms for reports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from penstock import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_says_what_is_allowed_and_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    allowed = {"Python": project["requires-python"]}
    for line in (*project["dependencies"], *extras):
        name, versions = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", line).groups()  # type: ignore[union-attr]
        allowed[name] = versions
    pins = dict(
        line.split("==")
        for name in ("requirements.txt", "requirements-engines.txt", "requirements-trackers.txt")
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pins["Python"] = "3.11"
    found = rows()
    assert len(found) >= 10
    for package, may, tested, _ in found:
        assert (may, tested) == (allowed[package], pins[package]), package


def test_the_citation_has_the_version() -> None:
    found: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert found["version"] == __version__
    assert {"title", "message", "authors", "license", "date-released"} <= set(found)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_is_one(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form["blank_issues_enabled"] is True
        return
    assert {"name", "description", "body"} <= set(form)
    assert all({"type", "id", "attributes"} <= set(field) for field in form["body"])
    if path.name == "bug.yml":
        assert "penstock doctor" in path.read_text()
