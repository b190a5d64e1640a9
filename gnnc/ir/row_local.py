"""Row-local ops: what a kernel can do to a finished row of its result before it leaves the cache.

A kernel makes complete rows; a *row program* then works on one accumulator: chain steps replace
it, stores write something made from it. ``classify`` says which step an fx node is, ``linearize``
reads the program of a whole chain. Pass ``fuse`` grows its groups with them and a backend turns
the same steps into its instructions, so what fuses is by construction what lowers.
"""

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

Extent = Literal["row", "col", "full", "scalar"]
Role = Literal["chain", "store", "view"]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction on the accumulator, by name: the row program's opcode in lower case.

    ``operands`` are fx nodes (None: absent, such as a batch norm without a bias), ``consts`` are
    plain numbers, in the order the instruction takes them.
    """

    kind: str
    operands: tuple[Node | None, ...] = ()
    consts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOp:
    """What one node (with the inner nodes it covers) does to the accumulator.

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
        """The nodes read besides the accumulator."""
        return (node for step in self.steps for node in step.operands if node is not None)


@dataclass(slots=True)
class Accumulator:
    """The current value of a chain: one fx value under the names (views) it goes by."""

    aliases: dict[Node, None] = field(default_factory=dict)

    @property
    def value(self) -> Node:
        """The name it was made under."""
        return next(iter(self.aliases))

    def __contains__(self, node: object) -> bool:
        return node in self.aliases


