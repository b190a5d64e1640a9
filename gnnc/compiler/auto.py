"""``precision="auto"`` end to end: choose, lower, run on the examples, and choose again if need be."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from gnnc.calibrate.timing import Times
from gnnc.cost import model
from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.ir import describe
from gnnc.ir.graph import placeholders
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context, Pass, Property, Stage, established_by, run_passes
from gnnc.passes.quantize import STATIC_SCALE
from gnnc.passes.search.choice import MAX_TIGHTENINGS, Choice, beyond
from gnnc.passes.search.measured import Observed, corrected, observed
from gnnc.passes.search.sensitivity import relative_l2
from gnnc.passes.search.solver import solve
from gnnc.passes.search.study import GROWTH
from gnnc.precision import AUTO, Precision

_MOST_CHOICES = 5
"""Number of times that a choice is made again from measured times: each may show new launches."""

_LOOSEN_BELOW = 0.8
"""A choice that uses less than this share of the budget is made once more with a looser limit."""


@dataclass(slots=True)
class _Try:
    """One way to lower the model.

    Attributes:
        name: for people.
        stages: the passes from ``assign`` on.
        context: what they learned.
        seconds: predicted time of the lowered program.
        times: what it took on the examples, where the backend's programs are timed.
        observed: what that shows of single ops.
        error: the largest error of an output on the examples.
        grown: the same had their values been ``GROWTH`` times as large as those that static scales
            came from.
    """

    name: str
    stages: list[Stage]
    context: Context
    seconds: float
    error: float
    grown: float
    times: Times | None = None
    observed: Observed | None = None

    @property
    def cost(self) -> float:
        """The seconds that tries are held against each other by."""
        return self.seconds if self.times is None else self.times.seconds

    @property
    def worst(self) -> float:
        """The error that must be within the budget."""
        return max(self.error, self.grown)

    @property
    def time_text(self) -> str:
        """The time, for people."""
        return f"{self.cost * 1e3:.3f} ms" if self.times is None else f"{self.cost * 1e3:.4f} ms measured"

    def __str__(self) -> str:
        return f"{self.error:.2g}{beyond(self.error, self.grown)}"


def run_auto(
    parts: Parts, pipeline: Sequence[Pass], context: Context, *, check_finite: bool
) -> tuple[list[Stage], Context]:
    """Run the passes with the precisions that are predicted fastest within the error budget.

    Without examples the choice is carried out as it is. With them, it is run, on the examples and with
    static scales that are too small for them, as those of another graph's values may be: over budget, it
    is made again under a tighter limit, at most ``MAX_TIGHTENINGS`` times, and then falls back to FP32.
    Last, it is held against every uniform precision that keeps the budget, in both runs: where one of
    those is predicted faster once lowered, it is taken. Where the backend's programs are timed, all of
    them are; the choice is made again from the times that launches of theirs took, and what took least
    is taken.

    Args:
        parts: the captured program.
        pipeline: the passes.
        context: what they share.
        check_finite: whether calls will look for values that are not finite: what is timed is what will run.

    Raises:
        UnsupportedError: no pass of the pipeline assigns precisions.
    """
    place = next((i for i, step in enumerate(pipeline) if Property.ASSIGNED in established_by(step)), None)
    if place is None:
        raise UnsupportedError(
            "precision='auto' is carried out by the pass 'assign', which the pipeline lacks"
        )
    before = run_passes(parts, pipeline[:place], context)
    start = before[-1][1] if before else parts
    if context.examples is None:
        return before + run_passes(start, pipeline[place:], context), context
    search = _Search(start, pipeline[place:], context, check_finite)
    best = search.run()
    return before + best.stages, best.context


class _Search:
    """The tries for one model."""

    def __init__(self, start: Parts, pipeline: Sequence[Pass], context: Context, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._start = start
        self._pipeline = pipeline
        self._context = context
        self._choice: Any = None
        self._study: Any = None

    def run(self) -> _Try:
        """Return the best try that keeps the budget, or the one of least error."""
        chosen = self._within_budget(self._try("auto", AUTO))
        self._study = self._choice.study
        uniform = [self._try(name, Precision.parse(name)) for name in self._uniform_names()]
        again = self._from_times([chosen, *uniform]) if chosen.times is not None else []
        # What was chosen comes first: it stays where others are no faster.
        good = [t for t in (chosen, *again, *uniform) if t.worst <= self._choice.budget]
        best = min(good, key=lambda t: t.cost) if good else chosen
        self._say(best, chosen, uniform)
        return best

    def _from_times(self, tries: list[_Try]) -> list[_Try]:
        """Choose again, with the times that launches of the tries took in place of their predictions."""
        found: list[_Try] = []
        for _ in range(_MOST_CHOICES):
            choice: Choice = self._choice
            seen = [t.observed for t in (*tries, *found) if t.observed is not None]
            known = corrected(self._study, seen)
            solution = solve(known, choice.limit, choice.grown_limit)
            plan = known.plan(solution.chosen)
            if any(plan.items() <= each.options.items() for each in seen):
                break
            self._choice = dataclasses.replace(choice, study=known, solution=solution, plan=plan)
            found.append(self._try("auto", AUTO))
            choice.log.append(f"chosen again from measured times: error {found[-1]}, {found[-1].time_text}")
            if found[-1].worst > choice.budget:
                self._choice.adjust(found[-1].error, found[-1].grown)
        return found

    def _uniform_names(self) -> list[str]:
        return sorted(self._context.target.precisions)

    def _within_budget(self, found: _Try) -> _Try:
        """Correct the choice by what running it shows."""
        choice, budget = self._choice, self._choice.budget
        best = found if found.worst <= budget else None
        for turn in range(1, MAX_TIGHTENINGS + 1):
            wasteful = best is found and found.worst < _LOOSEN_BELOW * budget and turn == 1
            if not choice.solution.feasible or (best is not None and not wasteful):
                break
            if not choice.adjust(found.error, found.grown):
                break
            verb = "loosened" if wasteful else "tightened"
            choice.log.append(f"{verb} to {choice.limit_text}: the run before erred {found}")
            found = self._try("auto", AUTO)
            if found.worst <= budget and (best is None or found.cost < best.cost):
                best = found
        return best or self._give_up()

    def _give_up(self) -> _Try:
        choice = self._choice
        choice.give_up()
        choice.log.append("the budget cannot be met this way: everything that may be is FP32")
        found = self._try("auto", AUTO)
        if found.worst > choice.budget:
            choice.log.append("overrides keep the error above the budget; this is the least that they allow")
        return found

    def _try(self, name: str, precision: Precision) -> _Try:
        context = dataclasses.replace(
            self._context,
            precision=precision,
            choice=self._choice if precision == AUTO else None,
            notes=list(self._context.notes),
            timings=dict(self._context.timings),
        )
        stages = run_passes(self._start, self._pipeline, context)
        if precision == AUTO:
            self._choice = context.choice
            # What later tries and corrections change must not change what this one says.
            context.choice = dataclasses.replace(context.choice)
        target, examples, lowered = context.target, context.examples, stages[-1][1].forward
        assert target.rates is not None and examples is not None
        predicted = predicted_times(lowered, examples, target.rates())
        run = lowered
        if target.lowering is not None:
            run = target.lowering.executable(lowered, check_finite=self._check_finite)
        try:
            errors = self._errors(lowered, run, context)
            times = None if target.timer is None else target.timer(run, examples)
        except PrecisionError:  # past the range of a precision, as 65504 in fp16: another may hold it
            errors, times = (float("inf"), float("inf")), None
        seen = None if times is None else observed(stages[0][1].forward, lowered, predicted, times.launches)
        return _Try(name, stages, context, sum(predicted.values()), *errors, times, seen)

    def _errors(self, gm: GraphModule, run: Any, context: Context) -> tuple[float, float]:
        """Run the lowered program on the examples, and again with scales that are too small for them."""
        assert context.examples is not None
        error = self._error(run(*context.examples))
        shrunken = _with_smaller_scales(gm, context.examples)
        return error, error if shrunken is None else self._error(run(*shrunken))

    def _error(self, outputs: Sequence[Any]) -> float:
        wanted = self._wanted()
        got = [value for value in outputs if isinstance(value, Tensor) and value.is_floating_point()]
        return max((relative_l2(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)

    def _wanted(self) -> list[Tensor]:
        choice: Choice = self._choice
        assert choice.study.bench is not None
        return choice.study.bench.outputs

    def _say(self, best: _Try, chosen: _Try, uniform: Sequence[_Try]) -> None:
        """Leave the choice that was taken, and what it was held against, in the best try's context."""
        is_uniform = any(best is other for other in uniform)
        base: Choice = (chosen if is_uniform else best).context.choice
        choice = dataclasses.replace(base, measured=best.error, grown=best.grown)
        for other in uniform:
            verdict = "over budget" if other.worst > choice.budget else other.time_text
            choice.log.append(f"uniform {other.name}: error {other}, {verdict}")
        choice.log.append(f"taken: {best.name}, predicted {best.seconds * 1e3:.3f} ms{_took(best)}")
        if is_uniform:
            choice.take_uniform(best.stages[0][1].forward, measured=best.times is not None)
            best.context.precision = AUTO
        best.context.choice = choice


