"""``gnnc.pack``, and feature matrices that arrive in int8 or FP8, against eager on the dequantized matrix."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow_but
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import gnnc
from gnnc.ir.nodes import op_name
from gnnc.quantized_tensor import QuantizedTensor, pack

FP8 = torch.float8_e4m3fn
CONVOLUTIONS = {
    "gcn": lambda width: pyg.GCNConv(width, 32),
    "sage": lambda width: pyg.SAGEConv(width, 32),
    "gin": lambda width: pyg.GINConv(nn.Linear(width, 32)),
    "gat": lambda width: pyg.GATConv(width, 8, heads=4),
    "max": lambda width: pyg.SAGEConv(width, 32, aggr="max"),
}


class Net(nn.Module):
    """Two convolutions with a ReLU between, and perhaps dropout of the features."""

    def __init__(self, name: str = "gcn", width: int = 47, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.dropout = CONVOLUTIONS[name](width), CONVOLUTIONS[name](32), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.dropout, self.training)
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graph(width: int = 47, nodes: int = 50) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(nodes, width), torch.randint(nodes, (2, 4 * nodes))


def floats(features: Any) -> Tensor:
    return features.dequantize() if isinstance(features, QuantizedTensor) else features.float()


def error(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 4), (0, 3), (4, 0), (2, 1433)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_packed_values_are_half_a_step_off(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype) * 3
    packed = pack(x)
    assert packed.shape == x.shape and packed.bits == 8 and len(packed) == shape[0]
    assert packed.nbytes == x.numel() + 4 * shape[0]
    step = (packed.scale / 2).reshape(-1, *[1] * (x.dim() - 1))
    assert ((packed.dequantize() - x.float()).abs() <= step * 1.0001).all()


def test_rows_of_a_mini_batch_are_those_of_the_whole() -> None:
    x, _ = graph()
    packed = pack(x)
    for rows in (slice(3, 9), torch.tensor([4, 1, 1]), x[:, 0] > 0):
        torch.testing.assert_close(packed[rows].dequantize(), packed.dequantize()[rows], rtol=0, atol=0)
        torch.testing.assert_close(packed[rows].values, pack(x[rows]).values, rtol=0, atol=0)


def test_a_file_of_packed_features_is_read_without_pickled_code(tmp_path: Path) -> None:
    packed = pack(graph()[0])
    torch.save({"x": packed, "y": 3}, tmp_path / "features.pt")
    read = torch.load(tmp_path / "features.pt", weights_only=True)["x"]
    assert isinstance(read, QuantizedTensor)
    assert torch.equal(read.values, packed.values) and torch.equal(read.scale, packed.scale)
    copied = copy.deepcopy(packed)
    assert copied.values is not packed.values and torch.equal(copied.values, packed.values)


@pytest.mark.parametrize("bits", [1, 2, 4, 16, True, "8", None])
def test_other_bits_are_refused_with_those_that_there_are(bits: Any) -> None:
    with pytest.raises(gnnc.UnsupportedError, match=r"bits=.*use bits=8"):
        pack(graph()[0], bits)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3), "at least 2 dimensions"),
        (torch.ones(3, 2, dtype=torch.int64), "floating"),
        ([[1.0, 2.0]], "list"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
    ],
)
def test_what_is_no_float_matrix_is_not_packed(x: Any, message: str) -> None:
    with pytest.raises(gnnc.InputError, match=message):
        pack(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_packed(value: float) -> None:
    with pytest.raises(gnnc.PrecisionError, match="NaN or infinite"):
        pack(torch.tensor([[1.0, value]]))


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        (torch.ones(3, 2), torch.ones(3), "values must be int8"),
        (torch.ones(3, dtype=torch.int8), torch.ones(3), "at least 2 dimensions"),
        (torch.ones(3, 2, dtype=torch.int8), torch.ones(2), "one for each row"),
        (torch.ones(3, 2, dtype=torch.int8), torch.ones(()), "one for each row"),
        (torch.ones(3, 2, dtype=torch.int8), torch.ones(3).double(), "scale must be float32"),
        (torch.ones(3, 2, dtype=torch.int8), torch.ones(3, requires_grad=True), "requires a gradient"),
        (torch.ones(3, 2, dtype=torch.int8), torch.ones(3, device="meta"), "one device"),
        (None, torch.ones(3), "got NoneType"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values: Any, scale: Any, message: str) -> None:
    with pytest.raises(gnnc.InputError, match=message):
        QuantizedTensor(values, scale)


@pytest.mark.parametrize("kind", ["packed", "fp8"])
@pytest.mark.parametrize("name", slow_but(("gcn", "sage"), list(CONVOLUTIONS)))
def test_inference_and_training_are_those_of_the_dequantized_matrix(name: str, kind: str) -> None:
    x, edge_index = graph()
    features = pack(x) if kind == "packed" else x.to(FP8)
    model = Net(name).train()
    twin = copy.deepcopy(model)
    compiled = gnnc.compile(twin, "int8")
    found, right = compiled(features, edge_index), model(floats(features), edge_index)
    for result in (found, right):
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    assert error(found, right) < 0.03
    grads = [
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (twin, model)
    ]
    assert torch.cosine_similarity(*grads, dim=0) > 0.995
    with torch.no_grad():
        assert error(compiled(features, edge_index), right) < 0.03


def program_of(compiled: gnnc.CompiledModel) -> Any:
    """Return the program of the last call."""
    assert compiled._dispatch.last is not None
    return compiled._dispatch.last.executable


def reference_ops(compiled: gnnc.CompiledModel) -> set[str]:
    """Return the nodes of the last training program that no kernel of the backend computes."""
    program = program_of(compiled)
    sides = (program.forward, program.backward)
    return {name for side in sides for name, kernel in side.kernels if kernel == "reference"}


@pytest.mark.parametrize("kind", ["packed", "fp8"])
def test_the_gradient_of_the_first_weight_is_a_kernel_of_the_cpu(kind: str) -> None:
    x, edge_index = graph()
    compiled = gnnc.compile(Net("sage").train(), "int8", backend="cpu")
    compiled(pack(x) if kind == "packed" else x.to(FP8), edge_index)
    assert all(name.startswith("sum") for name in reference_ops(compiled)), "the gradient of a bias"
    kernels = dict(program_of(compiled).backward.kernels)
    assert {kernels["qgemm_tn_default"], kernels["qgemm_tn_default_1"]} == {"gemm_tn"}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("architecture", "reads_fp8"), [("sm_80", False), ("sm_90", True)])
def test_gpus_without_fp8_train_on_features_that_arrive_so(architecture: str, reads_fp8: bool) -> None:
    x, edge_index = graph()
    compiled = gnnc.compile(Net("sage").train(), "int8", backend=f"cuda-offline:{architecture}")
    with pytest.raises(gnnc.BackendError, match="not here"):
        compiled(x.to(FP8), edge_index)
    assert reference_ops(compiled) == ({"ones_default"} if reads_fp8 else set())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["packed", "fp8"])
def test_ops_in_other_precisions_read_fp32_and_explain_says_so(precision: str, kind: str) -> None:
    x, edge_index = graph()
    features = pack(x) if kind == "packed" else x.to(FP8)
    model = Net().eval()
    compiled = gnnc.compile(model, precision)
    with torch.no_grad():
        found, right = compiled(features, edge_index), model(floats(features), edge_index)
    assert error(found, right) < (1e-5 if precision == "fp32" else 0.02)
    dtype = "int8" if kind == "packed" else "float8_e4m3fn"
    assert f"x arrives in {dtype} and is converted to FP32 at each call" in compiled.explain()


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_int8_rows_are_read_as_they_are(name: str) -> None:
    x, edge_index = graph()
    compiled = gnnc.compile(Net(name).eval(), "int8")
    with torch.no_grad():
        compiled(pack(x), edge_index)
    quantized = dict(compiled.stages)["cache"]
    values = next(node for node in quantized.graph.nodes if node.name == "x_values")
    read = {op_name(user) for user in values.users if user.users}
    assert read & {"qgemm", "qspmm"}
    assert name == "gin" or read <= {"qgemm", "qspmm", "sym_size"}


@pytest.mark.parametrize("width", [1, 16, 47, 602, 1433])
def test_every_width_and_stride(width: int) -> None:
    x, edge_index = graph(width)
    model = Net("sage", width).eval()
    compiled = gnnc.compile(model, "int8")
    packed = pack(x)
    strided = QuantizedTensor(packed.values.t().contiguous().t(), packed.scale.repeat(2)[: len(packed)])
    with torch.no_grad():
        right = model(packed.dequantize(), edge_index)
        found = compiled(packed, edge_index)
        assert error(found, right) < 0.03
        torch.testing.assert_close(compiled(strided, edge_index), found, rtol=0, atol=0)
        rows = packed[: len(packed) // 2]
        few = edge_index % len(rows)
        assert error(compiled(rows, few), model(rows.dequantize(), few)) < 0.03


class OfData(nn.Module):
    """A network that takes a PyG graph object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net("sage")

    def forward(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index)


