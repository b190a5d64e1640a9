"""``precision="auto"`` end to end: choose, lower, run on the examples, and choose again if need be."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from gnnc.compiler.example_run import CallRun, Make, StepRun
from gnnc.cost import model
from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.ir import describe
from gnnc.ir.graph import placeholders
from gnnc.ir.parts import GRADIENTS, Parts
from gnnc.passes.base import Context, Pass, Stage, assigned_at, run_passes, run_until_assigned
from gnnc.passes.search.choice import MAX_TIGHTENINGS, Choice, beyond
from gnnc.passes.search.measured import Observed, corrected, observed
from gnnc.passes.search.solver import solve
from gnnc.precision import AUTO, Precision

_BF16_ERROR = 0.01
"""Relative error of gradients that bf16 is taken to have where nothing is measured: 0.3 to 0.7% on Cora."""

_MOST_CHOICES = 5
"""Number of times that a choice is made again from measured times: each may show new launches."""

_LOOSEN_BELOW = 0.8
"""A choice that uses less than this share of the budget is made once more with a looser limit."""


@dataclass(slots=True)
class _Try:
    """One way to lower the model.

    Attributes:
        name: label of this way, for reports.
        stages: the passes from ``assign`` on.
        context: the request and the notes of these passes.
        seconds: predicted time of the lowered program.
        measured: seconds of a run on the examples, where the backend's programs are timed.
        observed: measured times of single ops, for each graph.
        error: the largest error of a judged value on the examples.
        grown: the largest error of a judged value on examples that are ``GROWTH`` times as large as those
            that static scales came from.
    """

    name: str
    stages: list[Stage]
    context: Context
    seconds: float
    error: float
    grown: float
    measured: float | None = None
    observed: Sequence[Observed] = ()

    @property
    def cost(self) -> float:
        """The seconds that tries are held against each other by."""
        return self.seconds if self.measured is None else self.measured

    @property
    def worst(self) -> float:
        """The error that must be within the budget."""
        return max(self.error, self.grown)

    @property
    def time_text(self) -> str:
        """The time, for people."""
        return f"{self.cost * 1e3:.3f} ms" if self.measured is None else f"{self.cost * 1e3:.4f} ms measured"

    def __str__(self) -> str:
        return f"{self.error:.2g}{beyond(self.error, self.grown)}"


def run_auto(
    parts: Parts, pipeline: Sequence[Pass], context: Context, *, check_finite: bool
) -> tuple[list[Stage], Context]:
    """Run the passes with the precisions that are predicted fastest within the error budget.

    Without examples the predicted choice is taken as it is. A program that trains then takes one precision
    for all ops, and leaves a note, since a graph alone does not show the errors of gradients.

    With examples the choice is run twice: on the examples, and with static scales that are too small for
    them, as they may be for the values of another graph. Over budget, the choice is made again under a
    tighter limit, at most ``MAX_TIGHTENINGS`` times, and then falls back to FP32.

    Last, the choice is compared with every uniform precision that keeps the budget in both runs; where one of
    these is predicted faster once lowered, it is taken. Where the backend times programs, all of them are
    timed, the choice is made again from the measured times of launches, and the fastest program is taken.

    Args:
        parts: the captured program.
        pipeline: the passes.
        context: the request that the passes serve, and their notes.
        check_finite: whether calls will look for values that are not finite: what is timed is what will run.

    Raises:
        UnsupportedError: no pass of the pipeline assigns precisions.
    """
    if assigned_at(pipeline) is None:
        raise UnsupportedError(
            "precision='auto' is carried out by the pass 'assign', which the pipeline lacks"
        )
    before, rest = run_until_assigned(parts, pipeline, context)
    start = before[-1][1] if before else parts
    if context.examples is None and context.step is None:
        if GRADIENTS in start.forward.meta:
            context.precision = _unmeasured(context)
        return before + run_passes(start, rest, context), context
    search = _Search(start, rest, context, check_finite)
    best = search.run()
    return before + best.stages, best.context


def _unmeasured(context: Context) -> Precision:
    """Return the precision of a training step without examples, and leave a note on it."""
    is_fast = "bf16" in context.target.precisions - context.target.slower
    takes_bf16 = is_fast and context.error_budget >= _BF16_ERROR
    text = "bf16, whose gradients err by less than 1%" if takes_bf16 else "fp32"
    context.current_pass = "auto"
    context.note(
        None,
        f"the step is {text}: without example_inputs of its form no error of a gradient was measured; with "
        "them each op has a precision of its own",
    )
    return Precision.parse("bf16" if takes_bf16 else "fp32")


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
        again = self._from_times([chosen, *uniform]) if chosen.measured is not None else []
        # What was chosen comes first: it stays where others are no faster.
        good = [t for t in (chosen, *again, *uniform) if t.worst <= self._choice.budget]
        best = min(good, key=lambda t: t.cost) if good else chosen
        self._say(best, chosen, uniform)
        if best.context.step is not None:
            best.context.step = None
            self._study.bench.release()
        return best

    def _from_times(self, tries: list[_Try]) -> list[_Try]:
        """Choose again, with the times that launches of the tries took in place of their predictions."""
        found: list[_Try] = []
        for _ in range(_MOST_CHOICES):
            choice: Choice = self._choice
            seen = [each for t in (*tries, *found) for each in t.observed]
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
        assigned, lowered, target = stages[0][1].forward, stages[-1][1], context.target
        assert target.rates is not None
        rates, run = target.rates(), self._run_of(assigned, lowered, context)
        predicted = [predicted_times(gm, values, rates) for gm, values in run.graphs]
        try:
            errors = self._errors(run)
            times = [] if target.timer is None else run.times(target.timer)
        except PrecisionError:  # past the range of a precision, as 65504 in fp16: another may hold it
            errors, times = (float("inf"), float("inf")), []
        parts = zip(run.graphs, predicted, times, strict=False)
        seen = [observed(assigned, gm, of_part, took.launches) for (gm, _), of_part, took in parts]
        seconds = sum(sum(of_part.values()) for of_part in predicted)
        measured = sum(took.seconds for took in times) if times else None
        return _Try(name, stages, context, seconds, *errors, measured, seen)

    def _run_of(self, assigned: GraphModule, lowered: Parts, context: Context) -> CallRun | StepRun:
        lowering = context.target.lowering
        make: Make = (
            (lambda gm: gm)
            if lowering is None
            else partial(lowering.executable, check_finite=self._check_finite)
        )
        if context.step is not None:
            bench = context.choice.study.bench if self._choice is None else self._choice.study.bench
            return StepRun(assigned, lowered, context.step, bench.tangents, make)
        assert context.examples is not None
        return CallRun(lowered, context.examples, make)

    def _errors(self, run: CallRun | StepRun) -> tuple[float, float]:
        """Run the lowered program on the examples, and again with scales that are too small for them."""
        error, again = self._error(run.outputs()), run.outputs_with_smaller_scales()
        return error, error if again is None else self._error(again)

    def _error(self, outputs: Sequence[Any]) -> float:
        choice: Choice = self._choice
        assert choice.study.bench is not None
        return max(choice.study.bench.compare(outputs), default=0.0)

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
            choice.take_uniform(best.stages[0][1].forward, measured=best.measured is not None)
            best.context.precision = AUTO
        best.context.choice = choice


def _took(found: _Try) -> str:
    return "" if found.measured is None else f", {found.time_text}"


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
    terms = model.work(launch)
    numbers = [term.at(lambda expr: model.evaluate(expr, sizes)) for term in terms]
    known = [
        each.amount is not None and (each.held is not None) == (term.held is not None)
        for each, term in zip(numbers, terms, strict=True)
    ]
    return numbers if all(known) else None
