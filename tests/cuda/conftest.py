import pytest
import torch

import gnnc
from gnnc.runtime import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a device are skipped, by name, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def compiler() -> None:
    """Skip where programs for CUDA cannot be compiled, which needs no device."""
    try:
        cuda.load_compiler()
    except gnnc.BackendError as error:
        pytest.skip(f"CUDA programs cannot be compiled here: {error}")


@pytest.fixture(autouse=True)
def used_memory(request: pytest.FixtureRequest) -> None:
    """Leave NaN in the memory that the next tensors get: whoever reads what nobody wrote shows."""
    if request.node.get_closest_marker("cuda") and torch.cuda.is_available():
        for size in (2**16, 2**22):
            blocks = [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]
            del blocks