def test_features_in_a_graph_object_and_by_key() -> None:
    x, edge_index = graph()
    packed, model = pack(x), OfData().eval()
    with torch.no_grad():
        right = model.net(packed.dequantize(), edge_index)
        assert error(gnnc.compile(model, "int8")(Data(x=packed, edge_index=edge_index)), right) < 0.03
        assert error(gnnc.compile(model.net, "int8")(edge_index=edge_index, x=packed), right) < 0.03


def test_floats_and_packed_features_are_calls_of_two_programs() -> None:
    x, edge_index = graph()
    compiled, packed = gnnc.compile(Net("sage").eval(), "int8"), pack(x)
    with torch.no_grad():
        first, second = compiled(x, edge_index), compiled(packed, edge_index)
        assert len(compiled._dispatch.captures) == 2
        torch.testing.assert_close(compiled(x, edge_index), first, rtol=0, atol=0)
        torch.testing.assert_close(compiled(packed, edge_index), second, rtol=0, atol=0)
        assert len(compiled._dispatch.captures) == 2
    assert error(second, first) < 0.03


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16])
def test_other_narrow_floats_are_refused_with_what_there_is(dtype: torch.dtype) -> None:
    x, edge_index = graph()
    with pytest.raises(gnnc.InputError, match=r"float8_e4m3fn or a gnnc\.QuantizedTensor"):
        gnnc.compile(Net().eval(), "int8")(x.to(dtype), edge_index)
