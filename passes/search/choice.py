"""Choice of ``precision="auto"``: made from a study, applied by ``assign``, corrected by measured runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.fx import Node

from gnnc.errors import UnsupportedError
from gnnc.passes.base import Context
from gnnc.passes.quantization.number_formats import Option, assigned_options
from gnnc.passes.search.solver import Solution, rank_correlation, solve
from gnnc.passes.search.study import GROWTH, OpChoices, Study, study

MAX_TIGHTENINGS = 5
"""Number of times that a choice is made again under a tighter limit where it measures over budget."""

_MARGIN = 0.97
"""Share of a corrected limit that is used, so that the next run does not measure just over budget."""


@dataclass(slots=True)
class Choice:
    """A choice of precisions with the study behind it and the errors of running it.

    Attributes:
        study: errors and times of every option.
        budget: the error that the user allows.
        solution: the latest choice.
        plan: the option of each primitive, by name; None while a uniform precision is tried.
        limit: the predicted error allowed to the latest choice on the examples.
        grown_limit: the same for values that have grown beyond the examples', see ``study.GROWTH``.
        measured: the largest error of a judged value in a run of the latest choice.
        grown: the same for values that have grown.
        log: the attempts, a line each.
    """

    study: Study
    budget: float
    solution: Solution
    plan: dict[str, Option] | None
    limit: float
    grown_limit: float
    measured: float | None = None
    grown: float | None = None
    log: list[str] = field(default_factory=list)

    @staticmethod
    def make(gm: fx.GraphModule, ctx: Context, allowed: Mapping[Node, Sequence[Option]]) -> "Choice":
        """Return the choice for a graph, after a study of its ops.

        Raises:
            UnsupportedError: the backend cannot be measured.
        """
        if ctx.target.rates is None:
            raise UnsupportedError(
                f"[gnnc.assign] precision='auto' weighs measured times, and backend {ctx.target.name!r} "
                "was given without rates: compile with gnnc.compile, or name a precision"
            )
        studied = study(gm, ctx, allowed, ctx.target.rates())
        budget = ctx.error_budget
        solution = solve(studied, budget)
        return Choice(studied, budget, solution, studied.plan(solution.chosen), budget, budget)

    def option(self, name: str) -> Option | None:
        """Return the option of a primitive, or None where none was chosen for it."""
        return None if self.plan is None else self.plan.get(name)

    @property
    def predicted(self) -> float:
        """Largest predicted error of a judged value."""
        return max(self.solution.errors, default=0.0)

    @property
    def limit_text(self) -> str:
        """Text of the limits."""
        grown = "" if self.grown_limit == self.budget else f" ({self.grown_limit:.2g} for larger values)"
        return f"{self.limit:.2g}{grown}"

    @property
    def predicted_grown(self) -> float:
        """Largest predicted error of a judged value, for values that have grown."""
        return max(self.study.error(self.solution.chosen)[self.study.outputs :], default=0.0)

    def adjust(self, measured: float, grown: float) -> bool:
        """Choose again under limits corrected by measured errors.

        An error over budget tightens the limit on its prediction in proportion. If none is over budget,
        both limits are loosened in the same way.

        Args:
            measured: the largest error of a judged value on the examples.
            grown: the same for values that have grown.

        Returns:
            Whether the choice changed.
        """
        before = self.solution.chosen
        fits = max(measured, grown) <= self.budget
        if fits or measured > self.budget:
            self.limit = self._corrected(self.predicted, measured)
        if fits or grown > self.budget:
            self.grown_limit = self._corrected(self.predicted_grown, grown)
        self.solution = solve(self.study, self.limit, self.grown_limit)
        self.plan = self.study.plan(self.solution.chosen)
        return self.solution.chosen != before

    def _corrected(self, predicted: float, measured: float) -> float:
        """Return the limit on a predicted error that keeps the measured error within the budget."""
        ratio = measured / predicted if predicted else 1.0
        limit = self.budget / max(ratio, 1e-9) * _MARGIN
        return min(limit, predicted * _MARGIN) if measured > self.budget else limit

    def give_up(self) -> None:
        """Choose the least error that the user's overrides allow."""
        self.limit = self.grown_limit = 0.0
        self.solution = solve(self.study, 0.0)
        self.plan = self.study.plan(self.solution.chosen)

    def take_uniform(self, assigned: fx.GraphModule, *, measured: bool = False) -> None:
        """Replace the choice by the precisions that ``assign`` wrote into a graph.

        Args:
            assigned: the graph.
            measured: whether its time was measured, rather than predicted.
        """
        options = assigned_options(assigned)
        chosen = tuple(_closest(op, options[op.node.name]) for op in self.study.ops)
        verb = "was measured" if measured else "is predicted"
        binding = f"a uniform precision {verb} to be faster, once lowered, than the mixed choice"
        self.solution = Solution(
            chosen, self.study.seconds(chosen), self.study.error(chosen)[: self.study.outputs], True, binding
        )
        self.plan = options

    def correlation(self) -> float | None:
        """Return Spearman's rank correlation of gain and measured sensitivity, or None if not measured."""
        if not self.study.measured:
            return None
        ops = [op for op in self.study.ops if op.gain is not None]
        return rank_correlation([op.gain or 0.0 for op in ops], [op.sensitivity for op in ops])

    def alternative(self, name: str) -> tuple[Option, float, float] | None:
        """Return the next best option of a primitive, the time that it adds, and its error."""
        for i, op in enumerate(self.study.ops):
            if op.node.name == name:
                return self._next_best(i, op)
        return None

    def _next_best(self, i: int, op: OpChoices) -> tuple[Option, float, float] | None:
        chosen = self.solution.chosen
        now = self.study.seconds(chosen)
        others = [
            (self.study.seconds((*chosen[:i], o, *chosen[i + 1 :])) - now, o)
            for o in range(len(op.options))
            if o != chosen[i]
        ]
        if not others:
            return None
        added, o = min(others)
        return op.options[o], added, op.error(o)


def _closest(op: OpChoices, option: Option) -> int:
    """Return the number of an option, or of the last option of its precision."""
    if option in op.options:
        return op.options.index(option)
    return max(i for i, other in enumerate(op.options) if other.precision == option.precision)


def report(choice: Choice) -> list[str]:
    """Return the lines of ``explain()`` about a choice."""
    predicted = f"{choice.predicted:.2g} predicted"
    lines = [
        f"budget {choice.budget:.2g}: {predicted}, {_measured(choice)}",
        choice.solution.binding,
        *choice.log,
    ]
    if any("gradient" in each.name for each in choice.study.judged):
        judged = ", ".join(each.name for each in choice.study.judged)
        lines.append(
            "a training step was measured, under a cross-entropy with random classes: the error is the "
            f"largest of {judged}"
        )
    if not choice.study.measured:
        lines.append(
            "no example_inputs: an op's weight is 1 + its receptive-field gain on an assumed graph, and "
            "nothing was measured"
        )
    elif (rank := choice.correlation()) is not None:
        lines.append(f"rank correlation of receptive-field gain and measured sensitivity: {rank:+.2f}")
    return lines


def _measured(choice: Choice) -> str:
    if choice.measured is None or choice.grown is None:
        return "not measured"
    return f"{choice.measured:.2g} measured{beyond(choice.measured, choice.grown)}"


def beyond(error: float, grown: float) -> str:
    """Return the text on the error for values that have grown; empty where it is the same."""
    return "" if grown == error else f" ({grown:.2g} had the values been {GROWTH:g} times as large)"
