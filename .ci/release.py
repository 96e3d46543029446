"""`make release VERSION=0.2.0`: cut the changelog, build, check what was built, commit and tag.

Nothing is published. Whatever is wrong is said before anything is written; a build that fails
leaves the tree as it was.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {
    "pyproject.toml": r'(?m)^version = "(.+)"$',
    "__init__.py": r'(?m)^__version__ = "(.+)"$',
    "CITATION.cff": r"(?m)^version: (.+)$",
}
"""Files that say the version, and where."""

UNRELEASED = "## Unreleased\n"
MUST_HOLD = ("penstock/py.typed", "penstock/configs/run.yaml", "penstock/launch/main.py")
MUST_NOT_HOLD = ("penstock/tests/", "penstock/benchmarks/", "penstock/examples/")
DEADLINE_S = 600.0


def main(version: str) -> None:
    """Make the release of this version."""
    texts = {name: (ROOT / name).read_text() for name in (*PLACES, "CHANGELOG.md")}
    check(version, texts)
    new = released(version, texts, datetime.datetime.now(datetime.UTC).date())
    for name, text in new.items():
        (ROOT / name).write_text(text)
    try:
        wheel = built()
        check_wheel(wheel, version)
    except BaseException:
        for name, text in texts.items():
            (ROOT / name).write_text(text)
        raise
    git("add", *new)
    git("commit", "--quiet", "-m", f"Release {version}")
    git("tag", "-a", f"v{version}", "-m", f"Penstock {version}")
    print(f"released {version}: {wheel.relative_to(ROOT)}, tag v{version}; nothing was published")


def check(version: str, texts: dict[str, str]) -> None:
    """Refuse a release that cannot be."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        refuse(f"VERSION: expected a version such as 0.2.0, got '{version}'")
    found = {name: re.findall(place, texts[name]) for name, place in PLACES.items()}
    if len({tuple(versions) for versions in found.values()}) != 1:
        refuse(f"the version is not the same everywhere: {found}")
    ((before,),) = {tuple(versions) for versions in found.values()}
    if [*map(int, version.split("."))] <= [*map(int, before.split("."))]:
        refuse(f"VERSION: {version} is not newer than {before}")
    if "\n- " not in unreleased(texts["CHANGELOG.md"]):
        refuse("CHANGELOG.md has nothing under Unreleased: what does the release change?")
    if git("status", "--porcelain"):
        refuse("the tree has changes that are not committed: commit or stash them first")
    if git("tag", "--list", f"v{version}"):
        refuse(f"there is a tag v{version}")


def unreleased(changelog: str) -> str:
    """What stands under Unreleased."""
    return changelog.partition(UNRELEASED)[2].partition("\n## ")[0]


def released(version: str, texts: dict[str, str], today: datetime.date) -> dict[str, str]:
    """The files with the new version; what was unreleased is under it, with the date."""
    new = {
        name: re.sub(place, lambda m: m[0].replace(m[1], version), texts[name])
        for name, place in PLACES.items()
    }
    new["CITATION.cff"] = re.sub(
        r"(?m)^date-released: .+$", f"date-released: {today}", new["CITATION.cff"]
    )
    head = f"{UNRELEASED}\n## {version} ({today})\n"
    new["CHANGELOG.md"] = texts["CHANGELOG.md"].replace(UNRELEASED, head, 1)
    return new


def built() -> Path:
    """The wheel, in dist/."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", "dist", ".")
    return max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def check_wheel(wheel: Path, version: str) -> None:
    """It has the package, with its data and without its tests, and its command says the version."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in MUST_HOLD if name not in names]
    extra = [name for name in names if name.startswith(MUST_NOT_HOLD)]
    if missing or extra:
        refuse(f"{wheel.name} lacks {missing}, and holds {extra[:3]}")
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=False)
        python = f"{place}/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        run(*pip, "--no-index", str(wheel))
        said = run(f"{place}/bin/penstock", "--version")
    if said.split() != ["penstock", version]:
        refuse(f"the built command says '{said}', and not penstock {version}")


def git(*words: str) -> str:
    """What git answers."""
    return run("git", *words)


def run(*words: str) -> str:
    """What a command prints; its error ends the release."""
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    if ran.returncode:
        refuse(f"{' '.join(words)} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout.strip()


def refuse(why: str) -> None:
    """End with a message."""
    sys.exit(f"make release: {why}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
