"""A model is ready soon: with no compiled kernels on disk, and in a new process that finds them there."""

from pathlib import Path
from typing import Any

import pytest
from compile_process import in_a_new_process

COLD, WARM = 8.0, 2.0


def seconds(times: dict[str, Any]) -> float:
    """Of the process's own work: on the clock, or where other tests take turns with it, of its threads."""
    return min(times["seconds"], times["cpu seconds"])


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["gcn:int8", "gat:int8", "gcn:fp16", "gat:fp16"])
def test_first_with_an_empty_cache_then_with_the_filled_one(case: str, tmp_path: Path) -> None:
    cold = in_a_new_process(case, tmp_path)
    files = sorted((tmp_path / "cuda").glob("*.cubin"))
    warm = in_a_new_process(case, tmp_path)
    assert files and sorted((tmp_path / "cuda").glob("*.cubin")) == files
    assert cold["kernels"] == warm["kernels"] > 3
    assert seconds(cold) <= COLD, cold
    assert seconds(warm) <= WARM, warm
    assert warm["compile"] < cold["compile"], (cold, warm)
