"""Normalize: give every computation one spelling, so that ``raise`` finds the regions.

The pass removes asserts, copies (but of outputs that they make contiguous), no-op views, permutations and
casts, concatenations of one tensor, expansions that broadcasting does anyway, dropout in eval mode, and
options of embeddings without a gradient. Every constant fill becomes ``aten.full``, every view a ``reshape``.
Dimensions become non-negative. Equal computations become one node, and each symbolic size has one node. If
two equal masks merge, the sizes of their selections (``u0``, ``u1``) merge too: later shapes are inferred
again, or layer 2 would get another graph than layer 1.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import (
    argument,
    call_key,
    first_operand,
    holds_tensor,
    is_pointwise,
    is_random,
    result_index,
    same_shape,
    same_size,
    shape_of,
    unpack,
    value_of,
)
from gnnc.ir.source import wants_gradient
from gnnc.passes.base import Context, Property
from gnnc.passes.rewrite.node_builder import NodeBuilder, Sizes
from gnnc.passes.rewrite.output_layout import contiguous_outputs, restore_contiguous_outputs
from gnnc.torch_private import OpOverload, schema, statically_known_true

aten = torch.ops.aten

_ASSERTS = (
    "aten._assert_scalar.default",
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.msg",
    "aten._assert_async.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)
_COPIES = (
    "aten.clone.default",
    "aten.detach.default",
    "aten.alias.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
    "aten.detach_copy.default",
    "aten.alias_copy.default",
)
_DETACHED = ("aten.detach.default", "aten.detach_copy.default")
_DENSE_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_VIEWS = (
    "aten.reshape.default",
    "aten.expand.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
    "aten.slice.Tensor",
    "aten.flatten.using_ints",
)
_RESHAPES = ("aten.reshape.default", *_DENSE_VIEWS, "aten.unsqueeze.default")
_DROPOUTS = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other")
_SPLITS = (
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten.unsafe_chunk.default",
    "aten.unbind.int",
)
_FILLS = {
    "aten.zeros.default": 0,
    "aten.zeros_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.ones.default": 1,
    "aten.ones_like.default": 1,
    "aten.new_ones.default": 1,
    "aten.full.default": None,
    "aten.full_like.default": None,
    "aten.new_full.default": None,
}
_DIM_NAMES = ("dim", "dims", "dim0", "dim1")
_DIMS_OF_INPUT = frozenset(
    f"aten.{name}"
    for name in (
        "all amax amin any argmax argmin argsort chunk cummax cummin cumprod cumsum flip gather glu "
        "index_add index_copy index_fill index_reduce index_select linalg_vector_norm log_softmax "
        "_log_softmax logcumsumexp logsumexp max mean median min mode narrow norm permute prod "
        "repeat_interleave roll scatter scatter_add scatter_reduce select select_scatter slice "
        "slice_scatter softmax _softmax sort split split_with_sizes squeeze std std_mean sum sym_size "
        "tensor_split topk transpose unbind unsafe_split unsafe_split_with_sizes var var_mean"
    ).split()
)
_DIMS_OF_RESULT = frozenset(("aten.cat", "aten.stack", "aten.unsqueeze"))
"""Ops whose operands may have fewer dimensions: ``cat`` skips an empty vector before matrices."""


@dataclass(frozen=True, slots=True)
class Normalize:
    """Bring a captured graph into the form that the other passes read."""

    name: ClassVar[str] = "normalize"
    establishes: ClassVar[frozenset[Property]] = frozenset({Property.NORMALIZED})

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Return ``gm`` normalized."""
        contiguous = contiguous_outputs(gm)
        trains = any(map(wants_gradient, placeholders(gm)))
        _clear_options_of_gradients(gm, trains)
        simplify(gm, keep_detached=trains)
        restore_contiguous_outputs(gm, contiguous)
        return gm


