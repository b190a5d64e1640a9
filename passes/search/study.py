"""What ``auto`` knows before it chooses: the error and the time of every op in every option.

Errors are measured on the examples, one op at a time; without examples an op's weight, 1 plus its
receptive-field gain, stands for its sensitivity. Times come from the backend's rates: those of the
op itself, and those of writing a tensor in the format that an option of its reader wants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import sympy
import torch
from torch import fx
from torch.fx import Node

from gnnc.cost import model
from gnnc.cost.model import Rates, Term
from gnnc.cost.receptive_field import assumed_reach, count_reach, receptive_gains
from gnnc.ir.attention import match_attention
from gnnc.ir.graph import output_node
from gnnc.ir.nodes import shape_or_none
from gnnc.ir.op import op_of, size_expr
from gnnc.ir.row_local import classify
from gnnc.ir.source import is_weight
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import AGGREGATIONS, FULL, LOW_OPERANDS, Option
from gnnc.passes.rewrite.assumed_sizes import Typical
from gnnc.passes.search.rounding import round_rows
from gnnc.passes.search.sensitivity import Bench, Errors

ASSUMED_DEGREE = 16
"""Edges a node of the graph that is assumed without examples."""

GROWTH = 1.5
"""Static scales must also hold for values this much larger than those of the examples.

Sums over hubs grow most: of scales from a random 80% of the nodes of a citation or purchase graph, those
behind such sums clipped the rest as they clip the 80% themselves at a growth of 1.2 to 1.5.
"""

_NOMINAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class OpChoices:
    """One primitive and what can be chosen for it.

    Attributes:
        node: the primitive.
        options: its options; the first is FP32 unless the user forced another.
        errors: for each option, the error of each output when only this op takes it: on the examples,
            and then, once more for each output, had their values been ``GROWTH`` times as large as
            those that static scales come from.
        seconds: for each option, the time of the op itself.
        gain: its receptive-field gain, None where it reads the input itself.
    """

    node: Node
    options: tuple[Option, ...]
    errors: tuple[Errors, ...]
    seconds: tuple[float, ...]
    gain: float | None = None

    @property
    def weight(self) -> float:
        """What stands for the sensitivity where none is measured: 1 + gain."""
        return 1.0 + max(self.gain or 0.0, 0.0)

    @property
    def sensitivity(self) -> float:
        """The largest error that any option of it makes."""
        return max(self.error(o) for o in range(len(self.options)))

    def error(self, option: int) -> float:
        """The error that an option makes on the examples, of the output that it harms most."""
        return max(self.errors[option][: len(self.errors[option]) // 2], default=0.0)


@dataclass(frozen=True, slots=True)
class Store:
    """Writing one tensor in one format, or loading it, which several readers may share.

    Attributes:
        readers: (op number, option number) of whatever needs it.
        seconds: the time that it takes.
    """

    readers: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(slots=True)
class Study:
    """Everything that a choice is made from.

    Attributes:
        ops: the primitives that can be below FP32.
        stores: the formats in which tensors may have to be written.
        outputs: number of floating outputs of the model.
        bench: runs the graph with ops rounded; None without examples.
        gains: receptive-field gain of every primitive that has one.
    """

    ops: tuple[OpChoices, ...]
    stores: tuple[Store, ...]
    outputs: int
    bench: Bench | None = None
    gains: Mapping[Node, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether errors were measured, on examples."""
        return self.bench is not None

    def seconds(self, chosen: Sequence[int]) -> float:
        """Return the predicted time of a choice: an option number for each op."""
        own = sum(op.seconds[o] for op, o in zip(self.ops, chosen, strict=True))
        taken = set(enumerate(chosen))
        return own + sum(s.seconds for s in self.stores if not taken.isdisjoint(s.readers))

    def error(self, chosen: Sequence[int]) -> Errors:
        """Return the predicted error of each output, on the examples and then for grown values.

        Errors of single ops add up in squares.
        """
        found = [op.errors[o] for op, o in zip(self.ops, chosen, strict=True)]
        return tuple(math.sqrt(sum(e[k] ** 2 for e in found)) for k in range(2 * self.outputs))

    def plan(self, chosen: Sequence[int]) -> dict[str, Option]:
        """Return the choice by name of the primitive."""
        return {op.node.name: op.options[o] for op, o in zip(self.ops, chosen, strict=True)}


