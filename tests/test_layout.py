"""What holds the tree together: imports go one way, each file has one name, and no file is long."""

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

import pytest

from gnnc.passes import PIPELINE

ROOT = Path(__file__).parent.parent
FOLDERS = {"gnnc": ROOT / "gnnc", "gnnc.passes": ROOT / "passes", "gnnc.runtime": ROOT / "runtime"}
LEAVES = {"gnnc.environment", "gnnc.errors", "gnnc.precision"}
# Packages and modules that may import both passes and runtime: the faces, the compiler driver, calibration.
API = {"gnnc", "gnnc.__main__", "gnnc.api", "gnnc.suggest_bits", "gnnc.pareto"}
DRIVERS = ("gnnc.compiler", "gnnc.calibrate")
LONGEST_FILE = 600


def python_files(folder: Path) -> Iterator[Path]:
    """The files of a folder, each once: links to folders are not followed."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__", "build")))
        yield from (Path(path) / name for name in sorted(files) if name.endswith(".py"))


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


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    seen = reach(name)
    if inside(name, "gnnc.ir"):
        assert {n for n in seen if not inside(n, "gnnc.ir")} <= LEAVES
    elif name in LEAVES:
        assert seen <= LEAVES
    elif inside(name, "gnnc.passes"):
        assert not {n for n in seen if inside(n, "gnnc.runtime")}
    elif inside(name, "gnnc.runtime"):
        assert not {n for n in seen if inside(n, "gnnc.passes")}
    elif name not in API and not any(inside(name, package) for package in DRIVERS):
        sides = {side for side in ("gnnc.passes", "gnnc.runtime") for n in imports(name) if inside(n, side)}
        assert len(sides) < 2, "only gnnc.api sees both"


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


def test_the_headings_of_how_it_works_follow_the_pipeline() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    headings = " ".join(re.findall(r"^## (.*)$", text, re.M))
    assert re.findall(r"`(\w+)`", headings) == [step.name for step in PIPELINE]