# ---- shapes -------------------------------------------------------------------------------------


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The (symbolic) shape of a tensor node, or None for anything else."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def same_sizes(a: Collection[Any], b: Collection[Any]) -> bool:
    """Whether two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(
        statically_known_true(x == y) for x, y in zip(a, b, strict=True)
    )


def extent_of(operand: tuple[Any, ...], acc: tuple[Any, ...]) -> Extent | None:
    """How an operand of this shape spreads over an accumulator of that shape."""
    if len(operand) > len(acc):
        return None
    padded = (1,) * (len(acc) - len(operand)) + operand
    if _all_ones(padded):
        return "scalar"
    if len(operand) == len(acc) and same_sizes(padded, acc):
        return "full"
    if statically_known_true(padded[0] == 1):
        return "col" if same_sizes(padded[1:], acc[1:]) else None
    if statically_known_true(padded[0] == acc[0]) and _all_ones(padded[1:]):
        return "row"
    return None


def _all_ones(sizes: Collection[Any]) -> bool:
    return all(statically_known_true(size == 1) for size in sizes)


def _is_float(node: Node, *dtypes: torch.dtype) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (dtypes or (torch.float32,))


# ---- single nodes: name of the target -> step ------------------------------------------------

_PLAIN = {
    "aten.relu.default": "relu",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
    "aten.silu.default": "silu",
    "aten.exp.default": "exp",
    "aten.neg.default": "neg",
    "aten.abs.default": "abs",
    "aten.square.default": "square",
    "aten.sqrt.default": "sqrt",
    "aten.reciprocal.default": "recip",
    "aten.log.default": "log",
    "aten.rsqrt.default": "rsqrt",
}
_POWERS = {2.0: "square", 0.5: "sqrt", -1.0: "recip", -0.5: "rsqrt"}
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.dim "
        "squeeze.dims flatten.using_ints clone.default alias.default detach.default "
        "contiguous.default"
    ).split()
)


def _leaky_relu(node: Node) -> tuple[Step, ...] | None:
    slope = argument(node, 1, "negative_slope", 0.01)
    return (Step("leaky_relu", consts=(float(slope),)),)


def _elu(node: Node) -> tuple[Step, ...] | None:
    alpha, scale, input_scale = (
        argument(node, i, name, 1.0) for i, name in ((1, "alpha"), (2, "scale"), (3, "input_scale"))
    )
    if scale != 1 or input_scale != 1:
        return None
    return (Step("elu", consts=(float(alpha),)),)


def _gelu(node: Node) -> tuple[Step, ...] | None:
    tanh = argument(node, 1, "approximate", "none") == "tanh"
    return (Step("gelu_tanh" if tanh else "gelu"),)


def _softplus(node: Node) -> tuple[Step, ...] | None:
    usual = argument(node, 1, "beta", 1) == 1 and argument(node, 2, "threshold", 20) == 20
    return (Step("softplus"),) if usual else None


def _power(node: Node) -> tuple[Step, ...] | None:
    exponent = node.args[1]
    kind = _POWERS.get(float(exponent)) if is_number(exponent) else None
    return (Step(kind),) if kind else None


def _clamp(node: Node) -> tuple[Step, ...] | None:
    low, high = argument(node, 1, "min", None), argument(node, 2, "max", None)
    bounds = [("clamp_min", low), ("clamp_max", high)]
    given = [(kind, bound) for kind, bound in bounds if bound is not None]
    if not all(is_number(bound) for _, bound in given):
        return None
    return tuple(Step(kind, consts=(float(bound),)) for kind, bound in given)


def _one_bound(kind: str) -> Callable[[Node], tuple[Step, ...] | None]:
    def match(node: Node) -> tuple[Step, ...] | None:
        bound = node.args[1]
        return (Step(kind, consts=(float(bound),)),) if is_number(bound) else None

    return match


def _layer_norm(node: Node) -> tuple[Step, ...] | None:
    shape = shape_of(_node(node.args[0]))
    if shape is None or not same_sizes(tuple(node.args[1]), shape[1:]):
        return None
    weight, bias = argument(node, 2, "weight", None), argument(node, 3, "bias", None)
    eps = argument(node, 4, "eps", 1e-5)
    return (Step("layer_norm", (weight, bias), (float(eps),)),)


def _row_softmax(kind: str) -> Callable[[Node], tuple[Step, ...] | None]:
    def match(node: Node) -> tuple[Step, ...] | None:
        shape = shape_of(_node(node.args[0]))
        last = shape is not None and len(shape) == 2 and node.args[1] in (-1, 1)
        plain = argument(node, 2, "dtype", None) in (None, False, torch.float32)
        return (Step(kind),) if last and plain else None

    return match


def _batch_norm(node: Node) -> tuple[Step, ...] | None:
    _, weight, bias, mean, var, training, _, eps = node.args[:8]
    if training or mean is None or var is None:
        return None
    return _batch_norm_step(node, mean, var, weight, bias, eps)


def _batch_norm_step(
    node: Node, mean: Any, var: Any, weight: Any, bias: Any, eps: Any
) -> tuple[Step, ...] | None:
    shape = shape_of(_node(node.args[0]))
    if shape is None or len(shape) != 2:
        return None
    return (Step("batch_norm", (mean, var, weight, bias), (float(eps),)),)


_SPECIAL: dict[str, Callable[[Node], tuple[Step, ...] | None]] = {
    "aten.leaky_relu.default": _leaky_relu,
    "aten.elu.default": _elu,
    "aten.gelu.default": _gelu,
    "aten.softplus.default": _softplus,
    "aten.pow.Tensor_Scalar": _power,
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _one_bound("clamp_min"),
    "aten.clamp_max.default": _one_bound("clamp_max"),
    "aten.hardtanh.default": lambda node: _hardtanh(node),
    "aten.layer_norm.default": _layer_norm,
    "aten.softmax.int": _row_softmax("softmax"),
    "aten._softmax.default": _row_softmax("softmax"),
    "aten.log_softmax.int": _row_softmax("log_softmax"),
    "aten._log_softmax.default": _row_softmax("log_softmax"),
    "aten.batch_norm.default": _batch_norm,
}


def _hardtanh(node: Node) -> tuple[Step, ...] | None:
    low, high = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
    return Step("clamp_min", consts=(float(low),)), Step("clamp_max", consts=(float(high),))


# ---- binary nodes: the accumulator on one side, an operand on the other ------------------------

_SUFFIX = {"row": "row", "col": "col", "full": "full", "scalar": "tensor"}
_NEG = Step("neg")


def _combine(verb: str, other: Any, extent: Extent | None) -> tuple[Step, ...]:
    if extent is None:
        return (Step(f"{verb}_const", consts=(float(other),)),)
    return (Step(f"{verb}_{_SUFFIX[extent]}", (other,)),)


def _subtract(acc_first: bool, other: Any, extent: Extent | None) -> tuple[Step, ...]:
    """acc - other = -((-acc) + other) and other - acc = (-acc) + other: exact in IEEE arithmetic."""
    if acc_first and extent is None:
        return (Step("add_const", consts=(-float(other),)),)
    added = (_NEG, *_combine("add", other, extent))
    return (*added, _NEG) if acc_first else added


def _divide(acc_first: bool, other: Any, extent: Extent | None) -> tuple[Step, ...] | None:
    if not acc_first:
        return (Step("recip"),) if extent is None and other == 1 else None
    if extent in ("row", "full", "col"):
        return _combine("div", other, extent)
    exact = extent is None and _is_power_of_two(float(other))
    return (Step("mul_const", consts=(1.0 / float(other),)),) if exact else None


def _is_power_of_two(value: float) -> bool:
    mantissa, _ = torch.frexp(torch.tensor(value, dtype=torch.float64))
    return abs(mantissa.item()) == 0.5


def _binary_steps(
    name: str, acc_first: bool, other: Any, extent: Extent | None
) -> tuple[Step, ...] | None:
    verb, _, overload = name.removeprefix("aten.").partition(".")
    if overload not in ("Tensor", "Scalar"):
        return None
    match verb:
        case "add" | "mul":
            return _combine(verb, other, extent)
        case "sub":
            return _subtract(acc_first, other, extent)
        case "rsub":
            return _subtract(not acc_first, other, extent)
        case "div":
            return _divide(acc_first, other, extent)
        case _:
            return None


def _binary(node: Node, acc: Accumulator) -> tuple[Step, ...] | None:
    if len(node.args) < 2 or node.kwargs.get("alpha", 1) != 1 or "rounding_mode" in node.kwargs:
        return None
    if len(node.args) > 2 and node.args[2] != 1:
        return None
    left, right = node.args[:2]
    acc_first = left in acc
    used, other = (left, right) if acc_first else (right, left)
    if used not in acc or other in acc:
        return None
    if is_number(other):
        return _binary_steps(str(node.target), acc_first, other, None)
    if not isinstance(other, Node) or not _is_float(other, torch.float32, torch.bfloat16):
        return None
    extent = extent_of(shape_of(other) or (), shape_of(_node(used)) or ())
    if extent is None or (extent != "full" and not _is_float(other)):
        return None
    return _binary_steps(str(node.target), acc_first, other, extent)


# ---- gnnc ops -----------------------------------------------------------------------------------


def _dequantize(node: Node, acc: Accumulator) -> tuple[Step, ...] | None:
    value, scale, granularity = node.args[:3]
    exponent = int(argument(node, 3, "exponent", 0))
    shape = shape_of(_node(value))
    if value not in acc or shape is None:
        return None
    if granularity == "column" and len(shape) != 2:
        return None
    kind = {"tensor": "mul_tensor", "row": "mul_row", "column": "mul_col"}[granularity]
    power = (Step("mul_const", consts=(2.0**exponent,)),) if exponent else ()
    return (*power, Step(kind, (scale,)))


def _quantize(node: Node, acc: Accumulator) -> RowOp | None:
    """A store of int8 rows: with their own scale, a given scale, or a given scale and own shifts."""
    value, scale, granularity = node.args[:3]
    shift = argument(node, 3, "shift", None)
    if value not in acc or argument(node, 4, "bits", 8) != 8:
        return None
    if granularity == "row" and shift is None and _is_made_from(scale, acc, "gnnc.scale.default"):
        return RowOp(node, (Step("quant_row"),), "store", (scale, node))
    if granularity == "row":
        return None
    if shift is None:
        return RowOp(node, (Step("quant_static", (scale,)),), "store", (node,))
    if not _is_made_from(shift, acc, "gnnc.row_shift.default") or shift.args[1] is not scale:
        return None
    return RowOp(node, (Step("quant_pow2", (scale,)),), "store", (shift, node))


def _is_made_from(node: Any, acc: Accumulator, target: str) -> bool:
    return isinstance(node, Node) and str(node.target) == target and node.args[0] in acc


# ---- patterns of several nodes ---------------------------------------------------------------------


def _native_batch_norm(node: Node, acc: Accumulator) -> RowOp | None:
    norm, index = node.args
    name = "aten._native_batch_norm_legit_no_training.default"
    if index != 0 or str(_node(norm).target) != name or norm.args[0] not in acc:
        return None
    _, weight, bias, mean, var, _, eps = norm.args
    steps = _batch_norm_step(norm, mean, var, weight, bias, eps)
    return RowOp(node, steps, "chain", (norm, node)) if steps else None


def _l2_normalize(node: Node, acc: Accumulator) -> RowOp | None:
    """x / max(norm(x), eps), the norm perhaps expanded to x's shape first."""
    clamped, covers = node.args[1], (node,)
    if not isinstance(clamped, Node):
        return None
    if str(clamped.target) == "aten.expand.default":
        covers = (clamped, *covers)
        clamped = _node(clamped.args[0])
    if str(clamped.target) != "aten.clamp_min.default" or not is_number(clamped.args[1]):
        return None
    norm = _node(clamped.args[0])
    if not _is_row_norm(norm, acc) or not _only_inside(norm, clamped, *covers):
        return None
    step = Step("l2_normalize", consts=(float(clamped.args[1]),))
    return RowOp(node, (step,), "chain", (norm, clamped, *covers))


