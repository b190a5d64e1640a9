import shutil
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from cuda_families import emulated, emulated_first

import gnnc
from gnnc.runtime import cuda


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Tests that need a device run on the emulator where there is none, or are skipped, by name."""
    if torch.cuda.is_available():
        return
    of_every_run, first = emulated(), emulated_first()
    everything = config.getoption("--emulate")
    for item in items:
        if not item.get_closest_marker("cuda"):
            continue
        if everything or item.nodeid in of_every_run:
            item.fixturenames.insert(0, "emulator")
            if not everything and item.nodeid not in first:
                item.add_marker(pytest.mark.slow)
        else:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@cache
def why_no_compiler() -> str | None:
    """Say why programs for CUDA cannot be compiled, which needs no device."""
    try:
        cuda.load_compiler()
    except gnnc.BackendError as error:
        return f"CUDA programs cannot be compiled here: {error}"
    return None


@pytest.fixture
def compiler() -> None:
    """Skip where programs for CUDA cannot be compiled."""
    if reason := why_no_compiler():
        pytest.skip(reason)


@pytest.fixture
def emulator(compiler: None) -> Iterator[None]:
    """The emulated device."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator of CUDA kernels needs g++")
    from emulator import emulated

    with emulated():
        yield


@pytest.fixture(autouse=True)
def used_memory(request: pytest.FixtureRequest) -> None:
    """Leave NaN in the memory that the next tensors get: whoever reads what nobody wrote shows."""
    if request.node.get_closest_marker("cuda") and torch.cuda.is_available():
        for size in (2**16, 2**22):
            blocks = [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]
            del blocks
