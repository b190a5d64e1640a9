"""Training on a CUDA device: gradients against float64 autograd on the CPU, and forms of calls."""

import copy
from typing import Any

import models
import pytest
import torch
from cuda_cases import on_device
from torch import Tensor, nn
from zoo import ZOO, Arguments, prepared

import gnnc
from gnnc.passes.pipeline import PIPELINE
from gnnc.passes.quantize import Quantize
from gnnc.runtime.cuda.driver.nvrtc import resources_of
from gnnc.torch_private import pytree

FAST = ("gcn", "gat", "gin", "sage-mean", "gatv2", "transformer")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ZOO]
Gradients = dict[str, Tensor | None]


def case(name: str) -> tuple[nn.Module, Arguments]:
    """Return a model in train(), and arguments with a directed graph of repeated edges and lone nodes.

    A model without parameters gets one, a factor of its features.
    """
    model = prepared(ZOO[name]).requires_grad_(True).train()
    trained = model if any(True for _ in model.parameters()) else Scaled(model)
    return trained, ZOO[name].arguments(40, 90, 0)


class Scaled(nn.Module):
    """A model without parameters on features that are multiplied by one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        """Multiply the features, and call the model."""
        return self.inner(x * self.factor, *rest, **named)


def loss_of(outputs: Any) -> Tensor:
    """Return a fixed projection of all outputs."""
    found = [out for out in pytree.tree_leaves(outputs) if isinstance(out, Tensor) and out.requires_grad]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(out.shape, generator=generator).to(out) for out in found]
    return torch.stack([(out * w).sum() for out, w in zip(found, weights, strict=True)]).sum()


def gradients_of(model: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.double().cpu() for n, p in model.named_parameters()}


def exact_gradients(model: nn.Module, arguments: Arguments, dtype: torch.dtype) -> Gradients:
    """Return the gradients of eager PyTorch in a type, on the CPU."""
    model = copy.deepcopy(model).to(dtype)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(cast, arguments)
    loss_of(model(*args, **kwargs)).backward()
    return gradients_of(model)


def rms(value: Tensor) -> float:
    return float(value.norm()) / max(value.numel(), 1) ** 0.5


def assert_near(found: Gradients, right: Gradients, own: Gradients) -> None:
    """Check gradients against those in float64, with what eager's own in float32 leave as allowance."""
    largest = max((rms(grad) for grad in right.values() if grad is not None), default=0.0)
    for path, grad in right.items():
        got, eager = found[path], own[path]
        assert (got is None) == (grad is None), path
        if got is not None and grad is not None and eager is not None:
            scale = max(rms(grad), 0.01 * largest, 1e-30)
            assert rms(got - grad) / scale <= 2 * rms(eager - grad) / scale + 3e-6, path


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_to_float64_as_those_of_eager(name: str) -> None:
    model, arguments = case(name)
    right, own = (exact_gradients(model, arguments, dtype) for dtype in (torch.float64, torch.float32))
    compiled = gnnc.compile(model.cuda(), "fp32")
    args, kwargs = on_device(arguments)
    loss_of(compiled(*args, **kwargs)).backward()
    assert "on backend cuda" in str(compiled)
    assert_near(gradients_of(model), right, own)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gcn", "gat", "gin", "sage-mean", "gatv2", "transformer"])
def test_gradients_in_16_bits_point_where_those_of_fp32_do(name: str, precision: str) -> None:
    model, arguments = case(name)
    right = exact_gradients(model, arguments, torch.float32)
    compiled = gnnc.compile(model.cuda(), precision)
    args, kwargs = on_device(arguments)
    loss_of(compiled(*args, **kwargs)).backward()
    found = gradients_of(model)
    flat = [
        torch.cat([grad.flatten() for grad in side.values() if grad is not None]) for side in (found, right)
    ]
    assert torch.cosine_similarity(*flat, dim=0) >= 0.995


class Dropped(nn.Module):
    """A layer with dropout before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = prepared(ZOO["gcn"]).requires_grad_(True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Drop, compute, drop."""
        x = nn.functional.dropout(x, 0.5, self.training)
        return nn.functional.dropout(self.inner(x, edge_index), 0.3, self.training)


@pytest.mark.cuda
def test_dropout_has_the_masks_of_eager_under_one_seed() -> None:
    model = Dropped().train().cuda()
    eager = copy.deepcopy(model)
    args, _ = on_device(ZOO["gcn"].arguments(40, 90, 0))
    compiled = gnnc.compile(model, "fp32")
    compiled(*args)
    for each in (eager, compiled):
        torch.manual_seed(3)
        loss_of(each(*args)).backward()
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_forwards_before_their_backwards_and_a_graph_that_is_kept(precision: str) -> None:
    """Saved values belong to their call: later calls, replayed as CUDA graphs too, do not write them."""
    model, _ = case("gcn")
    compiled = gnnc.compile(model.cuda(), precision)
    batches = [on_device(ZOO["gcn"].arguments(40, 90, seed))[0] for seed in range(2)]
    single: list[list[Tensor]] = []
    for batch in batches:
        loss = loss_of(compiled(*batch))
        single.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    for _ in range(6):
        losses = [loss_of(compiled(*batch)) for batch in batches]
        for loss, want in reversed(list(zip(losses, single, strict=True))):
            for keep in (True, False):
                found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=keep)
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


