"""No layer stores a row of features for every edge on CUDA, other than the ones that are listed here."""

import re
import sys
from pathlib import Path

import pytest
import torch
from edge_layers import EDGE_LAYERS, arguments_of
from torch import Tensor, nn

import gnnc
from gnnc.runtime.cuda.driver.kernel_set import KernelSet

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import layer_zoo

pytestmark = pytest.mark.usefixtures("compiler")
NODES, EDGES = 40, 300
BYTES = 2 * layer_zoo.WIDTH
"""Bytes of a row of 16 bits as wide as the layers."""
_STATES = "the edge states of the first block, which the bodies of the second read when all nodes are done"
_MESSAGE = "the message, which its sum and the network that moves the positions read in kernels of their own"
KNOWN = {
    "EGNN": _MESSAGE,
    "edge: EGNN": _MESSAGE,
    "mesh network": _STATES,
    "edge: MeshGraphNet": _STATES,
    "edge: GVP": "a weight multiplies several rows at every edge: its bodies run in PyTorch's ops",
    "edge: CompGCN": "bodies look up rows of a weight by the type of the edge: they run in PyTorch's ops",
}
"""Layers of the benchmarks, or of ``edge_layers`` (``edge: NAME``), that still store such rows, and why."""
_VIEWS = ("view", "unsqueeze", "squeeze", "expand", "slice", "select", "alias")


def _layers() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Return a layer and its arguments, by name."""
    torch.manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES))
    found: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {}
    for name, layer in layer_zoo.LAYERS.items():
        x, extra = layer_zoo.arguments(layer.takes, edge_index, NODES)
        found[name] = layer.make().eval(), (x, *extra)
    for name, layer in EDGE_LAYERS.items():
        found[f"edge: {name}"] = layer.build().eval(), tuple(arguments_of(layer, NODES, EDGES).values())
    return found


def _stored_bytes(program: str) -> list[int]:
    """Return the bytes an edge of each value of a printed program that is stored for every edge, and wide."""
    compute, stored, found = program.partition("def compute(")[2], None, list[int]()
    for line in compute.splitlines():
        inside = line.startswith(" " * 8)
        if line.lstrip().startswith("with fused."):
            stored = {name.strip() for name in line.partition("stores ")[2].split(",")}
        value = re.match(r" +(\w+) = (\S*?)\(.*# [fiu](\d+)\[E((?:, \d+)+)\]", line)
        if value is None or (inside and stored is not None and value[1] not in stored):
            continue
        columns = torch.Size(int(size) for size in re.findall(r"\d+", value[4])).numel()
        is_view = value[2].split(".")[1:2] and value[2].split(".")[1] in _VIEWS
        if columns * int(value[3]) // 8 >= BYTES and not is_view:
            found.append(columns * int(value[3]) // 8)
    return found


@pytest.mark.parametrize("name", _layers())
def test_a_layer_stores_no_row_of_features_for_every_edge(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSet, "compile", lambda self, architecture: {})  # its text is enough
    model, given = _layers()[name]
    compiled = gnnc.compile(model, precision="fp16", backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*given)
    text = compiled.explain()
    stored = _stored_bytes(str(compiled))
    for count in stored:
        assert f"stores {count} bytes for every edge" in text, "explain() names what is stored"
    assert bool(stored or "runs on matrices of all edges" in text) == (name in KNOWN), compiled