def study(gm: fx.GraphModule, ctx: Context, allowed: Mapping[Node, Sequence[Option]], rates: Rates) -> Study:
    """Measure and price every option.

    Args:
        gm: the primitives of the model, in FP32.
        ctx: the request.
        allowed: the options of each primitive that has any.
        rates: the machine's.
    """
    typical = Typical(gm, ctx.examples, ASSUMED_DEGREE)
    bench = None if ctx.examples is None else Bench(gm, ctx.examples)
    gains = _gains(gm, bench)
    free = {node: tuple(options) for node, options in allowed.items() if tuple(options) != (FULL,)}
    price = _Prices(typical, rates, ctx.target.joint_products)
    errors = _measured(bench, free) if bench is not None else _nominal(free, gains)
    ops = tuple(
        OpChoices(node, options, errors[node], tuple(price.op(node, o) for o in options), gains.get(node))
        for node, options in free.items()
    )
    outputs = len(bench.outputs) if bench is not None else 1
    return Study(ops, tuple(_stores(ops, price)), outputs, bench, gains)


def _gains(gm: fx.GraphModule, bench: Bench | None) -> dict[Node, float]:
    if bench is None:
        nodes = float(1 << 17)
        return receptive_gains(gm, assumed_reach(nodes, ASSUMED_DEGREE), nodes)
    values = {node: bench.value(node) for node in gm.graph.nodes if node.op != "output"}
    rows = [values[n].numel() - 1 for node in gm.graph.nodes if (n := _rowptr(node)) is not None]
    return receptive_gains(gm, count_reach(values), float(max(rows, default=1)))


def _rowptr(node: Node) -> Node | None:
    op = op_of(node)
    along_edges = op is not None and op.name in ("spmm", "sddmm", "message", "edge_map")
    return node.args[0] if along_edges else None  # type: ignore[return-value]


# Errors


def _measured(bench: Bench, free: Mapping[Node, Sequence[Option]]) -> dict[Node, tuple[Errors, ...]]:
    return {node: tuple(_measure(bench, node, o) for o in options) for node, options in free.items()}


def _measure(bench: Bench, node: Node, option: Option) -> Errors:
    if option == FULL:
        return (0.0,) * (2 * len(bench.outputs))
    now = bench.errors({node: option})
    is_static = option.granularity not in (None, "row")
    return now + (bench.errors({node: option}, GROWTH) if is_static else now)


def _nominal(
    free: Mapping[Node, Sequence[Option]], gains: Mapping[Node, float]
) -> dict[Node, tuple[Errors, ...]]:
    """Errors that the options make on normally distributed rows, by weight of the op.

    Weights say which op matters more than another and not how much an error grows, so their scale is
    free: it is chosen so that their root mean square is 1.
    """
    weights = {node: 1.0 + max(gains.get(node, 0.0), 0.0) for node in free}
    unit = math.sqrt(sum(w * w for w in weights.values()) / max(len(weights), 1))
    return {
        node: tuple((weights[node] / unit * nominal_error(node, option),) * 2 for option in options)
        for node, options in free.items()
    }


def nominal_error(node: Node, option: Option) -> float:
    """Return the relative L2 error of an op's operands on normally distributed rows."""
    if option == FULL:
        return 0.0
    op = op_of(node)
    assert op is not None
    positions = LOW_OPERANDS[op.name]
    return math.sqrt(sum(_rounding_error(option, _width(node.args[p])) ** 2 for p in positions))


