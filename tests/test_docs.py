"""The code of the how-to pages runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["add-an-op.md", "add-a-pass.md", "add-a-backend.md"])
def test_page_runs(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert blocks
    # A process of its own: the op of the page must not stay in the registry that other tests walk.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
