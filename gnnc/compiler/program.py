"""A compiled program: graphs, executable and call function for one structure of arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from gnnc.calibrate.calibration import stored_rates
from gnnc.capture.arguments import Call
from gnnc.capture.export import Captured
from gnnc.compiler.auto import predicted_times
from gnnc.compiler.gradient_errors import GradientErrors, measures_gradients
from gnnc.compiler.index_checks import Bounds
from gnnc.compiler.options import default_precision
from gnnc.compiler.static_scales import ScaledWeights
from gnnc.ir.parts import FORWARD, Parts
from gnnc.passes.base import Context, Pass, Stage
from gnnc.passes.quantization.saved_plan import Plan
from gnnc.passes.rewrite.boundary import whole_examples
from gnnc.passes.search.choice import Choice
from gnnc.passes.search.choice import report as choice_report
from gnnc.passes.search.study import OpChoices
from gnnc.precision import AUTO, Precision
from gnnc.report.summary import Chosen
from gnnc.runtime.backend import Backend
from gnnc.runtime.program.executable import Executable
from gnnc.runtime.program.features import FeaturesProgram
from gnnc.runtime.structure.runner import StructureRunner


@dataclass(frozen=True)
class Options:
    """Options of ``gnnc.compile``, validated.

    Attributes:
        precision: precision of the whole model.
        is_default: whether the user named no precision; the backend of a call then decides.
        overrides: module-path glob to precision.
        error_budget: relative L2 error allowed on the output.
        backend: the backend to lower for.
        requested: the name of the backend as the user gave it; ``auto`` goes by the model's device.
        check_finite: whether a non-finite scale is an error.
        cuda_graph: whether calls on a CUDA device launch a CUDA graph: a bool or ``auto``.
        pipeline: the passes.
        plan: precisions by layer and op, or None.
    """

    precision: Precision
    is_default: bool
    overrides: Mapping[str, Precision]
    error_budget: float
    backend: Backend
    requested: str
    check_finite: bool
    cuda_graph: bool | str
    pipeline: tuple[Pass, ...]
    plan: Plan | None = None

    @property
    def trains_on_examples(self) -> bool:
        """True if a training step runs on the examples: its errors decide, or ``summary()`` tells them."""
        return self.precision == AUTO or measures_gradients(self.pipeline)

    def with_backend(self, backend: Backend) -> "Options":
        """Return the options with another backend, and its default precision where none was named."""
        precision = default_precision(backend.target) if self.is_default else self.precision
        return replace(self, backend=backend, precision=precision)


def precision_remarks(options: Options) -> list[str]:
    """Return a sentence where the precision, or the one by default, is slower than FP32 on this machine."""
    slower, kernels = options.backend.target.slower, options.backend.description
    if options.is_default and "int8" in slower:
        return [f"fp32, since no precision was named and int8 is slower than that here ({kernels})"]
    if options.precision.name in slower:
        return [f"{options.precision}, as asked for, is slower than fp32 here ({kernels})"]
    return []


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Knowledge of the cost model and of ``auto`` about a program.

    Attributes:
        predicted: seconds of each launch, by name of the graph and of the node; empty where this machine was
            never measured.
        gains: receptive-field gain, by name of the primitive before it was quantized.
        choices: option, sensitivity and next best of each primitive, by the same name.
        chosen: lines of the report on the choice.
    """

    predicted: Mapping[tuple[str, str], float]
    gains: Mapping[str, float]
    choices: Mapping[str, Chosen]
    chosen: Sequence[str]


