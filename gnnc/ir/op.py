"""The record that defines an op in one place, and the registry that tests walk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch

from gnnc.errors import InputError
from gnnc.ir.qtype import QType
from gnnc.torch_private import OpOverload

NAMESPACE = "gnnc"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True, slots=True)
class Cost:
    """What an op must move and compute, as sympy expressions of the symbolic sizes.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Everything semantic about one primitive.

    Attributes:
        name: the name in the ``gnnc`` namespace.
        schema: arguments and results in ``torch.library`` notation.
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
    _LIBRARY.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(op.name, op.reference, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{op.name}"
    torch.library.register_fake(qualified, op.fake, lib=_LIBRARY)
    if op.gradient is not None:
        torch.library.register_autograd(
            qualified, op.gradient.backward, setup_context=op.gradient.setup, lib=_LIBRARY
        )
    REGISTRY[op.name] = op
    return op


def op_of(node: torch.fx.Node) -> Op | None:
    """Return the registered op that ``node`` calls, or None for anything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    return REGISTRY.get(target.__name__.split(".")[0]) if target.namespace == NAMESPACE else None


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
