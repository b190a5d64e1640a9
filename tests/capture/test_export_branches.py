"""Branches of PyG and torch.nn on whether a model is traced, and what each does to a compiled model.

A trace takes the branch that an eager call does not. The tables judge every such branch of the installed
versions; a branch that no table names fails, so that a new release cannot change a model in silence.
"""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor, nn

import gnnc
from gnnc.capture.export import capture

_QUESTION = re.compile(r"(is_(?:\w+_)?(?:compiling|exporting|tracing|scripting|onnx_export|torch_compile))\(")
_SAME = ("is_scripting", "is_tracing", "is_in_onnx_export")
"""Questions that a trace of gnnc answers as eager does: with no."""

EXTENSION = "kernels of torch_scatter, torch_sparse or pyg-lib: a faster way to the same values"
NOT_REACHED = "not reached in the forward of a captured model"
PYG = {
    ("_compile.py", "is_compiling"): (2, "the question itself"),
    ("_onnx.py", "is_in_onnx_export"): (1, "no either way: nothing exports to ONNX"),
    ("edge_index.py", "_spmm"): (3, EXTENSION),
    ("nn/conv/edge_updater.jinja", ""): (2, "skips hooks: gnnc.capture.hooks runs them"),
    ("nn/conv/message_passing.py", "_index_select"): (1, "skips a message about bad ids: calls check ids"),
    ("nn/conv/propagate.jinja", ""): (8, "skips hooks: gnnc.capture.hooks runs them"),
    ("nn/conv/rgcn_conv.py", "forward"): (1, EXTENSION),
    ("nn/conv/rgcn_conv.py", "message"): (1, EXTENSION),
    ("nn/dense/linear.py", "forward"): (3, EXTENSION),
    ("nn/to_hetero_module.py", "dict_forward"): (1, EXTENSION),
    ("utils/_index_sort.py", "index_sort"): (1, EXTENSION + "; neither sort is stable"),
    ("utils/_scatter.py", "scatter"): (4, EXTENSION + "; the other differs in gradients of ties alone"),
    ("utils/_scatter.py", "scatter_argmax"): (1, EXTENSION + "; of ties, another position may win"),
    ("utils/_segment.py", "segment"): (1, EXTENSION),
    ("utils/_softmax.py", "softmax"): (2, EXTENSION),
    ("utils/dropout.py", "dropout_path"): (1, "raises, as without pyg-lib: CaptureError says so"),
    ("warnings.py", "filterwarnings"): (1, "no warnings while a model is traced"),
    ("warnings.py", "warn"): (1, "no warnings while a model is traced"),
}
TORCH = {
    ("attention/flex_attention.py", "_extract_callable_pytree"): (1, NOT_REACHED),
    ("attention/flex_attention.py", "_warn_once"): (1, "no warnings while a model is traced"),
    ("attention/flex_attention.py", "flex_attention"): (1, NOT_REACHED + ": a higher-order op, CaptureError"),
    ("functional.py", "linear_cross_entropy"): (1, "memory of the backward pass"),
    ("functional.py", "pad"): (1, "backward of replicated padding"),
    ("modules/activation.py", "_is_make_fx_tracing"): (1, "the formula in place of the fused attention"),
    ("modules/module.py", "_call_impl"): (1, "hooks with always_call after an error, which ends the capture"),
    ("modules/transformer.py", "forward"): (1, "padding is not zeroed: gnnc.capture.pyg_patches refuses it"),
    ("parallel/distributed.py", "_pre_forward"): (
        1,
        "lazy initialization of DDP's buckets",
    ),
}
"""By file and function, the number of questions, and what a compiled model does for their answer."""


def _questions(package: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Return file, innermost function and name of every question of a package about tracing."""
    root = Path(str(package.__file__)).parent
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _QUESTION.search(text):
            for function, name in _of_tree(ast.parse(text), ""):
                yield path.relative_to(root).as_posix(), function, name
    for path in sorted(root.rglob("*.jinja")):
        for name in _QUESTION.findall(path.read_text(encoding="utf-8")):
            yield path.relative_to(root).as_posix(), "", name


def _of_tree(tree: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if _QUESTION.fullmatch(f"{name}("):
                yield function, name
        yield from _of_tree(node, node.name if isinstance(node, ast.FunctionDef) else function)


@pytest.mark.parametrize(("package", "judged"), [("torch_geometric", PYG), ("torch.nn", TORCH)])
def test_every_branch_on_tracing_is_judged(package: str, judged: dict[Any, tuple[int, str]]) -> None:
    found = Counter(
        (file, function)
        for file, function, name in _questions(importlib.import_module(package))
        if name not in _SAME
    )
    unjudged = {place: count for place, count in found.items() if count > judged.get(place, (0, ""))[0]}
    assert not unjudged, f"judge what these branches of {package} do to a compiled model: {unjudged}"
    assert sum(found.values()) > 0


def test_questions_that_a_trace_answers_as_eager_does() -> None:
    answers = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            jit, onnx = torch.jit, torch_geometric.is_in_onnx_export
            answers.append((jit.is_scripting(), jit.is_tracing(), onnx(), torch.onnx.is_in_onnx_export()))
            return x * 2

    capture(Asks(), (torch.ones(3),))
    assert answers and not any(map(any, answers))


class Encoder(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_an_encoder_that_zeroes_padding_by_values_is_refused() -> None:
    x, mask = torch.randn(4, 6, 8), torch.arange(6) >= torch.tensor([6, 3, 4, 5])[:, None]
    nested = Encoder(True).eval()
    with pytest.raises(gnnc.CaptureError, match="enable_nested_tensor=False"):
        gnnc.compile(nested, "fp32")(x, mask)
    assert "forward" not in vars(nested.encoder)
    plain = Encoder(False).eval()
    torch.testing.assert_close(gnnc.compile(plain, "fp32")(x, mask), plain(x, mask))
