"""Fixtures of the whole suite: goldens, graphs, the emulated GPU, and memory that is never zero by luck."""

import difflib
import gc
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import graphs
import pytest
import torch
from cpu_times import CpuTimes
from cuda_families import emulated, emulated_first
from fixed_rates import FIXED
from hypothesis import settings
from slow import mark_after_first
from torch.utils._python_dispatch import _get_current_dispatch_mode

import gnnc
from gnnc import environment
from gnnc.calibrate import calibration
from gnnc.cost.model import Rates
from gnnc.runtime import cuda
from gnnc.runtime.backend import get_backend
from gnnc.runtime.cuda.driver import nvrtc

TESTS = Path(__file__).parent
# `make test` draws few random programs, `make test-all` more, by --hypothesis-profile all.
settings.register_profile("all", max_examples=100)
settings.register_profile("few", max_examples=25)
settings.load_profile("few")
GOLDEN = TESTS / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the texts under tests/golden")
    parser.addoption("--emulate", action="store_true", help="run kernels' tests that need a GPU on the CPU")
    parser.addoption("--kernels", type=Path, help="the folder of compiled CUDA kernels; else one of this run")
    parser.addoption("--torch-cuda", help="the CUDA that torch is taken to be built for, such as 12.6")
    parser.addoption("--cpu-times", type=Path, help="the JSON file for the processor time of every test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and os.environ.get("CI"):
        raise pytest.UsageError("--update-golden is refused where CI is set: a person reads them first")
    if named := config.getoption("--torch-cuda"):
        torch.version.cuda = named
    if file := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(None if "PYTEST_XDIST_WORKER" in os.environ else file))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Mark cases as slow; skip tests that need a device where there is none and no emulator for them."""
    mark_after_first(items)
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


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what imports made, which are nearly all objects of a process."""
    gc.collect()
    gc.freeze()


def _golden_path(node: pytest.Item, part: str) -> Path:
    """tests/passes/test_fuse.py::test_fires[gcn] -> golden/passes/fuse/fires-gcn.txt."""
    module = node.path.relative_to(TESTS).with_suffix("")
    name = "-".join(filter(None, [node.name.removeprefix("test_"), part]))
    name = re.sub(r"[^\w.]+", "-", name).strip("-")
    return GOLDEN / module.parent / module.name.removeprefix("test_") / f"{name}.txt"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares a text with the file named after the test; `part` tells several apart."""
    update = request.config.getoption("--update-golden")

    def check(text: str, part: str = "") -> None:
        path = _golden_path(request.node, part)
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        where = path.relative_to(TESTS.parent)
        assert path.exists(), f"{where} is missing: run `pytest --update-golden`, then read it"
        expected = path.read_text()
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), str(where), "now", lineterm=""
            )
            pytest.fail("\n".join(lines), pytrace=False)

    return check


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the larger real graphs, which the repository does not hold."""
    folder = graphs.data_folder()
    if folder is None:
        pytest.skip("no ../shared/data beside the repository, and GNNC_DATA names no other folder")
    return folder


@pytest.fixture(scope="session")
def cora() -> dict[str, torch.Tensor | int]:
    """Cora: x, edge_index, y, masks and sizes. Shared by the tests, so do not write into it."""
    return graphs.load("cora")


@pytest.fixture(scope="session")
def compiled_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of CUDA kernels that tests compile, shared by the processes of this run."""
    if named := request.config.getoption("--kernels"):
        return named
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"


@cache
def why_no_compiler() -> str | None:
    """Return the reason why programs for CUDA cannot be compiled, or None; asks for no device."""
    try:
        cuda.load_compiler()
    except gnnc.BackendError as error:
        return f"CUDA programs cannot be compiled here: {error}"
    return None


@pytest.fixture
def compiler() -> None:
    """Skip the test where programs for CUDA cannot be compiled."""
    if reason := why_no_compiler():
        pytest.skip(reason)


@pytest.fixture
def emulator(compiler: None) -> Iterator[None]:
    """Run the test on the emulated GPU."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator of CUDA kernels needs g++")
    from emulator import emulated

    with emulated():
        yield


@pytest.fixture(autouse=True)
def no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled_kernels: Path) -> None:
    """Neither read nor replace what was measured or compiled on this machine before.

    Rates are each test's own. Kernels are those of all tests, but where a test names a cache.
    """
    cache = tmp_path / "gnnc-cache"
    monkeypatch.setenv(environment.CACHE, str(cache))
    monkeypatch.setattr(calibration, "_known", {})

    def folder() -> Path | None:
        named = environment.cache_folder()
        return compiled_kernels if named == cache else named

    monkeypatch.setattr(nvrtc, "cache_folder", folder)


@pytest.fixture
def rates(no_rates: None) -> Rates:
    """Rates of a fixed machine, so that choices do not depend on this one."""
    for name in ("cpu", "reference"):
        calibration._known[calibration._key(get_backend(name))] = FIXED
    return FIXED


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    # Under a dispatch mode (fake tensors, tracing) a fill would become part of the traced graph.
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    if traced or type(tensor) is not torch.Tensor or tensor.device.type == "meta":
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(torch.nan)
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what torch.empty and its kin return, so that memory never written shows in the result."""

    def wrap(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: _poison(empty(*args, **kwargs))

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
        (torch._C._dynamo.guards, ("_empty_strided_cuda",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    yield
