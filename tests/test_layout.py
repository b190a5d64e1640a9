"""The tree holds together: imports go one way, each file has one name and plain sentences, none is long."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from python_files import ROOT, python_files
from sentences import complaint, offenders

from gnnc.passes import PIPELINE

FOLDERS = {"gnnc": ROOT / "gnnc", "gnnc.passes": ROOT / "passes", "gnnc.runtime": ROOT / "runtime"}
LEAVES = {"gnnc.environment", "gnnc.errors", "gnnc.tensor_state", "gnnc.torch_private"}
# Packages and modules that may import both passes and runtime: the faces, the compiler driver, calibration.
API = {"gnnc", "gnnc.__main__", "gnnc.api", "gnnc.suggest_bits", "gnnc.pareto"}
DRIVERS = ("gnnc.compiler", "gnnc.calibrate")
LONGEST_FILE = 600
FOLDERS_OF_TEXT = "gnnc passes runtime csrc tests benchmarks examples docs packaging".split()
SUFFIXES_OF_TEXT = frozenset((".py", ".md", ".h", ".cpp", ".cuh", ".toml"))
BRITISH = re.compile(
    r"""
    (?: neighbo | behavio | colo | favo | hono ) [u]r
    | i[s]ation
    | (?: general | initial | maxim | minim | normal | optim | organ | parallel | random | real | recogn
        | serial | special | standard | summar | symmetr | synchron | util | vector ) i[s](?: e | ing )
    | labe[l]l | trave[l]l | (?: cance | equa | mode | signa ) [l]l(?: ed\b (?! \( ) | ing )
    | \b ce[n]tre | licen[c]e | defen[c]e | \b analy[s]e
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""British spellings; a bracket in each stem keeps the pattern from finding itself."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in python_files(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of gnnc that a module names in an import, at its top or inside a function."""
    found = set()
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join([*above, *filter(None, [source])])
            named = {f"{source}.{alias.name}" for alias in node.names} & modules().keys()
            # `from gnnc import errors` means that submodule, and not all that gnnc itself imports.
            found.update(named or {source})
    return frozenset(found & modules().keys())


def reach(name: str) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        for found in imports(todo.pop()) - seen:
            seen.add(found)
            todo.append(found)
    return seen


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.first(1)
@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    seen = reach(name)
    if inside(name, "gnnc.ir"):
        assert {n for n in seen if not inside(n, "gnnc.ir")} <= LEAVES
    elif name in LEAVES:
        assert seen <= LEAVES
    elif name == "gnnc.precision":
        assert not {n for n in seen - LEAVES if not inside(n, "gnnc.ir")}
    elif inside(name, "gnnc.passes"):
        assert not {n for n in seen if inside(n, "gnnc.runtime")}
    elif inside(name, "gnnc.runtime"):
        assert not {n for n in seen if inside(n, "gnnc.passes")}
    elif name not in API and not any(inside(name, package) for package in DRIVERS):
        sides = {side for side in ("gnnc.passes", "gnnc.runtime") for n in imports(name) if inside(n, side)}
        assert len(sides) < 2, "only gnnc.api sees both"


def test_no_circle_of_imports() -> None:
    """Imports inside functions and under TYPE_CHECKING count as well."""
    graph = nx.DiGraph((name, found) for name in modules() for found in imports(name) - {name})
    circles = [set(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert circles == []


def imported_roots(path: Path) -> set[str]:
    """Return the first names of the absolute imports of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("folder", "others"),
    [("tests", ["benchmarks"]), ("examples", ["tests", "tests/support", "benchmarks"])],
)
def test_no_test_or_example_imports_from(folder: str, others: list[str]) -> None:
    names = {path.stem for other in others for path in (ROOT / other).glob("*.py")} | set(others)
    own = {path.stem for path in python_files(ROOT / folder)}
    for path in python_files(ROOT / folder):
        assert not imported_roots(path) & (names - own), path
        assert folder != "examples" or "sys.path" not in path.read_text(), path


def test_no_file_is_loaded_under_two_names() -> None:
    for name in modules().keys() - {"gnnc.__main__"}:
        importlib.import_module(name)
    names = defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] in ("gnnc", "passes", "runtime"):
            names[os.path.realpath(file)].add(name)
    assert len(names) >= len(modules()) - 1
    assert not {file: found for file, found in names.items() if len(found) > 1}


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_folders_at_the_top_are_not_packages_of_their_own(name: str) -> None:
    run = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ImportError: import gnnc.{name}: {name} alone is a folder of gnnc" in run.stderr


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_links_are_links(name: str) -> None:
    assert os.readlink(ROOT / "gnnc" / name) == f"../{name}"


@pytest.mark.parametrize("folder", ["gnnc", "passes", "runtime", "tests", "benchmarks", "examples"])
def test_no_file_is_long(folder: str) -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in python_files(ROOT / folder)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}


def files_of_text() -> Iterator[Path]:
    """Yield the sources and pages of the repository; links to folders are not followed."""
    for folder in FOLDERS_OF_TEXT:
        for path, folders, names in os.walk(ROOT / folder):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
            yield from (Path(path) / name for name in names)
    yield from ROOT.iterdir()


def test_spelling_is_american() -> None:
    texts = [path for path in files_of_text() if path.suffix in SUFFIXES_OF_TEXT]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in BRITISH.finditer(line)
    ]
    assert len(texts) > 900 and BRITISH.search("normali" + "sed")
    assert not found, "\n".join(["British spellings:", *found])


def test_the_table_of_the_readme_lists_the_pipeline() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [step.name for step in PIPELINE]


def test_the_headings_of_how_it_works_follow_the_pipeline() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    headings = " ".join(re.findall(r"^## (.*)$", text, re.M))
    assert re.findall(r"`(\w+)`", headings) == [step.name for step in PIPELINE]


@pytest.mark.parametrize(
    "folder", ["gnnc", "passes", "runtime", "tests/support", "tests/emulator", "examples", "benchmarks"]
)
def test_first_sentences_say_what_a_thing_is_or_does(folder: str) -> None:
    """The rule is that of ``sentences``."""
    found = [
        line.removeprefix(f"{ROOT}/") for path in python_files(ROOT / folder) for line in offenders(path)
    ]
    assert not found, "\n".join(["first sentences to rewrite (see tests/support/sentences.py):", *found])


@pytest.mark.parametrize(
    ("sentence", "needs_verb", "good"),
    [
        ("Return the rows of a graph.", True, True),
        ("Writes each row once.", True, True),
        ("A gate reads the value that it scales.", True, True),
        ("The rows of a graph.", True, False),
        ("Cache of values derived from a tensor.", False, True),
        ("One layer, and a head.", False, True),
        ("One that nobody reads.", False, False),
        ("What is made of a tensor once.", False, False),
        ("Those that it holds.", False, False),
        ("Of each parameter, the place.", True, False),
        ("Its arguments, in order.", False, False),
        ("Whether a node is a row.", True, False),
        ("Return whether a node is a row. It may be one.", True, True),
        ("Write the launch.", True, False),
        ("Write the launch of the row program.", True, True),
    ],
)
def test_the_rule_tells_sentences_apart(sentence: str, needs_verb: bool, good: bool) -> None:
    assert (complaint(sentence, needs_verb=needs_verb) is None) == good
