"""Patches of PyG and torch.nn while a model is traced: no packed kernels, no caches, no loops over values."""

import contextlib
import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnc.capture.hooks import run_message_hooks
from gnnc.capture.pooling_ops import cluster_edges, merge_edges
from gnnc.capture.pyg_functions import traceable_functions
from gnnc.capture.thread_patches import in_this_thread, replaced
from gnnc.errors import CaptureError


@contextlib.contextmanager
def exportable(model: torch.nn.Module) -> Iterator[None]:
    """Patch PyG layers into a form that torch.export traces: their math, without packed kernels and caches.

    A layer with ``cached=True`` would bake the first graph in; the structure graph is cached
    by gnnc instead. ``HeteroLinear`` sorts rows by type and loops over the values of a pointer. Aggregations
    over sequences of neighbors look whether the index is sorted; compiled, they sort it.
    ``model`` is a private copy: the attributes of its modules stay changed.
    """
    import torch_geometric.backend as backend  # a second of imports that capture alone needs
    from torch_geometric.nn import Aggregation, ClusterPooling, EdgePooling, HeteroLinear
    from torch_geometric.nn.aggr import LCMAggregation, PatchTransformerAggregation

    for module in model.modules():
        if getattr(module, "cached", False) is True:
            module.cached = False
        for name in [name for name in vars(module) if name.startswith("_cached_")]:
            vars(module)[name] = None
        if type(module) is HeteroLinear:
            vars(module)["forward"] = partial(_hetero_linear, module)
        if isinstance(module, Aggregation):
            vars(module)["to_dense_batch"] = partial(_to_dense_batch, module)
        if isinstance(module, LCMAggregation | PatchTransformerAggregation):
            vars(module)["to_dense_batch"] = partial(_to_rows_of_number, module)
        if isinstance(module, PatchTransformerAggregation):
            vars(module)["forward"] = partial(_patch_transformer, module)
        if isinstance(module, torch.nn.TransformerEncoder):
            vars(module)["forward"] = partial(_encoder, module)
        if isinstance(module, EdgePooling):
            vars(module)["_merge_edges"] = partial(merge_edges, module)
        if isinstance(module, ClusterPooling):
            vars(module)["_merge_edges"] = partial(cluster_edges, module)
        run_message_hooks(module)
    unpacked = in_this_thread(lambda *_, **__: False, backend.use_segment_matmul_heuristic)
    with replaced(backend, "use_segment_matmul_heuristic", unpacked), traceable_functions():
        yield


def _to_dense_batch(
    aggregation: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    fill_value: float = 0.0,
    max_num_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of each group, padded, as the aggregation's method does, in the order of the index."""
    from torch_geometric.utils import to_dense_batch

    aggregation.assert_index_present(index)
    aggregation.assert_two_dimensional_input(x, dim)
    assert index is not None
    order = index.argsort(stable=True)
    groups = index.index_select(0, order)
    return to_dense_batch(x.index_select(0, order), groups, fill_value, max_num_elements, dim_size)


def _to_rows_of_number(
    aggregation: Any,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    fill_value: float = 0.0,
    max_num_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of each group, padded to a number: what follows computes with it in Python."""
    dense, mask = _to_dense_batch(aggregation, x, index, ptr, dim_size, dim, fill_value)
    count = operator.index(dense.shape[1] if max_num_elements is None else max_num_elements)
    rows = F.pad(dense, (0, 0, 0, count), value=fill_value).narrow(1, 0, count)
    return rows, F.pad(mask, (0, count)).narrow(1, 0, count)


def _patch_transformer(
    aggregation: Any,
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Tensor:
    """Run a PatchTransformerAggregation for the number of elements in its largest group."""
    from torch_geometric.utils import scatter

    if max_num_elements is None:
        counts = scatter(torch.ones_like(index), index, 0, dim_size) if ptr is None else ptr.diff()
        max_num_elements = operator.index(counts.max().item()) + 1  # pyright: ignore[reportArgumentType]
    return type(aggregation).forward(aggregation, x, index, ptr, dim_size, dim, max_num_elements)


def _hetero_linear(layer: torch.nn.Module, x: Tensor, type_vec: Tensor) -> Tensor:
    """Return ``x [N, F] @ weight[type_vec] + bias[type_vec]``, ``[N, O]``: one product for each type."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    out: Tensor | None = None
    for kind in range(weight.shape[0]):
        mine = torch.where((type_vec == kind).unsqueeze(1), x, 0.0)
        term = mine @ weight[kind]
        out = term if out is None else out + term
    assert out is not None
    return out if bias is None else out + bias[type_vec]  # pyright: ignore[reportIndexIssue]


def _encoder(
    encoder: torch.nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Run a TransformerEncoder; refuse the path of nested tensors, which writes zeros over the padding.

    Eager takes it where the values of the mask are left-aligned, and a trace never does.
    """
    nested = encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()
    if nested and src_key_padding_mask is not None and mask is None and not encoder.training:
        raise CaptureError(
            "TransformerEncoder with src_key_padding_mask fills padded positions with zeros or not, by the "
            "values of the mask, which tracing does not reproduce: construct it with "
            "enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False) first"
        )
    return type(encoder).forward(encoder, src, mask, src_key_padding_mask, is_causal)
