"""What a run on example inputs tells: the largest value and the error of each way to quantize.

Granularity is chosen from a table of candidates: sums of integers before sums of floats, as long as
the error on the examples is small enough, or else the one with the least error. (``auto`` weighs
their times too: see ``passes.auto``.)
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
from gnnc.ir.quantized import qmax_of

MAX_ROWS = 1 << 14
"""Rows of an example that the errors are measured on, evenly spread."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to quantize the rows that an aggregation adds.

    Attributes:
        granularity: ``row_pow2``, ``tensor`` or ``row``.
        static: whether the scale comes from examples.
        exact: whether the sum is one of integers, which no edge value may be a float for.
        reduces: the reductions that it can do.
        headroom: how many times larger than on the examples values may be before a static scale clips
            them. Room for twice the values takes one of the shifts of ``row_pow2``, which loses hardly
            anything there; where there is one scale for all rows it would take a bit of every value.
    """

    granularity: str
    static: bool
    exact: bool
    reduces: frozenset[str]
    headroom: float = 1.0


CANDIDATES = (
    Candidate("tensor", True, True, frozenset({"sum", "max", "min"})),
    Candidate("row_pow2", True, True, frozenset({"sum"}), headroom=2.0),
    Candidate("row", False, False, frozenset({"sum", "mean", "max", "min"})),
)
"""How an aggregation's input can be quantized."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the examples say about one tensor.

    Attributes:
        amax: the largest magnitude.
        errors: mean relative error of a row, by granularity.
    """

    amax: float
    errors: Mapping[str, float]


def observe(gm: fx.GraphModule, values: tuple[Any, ...], wanted: Collection[Node]) -> dict[Node, Observation]:
    """Run ``gm`` on ``values`` and look at the tensors that ``wanted`` make."""
    observer = _Observer(gm, frozenset(wanted))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        observer.run(*values)
    for node, observation in observer.seen.items():
        _check_finite(node, observation)
    return observer.seen


class _Observer(fx.Interpreter):
    """Runs what leads to the wanted tensors, with a faster SpMM than the reference."""

    def __init__(self, gm: fx.GraphModule, wanted: frozenset[Node]) -> None:
        super().__init__(gm)
        self.wanted = wanted
        self.needed = _ancestors(wanted)
        self.seen: dict[Node, Observation] = {}

    def run_node(self, n: Node) -> Any:
        if n not in self.needed and n.op != "placeholder":
            return None
        result = super().run_node(n)
        if n in self.wanted:
            self.seen[n] = _look(result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.gnnc.spmm.default:
            rowptr, col, value, x, reduce, num_dst = args
            if reduce == "sum":
                return spmm_sum(rowptr, col, value, x, num_dst)
        return super().call_function(target, args, kwargs)


def _ancestors(nodes: Collection[Node]) -> set[Node]:
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def spmm_sum(rowptr: Tensor, col: Tensor, value: Tensor | None, x: Tensor, num_dst: int) -> Tensor:
    """``gnnc.spmm`` with ``sum``, up to rounding, without a tensor of edges by width."""
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


def _look(x: Tensor) -> Observation:
    amax = float(x.abs().max()) if x.numel() else 0.0
    rows = x.reshape(x.shape[0], -1).float() if x.numel() else x.new_zeros(1, 1)
    sample = rows[:: max(1, rows.shape[0] // MAX_ROWS)]
    base = torch.tensor(amax / qmax_of(8), device=x.device)
    errors = {c.granularity: row_error(sample, c.granularity, base * c.headroom) for c in CANDIDATES}
    return Observation(amax, errors)


def _check_finite(node: Node, seen: Observation) -> None:
    if not math.isfinite(seen.amax):
        layer = node.meta.get("layer") or "the model's root"
        raise PrecisionError(
            f"[gnnc.quantize] {node.name} (in {layer}) is not finite on example_inputs: no scale "
            "fits it; look for an overflow or a division by zero before it"
        )


def row_error(x: Tensor, granularity: str, base: Tensor) -> float:
    """Mean over the rows of |x - x̂| / |x| (L2), x̂ being x in 8 bits and back."""
    ops = torch.ops.gnnc
    if granularity == "row":
        scale = ops.scale(x, "row")
        back = ops.dequantize(ops.quantize(x, scale, "row"), scale, "row")
    else:
        shift = ops.row_shift(x, base) if granularity == "row_pow2" else x.new_zeros(x.shape[0])
        codes = ops.quantize(x, base, "tensor", shift)
        back = ops.dequantize(codes, base * torch.exp2(-shift.float()), "row")
    norm = x.norm(dim=1)
    kept = norm > 0
    return float(((x - back).norm(dim=1)[kept] / norm[kept]).mean()) if bool(kept.any()) else 0.0


def choose(
    candidates: Collection[Candidate], seen: Observation | None, limit: float
) -> tuple[Candidate, str]:
    """Return the candidate to use and a sentence that says why."""
    if seen is None:
        dynamic = next(c for c in candidates if not c.static)
        return dynamic, f"{dynamic.granularity} scales, taken at each call"
    good = [c for c in candidates if seen.errors[c.granularity] <= limit]
    if good:
        best = min(good, key=lambda c: (not c.exact, seen.errors[c.granularity]))
    else:
        best = min(candidates, key=lambda c: seen.errors[c.granularity])
    errors = ", ".join(f"{c.granularity} {seen.errors[c.granularity]:.2%}" for c in candidates)
    return best, f"{best.granularity} scales: error on the examples is {errors}"
