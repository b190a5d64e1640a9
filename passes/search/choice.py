"""``precision="auto"``: the choice that ``assign`` carries out, and how measured runs correct it."""

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
"""How often a choice that measures over budget is made again under a tighter one."""

_MARGIN = 0.97


@dataclass(slots=True)
class Choice:
    """What ``auto`` weighed, what it chose, and what running it showed.

    Attributes:
        study: errors and times of every option.
        budget: the error that the user allows.
        solution: the latest choice.
        plan: the option of each primitive, by name; None while a uniform precision is tried.
        limit: the predicted error that the latest choice was allowed on the examples.
        grown_limit: the one for values that have grown beyond the examples', see ``study.GROWTH``.
        measured: the largest error of an output that a run of the latest choice showed.
        grown: the same for values that have grown.
        log: what was tried, a line each.
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
        """Study a graph and choose.

        Raises:
            UnsupportedError: the backend cannot be measured.
        """
        if ctx.target.rates is None:
            raise UnsupportedError(
                f"[gnnc.assign] precision='auto' weighs measured times, and backend {ctx.target.name!r} "
                "was given without rates: compile with gnnc.compile, or name a precision"
            )
        known = study(gm, ctx, allowed, ctx.target.rates())
        budget = ctx.error_budget
        solution = solve(known, budget)
        return Choice(known, budget, solution, known.plan(solution.chosen), budget, budget)

    def option(self, name: str) -> Option | None:
        """Return the option of a primitive, or None where none was chosen for it."""
        return None if self.plan is None else self.plan.get(name)

    @property
    def predicted(self) -> float:
        """The largest predicted error of an output."""
        return max(self.solution.errors, default=0.0)

    @property
    def limit_text(self) -> str:
        """The limits, for people."""
        grown = "" if self.grown_limit == self.budget else f" ({self.grown_limit:.2g} for larger values)"
        return f"{self.limit:.2g}{grown}"

    @property
    def predicted_grown(self) -> float:
        """The largest predicted error of an output, for values that have grown."""
        return max(self.study.error(self.solution.chosen)[self.study.outputs :], default=0.0)

    def adjust(self, measured: float, grown: float) -> bool:
        """Take note of measured errors; choose again where they show the prediction to be off.

        An error over budget tightens the limit on its prediction in proportion. Where none is, both are
        loosened so.

        Args:
            measured: the largest error of an output on the examples.
            grown: the same for values that have grown.

        Returns:
            Whether another choice was made.
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
        """The limit on a prediction that keeps what is measured within the budget."""
        ratio = measured / predicted if predicted else 1.0
        limit = self.budget / max(ratio, 1e-9) * _MARGIN
        return min(limit, predicted * _MARGIN) if measured > self.budget else limit

    def give_up(self) -> None:
        """Choose the least error that the user's overrides leave."""
        self.limit = self.grown_limit = 0.0
        self.solution = solve(self.study, 0.0)
        self.plan = self.study.plan(self.solution.chosen)

    def take_uniform(self, assigned: fx.GraphModule, *, measured: bool = False) -> None:
        """Take the precisions that ``assign`` wrote into a graph instead.

        Args:
            assigned: the graph.
            measured: whether its time was measured, rather than predicted.
        """
        options = assigned_options(assigned)
        chosen = tuple(_closest(op, options[op.node.name]) for op in self.study.ops)
        known = "was measured" if measured else "is predicted"
        binding = f"a uniform precision {known} to be faster, once lowered, than what was put together"
        self.solution = Solution(
            chosen, self.study.seconds(chosen), self.study.error(chosen)[: self.study.outputs], True, binding
        )
        self.plan = options

    def correlation(self) -> float | None:
        """Spearman's rank correlation of gain and measured sensitivity, or None."""
        if not self.study.measured:
            return None
        known = [op for op in self.study.ops if op.gain is not None]
        return rank_correlation([op.gain or 0.0 for op in known], [op.sensitivity for op in known])

    def alternative(self, name: str) -> tuple[Option, float, float] | None:
        """Return the next best option of a primitive: what it adds to the time, and its error."""
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
    """The number of an option, or of the last of its precision."""
    if option in op.options:
        return op.options.index(option)
    return max(i for i, known in enumerate(op.options) if known.precision == option.precision)


def report(choice: Choice) -> list[str]:
    """Return what ``explain()`` says of a choice."""
    known = choice.study
    predicted = f"{choice.predicted:.2g} predicted"
    lines = [
        f"budget {choice.budget:.2g}: {predicted}, {_measured(choice)}",
        choice.solution.binding,
        *choice.log,
    ]
    if not known.measured:
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
    """Return what is to be said of an error for values that have grown; nothing where it is the same."""
    return "" if grown == error else f" ({grown:.2g} had the values been {GROWTH:g} times as large)"
