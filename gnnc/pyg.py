"""PyG in the form that torch.export can trace: no packed kernels, no caches, no loops over values."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor


@contextlib.contextmanager
def exportable(model: torch.nn.Module) -> Iterator[None]:
    """Trace PyG layers by what they compute, not by how their own kernels go about it.

    A layer with ``cached=True`` would bake the first graph in; the structure graph is cached
    by gnnc instead. ``HeteroLinear`` sorts rows by type and loops over the values of a pointer.
    To be used where all attributes of the modules are restored afterwards.
    """
    import torch_geometric.backend as backend  # a second of imports that capture alone needs
    from torch_geometric.nn import HeteroLinear

    for module in model.modules():
        if getattr(module, "cached", False) is True:
            module.cached = False
        for name in [name for name in vars(module) if name.startswith("_cached_")]:
            vars(module)[name] = None
        if type(module) is HeteroLinear:
            vars(module)["forward"] = partial(_hetero_linear, module)
    before = backend.use_segment_matmul
    backend.use_segment_matmul = False
    try:
        yield
    finally:
        backend.use_segment_matmul = before


def _hetero_linear(layer: torch.nn.Module, x: Tensor, type_vec: Tensor) -> Tensor:
    """``x [N, F] @ weight[type_vec] + bias[type_vec]``, ``[N, O]``: by type."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    out: Tensor | None = None
    for kind in range(weight.shape[0]):
        mine = torch.where((type_vec == kind).unsqueeze(1), x, 0.0)
        term = mine @ weight[kind]
        out = term if out is None else out + term
    assert out is not None
    return out if bias is None else out + bias[type_vec]  # pyright: ignore[reportIndexIssue]
