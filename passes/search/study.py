"""Study of a model for ``precision="auto"``: the error and the time of every op in every option.

Errors are measured on the examples, one op at a time; without examples an op's weight, 1 plus its
receptive-field gain, stands for its sensitivity. Times are predicted from the backend's rates: the time
of the op itself (``passes.search.prices``), and the time to write a tensor in the format that an option
of its reader wants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import fx
from torch.fx import Node

from gnnc.cost import model
from gnnc.cost.model import Rates
from gnnc.cost.receptive_field import assumed_reach, count_reach, receptive_gains
from gnnc.ir.graph import output_node
from gnnc.ir.nodes import argument, operand, shape_or_none, unpack
from gnnc.ir.op import op_of
from gnnc.ir.parts import GRADIENTS
from gnnc.ir.row_local import classify
from gnnc.ir.source import is_weight
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import FULL, Option
from gnnc.passes.rewrite.assumed_sizes import AssumedSizes
from gnnc.passes.search.judged_values import JudgedValue
from gnnc.passes.search.prices import Prices
from gnnc.passes.search.rounding import round_rows
from gnnc.passes.search.sensitivity import Bench, Errors

ASSUMED_DEGREE = 16
"""Edges per node of the graph that is assumed without examples."""

GROWTH = 1.5
"""Factor by which values may exceed the examples' before static scales clip too much.

