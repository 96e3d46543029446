"""Sixty one-line faults of the product code, and which of them the tests catch.

    python benchmarks/faults.py --draw benchmarks/data/faults.json
    python benchmarks/faults.py benchmarks/data/faults.json --json FILE

Faults are drawn with a fixed seed, as many of each folder as its share of the lines: a comparison
flipped, a number off by one, `and` for `or`, a `not` dropped, two arguments swapped, a truth value
or a default changed, a statement removed. Never drawn is what cannot show, by rule: annotations,
decorators, texts and what makes messages, logging, `__all__`, blocks for type checkers, limits of
time and of bytes, and flags such as `exist_ok`.

A fault is applied by content, to the one line of its text in a function of its name, so that it
finds its place after code has moved; of several, to one in the file or folder where it was. Then
those tests run that belong to the file: the mirrored one, those that import the module, and the
others of the mirrored folder, for `--limit` seconds of the processor. It is caught if a test fails.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench import parser, report, table

FOLDERS = ("dataflow", "algorithms", "planner", "workers", "configs", "launch")
SEED, NUM_FAULTS = 39, 60
WALL = 8
"""Seconds in which a second of the processor is had on a busy machine, at the most."""
FLIPS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SIGNS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
}
FLAGS = {"strict", "daemon", "exist_ok", "parents", "missing_ok", "repr", "compare", "ensure_ascii"}
BUILT_IN = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "validated"}
"""Functions of whose arguments each is of another kind, so that none passes for the other."""
LIMITS = re.compile(r"_S$|_BYTES$|_MOST|MOST_|LIMIT|PATIENCE|TIMEOUT|WIDTH|SHOWN", re.IGNORECASE)
SPEECH = re.compile(r"\b(_?log|logging|warnings|print|say|stderr|stdout|message|note)\b|_LOG\b")
DECLARED = re.compile(r"TypeVar|ParamSpec|NewType|TYPE_CHECKING|sys\.version_info")


@dataclass(frozen=True)
class Fault:
    """One changed line.

    Attributes:
        file: Where it was when it was drawn.
        qualname: Of the function or class around it; "" at the top of the module.
        kind: How it was changed.
        old: The line, without its indentation.
        new: What it becomes.
    """

    file: str
    qualname: str
    kind: str
    old: str
    new: str


class Drawer(ast.NodeVisitor):
    """Collects every fault that a file could have, by line."""

    def __init__(self, root: Path, path: Path) -> None:
        self.file = str(path.relative_to(root))
        self.lines = path.read_text().splitlines()
        self.found: dict[int, list[Fault]] = defaultdict(list)
        self._names: list[str] = []
        self.visit(ast.parse("\n".join(self.lines)))

    def add(self, kind: str, node: ast.AST, start: int, end: int, new: str) -> None:
        """Put `new` in place of the columns of a node's line, should that line say no message."""
        number: int = node.lineno  # type: ignore[attr-defined]
        line = self.lines[number - 1]
        changed = f"{line[:start]}{new}{line[end:]}"
        if not line.isascii() or SPEECH.search(line) or DECLARED.search(line) or changed == line:
            return
        found = Fault(self.file, ".".join(self._names), kind, line.strip(), changed.strip())
        self.found[number].append(found)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            line = self.lines[right.lineno - 1]
            gap = line[left.end_col_offset : right.col_offset]
            if gap.count(old) == 1:
                at = left.end_col_offset + gap.index(old)
                self.add(kind, right, at, at + len(old), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip comparisons."""
        for left, op, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            self._between("comparison flipped", left, right, *FLIPS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Change signs, except of texts and of types."""
        text = any(isinstance(s, ast.JoinedStr | ast.List) for s in (node.left, node.right))
        if type(node.op) in SIGNS and not text:
            self._between("sign changed", node.left, node.right, *SIGNS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Swap `and` and `or`."""
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and/or swapped", left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop `not`."""
        if isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            self.add("not dropped", node, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change numbers and truth values."""
        value = node.value
        if node.end_col_offset is None or not isinstance(value, bool | int | float):
            return
        new = repr(not value) if isinstance(value, bool) else repr(value + 1)
        if isinstance(value, float):
            new = repr(value * 2 or 1.0)
        self.add("constant changed", node, node.col_offset, node.end_col_offset, new)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap the first two positional arguments; leave flags as they are."""
        refused = isinstance(node.func, ast.Name) and node.func.id in BUILT_IN
        if not refused and len(node.args) > 1 and node.args[0].lineno == node.args[1].end_lineno:
            one, two = node.args[:2]
            line = self.lines[one.lineno - 1]
            if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                texts = [line[a.col_offset : a.end_col_offset] for a in (one, two)]
                between = line[one.end_col_offset : two.col_offset]
                new = f"{texts[1]}{between}{texts[0]}"
                end = two.end_col_offset or 0
                self.add("arguments swapped", one, one.col_offset, end, new)
        node.keywords = [k for k in node.keywords if k.arg not in FLAGS]
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call made for its effect; texts and `...` are left alone."""
        if not isinstance(node.value, ast.Constant):
            self._remove(node)
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Remove what is added up."""
        self._remove(node)
        self.generic_visit(node)

    def _remove(self, node: ast.stmt) -> None:
        if node.lineno == node.end_lineno:
            line = self.lines[node.lineno - 1]
            if line.strip() == line[node.col_offset : node.end_col_offset]:
                self.add("statement removed", node, node.col_offset, len(line), "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leave limits and declared types alone."""
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if not any(name == "__all__" or LIMITS.search(name) for name in names):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value, not at the type."""
        limit = isinstance(node.target, ast.Name) and LIMITS.search(node.target.id)
        if node.value is not None and not limit:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """Pass by what only type checkers read."""
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Pass by what makes a message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Pass by what type checkers are told."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Pass by texts."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Pass by the parameters of types."""
        if not (isinstance(node.value, ast.Name) and node.value.id in ("Literal", "dict", "tuple")):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Look at defaults and at the body, not at decorators and types."""
        if node.name in ("__repr__", "__str__", "main") or node.name.startswith("_say"):
            return
        self._names.append(node.name)
        defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
        for part in (*defaults, *node.body):
            self.visit(part)
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Look at the body alone."""
        self._names.append(node.name)
        for part in node.body:
            self.visit(part)
        self._names.pop()


def draw(root: Path) -> list[Fault]:
    """Draw faults: each folder's share by its lines, and each line with a fault equally likely."""
    chance = random.Random(SEED)
    files = {folder: sorted((root / folder).rglob("*.py")) for folder in FOLDERS}
    num_lines = {f: sum(len(p.read_text().splitlines()) for p in files[f]) for f in FOLDERS}
    exact = {f: NUM_FAULTS * num_lines[f] / sum(num_lines.values()) for f in FOLDERS}
    shares = {folder: int(share) for folder, share in exact.items()}
    by_rest = sorted(FOLDERS, key=lambda folder: shares[folder] - exact[folder])
    for folder in by_rest[: NUM_FAULTS - sum(shares.values())]:
        shares[folder] += 1
    drawn: list[Fault] = []
    for folder in FOLDERS:
        found = [faults for path in files[folder] for faults in Drawer(root, path).found.values()]
        order = (chance.choice(faults) for faults in chance.sample(found, len(found)))
        drawn += islice((fault for fault in order if _parses(root, fault)), shares[folder])
    return drawn


def _parses(root: Path, fault: Fault) -> bool:
    try:
        ast.parse((root / fault.file).read_text().replace(fault.old, fault.new))
    except SyntaxError:
        return False
    return True


def places(root: Path, fault: Fault) -> list[tuple[Path, int]]:
    """Find the lines that are a fault's, its own file's first, then its folder's."""
    name = fault.qualname.rpartition(".")[2]
    found: list[tuple[Path, int]] = []
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        text = path.read_text()
        if fault.old not in text or name not in text:
            continue
        for around in _named(ast.parse(text), name):
            last = getattr(around, "end_lineno", None) or len(text.splitlines())
            for number in range(getattr(around, "lineno", 1), last + 1):
                if text.splitlines()[number - 1].strip() == fault.old:
                    found.append((path, number))
    home = root / fault.file
    return sorted(set(found), key=lambda p: (p[0] != home, p[0].parent != home.parent, p))


def _named(tree: ast.Module, name: str) -> Iterator[ast.AST]:
    if not name:
        yield tree
    for node in ast.walk(tree):
        if getattr(node, "name", None) == name and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            yield node


def tests_of(root: Path, path: Path) -> list[Path]:
    """Order the tests that belong to a file: its own, those that import it, its folder's."""
    inner = path.relative_to(root)
    mirror = root / "tests" / inner.parent
    module = ".".join(("penstock", *inner.with_suffix("").parts)).removesuffix(".__init__")
    imports = re.compile(
        rf"\b{re.escape(module)}\b|\b{module.rpartition('.')[0]} import .*{path.stem}"
    )
    own = mirror / f"test_{path.stem}.py"
    every = sorted((root / "tests").rglob("test_*.py"))
    importing = [test for test in every if imports.search(test.read_text())]
    importing.sort(key=lambda test: test.parent != mirror)
    ordered = [
        own,
        *importing,
        *sorted(mirror.glob("test_*.py")),
        *sorted(mirror.rglob("test_*.py")),
    ]
    return [test for test in dict.fromkeys(ordered) if test.is_file()]


def caught(root: Path, tests: list[Path], limit_s: int) -> tuple[str, str]:
    """Run tests until one fails; gives how it ended, and the first that failed."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not nightly"]
    words += ["-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE", *map(str, tests)]
    with subprocess.Popen(
        words,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_CPU, (limit_s, limit_s)),
    ) as process:
        try:
            said = process.communicate(timeout=WALL * limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "not within the limit", ""
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "not within the limit", ""
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if process.returncode in (0, 5):
        return "not caught", ""
    return "caught", first[1] if first else said.strip().splitlines()[-1][:200]


def tried(root: Path, fault: Fault, limit_s: int) -> dict[str, Any]:
    """Apply a fault, run the tests that belong to it, and take it back."""
    found = places(root, fault)
    if not found:
        return {"ended": "gone"}
    path, number = found[0]
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    start_s = time.monotonic()
    try:
        lines[number - 1] = lines[number - 1].replace(fault.old, fault.new)
        path.write_text("".join(lines))
        ended, test = caught(root, tests_of(root, path), limit_s)
    finally:
        path.write_text(text)
    where = f"{path.relative_to(root)}:{number}"
    spent_s = round(time.monotonic() - start_s, 1)
    return {"ended": ended, "test": test, "where": where, "seconds": spent_s}


def main() -> None:
    """Draw, or try."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("faults", type=Path, nargs="?", help="what was drawn")
    arguments.add_argument("--draw", type=Path, metavar="FILE", help="draw, and write it there")
    arguments.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    arguments.add_argument("--limit", type=int, default=120, help="CPU seconds for one fault")
    arguments.add_argument("--only", nargs="*", type=int, help="numbers of faults")
    given = arguments.parse_args()
    root: Path = given.root.resolve()
    if given.draw is not None:
        drawn = [asdict(fault) for fault in draw(root)]
        given.draw.write_text(json.dumps(drawn, indent=1) + "\n")
        return
    faults = [Fault(**one) for one in json.loads(given.faults.read_text())]
    ended: dict[int, dict[str, Any]] = {}
    for number, fault in enumerate(faults):
        if given.only is None or number in given.only:
            ended[number] = {**asdict(fault), **tried(root, fault, given.limit)}
            print(number, ended[number]["ended"], ended[number].get("test", ""), flush=True)
            report({"faults": ended}, given.json)
    counts: dict[str, int] = defaultdict(int)
    for one in ended.values():
        counts[one["ended"]] += 1
    print(table(["ended", "faults"], sorted(counts.items())))


if __name__ == "__main__":
    main()
