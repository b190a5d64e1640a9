"""The record that defines an op in one place, and the registry that tests walk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal, NoReturn, get_args

import sympy
import torch

from gnnc.errors import InputError
from gnnc.ir.operands import validated
from gnnc.ir.qtype import QType
from gnnc.torch_private import OpOverload

NAMESPACE = "gnnc"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory traffic and arithmetic of an op, as sympy expressions of the symbolic sizes.

    Attributes:
        bytes: compulsory plus gathered bytes of memory traffic.
        flops: multiplications plus additions (integer or float).
    """

    bytes: sympy.Expr
    flops: sympy.Expr


@dataclass(frozen=True, slots=True)
class ErrorInput:
    """Arguments that the op must refuse, and a regular expression its message must match."""

    args: tuple[Any, ...]
    match: str
    error: type[Exception] = InputError


@dataclass(frozen=True, slots=True)
class Gradient:
    """Autograd rule: ``backward(ctx, *grads)`` and ``setup(ctx, inputs, output)``.

    Both follow ``torch.library.register_autograd``.
    """

    backward: Callable[..., Any]
    setup: Callable[..., None]


Kind = Literal["structure", "dense", "aggregate", "edge", "precision"]
Counted = Literal["gemm", "spmm", "sddmm", "softmax", "segment", "message"]
Step = Literal["step", "quantize", "exp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Everything semantic about one primitive.

    Attributes:
        name: the name in the ``gnnc`` namespace.
        schema: arguments and results in ``torch.library`` notation.
        kind: what the op computes: ``structure`` (integers of the graph: CSR, degrees), ``dense`` (rows of
            features), ``aggregate`` (edges into rows), ``edge`` (a value for each edge) or ``precision``
            (another form of the same values, such as quantized ones).
        features: operands that carry features, edge values or weights, in the order of the schema.
        gathered: features whose rows the op reads at both ends of edges, so once an edge.
        low_operands: features that may be held in fewer bits; none: the op is computed in FP32.
        integer_operands: features that must be quantized values; the others must be numbers.
        result_dtype: dtype of the result, where that is the same for all operands.
        counted_as: the count of "quantized k of n" that the op belongs to, if any.
        family: kernel family of the op: the fused groups that it may lead (``gemm``, ``spmm``) and the
            measured rates of the cost model; the op's own name unless given.
        step: the cost model's term for one element of the result, where the op gathers nothing.
        label: name of the result in printed programs: ``h{n}`` is numbered, ``{x}_q`` follows the name of
            operand ``x``, any other text stands as it is. None: named by dtype and shape, and the
            results of an op with several by the names in its schema.
        cached_alone: the structure cache keeps the result by itself, never computing it again with
            the results of another part.
        reference: the meaning, in plain PyTorch.
        fake: the shape and dtype rule (``torch.library.register_fake``).
        cost: bytes and flops from the arguments' FakeTensors.
        gradient: the autograd rule, or None where ``no_gradient`` says why there is none.
        no_gradient: why the op has no gradient.
        quantized: name of the op that computes the same on integers, if any.
        qtype: the type of the result from the arguments by name, where that is quantized values.
        samples: argument tuples that tests run.
        error_inputs: argument tuples that must be refused.
    """

    name: str
    schema: str
    kind: Kind
    features: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    low_operands: tuple[str, ...] = ()
    integer_operands: tuple[str, ...] = ()
    result_dtype: torch.dtype | None = None
    counted_as: Counted | None = None
    family: str = ""
    step: Step = "step"
    label: str | None = None
    cached_alone: bool = False
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Callable[..., Cost]
    samples: Callable[[], Sequence[tuple[Any, ...]]]
    error_inputs: Callable[[], Sequence[ErrorInput]]
    gradient: Gradient | None = None
    no_gradient: str | None = None
    quantized: str | None = None
    qtype: Callable[[Mapping[str, Any]], QType] | None = None
    doc: str = field(default="")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the op's parameters, in order."""
        declared = self.schema[1 : self.schema.index(") ->")].split(",")
        return tuple(text.split("=")[0].split()[-1] for text in declared)

    @property
    def has_body(self) -> bool:
        """Return whether the op computes a body at every edge (``gnnc.ir.body``)."""
        return "body" in self.parameters

    @property
    def crosses_edges(self) -> bool:
        """Return whether the op reads features at the other ends of edges, by the source ids ``col``."""
        return bool(self.gathered) and "col" in self.parameters

    @property
    def cost_family(self) -> str:
        """The kernel family of the op, which has its fused groups and its measured rates."""
        return self.family or self.name

    @property
    def target(self) -> OpOverload:
        """The callable that stands in graphs."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


REGISTRY: dict[str, Op] = {}


def define(op: Op) -> Op:
    """Register ``op`` with ``torch.library`` and with the registry."""
    if op.name in REGISTRY:
        raise ValueError(f"op {op.name!r} is defined twice")
    if (op.gradient is None) == (op.no_gradient is None):
        raise ValueError(f"op {op.name!r} needs a gradient or the reason for having none")
    _check_traits(op)
    _LIBRARY.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(op.name, validated(op.name, op.parameters, op.reference), "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{op.name}"
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.gradient is not None:
        torch.library.register_autograd(
            qualified, op.gradient.backward, setup_context=op.gradient.setup, lib=_LIBRARY
        )
    REGISTRY[op.name] = op
    return op


def _check_traits(op: Op) -> None:
    """Refuse traits that name an operand which the schema lacks, or contradict each other."""
    if op.kind not in get_args(Kind):
        raise ValueError(f"op {op.name!r} has kind {op.kind!r}; use one of {get_args(Kind)}")
    named = {field for _, field, _, _ in Formatter().parse(op.label or "") if field not in (None, "n")}
    for name in (*op.features, *op.gathered, *op.low_operands, *op.integer_operands, *named):
        if name not in op.parameters:
            raise ValueError(f"a trait of op {op.name!r} names {name!r}; it takes {op.parameters}")
    if not {*op.gathered, *op.low_operands, *op.integer_operands} <= set(op.features):
        raise ValueError(
            f"gathered, low_operands and integer_operands of op {op.name!r} must be among its features"
        )
    if op.features != tuple(name for name in op.parameters if name in op.features):
        raise ValueError(f"features of op {op.name!r} must stand in the order of its schema")
    if op.kind == "structure" and op.features:
        raise ValueError(f"op {op.name!r} of kind 'structure' has features; give it another kind")
    if op.kind not in ("structure", "precision") and not op.features:
        raise ValueError(f"op {op.name!r} computes on features; name them in `features`")


def op_of(node: torch.fx.Node) -> Op | None:
    """Return the registered op that ``node`` calls, or None for anything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    return REGISTRY.get(target.__name__.split(".")[0]) if target.namespace == NAMESPACE else None


def has_body(node: torch.fx.Node) -> bool:
    """Return whether ``node`` calls an op that computes a body at every edge."""
    op = op_of(node)
    return op is not None and op.has_body


def check(condition: bool, op: str, message: Callable[[], str]) -> None:
    """Raise an ``InputError`` that names the op, unless ``condition`` holds."""
    if not condition:
        refuse(op, message())


def refuse(op: str, message: str) -> NoReturn:
    """Raise an ``InputError`` that names the op."""
    raise InputError(f"[{NAMESPACE}.{op}] {message}")


def size_expr(size: Any) -> sympy.Expr:
    """Return a concrete or symbolic size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def numel(tensor: torch.Tensor) -> sympy.Expr:
    """Return the number of elements as a sympy expression."""
    result = sympy.Integer(1)
    for size in tensor.shape:
        result *= size_expr(size)
    return result


def nbytes(*tensors: torch.Tensor | None) -> sympy.Expr:
    """Return the bytes that the tensors hold as a sympy expression."""
    return sum((numel(t) * t.element_size() for t in tensors if t is not None), start=sympy.Integer(0))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` are formed and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32