def _is_row_norm(node: Node, acc: Accumulator) -> bool:
    if str(node.target) != "aten.linalg_vector_norm.default" or node.args[0] not in acc:
        return False
    shape = shape_of(_node(node.args[0]))
    order, dims, keep = (argument(node, i, "", d) for i, d in ((1, 2), (2, None), (3, False)))
    flat = shape is not None and len(shape) == 2
    return flat and order == 2 and dims in ([-1], [1], (-1,), (1,)) and keep


def _row_dot(node: Node, acc: Accumulator) -> RowOp | None:
    """(x.view(N, H, D) * att).sum(-1): an attention column a head."""
    product = _node(node.args[0])
    if str(product.target) != "aten.mul.Tensor" or not _only_inside(product, node):
        return None
    steps = _binary(product, acc)
    shape = shape_of(product)
    if not steps or steps[0].kind != "mul_col" or shape is None:
        return None
    if list(argument(node, 1, "dim", None) or ()) not in ([-1], [len(shape) - 1]):
        return None
    if argument(node, 2, "keepdim", False) or len(shape) not in (2, 3):
        return None
    heads = int(shape[1]) if len(shape) == 3 else 1
    return RowOp(
        node, (Step("row_dot", steps[0].operands, (heads,)),), "store", (product, node)
    )