Sums over hubs grow most: scales taken from a random 80% of the nodes of a citation or purchase graph clip
the sums of the other nodes as much as they clip the 80% themselves at a growth of 1.2 to 1.5.
"""

_NOMINAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class OpChoices:
    """A primitive with the options that can be chosen for it.

    Attributes:
        node: the primitive.
        options: its options; the first is FP32 unless the user forced another.
        errors: for each option, the relative L2 error of each judged value when this op alone takes the
            option: first on the examples, then for values ``GROWTH`` times as large as those that static
            scales were taken from.
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
        """Stand-in for the sensitivity where none is measured: 1 + gain."""
        return 1.0 + max(self.gain or 0.0, 0.0)

    @property
    def sensitivity(self) -> float:
        """Largest error that an option of the op makes."""
        return max(self.error(o) for o in range(len(self.options)))

    def error(self, option: int) -> float:
        """Return the error of an option on the examples, of the judged value with the largest."""
        return max(self.errors[option][: len(self.errors[option]) // 2], default=0.0)


@dataclass(frozen=True, slots=True)
class Store:
    """Cost of writing or loading one tensor in one format, shared by all readers of that format.

    Attributes:
        readers: (op number, option number) of each reader.
        seconds: the time to write or load the tensor once.
    """

    readers: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(slots=True)
class Study:
    """Errors and times that a choice of options is made from.

    Attributes:
        ops: the primitives that can be below FP32.
        stores: the cost of each format in which a tensor may have to be written.
        outputs: number of judged values: the floating outputs of the model, in training also gradients.
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
        """Return whether errors were measured on examples."""
        return self.bench is not None

    @property
    def judged(self) -> list[JudgedValue]:
        """Return the values whose errors count; an empty list where none were measured."""
        return [] if self.bench is None else self.bench.judged

    def seconds(self, chosen: Sequence[int]) -> float:
        """Return the predicted time of a choice: an option number for each op."""
        of_ops = sum(op.seconds[o] for op, o in zip(self.ops, chosen, strict=True))
        readers = set(enumerate(chosen))
        return of_ops + sum(store.seconds for store in self.stores if not readers.isdisjoint(store.readers))

    def error(self, chosen: Sequence[int]) -> Errors:
        """Return the predicted error of each judged value, on the examples and then for grown values.

        Squared errors of single ops add up.
        """
        errors = [op.errors[o] for op, o in zip(self.ops, chosen, strict=True)]
        return tuple(math.sqrt(sum(error[k] ** 2 for error in errors)) for k in range(2 * self.outputs))

    def plan(self, chosen: Sequence[int]) -> dict[str, Option]:
        """Return the choice by name of the primitive."""
        return {op.node.name: op.options[o] for op, o in zip(self.ops, chosen, strict=True)}


def study(gm: fx.GraphModule, ctx: Context, allowed: Mapping[Node, Sequence[Option]], rates: Rates) -> Study:
    """Measure the error and predict the time of every option.

    Args:
        gm: the primitives of the model, in FP32.
        ctx: the request.
        allowed: the options of each primitive that has any.
        rates: the machine's rates.
    """
    values = ctx.examples if ctx.step is None else ctx.step
    assumed_sizes = AssumedSizes(gm, values, ASSUMED_DEGREE)
    bench = None if values is None else Bench(gm, values)
    gains = _gains(gm, bench)
    free = {node: tuple(options) for node, options in allowed.items() if tuple(options) != (FULL,)}
    price = Prices(assumed_sizes, rates, ctx.target)
    errors = _measured(bench, free) if bench is not None else _nominal(free, gains)
    ops = tuple(
        OpChoices(node, options, errors[node], tuple(price.op(node, o) for o in options), gains.get(node))
        for node, options in free.items()
    )
    outputs = len(bench.judged) if bench is not None else 1
    return Study(ops, tuple(_stores(ops, price)), outputs, bench, gains)


def _gains(gm: fx.GraphModule, bench: Bench | None) -> dict[Node, float]:
    if GRADIENTS in gm.meta:  # the receptive field of a gradient is the graph's
        return {}
    if bench is None:
        nodes = float(1 << 17)
        return receptive_gains(gm, assumed_reach(nodes, ASSUMED_DEGREE), nodes)
    values = {node: bench.value(node) for node in gm.graph.nodes if node.op != "output"}
    rows = [values[n].numel() - 1 for node in gm.graph.nodes if (n := _rowptr(node)) is not None]
    return receptive_gains(gm, count_reach(values), float(max(rows, default=1)))


def _rowptr(node: Node) -> Node | None:
    op = op_of(node)
    return operand(node, "rowptr") if op is not None and op.crosses_edges else None


def _measured(bench: Bench, free: Mapping[Node, Sequence[Option]]) -> dict[Node, tuple[Errors, ...]]:
    return {node: tuple(_measure(bench, node, o) for o in options) for node, options in free.items()}


def _measure(bench: Bench, node: Node, option: Option) -> Errors:
    if option == FULL:
        return (0.0,) * (2 * len(bench.judged))
    now = bench.errors({node: option})
    is_static = option.granularity not in (None, "row")
    return now + (bench.errors({node: option}, GROWTH) if is_static else now)


def _nominal(
    free: Mapping[Node, Sequence[Option]], gains: Mapping[Node, float]
) -> dict[Node, tuple[Errors, ...]]:
    """Return the error of each option on normally distributed rows, times the weight of the op.

    Weights rank the ops and say nothing of how much an error grows, so their scale is free: they are
    divided by their root mean square.
    """
    weights = {node: 1.0 + max(gains.get(node, 0.0), 0.0) for node in free}
    rms = math.sqrt(sum(w * w for w in weights.values()) / max(len(weights), 1))
    return {
        node: tuple((weights[node] / rms * nominal_error(node, option),) * 2 for option in options)
        for node, options in free.items()
    }


def nominal_error(node: Node, option: Option) -> float:
    """Return the relative L2 error of an op's operands on normally distributed rows."""
    if option == FULL:
        return 0.0
    op = op_of(node)
    assert op is not None
    low = unpack(node, *op.low_operands)
    return math.sqrt(sum(_rounding_error(option, _width(tensor)) ** 2 for tensor in low))


def _width(node: object) -> int:
    shape = (shape_or_none(node) or ()) if isinstance(node, Node) else ()
    return math.prod(size for size in shape[1:] if isinstance(size, int))


@cache
def _rounding_error(option: Option, width: int) -> float:
    x = torch.randn(_NOMINAL_ROWS, max(width, 1), generator=torch.Generator().manual_seed(0))
    if option.precision.is_quantized:
        rounded = round_rows(x, option.precision.activation_qtype())
    else:
        rounded = x.to(torch.bfloat16 if option.precision.name == "bf16" else torch.float16).float()
    return float((rounded - x).norm() / x.norm())


def _stores(ops: Sequence[OpChoices], price: Prices) -> list[Store]:
    """Return a store for each tensor and each format that an option of a reader wants."""
    readers: dict[tuple[Node, str], list[tuple[int, int]]] = {}
    consumers: dict[Node, set[Node]] = {}
    for i, op in enumerate(ops):
        for tensor in _operands(op.node):
            consumers.setdefault(tensor, set()).add(op.node)
            for o, option in enumerate(op.options):
                readers.setdefault((tensor, _format(option)), []).append((i, o))
    stores = []
    for (tensor, name), choices in readers.items():
        stores += _loads(ops, tensor, name, choices, price)
        if name == "fp32" and _is_read_in_fp32(tensor, consumers[tensor]):
            continue
        only_gemms = all(model.family_of(node) == "gemm" for node in consumers[tensor])
        at_load = only_gemms and price.joins(tensor, consumers[tensor], name)
        stores.append(Store(tuple(choices), price.store(tensor, name, at_load)))
    return stores


def _loads(
    ops: Sequence[OpChoices], tensor: Node, name: str, readers: Sequence[tuple[int, int]], price: Prices
) -> list[Store]:
    """Return the cost of reading a matrix: once where its products are one kernel, else once a product."""
    gemms = [(i, o) for i, o in readers if model.family_of(ops[i].node) == "gemm"]
    if not gemms:
        return []
    products = {ops[i].node for i, _ in gemms}
    groups = [gemms] if price.joins(tensor, products, name) else [[reader] for reader in gemms]
    return [Store(tuple(group), price.load(tensor, name)) for group in groups]


def _operands(node: Node) -> list[Node]:
    """Return the feature tensors, not the weights, that an op reads in low precision; views are skipped."""
    op = op_of(node)
    assert op is not None
    tensors = []
    for name in op.low_operands:
        tensor = argument(node, name)
        if isinstance(tensor, Node) and not is_weight(tensor) and (op.kind, name) != ("dense", "w"):
            tensors.append(_behind_views(tensor))
    return list(dict.fromkeys(tensors))


def _behind_views(node: Node) -> Node:
    while node.all_input_nodes:
        before = node.all_input_nodes[0]
        op = classify(node, before)
        if op is None or op.role != "view":
            return node
        node = before
    return node


def _format(option: Option) -> str:
    if not option.precision.is_quantized:
        return option.precision.name
    return f"{option.precision.name} {option.granularity or 'row'}"


def _is_read_in_fp32(tensor: Node, consumers: set[Node]) -> bool:
    """Return whether a node other than ``consumers`` reads the tensor in FP32 anyway."""
    output = output_node(tensor.graph.owning_module)  # type: ignore[arg-type]
    return any(user is output or (user not in consumers and not _is_fused(user)) for user in tensor.users)


def _is_fused(user: Node) -> bool:
    """Return whether a reader is fused behind the producer of the tensor, or narrows it itself."""
    return op_of(user) is None
