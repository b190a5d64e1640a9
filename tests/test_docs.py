"""The code of the how-to pages runs unchanged, and decisions open with the decision."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import complaint, first_sentence

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.first(1)
@pytest.mark.parametrize("page", ["add-an-op.md", "add-a-pass.md", "add-a-backend.md"])
def test_page_runs(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    # A process of its own: the op of the page must not stay in the registry that other tests walk.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_the_first_example_runs_as_pasted(page: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert example is not None and "gnnc.compile(" in example[1]
    done = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quantized 3 of 4 ops" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["auto.md", "concepts.md", "how-it-works.md", "training.md"])
def test_the_first_example_of_a_page_runs_as_pasted(page: str, tmp_path: Path) -> None:
    example = re.search(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert example is not None and "gnnc." in example[1]
    path = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", example[1]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_training_example_runs_as_pasted() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    example = re.search(r"^## Training\n.*?^```python\n(.*?)^```", readme, re.M | re.S)
    assert example is not None and "loss.backward()" in example[1]
    done = subprocess.run([sys.executable, "-c", example[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Saved for the backward graph" in done.stdout


DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem[:3])
def test_a_decision_opens_with_one_sentence_and_is_indexed(page: Path) -> None:
    title, opening, *_ = (" ".join(part.split()) for part in page.read_text().split("\n\n"))
    assert opening.endswith(".") and first_sentence(opening) == opening
    assert complaint(opening, needs_verb=True) is None
    assert title.startswith(f"# {page.stem[:3]}: ")
    index = (DOCS / "decisions" / "README.md").read_text()
    assert f"- [{title.removeprefix('# ')}]({page.name})" in index
