"""The CPU kernels compute what the reference computes, in every precision, on every kind of model."""

import copy
from typing import Any

import pytest
import torch
from backend_models import MODELS, given
from shared_captures import shared_captures
from slow import slow_after
from torch import nn

import gnnc
from gnnc.runtime import backend as backends
from gnnc.runtime import registry
from gnnc.runtime.backend import Backend, backend_names, get_backend, register_backend
from gnnc.runtime.registry import Decline
from gnnc.target import Target

PRECISIONS = ("int8", "fp32", "bf16")
GIVEN = given()
"""Arguments of a call: the same tensors in every test, so that a trace is shared."""


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model, traced once for all tests that call it with `GIVEN`."""
    torch.manual_seed(0)
    with shared_captures():
        yield MODELS[request.param]().eval()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("precision", slow_after(1, PRECISIONS))
def test_cpu_equals_reference(model, precision):
    eager = model(*GIVEN)
    results = {}
    for backend in ("cpu", "reference"):
        compiled = gnnc.compile(model, precision, backend=backend)
        results[backend] = compiled(*GIVEN)
    assert relative(results["reference"], eager) < {"fp32": 1e-5, "bf16": 0.02, "int8": 0.05}[precision]
    assert (
        relative(results["cpu"], results["reference"])
        < {"fp32": 1e-5, "bf16": 0.005, "int8": 0.01}[precision]
    )


@pytest.mark.first(1)
@torch.no_grad()
def test_static_scales_on_the_cpu(model):
    compiled = gnnc.compile(model, "int8", backend="cpu", example_inputs=GIVEN)
    assert relative(compiled(*GIVEN), model(*GIVEN)) < 0.05


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_the_four_models_run_on_kernels_of_our_own(name):
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS[name]().eval(), "int8", backend="cpu")
    compiled(*given())
    fallbacks = [
        node
        for node in compiled.graph_module.graph.nodes
        if node.meta.get("kernel") == "reference" and node.meta["val"].dim() > 1
    ]
    assert not fallbacks, compiled.explain()


class Declines:
    """A kernel that is asked first and takes nothing."""

    @staticmethod
    def plan(node):
        return Decline("it is Sunday")

    @staticmethod
    def emit(plan, node, emitter):
        raise AssertionError("a kernel that declined was chosen")


@pytest.fixture
def kernels(monkeypatch):
    get_backend("cpu")
    copied = {name: list(entries) for name, entries in registry._KERNELS.items()}
    monkeypatch.setattr(registry, "_KERNELS", copied)
    return copied


@torch.no_grad()
def test_explain_names_the_kernels_that_declined(kernels):
    registry.kernel("fused:gemm", backend="cpu", name="picky", priority=99, elements=None)(Declines)
    compiled = gnnc.compile(MODELS["GCN"]().eval(), "int8", backend="cpu")
    compiled(*given())
    assert "kernel picky declined: it is Sunday" in compiled.explain()


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("absent", ["gemm", "spmm", "attention", "map"])
def test_without_a_kernel_its_submodules_are_taken_apart(kernels, absent):
    kernels["cpu"] = [entry for entry in kernels["cpu"] if entry.name != absent]
    torch.manual_seed(0)
    model = MODELS["GAT" if absent == "attention" else "GCN"]().eval()
    compiled = gnnc.compile(model, "int8", backend="cpu", example_inputs=given())
    assert relative(compiled(*given()), model(*given())) < 0.05
    if absent != "map":
        assert "taken apart, no kernel runs it as a whole" in compiled.explain()


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize(("picky", "reason"), [(False, "whole\n"), (True, "whole (picky: it is Sunday)\n")])
def test_a_submodule_is_taken_apart_with_the_reasons_that_there_are(kernels, picky, reason):
    kernels["cpu"] = [
        entry for entry in kernels["cpu"] if not any(kind.startswith("fused:") for kind in entry.kinds)
    ]
    if picky:
        registry.kernel("fused:gemm", backend="cpu", name="picky", elements=None)(Declines)
    compiled = gnnc.compile(MODELS["GCN"]().eval(), "int8", backend="cpu", example_inputs=given())
    assert f"taken apart, no kernel runs it as a {reason}" in compiled.explain()
    assert "()" not in compiled.explain()


@torch.no_grad()
def test_memory_is_flat_over_mini_batches():
    torch.manual_seed(0)
    compiled = gnnc.compile(MODELS["GAT"]().eval(), "int8", backend="cpu")
    compiled(*given(300, 2000))
    program, held = compiled._dispatch.last, set()
    for i in range(40):
        compiled(*given(100 + i % 7, 400 + i))
        held.add((program.executable.arena_bytes, len(program.runner.cache) <= 3))
    assert compiled._dispatch.last is program and len(held) == 1
    compiled.clear_cache()
    assert program.executable.arena_bytes == 0 and len(program.runner.cache) == 0


class Halves(nn.Module):
    """Row-local ops that begin with rows of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.to(self.dtype).float()) * 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(dtype, backend):
    model, x = Halves(dtype), given()[0]
    assert torch.equal(gnnc.compile(model, "fp32", backend=backend)(x), model(x))