def _width(node: object) -> int:
    shape = (shape_or_none(node) or ()) if isinstance(node, Node) else ()
    return math.prod(size for size in shape[1:] if isinstance(size, int))


@cache
def _rounding_error(option: Option, width: int) -> float:
    x = torch.randn(_NOMINAL_ROWS, max(width, 1), generator=torch.Generator().manual_seed(0))
    if option.precision.is_integer:
        rounded = round_rows(x, option.precision.activation_qtype())
    else:
        rounded = x.to(torch.bfloat16 if option.precision.name == "bf16" else torch.float16).float()
    return float((rounded - x).norm() / x.norm())


# Times


class _Prices:
    """Seconds of ops and of stores, from sizes and rates."""

    def __init__(self, typical: Typical, rates: Rates, joint_products: bool) -> None:
        self._typical = typical
        self._rates = rates
        self.joint_products = joint_products

    def op(self, node: Node, option: Option) -> float:
        """Time of a primitive, without streaming its result out."""
        size = _element_bytes(option)
        terms = model.op_terms(node, _mode(node, option), size)
        if model.kind_of(node) == "gemm":
            terms += _preparation(node, node.args[1], option)
        elif option.precision.is_integer and option.granularity not in (None, "row"):
            terms.append(Term("step", model.elements(node)))
        return self._seconds(_family(node), terms)

    def store(self, tensor: Node, name: str, gemm_loads: bool) -> float:
        """Time to have a tensor in a format."""
        maker = _maker(tensor)
        if gemm_loads and maker is None:
            return self._narrow(tensor, name)
        if maker is None and name == "fp32":
            return 0.0
        terms = _write(tensor, name)
        if maker is None:
            read = model.held(tensor)
            return self._seconds("map", [Term("launch", model.ONE), Term("read", read, read), *terms])
        return self._seconds(_family(maker), terms)

    def load(self, tensor: Node, name: str) -> float:
        """Time of a GEMM's launch, and of reading its rows in a format."""
        size = model.padded(tensor, _element_bytes(Option.parse(name)))
        return self._seconds("gemm", [Term("launch", model.ONE), Term("read", size, size)])

    def _narrow(self, tensor: Node, name: str) -> float:
        """A GEMM narrows FP32 rows as it loads them: it reads more, and quantizes."""
        if name == "fp32":
            return 0.0
        option = Option.parse(name)
        size = _element_bytes(option)
        terms = [Term("quantize" if option.precision.is_integer else "step", model.elements(tensor))]
        whole, narrow = model.padded(tensor, 4), model.padded(tensor, size)
        wide = self._seconds("gemm", [*terms, Term("read", whole, whole)])
        return wide - self._seconds("gemm", [Term("read", narrow, narrow)])

    def _seconds(self, family: str, terms: Sequence[Term]) -> float:
        return self._rates.seconds(family, [term.at(self._typical.value) for term in terms])


def _preparation(node: Node, weight: object, option: Option) -> list[Term]:
    """What a GEMM does to its weight and to its integer result."""
    assert isinstance(weight, Node)
    if option == FULL:
        return []
    if not option.precision.is_integer:
        return [Term("step", model.elements(weight))]
    return [Term("quantize", model.elements(weight)), Term("step", 2 * model.elements(node))]


def _write(tensor: Node, name: str) -> list[Term]:
    option = Option.parse(name)
    size = model.padded(tensor, _element_bytes(option))
    if not option.precision.is_integer:
        steps = [] if name == "fp32" else [Term("step", model.elements(tensor))]
        return [Term("write", size, size), *steps]
    rows = size_expr(tensor.meta["val"].shape[0])
    scales = {"row": rows * 4, "row_pow2": rows}.get(option.granularity or "row")
    extra = [] if scales is None else [Term("write", scales, scales), Term("quantize", rows)]
    return [Term("write", size, size), Term("quantize", model.elements(tensor)), *extra]