def _took(found: _Try) -> str:
    return "" if found.times is None else f", {found.time_text}"


def _with_smaller_scales(gm: GraphModule, values: Sequence[Any]) -> list[Any] | None:
    """The values with static scales as smaller values would have given them; None where there are none."""
    inputs = placeholders(gm)
    if not any(STATIC_SCALE in node.meta for node in inputs):
        return None
    pairs = zip(inputs, values, strict=True)
    return [value / GROWTH if STATIC_SCALE in node.meta else value for node, value in pairs]


def predicted_times(gm: GraphModule, values: Sequence[Any] | None, rates: model.Rates) -> dict[str, float]:
    """Return the predicted seconds of every launch of a lowered graph, by node.

    Args:
        gm: the lowered compute graph.
        values: its arguments, from which the sizes come; without, they are those of the capture.
        rates: the machine's.
    """
    sizes = model.sizes_of(placeholders(gm), values)
    found = {}
    for launch in model.launches(describe.inline(gm)):
        terms = _numbers(launch, sizes)
        if terms is not None:
            found[launch.name] = rates.seconds(launch.family, terms)
    return found


def _numbers(launch: model.Launch, sizes: Any) -> list[model.Term] | None:
    terms = [term.at(lambda expr: model.evaluate(expr, sizes)) for term in model.work(launch)]
    return None if any(term.amount is None for term in terms) else terms
