"""Calls of every layer can be replayed as CUDA graphs, in inference and training, other than those listed."""

import pytest
import torch
from layer_zoo import LAYERS, arguments
from shared_captures import shared_captures
from slow import slow_but
from torch import Tensor, nn

import gnnc
from gnnc.runtime.cuda.driver.kernel_set import KernelSet

pytestmark = pytest.mark.usefixtures("compiler")
NODES, EDGES = 40, 300
FIRST = ["PNA", "mesh network", "EdgeConv", "MF"]
CASES = slow_but(FIRST, list(LAYERS))
_STACKS = "a weight a stack multiplies [nodes, stacks, features], in torch.bmm"
_DEGREES = "a weight a degree multiplies the rows of that degree, which index_copy and index_add move"
_LOOPS = "weights of self loops are written into learned weights of edges by a mask"
IN_TRAINING = {"ARMA": _STACKS, "MF": _DEGREES, "PDN": _LOOPS}
"""Layers whose training steps run an op in PyTorch between kernels, and which."""
IN_INFERENCE = {"ARMA": _STACKS}
"""The same of inference."""


class Trained(nn.Module):
    """Linear layer before a layer, whose rows then need gradients."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(width, width), layer

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        return self.layer(self.first(x), *extra)


def explained(name: str, *, training: bool) -> list[str]:
    """Return what ``explain()`` says of a layer in each precision, for a device that need not be here."""
    torch.manual_seed(0)
    x, extra = arguments(LAYERS[name].takes, torch.randint(NODES, (2, EDGES)), NODES)
    layer = LAYERS[name].make()
    model = Trained(layer, x.shape[1]).train() if training else layer.eval()
    texts = []
    with shared_captures():
        for precision in ("fp16", "int8", "fp32"):
            compiled = gnnc.compile(model, precision=precision, backend="cuda-offline:sm_90")
            with torch.set_grad_enabled(training), pytest.raises(gnnc.BackendError, match="not here"):
                compiled(x, *extra)
            texts.append(compiled.explain())
    return texts


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a program is enough."""
    monkeypatch.setattr(KernelSet, "compile", lambda self, architecture: {})


@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    for text in explained(name, training=False):
        assert ("launched one by one" in text) == (name in IN_INFERENCE), text
        assert ("each call can be replayed as one CUDA graph" in text) != (name in IN_INFERENCE)


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    for text in explained(name, training=True):
        assert ("launched one by one" in text) == (name in IN_TRAINING), text
        for part in ("forward", "backward"):
            assert name in IN_TRAINING or f"{part}: each call can be replayed as one CUDA graph" in text, text
