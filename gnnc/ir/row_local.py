"""Row-local ops: ops that a kernel can apply to a finished row of its result before it leaves the cache.

A kernel makes complete rows; a *row program* then works on one accumulator: chain steps replace
it, stores write something made from it. ``classify`` says which step an fx node is, ``linearize``
reads the program of a whole chain. Pass ``fuse`` grows its groups with them and a backend turns
the same steps into its instructions, so that every op that fuses can be lowered.
"""

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from gnnc.ir.aten import ROW_VIEWS
from gnnc.ir.nodes import (
    argument,
    arguments,
    aten_name,
    first_operand,
    is_float,
    is_number,
    operand,
    result_index,
    same_shape,
    same_size,
    shape_or_none,
    unpack,
)
from gnnc.ir.qtype import BYTE_DTYPES, QType
from gnnc.ir.row_steps import Step, batch_norm_step, binary_steps, folded_steps, single_steps
from gnnc.torch_private import statically_known_true

Role = Literal["chain", "store", "view"]


@dataclass(frozen=True, slots=True)
class RowOp:
    """The effect of one node (with the inner nodes that it covers) on the accumulator.

    Attributes:
        root: the node whose value the op makes.
        steps: the instructions, in order; none for a view.
        role: ``chain`` (root is the next accumulator), ``store`` (root is written, the accumulator
            stays) or ``view`` (root is the accumulator under another shape).
        covers: every node that the op stands for, root last.
    """

    root: Node
    steps: tuple[Step, ...]
    role: Role = "chain"
    covers: tuple[Node, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the first step, or ``"view"``."""
        return self.steps[0].kind if self.steps else "view"

    @property
    def operands(self) -> Iterator[Node]:
        """The nodes that the op reads besides the accumulator."""
        return (node for step in self.steps for node in step.operands if node is not None)


@dataclass(slots=True)
class Accumulator:
    """The current value of a chain, with the nodes that are views of it."""

    aliases: dict[Node, None] = field(default_factory=dict)

    @property
    def value(self) -> Node:
        """The node that computed the value."""
        return next(iter(self.aliases))

    def __contains__(self, node: object) -> bool:
        return node in self.aliases


def _quantize(node: Node, acc: Accumulator) -> RowOp | None:
    """Match a store of quantized rows, under the scale of each row, a given scale, or fractions of one."""
    named = arguments(node)
    scale, shift, qtype = named["scale"], named["shift"], QType.parse(named["qtype"])
    if named["x"] not in acc:
        return None
    # A stochastic rounding has its seed behind the other operands, and its stream as a constant.
    seed, stream = ((named["seed"],), (named["stream"],)) if named["seed"] is not None else ((), ())
    if qtype.granularity == "row":
        is_dynamic = _is_made_from(scale, acc, "gnnc.scale.default")
        return RowOp(node, (Step("quant_row", seed, stream),), "store", (scale, node)) if is_dynamic else None
    if qtype.granularity != "row_pow2":
        return RowOp(node, (Step("quant_static", (scale, *seed), stream),), "store", (node,))
    if not _is_made_from(shift, acc, "gnnc.row_shift.default") or arguments(shift)["base"] is not scale:
        return None
    return RowOp(node, (Step("quant_pow2", (scale, *seed), stream),), "store", (shift, node))


def _is_made_from(node: Any, acc: Accumulator, target: str) -> bool:
    return isinstance(node, Node) and str(node.target) == target and arguments(node)["x"] in acc


def _native_batch_norm(node: Node, acc: Accumulator) -> RowOp | None:
    norm = first_operand(node)
    name = "aten._native_batch_norm_legit_no_training.default"
    if result_index(node) != 0 or str(norm.target) != name or argument(norm, "input") not in acc:
        return None
    steps = batch_norm_step(norm)
    return RowOp(node, steps, "chain", (norm, node)) if steps else None


def _l2_normalize(node: Node, acc: Accumulator) -> RowOp | None:
    """Match ``x / max(norm(x), eps)``, where the norm may be expanded to the shape of x first."""
    source, clamped = unpack(node, "self", "other")
    covers: tuple[Node, ...] = (node,)
    if source not in acc or not isinstance(clamped, Node):
        return None
    if str(clamped.target) == "aten.expand.default":
        covers = (clamped, *covers)
        clamped = operand(clamped, "self")
    if str(clamped.target) != "aten.clamp_min.default" or not is_number(argument(clamped, "min")):
        return None
    norm = operand(clamped, "self")
    if not _is_row_norm(norm, acc) or not _only_inside(norm, clamped, *covers):
        return None
    step = Step("l2_normalize", consts=(float(argument(clamped, "min")),))
    return RowOp(node, (step,), "chain", (norm, clamped, *covers))


def _is_row_norm(node: Node, acc: Accumulator) -> bool:
    if str(node.target) != "aten.linalg_vector_norm.default":
        return False
    source, order, dims, keep = unpack(node, "self", "ord", "dim", "keepdim")
    is_matrix = source in acc and len(shape_or_none(source) or ()) == 2
    return is_matrix and order == 2 and dims in ([-1], [1], (-1,), (1,)) and keep


def _row_dot(node: Node, acc: Accumulator) -> RowOp | None:
    """Match ``(x.view(N, H, D) * att).sum(-1)``: the dot product of each head with an attention vector."""
    product = operand(node, "self")
    if str(product.target) != "aten.mul.Tensor" or not _only_inside(product, node):
        return None
    steps = binary_steps(product, acc)
    shape = shape_or_none(product)
    if not steps or steps[0].kind != "mul_col" or shape is None:
        return None
    if list(argument(node, "dim") or ()) not in ([-1], [len(shape) - 1]):
        return None
    if argument(node, "keepdim") or len(shape) not in (2, 3):
        return None
    heads = int(shape[1]) if len(shape) == 3 else 1
    return RowOp(node, (Step("row_dot", steps[0].operands, (heads,)),), "store", (product, node))


def _sum(node: Node, acc: Accumulator) -> RowOp | None:
    return _column_sum(node, acc) or _row_dot(node, acc)


def _column_sum(node: Node, acc: Accumulator) -> RowOp | None:
    """Match the sum of all rows, such as the gradient of a bias."""
    if list(argument(node, "dim") or ()) != [0] or argument(node, "self") not in acc:
        return None
    plain = argument(node, "dtype") in (None, torch.float32) and is_float(node)
    return RowOp(node, (Step("col_sum"),), "store", (node,)) if plain else None


def _relu_mask(node: Node, acc: Accumulator) -> RowOp | None:
    value = argument(node, "x")
    if value not in acc or len(shape_or_none(value) or ()) != 2:
        return None
    return RowOp(node, (Step("store_bits"),), "store", (node,))


def _fp16_scale(node: Node, acc: Accumulator) -> RowOp | None:
    return RowOp(node, (Step("fp16_scale"),), "store", (node,)) if argument(node, "x") in acc else None


def _head_mean(node: Node, acc: Accumulator) -> RowOp | None:
    source, dims, keep = unpack(node, "self", "dim", "keepdim")
    shape = shape_or_none(source)
    if source not in acc or shape is None or len(shape) != 3:
        return None
    if keep or list(dims or ()) not in ([1], [-2]):
        return None
    return RowOp(node, (Step("head_mean", consts=(int(shape[1]),)),), "chain", (node,))


def _to_copy(node: Node, acc: Accumulator) -> RowOp | None:
    source, dtype = unpack(node, "self", "dtype")
    if source not in acc:
        return None
    if dtype in _HALF_STORES:
        return RowOp(node, (Step(_HALF_STORES[dtype]),), "store", (node,))
    return RowOp(node, (), "view", (node,)) if dtype is torch.float32 else None


def _scale(node: Node, acc: Accumulator) -> RowOp | None:
    """Match the scale of the whole tensor, which every row raises."""
    named = arguments(node)
    if named["x"] not in acc or not QType.parse(named["qtype"]).has_one_scale:
        return None
    return RowOp(node, (Step(SCALE_TENSOR),), "store", (node,))


SCALE_TENSOR = "scale_tensor"
"""Kind of the step that raises a scale by a row; only some kernels have it."""
_HALF_STORES = {torch.bfloat16: "store_bf16", torch.float16: "store_fp16"}

_PATTERNS: dict[str, Callable[[Node, Accumulator], RowOp | None]] = {
    "gnnc.quantize.default": _quantize,
    "gnnc.scale.default": _scale,
    "aten._to_copy.default": _to_copy,
    "aten.sum.dim_IntList": _sum,
    "gnnc.relu_mask.default": _relu_mask,
    "gnnc.fp16_scale.default": _fp16_scale,
    "aten.mean.dim": _head_mean,
    "aten.div.Tensor": _l2_normalize,
    str(operator.getitem): _native_batch_norm,
}


def classify(node: Node, acc: Accumulator | Node) -> RowOp | None:
    """Return the row op that ``node`` is on the accumulator, or None where it is not row-local to it."""
    acc = acc if isinstance(acc, Accumulator) else Accumulator({acc: None})
    if node.op != "call_function" or not _has_fixed_columns(acc.value):
        return None
    if not is_float(acc.value):
        return _widened(node, acc)
    pattern = _PATTERNS.get(str(node.target))
    if pattern and (matched := pattern(node, acc)):
        return matched
    return _classify_single(node, acc)


def _alternatives(node: Node, acc: Accumulator) -> Iterator[RowOp]:
    """Yield the row ops that ``node`` may be, those that stand for most nodes first."""
    plain = classify(node, acc)
    if plain is not None and plain.role == "chain" and plain.covers == (node,):
        for steps, covers in folded_steps(node, acc):
            yield RowOp(node, steps, "chain", covers)
    if plain is not None:
        yield plain


def _widened(node: Node, acc: Accumulator) -> RowOp | None:
    """Match the conversion to FP32 of 16-bit or quantized rows as they are loaded."""
    if is_float(acc.value, *BYTE_DTYPES):
        steps = single_steps(node, acc) if str(node.target) == "gnnc.dequantize.default" else None
        return RowOp(node, steps, "chain", (node,)) if steps else None
    if node.target is not torch.ops.aten._to_copy.default or not is_float(acc.value, *_HALF_STORES):
        return None
    source, dtype = unpack(node, "self", "dtype")
    return RowOp(node, (), "chain", (node,)) if source in acc and dtype is torch.float32 else None


def _has_fixed_columns(node: Node) -> bool:
    """Return whether the row width is the same on every graph."""
    return all(isinstance(size, int) for size in (shape_or_none(node) or ())[1:])


def _classify_single(node: Node, acc: Accumulator) -> RowOp | None:
    if aten_name(node) in ROW_VIEWS or _is_unit_select(node):
        source = operand(node, "self")
        has_same_rows = source in acc and _keeps_rows(node, source)
        return RowOp(node, (), "view", (node,)) if has_same_rows else None
    steps = single_steps(node, acc)
    if not steps or not is_float(node) or not _same_shape(node, acc):
        return None
    return RowOp(node, steps, "chain", (node,))


def _is_unit_select(node: Node) -> bool:
    """Return whether a node selects the only index of a dimension that is not that of the rows."""
    if aten_name(node) != "select.int":
        return False
    source, dim = unpack(node, "self", "dim")
    shape = shape_or_none(source) or ()
    return 0 < dim < len(shape) and same_size(shape[dim], 1)


def _same_shape(node: Node, acc: Accumulator) -> bool:
    shape = shape_or_none(node)
    return shape is not None and any(same_shape(shape, shape_or_none(a) or ()) for a in acc.aliases)


def _keeps_rows(node: Node, value: Node) -> bool:
    new, old = shape_or_none(node), shape_or_none(value)
    return bool(new and old) and statically_known_true(new[0] == old[0]) and is_float(node)


def linearize(
    start: Node,
    admit: Callable[[RowOp], bool] = lambda op: True,
    outputs: Collection[Node] = (),
) -> list[RowOp]:
    """Return the row program that begins at ``start``, in the order in which a kernel runs it.

    Args:
        start: the node that makes the first accumulator (an anchor, or the input of a map).
        admit: whether an op that could come next may; asked of stores and views too.
        outputs: nodes that must be written: a ``store_f32`` op follows each one in the chain.
    """
    program: list[RowOp] = []
    acc = Accumulator({start: None})
    while True:
        _take_views(acc, admit, program)
        near = [op for node in _users(acc) for op in _alternatives(node, acc)]
        program += [op for op in near if op.role == "store" and admit(op)]
        program += [_store(node) for node in acc.aliases if node in outputs]
        taken = {node for op in program for node in op.covers}
        chains = (op for op in near if op.role == "chain" and taken.isdisjoint(op.covers))
        following = next((op for op in chains if admit(op)), None)
        if following is None:
            return program
        program.append(following)
        acc = Accumulator({following.root: None})


def _take_views(acc: Accumulator, admit: Callable[[RowOp], bool], program: list[RowOp]) -> None:
    pending = list(acc.aliases)
    while pending:
        for user in pending.pop().users:
            op = classify(user, acc)
            if op and op.role == "view" and user not in acc and admit(op):
                acc.aliases[user] = None
                program.append(op)
                pending.append(user)


def _users(acc: Accumulator) -> list[Node]:
    """Return the users of the accumulator and their users (a pattern's root may be two steps away)."""
    near = {user: None for alias in acc.aliases for user in alias.users if user not in acc}
    far = {user: None for node in near for user in node.users if user not in acc}
    return sorted(near | far)


def _store(node: Node) -> RowOp:
    return RowOp(node, (Step("store_f32"),), "store", ())


def _only_inside(*nodes: Node) -> bool:
    """Return whether only these nodes read every node but the last."""
    return all(set(node.users) <= set(nodes) for node in nodes[:-1])