def _clear_options_of_gradients(gm: fx.GraphModule, trains: bool) -> None:
    """Clear the options of embeddings where no gradient depends on them; no gradient is sparse."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.embedding.default):
        table = first_operand(node)
        is_trained = wants_gradient(table) if table.op == "placeholder" else trains
        kept = ("padding_idx", "scale_grad_by_freq") if is_trained else ()
        node.args, node.kwargs = unpack(node, "weight", "indices", *kept), {}


def simplify(gm: fx.GraphModule, *, keep_detached: bool = False) -> None:
    """Bring a graph into the form that the passes read, in place.

    Args:
        gm: the graph.
        keep_detached: whether ``detach`` has an effect: the gradients of the graph are to be computed.
    """
    _Normalizer(gm, keep_detached).run()


class _Normalizer:
    """Forward walk that simplifies each node, then merges it with an equal node before it."""

    def __init__(self, gm: fx.GraphModule, keep_detached: bool) -> None:
        self.graph = gm.graph
        self.keep_detached = keep_detached
        self.builder = NodeBuilder(gm)
        self.sizes = Sizes(self.builder)
        self.first_of_key: dict[Any, Node] = {}
        self.merged_symbols: set[Any] = set()
        self.restrided: set[Node] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))

    def _visit(self, node: Node) -> None:
        if str(node.target) in _ASSERTS:
            self.graph.erase_node(node)
            return
        self._spell_out(node)
        self._refresh(node)
        _make_dims_positive(node)
        _broadcast_instead_of_expand(node)
        replacement = self._replacement(node)
        if replacement is node:
            return
        if holds_tensor(node) and _strides(replacement) != _strides(node):
            self.restrided.add(replacement)
        node.replace_all_uses_with(replacement)
        self.graph.erase_node(node)

    def _replacement(self, node: Node) -> Any:
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            value = node.meta["val"]
            return value if isinstance(value, int) else self.sizes.add(node)
        if self.keep_detached and str(node.target) in _DETACHED:
            return self._first_equal(node)
        simpler = _simplified(node) or self._filled(node) or self._part(node)
        return simpler if simpler is not None else self._first_equal(node)

    def _first_equal(self, node: Node) -> Node:
        """Return the first node that computes the same, perhaps ``node``."""
        if is_random(node) or "empty" in str(node.target):
            return node
        first = self.first_of_key.setdefault(call_key(node.target, node.args, node.kwargs), node)
        if first is not node:
            self.merged_symbols |= _unbacked(node) - _unbacked(first)
        return first

    def _refresh(self, node: Node) -> None:
        """Infer the value again if a symbol of its shape merged, or an operand has other strides."""
        if self.merged_symbols and not self.merged_symbols.isdisjoint(_unbacked(node)):
            node.meta["val"] = self.builder.infer(node)
        elif not self.restrided.isdisjoint(node.all_input_nodes):
            self._infer_again(node)

    def _infer_again(self, node: Node) -> None:
        """Infer the value of a node whose strides may have changed."""
        before = _strides(node)
        node.meta["val"] = self.builder.infer(node)
        if _strides(node) != before:
            self.restrided.add(node)

    def _filled(self, node: Node) -> Node | None:
        """Return a constant fill as ``aten.full(sizes, value)``, or None for another node."""
        name = str(node.target)
        if name not in _FILLS or not holds_tensor(node) or _is_plain_full(node):
            return None
        value = _FILLS[name]
        if value is None:
            value = argument(node, "fill_value")
        if not isinstance(value, int | float):
            return None
        sizes = self._fill_sizes(node, name)
        like = value_of(node)
        options = {"dtype": like.dtype, "device": like.device}
        new = self.builder.call(aten.full.default, sizes, value, layer=node.meta["layer"], **options)
        return self._first_or_erase(new)

    def _part(self, node: Node) -> Node | None:
        """Return one part of a tensor that is split along columns as a slice, or None for another node."""
        if node.target is not operator.getitem or str(first_operand(node).target) not in _SPLITS:
            return None
        split, index = first_operand(node), result_index(node)
        whole, dim = first_operand(split), argument(split, "dim")
        dim %= len(shape_of(whole))
        parts = split.meta["val"]
        if dim == 0 or not isinstance(shape_of(whole)[dim], int):
            return None
        layer = node.meta["layer"]
        if str(split.target) == "aten.unbind.int":
            return self._first_or_erase(self.builder.call(aten.select.int, whole, dim, index, layer=layer))
        widths = [part.shape[dim] for part in parts[: index + 1]]
        start, end = sum(widths[:-1]), sum(widths)
        part = self.builder.call(aten.slice.Tensor, whole, dim, start, end, layer=layer)
        return self._first_or_erase(part)

    def _spell_out(self, node: Node) -> None:
        """Rewrite ``x.expand_as(y)``, ``y.copy(x)`` and ``x.to(y)`` without ``y``, and a view as a reshape.

        A view needs certain strides, which change where a copy is dropped or rows are read later.
        """
        if str(node.target) == "aten.expand_as.default":
            small, like = unpack(node, "self", "other")
            node.target, node.args = aten.expand.default, (small, self._expanded_sizes(small, like))
        elif str(node.target) == "aten.copy.default":
            self._spell_copy(node)
        elif str(node.target) in _DENSE_VIEWS:
            node.target = aten.reshape.default
        elif str(node.target) == "aten.sgn.default" and not value_of(node).is_complex():
            node.target = aten.sign.default  # the gradient of sgn is a number of no shape
        elif str(node.target) in _CASTS:
            source = first_operand(node)
            changed = _changed_options(source, node)
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), changed

    def _spell_copy(self, node: Node) -> None:
        """Rewrite the write of ``src`` into all of ``self`` as a conversion and expansion of ``src``."""
        like, small = unpack(node, "self", "src")
        if changed := _changed_options(small, like):
            small = self.builder.call(aten._to_copy.default, small, layer=node.meta["layer"], **changed)
        node.target, node.args = aten.expand.default, (small, self._expanded_sizes(small, like))
        node.kwargs = {}
        self._infer_again(node)

    def _expanded_sizes(self, small: Any, like: Any) -> list[Any]:
        """Return the sizes of ``like``, from ``small`` where it has them, so that ``like`` may be dead."""
        new = len(shape_of(like)) - len(shape_of(small))
        return [
            self.sizes.of(small, dim - new)
            if dim >= new and same_size(shape_of(small)[dim - new], size)
            else self.sizes.of(like, dim)
            for dim, size in enumerate(shape_of(like))
        ]

    def _first_or_erase(self, new: Node) -> Node:
        first = self.first_of_key.setdefault(call_key(new.target, new.args, new.kwargs), new)
        if first is not new:
            self.graph.erase_node(new)
        return first

    def _fill_sizes(self, node: Node, name: str) -> list[Any]:
        if name.endswith("_like.default"):
            like = first_operand(node)
            return [self.sizes.of(like, dim) for dim in range(len(shape_of(like)))]
        return list(argument(node, "size"))


def _simplified(node: Node) -> Node | None:
    """Return the operand that replaces ``node``, an op without effect, or None."""
    for rule in _RULES:
        simpler = rule(node)
        if simpler is not None:
            return simpler
    return None


def _copy(node: Node) -> Node | None:
    return first_operand(node) if str(node.target) in _COPIES else None


def _view(node: Node) -> Node | None:
    if str(node.target) not in _VIEWS:
        return None
    source = first_operand(node)
    return source if same_shape(shape_of(node), shape_of(source)) else None


def only_index(node: Node) -> Node | None:
    """Return the value that a view gave a dimension of one index, if ``node`` selects this index."""
    if str(node.target) != "aten.select.int":
        return None
    view, dim = unpack(node, "self", "dim")
    if str(view.target) not in _RESHAPES or not statically_known_true(shape_of(view)[dim] == 1):
        return None
    source = first_operand(view)
    return source if same_shape(shape_of(node), shape_of(source)) else None


def _permutation(node: Node) -> Node | None:
    """Return the operand of a permutation that moves no dimension."""
    if str(node.target) == "aten.permute.default":
        dims = argument(node, "dims")
        moves = list(dims) != sorted(dims)
    elif str(node.target) == "aten.transpose.int":
        moves = argument(node, "dim0") != argument(node, "dim1")
    else:
        return None
    return None if moves else first_operand(node)


def _cast(node: Node) -> Node | None:
    if str(node.target) != "aten._to_copy.default":
        return None
    source = first_operand(node)
    before, after = value_of(source), value_of(node)
    same = before.dtype == after.dtype and before.device == after.device
    return source if same else None


def _dropout(node: Node) -> Node | None:
    """Return the operand of a dropout that is off; ``native_dropout`` is matched at its first result."""
    source = node
    if node.target is operator.getitem:
        source = first_operand(node)
        if str(source.target) != "aten.native_dropout.default" or result_index(node) != 0:
            return None
    elif str(node.target) not in _DROPOUTS:
        return None
    p, train = unpack(source, "p", "train")
    return first_operand(source) if p == 0 or train is False else None


def _times_one(node: Node) -> Node | None:
    """Return ``x`` of ``x * full(1)`` if shape and dtype stay; PyG multiplies absent edge weights so."""
    if str(node.target) != "aten.mul.Tensor":
        return None
    left, right = unpack(node, "self", "other")
    for factor, ones in ((left, right), (right, left)):
        if not (holds_tensor(factor) and holds_tensor(ones) and _is_full_of(ones, 1)):
            continue
        before, after = value_of(factor), value_of(node)
        if before.dtype == after.dtype and same_shape(before.shape, after.shape):
            return factor
    return None


def _once(node: Node) -> Node | None:
    """Return the operand of a concatenation of one tensor, or of a repetition of a tensor as it is."""
    if str(node.target) == "aten.cat.default":
        tensors = argument(node, "tensors")
        return tensors[0] if len(tensors) == 1 else None
    if str(node.target) != "aten.repeat.default":
        return None
    source, repeats = unpack(node, "self", "repeats")
    same = len(repeats) == len(shape_of(source)) and all(
        type(count) is int and count == 1 for count in repeats
    )
    return source if same else None


_RULES: tuple[Callable[[Node], Any], ...] = (
    _copy,
    _view,
    only_index,
    _permutation,
    _cast,
    _dropout,
    _times_one,
    _once,
)


def _is_plain_full(node: Node) -> bool:
    return str(node.target) == "aten.full.default" and set(node.kwargs) == {"dtype", "device"}


def _is_full_of(node: Node, value: float) -> bool:
    return str(node.target) == "aten.full.default" and argument(node, "fill_value") == value


def _broadcast_instead_of_expand(node: Node) -> None:
    """Rewrite ``x / s.expand_as(x)`` as ``x / s``: the other operands have the sizes already."""
    if not is_pointwise(node) or not holds_tensor(node):
        return
    for arg in [arg for arg in node.all_input_nodes if str(arg.target) == "aten.expand.default"]:
        others = [other for other in node.all_input_nodes if other is not arg and holds_tensor(other)]
        small = shape_of(first_operand(arg))  # a scalar would take part in type promotion differently
        if small and _broadcast_to([small, *map(shape_of, others)], shape_of(node)):
            node.replace_input_with(arg, first_operand(arg))


def _broadcast_to(shapes: Sequence[tuple[Any, ...]], result: tuple[Any, ...]) -> bool:
    """Return whether each size of a result is that of one of the shapes that are broadcast to it."""
    from_end = [(dim - len(result), size) for dim, size in enumerate(result)]
    return all(
        any(len(shape) >= -dim and same_size(shape[dim], size) for shape in shapes) for dim, size in from_end
    )


def _changed_options(before: Node, after: Node) -> dict[str, Any]:
    """Return dtype and device of a value, where they differ from those of the value before."""
    options = {"dtype": value_of(after).dtype, "device": value_of(after).device}
    return {name: kind for name, kind in options.items() if getattr(value_of(before), name) != kind}


def _strides(node: Node) -> Any:
    """Return the strides of a tensor node as text, since equality of symbolic ones would be guarded."""
    value = node.meta.get("val")
    return str(value.stride()) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _unbacked(node: Node) -> set[Any]:
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return {
        symbol
        for size in sizes
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
        if symbol.name.startswith("u")
    }


def _make_dims_positive(node: Node) -> None:
    """Make the ``dim`` arguments of the ops in the tables non-negative."""
    ranked = _ranked_by_dims(node)
    if ranked is None or not holds_tensor(ranked):
        return
    assert isinstance(node.target, OpOverload)
    rank = len(shape_of(ranked))
    for position, parameter in enumerate(schema(node.target).arguments):
        if parameter.name not in _DIM_NAMES:
            continue
        if position < len(node.args):
            node.update_arg(position, _positive(node.args[position], rank))
        elif parameter.name in node.kwargs:
            node.update_kwarg(parameter.name, _positive(node.kwargs[parameter.name], rank))


def _ranked_by_dims(node: Node) -> Any:
    """Return the node whose dimensions ``dim`` counts, or None for an op that is in no table."""
    name = str(node.target).rpartition(".")[0]
    if name in _DIMS_OF_RESULT:
        return node
    return first_operand(node) if name in _DIMS_OF_INPUT else None


def _positive(dim: Any, rank: int) -> Any:
    if isinstance(dim, list | tuple):
        return [_positive(item, rank) for item in dim]
    return dim + rank if type(dim) is int and dim < 0 else dim
