"""Observation of tensors on example inputs: the largest value and the error of each quantized type.

Granularity is chosen from a table of candidates: sums of integers before sums of floats, as long as
the error on the examples is small enough, or else the one with the least error. (``auto`` weighs
their times too: see ``gnnc.passes.search.study``.)
"""

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from gnnc.errors import PrecisionError
from gnnc.ir.nodes import ancestors
from gnnc.ir.qtype import Granularity, QType
from gnnc.precision import Precision

CLIPPED = 1.25
"""Ratio of the largest value to the largest that a static scale holds, up to which values may be clipped."""

MAX_ROWS = 1 << 14
"""Rows of an example that the errors are measured on, evenly spread."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to quantize the rows that an aggregation adds.

    Attributes:
        granularity: ``row_pow2``, ``tensor`` or ``row``.
        static: whether the scale comes from examples.
        exact: whether integers are added, which excludes float edge values.
        reduces: the reductions that it can do.
        headroom: factor by which values may exceed those of the examples before a static scale clips
            them. Room for twice the values takes one of the shifts of ``row_pow2``, which loses hardly
            anything there; where there is one scale for all rows it would take a bit of every value.
        least: part of the examples' largest value that a largest value must reach under a static scale: half
            the value has twice the error, where rows do not take fractions of the scale.
    """

    granularity: Granularity
    static: bool
    exact: bool
    reduces: frozenset[str]
    headroom: float = 1.0
    least: float = 0.0

    def qtype(self, precision: Precision) -> QType:
        """Return the type of the rows in this precision."""
        return precision.activation_qtype(self.granularity)


CANDIDATES = (
    Candidate("tensor", True, True, frozenset({"sum", "max", "min"}), least=1 / 2),
    Candidate("row_pow2", True, True, frozenset({"sum"}), headroom=2.0, least=1 / 64),
    Candidate("row", False, False, frozenset({"sum", "mean", "max", "min"})),
)
"""The ways in which an aggregation's input can be quantized."""

HEADROOM = {candidate.granularity: candidate.headroom for candidate in CANDIDATES}
"""Headroom of a static scale, by granularity."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The range and the quantization errors of one tensor on the examples.

    Attributes:
        amax: the largest magnitude.
        errors: mean relative error of a row, by quantized type.
    """

    amax: float
    errors: Mapping[QType, float]


def observe(
    gm: fx.GraphModule, values: tuple[Any, ...], qtypes: Mapping[Node, Collection[QType]]
) -> dict[Node, Observation]:
    """Run ``gm`` on examples and observe the tensors of some of its nodes.

    Args:
        gm: the graph.
        values: its arguments in placeholder order.
        qtypes: the nodes to observe, and the quantized types to measure the error of.

    Raises:
        PrecisionError: a tensor is not finite.
    """
    observer = _Observer(gm, qtypes)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        observer.run(*values)
    for node, observation in observer.observed.items():
        _check_finite(node, observation)
    return observer.observed


class _Observer(fx.Interpreter):
    """Interpreter of the ancestors of the observed nodes, with a faster SpMM than the reference."""

    def __init__(self, gm: fx.GraphModule, qtypes: Mapping[Node, Collection[QType]]) -> None:
        super().__init__(gm)
        self.qtypes = qtypes
        self.needed = ancestors(qtypes)
        self.observed: dict[Node, Observation] = {}

    def run_node(self, n: Node) -> Any:
        if n not in self.needed and n.op != "placeholder":
            return None
        result = super().run_node(n)
        if n in self.qtypes:
            self.observed[n] = _observation(result, self.qtypes[n])
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.gnnc.spmm.default:
            rowptr, col, value, x, reduce, num_dst = args
            if reduce == "sum":
                return spmm_sum(rowptr, col, value, x, num_dst)
        return super().call_function(target, args, kwargs)


def spmm_sum(rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, num_dst: int) -> Tensor:
    """Return ``gnnc.spmm`` with ``sum``, up to rounding, without a tensor of edges by width."""
    if value is None:
        value = x.new_ones(col.numel())
    if value.dim() == 2:
        heads = zip(value.unbind(1), x.unbind(1), strict=True)
        return torch.stack([spmm_sum(rowptr, col, v, h, num_dst) for v, h in heads], 1)
    flat = x.reshape(x.shape[0], -1).float()
    matrix = torch.sparse_csr_tensor(
        rowptr.to(col.dtype), col, value.float(), (num_dst, x.shape[0]), check_invariants=False
    )
    return (matrix @ flat).reshape(num_dst, *x.shape[1:])


def _observation(x: Tensor, qtypes: Collection[QType]) -> Observation:
    amax = float(x.abs().max()) if x.numel() else 0.0
    rows = x.reshape(x.shape[0], -1).float() if x.numel() else x.new_zeros(1, 1)
    sample = rows[:: max(1, rows.shape[0] // MAX_ROWS)]
    errors = {}
    for qtype in qtypes:
        base = torch.tensor(amax / qtype.qmax, dtype=torch.float32, device=x.device)
        errors[qtype] = row_error(sample, qtype, base * HEADROOM[qtype.granularity])
    return Observation(amax, errors)


def _check_finite(node: Node, observed: Observation) -> None:
    if not math.isfinite(observed.amax):
        layer = node.meta.get("layer") or "the model's root"
        raise PrecisionError(
            f"[gnnc.quantize] {node.name} (in {layer}) is not finite on example_inputs: no scale "
            "fits it; look for an overflow or a division by zero before it"
        )


def row_error(x: Tensor, qtype: QType, base: Tensor) -> float:
    """Return the mean over the rows of ``|x - x̂| / |x|`` (L2), x̂ being x quantized and dequantized.

    Args:
        x: float32 ``[N, F]``.
        qtype: the quantized type.
        base: float32 ``[]``, the static scale; not read where each row takes its own.
    """
    back = _round_trip(x, qtype, base)
    norm = x.norm(dim=1)
    nonzero = norm > 0
    return float(((x - back).norm(dim=1)[nonzero] / norm[nonzero]).mean()) if bool(nonzero.any()) else 0.0


def _round_trip(x: Tensor, qtype: QType, base: Tensor) -> Tensor:
    ops, text = torch.ops.gnnc, str(qtype)
    if qtype.granularity == "row":
        scale = ops.scale(x, text)
        return ops.dequantize(ops.quantize(x, scale, text), scale, "row")
    if qtype.granularity != "row_pow2":
        return ops.dequantize(ops.quantize(x, base, text), base, "tensor")
    shift = ops.row_shift(x, base, text)
    return ops.dequantize(ops.quantize(x, base, text, shift), base * torch.exp2(-shift.float()), "row")


def choose(
    candidates: Collection[Candidate], precision: Precision, observed: Observation | None, limit: float
) -> tuple[Candidate, str]:
    """Return the candidate to use and a sentence that says why.

    Args:
        candidates: the ways that the aggregation can take.
        precision: the precision of its rows.
        observed: the observation of its rows; None: scales are taken at each call.
        limit: mean relative error of a row up to which a candidate is good enough.
    """
    if observed is None:
        dynamic = next(c for c in candidates if not c.static)
        return dynamic, f"{dynamic.granularity} scales, taken at each call"
    errors = {c: observed.errors[c.qtype(precision)] for c in candidates}
    good = [c for c in candidates if errors[c] <= limit]
    if good:
        best = min(good, key=lambda c: (not c.exact, errors[c]))
    else:
        best = min(candidates, key=lambda c: errors[c])
    listed = ", ".join(f"{c.granularity} {error:.2%}" for c, error in errors.items())
    return best, f"{best.granularity} scales: error on the examples is {listed}"