def _head_mean(node: Node, acc: Accumulator) -> RowOp | None:
    shape = shape_of(_node(node.args[0]))
    if node.args[0] not in acc or shape is None or len(shape) != 3:
        return None
    if list(argument(node, 1, "dim", None) or ()) not in ([1], [-2]):
        return None
    if argument(node, 2, "keepdim", False):
        return None
    return RowOp(node, (Step("head_mean", consts=(int(shape[1]),)),), "chain", (node,))


def _to_copy(node: Node, acc: Accumulator) -> RowOp | None:
    dtype = node.kwargs.get("dtype")
    if node.args[0] not in acc:
        return None
    if dtype is torch.bfloat16:
        return RowOp(node, (Step("store_bf16"),), "store", (node,))
    return RowOp(node, (), "view", (node,)) if dtype is torch.float32 else None


_PATTERNS: dict[str, Callable[[Node, Accumulator], RowOp | None]] = {
    "gnnc.quantize.default": _quantize,
    "aten._to_copy.default": _to_copy,
    "aten.sum.dim_IntList": _row_dot,
    "aten.mean.dim": _head_mean,
    "aten.div.Tensor": _l2_normalize,
    str(operator.getitem): _native_batch_norm,
}


# ---- the two entry points -------------------------------------------------------------------------


