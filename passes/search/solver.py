"""Exact solver of the choice of options: the least predicted time within an error budget.

The integer program, with op i, option o, tensor t, format f and output k::

    minimize    sum c[i,o] x[i,o] + sum s[t,f] y[t,f]
    subject to  sum_o x[i,o] = 1                       each op takes one option
                y[t,f] >= x[i,o]                       a format that a reader needs is written, once
                sum e[k,i,o]^2 x[i,o] <= limit[k]^2    on the examples, and again for grown values
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnc.passes.search.study import Study

_LEAST = 1e-30
"""Least limit: a smaller one counts as this, and only FP32 keeps it."""

_TIE = 1e-9
"""Relative difference of times below which two choices tie: the earlier options then win."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice of one option for each op.

    Attributes:
        chosen: an option number for each op of the study.
        seconds: predicted time of the chosen options and of the formats that they need.
        errors: predicted error of each output, on the examples.
        feasible: whether the predicted error is within the budget; if not, the error is the least.
        binding: the constraint that keeps it from being faster, as text.
    """

    chosen: tuple[int, ...]
    seconds: float
    errors: tuple[float, ...]
    feasible: bool
    binding: str


def solve(study: Study, budget: float, grown: float | None = None) -> Solution:
    """Return the fastest choice whose predicted error is at most ``budget`` for every output.

    If no choice is, because the user forced low precisions, return the one of least error.

    Args:
        study: errors and times.
        budget: the predicted error allowed on the examples.
        grown: the predicted error allowed for values larger than the examples'; None: ``budget``.
    """
    limits = np.repeat([budget, budget if grown is None else grown], study.outputs)
    chosen = _program(study, limits)
    if chosen is None:
        least = tuple(min(range(len(op.options)), key=lambda o: max(op.errors[o])) for op in study.ops)
        return _solution(study, least, False, "no choice of precisions meets the budget")
    return _solution(study, chosen, True, _binding(study, chosen, limits))


def _solution(study: Study, chosen: tuple[int, ...], feasible: bool, binding: str) -> Solution:
    errors = study.error(chosen)[: study.outputs]
    return Solution(chosen, study.seconds(chosen), errors, feasible, binding)


def _program(study: Study, limits: np.ndarray) -> tuple[int, ...] | None:
    from scipy.optimize import Bounds, milp  # scipy takes most of a second to import

    if not study.ops:
        return ()
    places = [(i, o) for i, op in enumerate(study.ops) for o in range(len(op.options))]
    column = {place: k for k, place in enumerate(places)}
    width = len(places) + len(study.stores)
    costs = np.array([study.ops[i].seconds[o] for i, o in places] + [s.seconds for s in study.stores])
    scale = max(float(np.abs(costs).max()), 1e-12)
    errors = np.array([study.ops[i].errors[o] for i, o in places]).reshape(len(places), len(limits))
    upper = np.ones(width)
    upper[: len(places)][~np.isfinite(errors).all(1)] = 0.0
    result = milp(
        costs / scale,
        integrality=np.array([1.0] * len(places) + [0.0] * len(study.stores)),
        bounds=Bounds(0.0, upper),
        constraints=_constraints(study, column, errors / np.maximum(limits, _LEAST), width),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    chosen = tuple(
        max(range(len(op.options)), key=lambda o: result.x[column[i, o]]) for i, op in enumerate(study.ops)
    )
    return _earliest(study, chosen, limits)


def _earliest(study: Study, chosen: tuple[int, ...], limits: np.ndarray) -> tuple[int, ...]:
    """Replace options by earlier ones that are as fast, so that equally fast choices come out the same."""
    most = study.seconds(chosen) * (1 + _TIE)
    for i in range(len(study.ops)):
        for o in range(chosen[i]):
            other = (*chosen[:i], o, *chosen[i + 1 :])
            if study.seconds(other) <= most and bool((np.array(study.error(other)) <= limits).all()):
                chosen = other
                break
    return chosen


def _constraints(
    study: Study, column: dict[tuple[int, int], int], shares: np.ndarray, width: int
) -> list[Any]:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import lil_matrix

    one = lil_matrix((len(study.ops), width))
    for (i, _), k in column.items():
        one[i, k] = 1.0
    constraints = [LinearConstraint(one.tocsr(), 1.0, 1.0)]
    needs = [(s, reader) for s, store in enumerate(study.stores) for reader in store.readers]
    if needs:
        needed = lil_matrix((len(needs), width))
        for row, (s, reader) in enumerate(needs):
            needed[row, len(column) + s] = 1.0
            needed[row, column[reader]] = -1.0
        constraints.append(LinearConstraint(needed.tocsr(), 0.0, np.inf))
    squares = np.zeros((shares.shape[1], width))
    squares[:, : len(column)] = np.where(np.isfinite(shares), shares, 0.0).T ** 2
    if len(squares):
        constraints.append(LinearConstraint(squares, -np.inf, 1.0))
    return constraints


def _binding(study: Study, chosen: Sequence[int], limits: np.ndarray) -> str:
    """Return the text on the single change that saves most time among those that break a limit."""
    now = study.seconds(chosen)
    steps = []
    for i, op in enumerate(study.ops):
        for o in range(len(op.options)):
            other = (*chosen[:i], o, *chosen[i + 1 :])
            saved, errors = now - study.seconds(other), np.array(study.error(other))
            if saved > 0 and bool((errors > limits).any()):
                steps.append((saved, i, o, float(errors[errors > limits].max())))
    used = f"predicted error {max(study.error(chosen)[: study.outputs], default=0.0):.2g}"
    if len(limits):
        used += f" of a limit of {limits[0]:.2g}"
    if not steps:
        return f"nothing binds, {used}: no op has a faster precision"
    saved, i, o, error = max(steps)
    op = study.ops[i]
    layer = op.node.meta.get("layer") or "the root"
    name = str(op.node.target).split(".")[1]
    return (
        f"the error budget binds, {used}: {layer} {name} in {op.options[o]} would save "
        f"{saved * 1e3:.3f} ms, and take the error to {error:.2g}"
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None where one of the two does not vary."""
    from scipy.stats import rankdata

    if len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    ranks = np.corrcoef(rankdata(first), rankdata(second))
    return float(ranks[0, 1])