@pytest.fixture
def toy(monkeypatch):
    """The name of a backend without kernels of its own, registered for one test."""
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))

    def create(device):
        return Backend(
            target=Target("toy"),
            chain=("reference",),
            device_types=frozenset({"cpu"}),
        )

    get_backend("reference")
    register_backend("toy", create)
    return "toy"


@torch.no_grad()
def test_a_registered_backend_compiles_and_survives_a_copy(toy):
    torch.manual_seed(0)
    model, arguments = MODELS["GCN"]().eval(), given()
    compiled = gnnc.compile(model, "fp32", backend=toy)
    assert relative(compiled(*arguments), model(*arguments)) < 1e-5
    assert toy in backend_names()
    assert copy.deepcopy(get_backend(toy)).name == toy


def test_a_backend_name_is_given_once(toy):
    for name in (toy, "cpu", "auto", "toy:fast"):
        with pytest.raises(ValueError, match="choose another name"):
            register_backend(name, lambda device: get_backend("reference"))


def test_only_backends_with_options_take_one(toy):
    assert get_backend("cuda-offline:sm_90").name == "cuda-offline:sm_90"
    for name in ("toy:fast", "cpu:sm_90", "auto:sm_90"):
        with pytest.raises(gnnc.BackendError, match=f"unknown backend '{name}'; choose one of 'auto', 'cpu'"):
            get_backend(name)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    "name",
    [
        "compute_90", "banana", "90", "sm_", "sm_9", "sm_90ab", "sm_90 ", "SM_90", "sm_٩٠", "sm_9.0",
        "sm_90\n", "sm_80a", "sm_90b", "sm_90f",
    ],
)  # fmt: skip
def test_what_names_no_architecture_is_refused_with_the_form(name: str) -> None:
    with pytest.raises(gnnc.BackendError, match="names no architecture: write sm_ .* 'cuda-offline:sm_90'"):
        get_backend(f"cuda-offline:{name}")


@pytest.mark.usefixtures("compiler")
def test_architectures_with_a_letter_are_those_of_their_number() -> None:
    for name, has_fp8 in (("sm_80", False), ("sm_89", True), ("sm_90a", True), ("sm_100f", True)):
        backend = get_backend(f"cuda-offline:{name}")
        assert backend.name == f"cuda-offline:{name}" and ("fp8" in backend.target.precisions) == has_fp8
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    compiled = gnnc.compile(model, "bf16", backend="cuda-offline:sm_90a")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(torch.randn(5, 8))
    assert compiled._dispatch.last is not None
    program: Any = compiled._dispatch.last.executable
    assert program.code["sm_90a"] and all(program.code["sm_90a"].values())


def test_auto_takes_the_backend_that_is_named_like_the_device(toy, monkeypatch):
    assert get_backend("auto").name == get_backend("auto", torch.device("meta")).name == "cpu"
    monkeypatch.setitem(backends._REGISTRY, "meta", backends._REGISTRY[toy])
    assert get_backend("auto", torch.device("meta")).name == toy


def test_a_call_on_a_device_that_a_backend_does_not_run_on_is_refused(toy):
    class Relu(nn.Module):
        def forward(self, x):
            return x.relu()

    compiled = gnnc.compile(Relu(), "fp32", backend=toy)
    with pytest.raises(gnnc.InputError, match="backend 'toy' does not run: move both with .to\\('cpu'\\)"):
        compiled(torch.empty(3, 2, device="meta"))