def classify(node: Node, acc: Accumulator | Node) -> RowOp | None:
    """Say what ``node`` does to the accumulator, or None where it is not row-local to it."""
    acc = acc if isinstance(acc, Accumulator) else Accumulator({acc: None})
    if node.op != "call_function" or not _is_float(acc.value):
        return None
    pattern = _PATTERNS.get(str(node.target))
    if pattern and _reads_nodes(node) and (matched := pattern(node, acc)):
        return matched
    return _classify_single(node, acc)


def _classify_single(node: Node, acc: Accumulator) -> RowOp | None:
    name, first = str(node.target), node.args[0] if node.args else None
    if name in _VIEWS:
        kept = first in acc and _keeps_rows(node, _node(first))
        return RowOp(node, (), "view", (node,)) if kept else None
    steps = _single_steps(name, node, acc)
    if not steps or not _is_float(node) or not _same_shape(node, acc):
        return None
    return RowOp(node, steps, "chain", (node,))


def _single_steps(name: str, node: Node, acc: Accumulator) -> tuple[Step, ...] | None:
    if name == "gnnc.dequantize.default":
        return _dequantize(node, acc)
    if name in _PLAIN or name in _SPECIAL:
        if node.args[0] not in acc or any(arg in acc for arg in node.args[1:] if _is_node(arg)):
            return None
        return (Step(_PLAIN[name]),) if name in _PLAIN else _SPECIAL[name](node)
    return _binary(node, acc)


def _same_shape(node: Node, acc: Accumulator) -> bool:
    shape = shape_of(node)
    return shape is not None and any(same_sizes(shape, shape_of(a) or ()) for a in acc.aliases)


def _keeps_rows(node: Node, value: Node) -> bool:
    new, old = shape_of(node), shape_of(value)
    return bool(new and old) and statically_known_true(new[0] == old[0]) and _is_float(node)


def linearize(
    start: Node,
    admit: Callable[[RowOp], bool] = lambda op: True,
    outputs: Collection[Node] = (),
) -> list[RowOp]:
    """Read the row program that begins at ``start``, in the order a kernel runs it.

    Args:
        start: the node that makes the first accumulator (an anchor, or what a map reads).
        admit: says for each op that could come next whether it may; stores and views too.
        outputs: nodes that must be written: a ``store_f32`` op follows each that the chain makes.
    """
    program: list[RowOp] = []
    acc = Accumulator({start: None})
    while True:
        _take_views(acc, admit, program)
        near = [op for node in _users(acc) if (op := classify(node, acc))]
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
    """Users of the accumulator and their users (a pattern's root may be two steps away)."""
    near = {user: None for alias in acc.aliases for user in alias.users if user not in acc}
    far = {user: None for node in near for user in node.users if user not in acc}
    return sorted(near | far)


def _store(node: Node) -> RowOp:
    return RowOp(node, (Step("store_f32"),), "store", ())


# ---- arguments -------------------------------------------------------------------------------------


def argument(node: Node, index: int, name: str, default: Any) -> Any:
    """An op's argument by position or keyword, or its default."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def is_number(value: Any) -> bool:
    """Whether an argument is a plain Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _reads_nodes(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Node)


def _only_inside(*nodes: Node) -> bool:
    """Whether every node but the last is read by the others alone."""
    return all(set(node.users) <= set(nodes) for node in nodes[:-1])
