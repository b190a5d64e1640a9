"""Checks of the arguments of ops, by their names in the schemas: dtypes, literals, sizes that must agree.

A name means the same in every op, so that one table serves all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gnnc.errors import VerifyError
from gnnc.ir.body import GROUPS, body_inputs, body_values, parse_body
from gnnc.ir.message import MESSAGE_REDUCTIONS, values_taken
from gnnc.ir.nodes import qtype_of
from gnnc.ir.op import REGISTRY, op_of
from gnnc.ir.qtype import QType
from gnnc.ir.quantized import SCALE_LAYOUTS
from gnnc.ir.sparse import EDGE_OPS, REDUCTIONS
from gnnc.torch_private import schema, statically_known_true

_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "rowptr": (torch.int64,),
    "col": (torch.int32, torch.int64),
    "perm": (torch.int32, torch.int64),
    "scale": (torch.float32,),
    "x_scale": (torch.float32,),
    "a_scale": (torch.float32,),
    "b_scale": (torch.float32,),
    "base": (torch.float32,),
    "shift": (torch.uint8,),
}
_FLOATS = ("x", "w", "a", "b", "logits")
"""Arguments that hold numbers, not quantized values, in ops that are not of integers."""

_LITERALS: dict[str, tuple[Any, ...]] = {
    "reduce": REDUCTIONS,
    "granularity": SCALE_LAYOUTS,
    "bits": tuple(range(1, 9)),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op: its arguments by name, as nodes and as their values."""

    op: str
    given: dict[str, Any]

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the (fake) tensor that is given as ``name``, if one is."""
        value = _value(self.given.get(name))
        return value if isinstance(value, torch.Tensor) else None

    def qtype(self, name: str) -> QType | None:
        """Return the type of the quantized values given as ``name``, or None."""
        value = self.given.get(name)
        return qtype_of(value) if isinstance(value, fx.Node) else None

    def rows(self, name: str) -> Any:
        """Return the first size of the tensor given as ``name``, or None."""
        tensor = self.tensor(name)
        return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def problem_of_arguments(node: fx.Node) -> str | None:
    """Return a clause that says what is wrong with a call of a gnnc op and what to do, or None."""
    op = op_of(node)
    assert op is not None
    call = Call(op.name, {})
    parameters = schema(node.target).arguments  # type: ignore[arg-type]
    names = [parameter.name for parameter in parameters]
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return f"gives {op.name} arguments that it does not take; it takes {', '.join(names)}"
    call.given.update(zip(names, node.args, strict=False), **node.kwargs)
    for parameter in parameters:
        if parameter.name not in call.given and not parameter.has_default_value():
            return f"calls {op.name} without {parameter.name}; give it all of {', '.join(names)}"
    for rule in _RULES:
        problem = rule(call)
        if problem is not None:
            return problem
    return _problem_of_result(call, node.meta["val"])


def _problem_of_dtypes(call: Call) -> str | None:
    integers = REGISTRY[call.op].integer_operands
    for name in call.given:
        tensor = call.tensor(name)
        if tensor is None:
            continue
        wanted = _DTYPES.get(name)
        if wanted is not None and tensor.dtype not in wanted:
            dtypes = " or ".join(_short(dtype) for dtype in wanted)
            return f"takes {tensor.dtype} as {name}, where {call.op} needs {dtypes}; convert it"
        qtype = call.qtype(name)
        if name in integers and qtype is None:
            return f"takes {tensor.dtype} as {name}, where {call.op} needs quantized values; quantize it"
        is_scaled = call.given.get(f"{name}_scale") is not None
        if is_scaled and qtype is None:
            return f"takes {tensor.dtype} as {name} and a scale for it; quantize it, or leave the scale out"
        if name in _FLOATS and name not in integers and qtype is not None and not is_scaled:
            return f"takes {qtype} as {name}, where {call.op} needs numbers; dequantize it, or use q{call.op}"
        if qtype is not None and tensor.dtype != qtype.dtype:
            return f"takes {tensor.dtype} as {name}, which says {qtype}; its dtype must be {qtype.dtype}"
    return None


def _problem_of_literals(call: Call) -> str | None:
    for name, known in (*_LITERALS.items(), ("op", EDGE_OPS)):
        value = call.given.get(name)
        several = call.op == "message" and name == "reduce" and isinstance(value, str)
        allowed = MESSAGE_REDUCTIONS if several else known
        if value is not None and any(v not in allowed for v in (value.split(",") if several else (value,))):
            listed = f"{allowed[0]}..{allowed[-1]}" if name == "bits" else ", ".join(allowed)
            return f"has {name} {value!r}; use one of {listed}"
    return None


def _problem_of_qtype(call: Call) -> str | None:
    if "qtype" not in call.given:
        return None
    try:
        qtype = QType.parse(call.given["qtype"])
    except ValueError as error:
        return f"has a qtype that cannot be read: {error}"
    is_shifted = qtype.granularity == "row_pow2"
    if call.op == "row_shift" and not is_shifted:
        return f"shifts rows of {qtype}, which have no shift; use row_pow2"
    if call.op == "quantize" and is_shifted != (call.given.get("shift") is not None):
        return f"makes {qtype} with{'out' if is_shifted else ''} shifts; row_pow2 takes them, and it alone"
    return None


def _problem_of_sizes(call: Call) -> str | None:
    rowptr, edges = call.tensor("rowptr"), call.rows("col")
    if rowptr is not None and rowptr.dim() != 1:
        return f"takes rowptr with {rowptr.dim()} dimensions; it is [num_dst + 1]"
    num_dst = _value(call.given.get("num_dst"))
    if rowptr is not None and _differ(rowptr.shape[0], _plus_one(num_dst)):
        return f"makes {num_dst} rows, but rowptr has {rowptr.shape[0]} entries; num_dst is one less"
    if _differ(call.rows("value"), edges):
        return f"has {call.rows('value')} edge values for {edges} edges; give each edge one, in CSR order"
    value, x = call.tensor("value"), call.tensor("x")
    if value is not None and x is not None and value.dim() == 2 and _differ(value.shape[1], x.shape[1]):
        return f"has {value.shape[1]} values an edge for {x.shape[1]} heads of x; give each head one, or all"
    for name, rows in (("x_scale", "x"), ("shift", "x"), ("a_scale", "a"), ("b_scale", "b")):
        if _differ(call.rows(name), call.rows(rows)):
            return (
                f"has {call.rows(name)} entries of {name} for {call.rows(rows)} rows of {rows}; "
                "give each row one"
            )
    return None


def _problem_of_widths(call: Call) -> str | None:
    if call.op not in ("gemm", "qgemm"):
        return None
    x, w = call.tensor("x"), call.tensor("w")
    if x is None or w is None or w.dim() != 2:
        return "takes a weight that is not a matrix; reshape it to [out, in]"
    inner = w.shape[0 if call.given.get("w_is_kn") else 1]
    if _differ(x.shape[-1], inner):
        return f"multiplies rows of {x.shape[-1]} with a weight for {inner}; see whether w_is_kn is right"
    return None


def _problem_of_scales(call: Call) -> str | None:
    if call.given.get("x_scale") is not None and call.given.get("shift") is not None:
        return "has both x_scale and shift; rows are scaled one way: leave one out"
    is_of_edges = call.op == "qsddmm"
    if is_of_edges and (call.given.get("a_scale") is None) != (call.given.get("b_scale") is None):
        return "has a scale for the rows of one end only; give both a_scale and b_scale, or neither"
    if call.op not in ("quantize", "dequantize"):
        return None
    scale, values = call.tensor("scale"), call.tensor("x" if call.op == "quantize" else "q")
    if scale is None or values is None:
        return None
    granularity = _layout_of_scale(call)
    dimensions = 0 if granularity == "tensor" else 1
    single = dimensions == 0 and scale.dim() == 1 and not _differ(scale.shape[0], 1)
    if scale.dim() != dimensions and not single:
        return f"has a scale of {scale.dim()} dimensions, but granularity {granularity!r}; they must agree"
    size = {"row": 0, "column": -1}.get(granularity)
    if size is not None and _differ(scale.shape[0], values.shape[size]):
        many = values.shape[size]
        return f"has {scale.shape[0]} scales for {many} {granularity}s; give each {granularity} one"
    return None


def _layout_of_scale(call: Call) -> str:
    """Return the layout of the scale of ``quantize`` or ``dequantize``."""
    if call.op == "dequantize":
        return call.given["granularity"]
    qtype = QType.parse(call.given["qtype"])
    return "tensor" if qtype.has_one_scale else qtype.granularity


def _problem_of_body(call: Call) -> str | None:
    if "body" not in call.given:
        return None
    try:
        parse_body(call.given["body"])
    except (VerifyError, SyntaxError, AttributeError) as error:
        return f"has a body that cannot be read: {error}; write it with gnnc.ir.body_text"
    for name in body_inputs(call.given["body"]):
        group = GROUPS[name[0]]
        many = len(call.given[group])
        if int(name[1:]) >= many:
            return f"has a body that reads {name}, but {many} {group} operands; pass what it reads"
    return _problem_of_values(call)


def _problem_of_values(call: Call) -> str | None:
    """Check that the body of a message returns as many values as the reductions take."""
    returned = len(body_values(parse_body(call.given["body"]).graph))
    reduce = call.given.get("reduce")
    taken = sum(map(values_taken, reduce.split(","))) if reduce is not None else 1
    if returned == taken:
        return None
    return f"has a body that returns {returned} values, but {call.op} takes {taken}; return what it takes"


_RULES: tuple[Callable[[Call], str | None], ...] = (
    _problem_of_dtypes,
    _problem_of_literals,
    _problem_of_qtype,
    _problem_of_sizes,
    _problem_of_widths,
    _problem_of_scales,
    _problem_of_body,
)


def _problem_of_result(call: Call, result: Any) -> str | None:
    dtype = REGISTRY[call.op].result_dtype
    if call.op == "quantize":
        dtype = QType.parse(call.given["qtype"]).dtype
    if dtype is None or not isinstance(result, torch.Tensor) or result.dtype == dtype:
        return None
    return f"says that it makes {result.dtype}, but {call.op} makes {_short(dtype)}; infer its meta again"


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _plus_one(size: Any) -> Any:
    return None if size is None else size + 1


def _differ(a: Any, b: Any) -> bool:
    """Return whether two sizes are known, and differ for every value of their symbols."""
    if a is None or b is None or isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return statically_known_true(a != b)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