def _element_bytes(option: Option) -> sympy.Rational:
    return sympy.Rational(option.precision.activation_bits, 8)


def _mode(node: Node, option: Option) -> str:
    name = option.precision.name
    return f"{name}.{option.granularity or 'row'}" if _is_scaled_sum(node, option) else name


def _is_scaled_sum(node: Node, option: Option) -> bool:
    op = op_of(node)
    return op is not None and op.name in AGGREGATIONS and option.precision.is_integer


def _family(node: Node) -> str:
    return "attention" if match_attention(node) else model.family_of(node)


def _stores(ops: Sequence[OpChoices], price: _Prices) -> list[Store]:
    """One store for each tensor and format that some option of some reader wants."""
    readers: dict[tuple[Node, str], list[tuple[int, int]]] = {}
    consumers: dict[Node, set[Node]] = {}
    for i, op in enumerate(ops):
        for tensor in _operands(op.node):
            consumers.setdefault(tensor, set()).add(op.node)
            for o, option in enumerate(op.options):
                readers.setdefault((tensor, _format(option)), []).append((i, o))
    found = []
    for (tensor, name), wanted in readers.items():
        found += _loads(ops, tensor, name, wanted, price)
        if name == "fp32" and _is_kept(tensor, consumers[tensor]):
            continue
        only_gemms = all(model.kind_of(node) == "gemm" for node in consumers[tensor])
        at_load = only_gemms and (price.joint_products or len(consumers[tensor]) == 1)
        found.append(Store(tuple(wanted), price.store(tensor, name, at_load)))
    return found


def _loads(
    ops: Sequence[OpChoices], tensor: Node, name: str, wanted: Sequence[tuple[int, int]], price: _Prices
) -> list[Store]:
    """What reading a matrix costs: once where products of one matrix are one kernel, else for each."""
    gemms = [(i, o) for i, o in wanted if model.kind_of(ops[i].node) == "gemm"]
    if not gemms:
        return []
    groups = [gemms] if price.joint_products else [[reader] for reader in gemms]
    return [Store(tuple(group), price.load(tensor, name)) for group in groups]


def _operands(node: Node) -> list[Node]:
    """The feature tensors that an op narrows, behind views of them; weights are its own."""
    op = op_of(node)
    assert op is not None
    found = []
    for position in LOW_OPERANDS[op.name]:
        tensor = node.args[position]
        if isinstance(tensor, Node) and not is_weight(tensor) and (op.name, position) != ("gemm", 1):
            found.append(_behind_views(tensor))
    return list(dict.fromkeys(found))


def _behind_views(node: Node) -> Node:
    while node.all_input_nodes:
        before = node.all_input_nodes[0]
        op = classify(node, before)
        if op is None or op.role != "view":
            return node
        node = before
    return node


def _format(option: Option) -> str:
    if not option.precision.is_integer:
        return option.precision.name
    return f"{option.precision.name} {option.granularity or 'row'}"


def _is_kept(tensor: Node, consumers: set[Node]) -> bool:
    """Whether someone else reads the tensor in FP32 anyway."""
    output = output_node(tensor.graph.owning_module)  # type: ignore[arg-type]
    return any(user is output or (user not in consumers and not _passes_on(user)) for user in tensor.users)


def _passes_on(user: Node) -> bool:
    """Whether a reader is fused behind what makes the tensor, or narrows it itself."""
    return op_of(user) is None


def _maker(tensor: Node) -> Node | None:
    """The primitive in whose kernel a tensor is made, or None."""
    node = tensor
    while op_of(node) is None:
        rows = [n for n in node.all_input_nodes if (op := classify(node, n)) and op.role != "store"]
        if not rows:
            return None
        node = rows[0]
    return node


__all__ = ["OpChoices", "Store", "Study", "nominal_error", "study"]