@dataclass
class Program:
    """A model compiled for one structure of arguments.

    Attributes:
        captured: the traced call; the tensors of its arguments are the caller's alone again.
        backend: the backend that it is lowered for.
        snapshots: (pass name, graphs after it), the captured graph first.
        context: the request, with the notes of the passes.
        executable: the lowered compute graph.
        run: function of a call: takes its flat tensors and returns the model's result.
        bind: takes a replacement of ``executable`` and one of ``runner``; returns the function of a call that
            runs these, with the result of the lowered graph in place of the model's.
        timings: measured seconds by name of the graph and of the node, from ``profile``.
        floors: seconds that the compulsory bytes of each node take at copy bandwidth, by the same names.
        tuned: measurements of the graph's cuts by ``tune``, to be printed; None: there are none.
        seconds: compile time by phase.
        scaled_weights: the weights that static scales were taken with; None: the program has no such scale.
        features: the program of quantized arguments, which are cached; None: there are none.
        dynamic: the program of calls that the static scales do not suit, compiled at the first of them.
        gradient_errors: relative L2 errors of a step on the example inputs, where a pass asks for them.
        successor: the program with scales of other weights, which has taken this one's place.
    """

    captured: Captured
    backend: Backend
    snapshots: tuple[Stage, ...]
    context: Context
    executable: Executable
    runner: StructureRunner | None
    bounds: Bounds
    run: Callable[[Sequence[Tensor]], Any]
    bind: Callable[..., Callable[[Sequence[Tensor]], Any]]
    profiled: Callable[[Sequence[Tensor]], list[Any]]
    timings: dict[tuple[str, str], float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    tuned: Sequence[Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    scaled_weights: ScaledWeights | None = None
    features: FeaturesProgram | None = None
    dynamic: "Program | None" = None
    successor: "Program | None" = None
    gradient_errors: GradientErrors | None = None

    @property
    def parts(self) -> Parts:
        """The lowered graphs."""
        return self.snapshots[-1][1]

    @property
    def stages(self) -> tuple[tuple[str, GraphModule], ...]:
        """(pass name, forward graph after it), the captured graph first."""
        return tuple((name, parts.forward) for name, parts in self.snapshots)

    @property
    def notes(self) -> list[Any]:
        """Remarks of the passes."""
        return self.context.notes

    def examples(self) -> tuple[Any, ...] | None:
        """Return the arguments of the lowered graph on the example inputs; the structure is computed anew."""
        return whole_examples(self.parts, self.context)

    def knowledge(self) -> Knowledge:
        """Return what ``summary()`` and ``explain()`` tell beside the graph itself."""
        rates = stored_rates(self.backend)
        values = self.context.examples
        predicted = {
            (part, node): seconds
            for part, gm in (() if rates is None else self.parts.per_call())
            for node, seconds in predicted_times(gm, values if part == FORWARD else None, rates).items()
        }
        choice: Choice | None = self.context.choice
        if choice is None:
            return Knowledge(predicted, {}, {}, ())
        gains = {node.name: gain for node, gain in choice.study.gains.items()}
        chosen = zip(choice.study.ops, choice.solution.chosen, strict=True)
        choices = {op.node.name: _chosen(choice, op, o) for op, o in chosen}
        return Knowledge(predicted, gains, choices, choice_report(choice))

    def clear(self) -> None:
        """Drop cached structures, cuts that were measured for them, and kept memory."""
        self.tuned = None
        self.executable.clear()
        self.bounds.clear()
        if self.runner is not None:
            self.runner.clear()
        if self.features is not None:
            self.features.clear()
        if self.dynamic is not None:
            self.dynamic.clear()


def _chosen(choice: Choice, op: OpChoices, number: int) -> Chosen:
    other = choice.alternative(op.node.name)
    return Chosen(
        str(op.options[number]),
        op.error(number) if choice.study.measured else None,
        None if other is None else (str(other[0]), *other[1:]),
    )


def find(programs: Sequence[Program], call: Call) -> tuple[Program | None, str | None]:
    """Return the program whose guards these tensors satisfy; else the guard of the last that they break."""
    for program in programs:
        if program.captured.guards.sizes_fit(call.tensors):
            return program, None
    return None, programs[-1].captured.guards.failure(call.tensors) if programs else None