@pytest.mark.cuda
def test_batches_of_any_size_are_one_program() -> None:
    model, _ = case("sage-mean")
    compiled = gnnc.compile(model.cuda(), "fp32")
    for number, (nodes, edges) in enumerate([(40, 90), (7, 3), (300, 2000), (5, 0), (40, 91)]):
        arguments = ZOO["sage-mean"].arguments(nodes, edges, number)
        on_cpu = copy.deepcopy(model).cpu()
        right, own = (exact_gradients(on_cpu, arguments, dtype) for dtype in (torch.float64, torch.float32))
        model.zero_grad()
        args, kwargs = on_device(arguments)
        loss_of(compiled(*args, **kwargs)).backward()
        assert_near(gradients_of(model), right, own)


@pytest.mark.cuda
def test_steps_with_a_grad_scaler_have_the_losses_of_eager() -> None:
    losses = []
    for precision in ("fp16", None):
        torch.manual_seed(0)
        model, arguments = case("gcn")
        model.cuda()
        args, kwargs = on_device(arguments)
        run = model if precision is None else gnnc.compile(model, precision)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for _ in range(10):
            optimizer.zero_grad()
            loss = run(*args, **kwargs).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_both_programs_compile_without_a_device(name: str) -> None:
    model, (args, kwargs) = case(name)
    compiled = gnnc.compile(model, "fp16", backend="cuda-offline")
    with pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*args, **kwargs)
    program: Any = compiled._dispatch.last.executable
    for side in (program.forward, program.backward):
        assert set(side.code) == {"sm_80", "sm_90", "sm_100"} and all(side.code.values())
    kernels = {kernel for _, kernel in program.backward.kernels}
    assert {"gemm_tn", "rowmap"} <= kernels
    assert "reference" not in kernels, "PyTorch's ops keep the program out of a CUDA graph"


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("gradients", ["row_pow2", "row", "tensor"])
def test_every_scale_of_gradients_compiles_without_a_device(name: str, gradients: Any) -> None:
    model, x = models.MODELS[name](300, 5).train(), torch.randn(40, 300)  # sums are over rows of 64 columns
    rounding = Quantize(gradients=gradients)
    pipeline = tuple(rounding if step.name == rounding.name else step for step in PIPELINE)
    compiled = gnnc.compile(model, "int8", backend="cuda-offline:sm_90", pipeline=pipeline)
    with pytest.raises(gnnc.BackendError, match="not here"):
        compiled(x, torch.randint(40, (2, 90)))
    program: Any = compiled._dispatch.last.executable
    assert all(side.code["sm_90"] for side in (program.forward, program.backward))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["gcn", pytest.param("gat", marks=pytest.mark.slow)])
def test_a_step_in_int8_converts_nothing_in_ops_of_pytorch(name: str) -> None:
    model, (args, kwargs) = case(name)
    compiled = gnnc.compile(model, "int8", backend="cuda-offline:sm_90")
    with pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*args, **kwargs)
    program: Any = compiled._dispatch.last.executable
    assert "reference" not in {kernel for _, kernel in program.backward.kernels}
    assert "has no quantized form" not in compiled.explain()


@pytest.mark.cuda
@pytest.mark.parametrize("name", FAST)
def test_gradients_in_fp8_are_those_of_the_reference(name: str) -> None:
    model, arguments = case(name)
    found: list[Tensor] = []
    for device, backend in (("cpu", "reference"), ("cuda", "cuda")):
        twin = copy.deepcopy(model).to(device)
        args, kwargs = on_device(arguments) if device == "cuda" else arguments
        loss_of(gnnc.compile(twin, "fp8", backend=backend)(*args, **kwargs)).backward()
        found.append(torch.cat([g.flatten() for g in gradients_of(twin).values() if g is not None]))
    exact = exact_gradients(model, arguments, torch.float64)
    right = torch.cat([g.flatten() for g in exact.values() if g is not None])
    reference, cuda = (torch.cosine_similarity(right, own, dim=0).item() for own in found)
    assert reference > 0.9 and cuda > reference - 0.02, "batch norm over 40 nodes magnifies what fp8 rounds"


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_a_step_in_fp8_compiles_for_gpus_that_have_it(name: str) -> None:
    model, (args, kwargs) = case(name)
    for architecture in ("sm_90", "sm_100"):
        compiled = gnnc.compile(model, "fp8", backend=f"cuda-offline:{architecture}")
        with pytest.raises(gnnc.BackendError, match="not here"):
            compiled(*args, **kwargs)
        program: Any = compiled._dispatch.last.executable
        for side in (program.forward, program.backward):
            left = {name for name, kernel in side.kernels if kernel == "reference"}
            assert all(name.startswith("_to_copy") for name in left), "logits are saved in bf16"
            report = resources_of(side.code[architecture])
            assert not [name for name, kernel in report.items() if kernel.spilled or kernel.stack]
    for backend in ("cuda-offline", "cuda-offline:sm_80", "cpu"):
        with pytest.raises(gnnc.UnsupportedError, match="sm_89 and newer"):
            gnnc.compile(model, "fp8", backend=backend)


@pytest.mark.cuda
def test_a_seed_repeats_the_gradients_in_int8() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    x = torch.randn(50, 20)
    found: list[Gradients] = []
    for device, seed in (("cpu", 3), ("cuda", 3), ("cuda", 3), ("cuda", 4)):
        twin = copy.deepcopy(model).to(device)
        compiled = gnnc.compile(twin, "int8", backend=device)  # "auto" would emulate both
        torch.manual_seed(seed)
        compiled(x.to(device)).square().mean().backward()
        found.append(gradients_of(twin))
    cpu, first, again, other = (torch.cat([g.flatten() for g in f.values() if g is not None]) for f in found)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (cpu - first).norm() < 0.1 * (other - first).norm(), "the CPU draws the bits of the GPU"
