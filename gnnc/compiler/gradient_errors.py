"""Errors of the gradients that a training program computes, measured on a step of the examples."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from gnnc.compiler.example_run import StepRun
from gnnc.passes.base import Context, Property, Stage, established_by
from gnnc.passes.search.sensitivity import Bench

GradientErrors = tuple[tuple[str, float], ...]
"""(what it is of, relative L2 error against FP32), for each output and gradient."""


def measures_gradients(pipeline: Sequence[Any]) -> bool:
    """Return whether a pass asks for the errors of gradients, as ``Partition(save_bits=4)`` does."""
    return any(getattr(step, "measures_gradients", False) for step in pipeline)


def assigned_at(pipeline: Sequence[Any]) -> int | None:
    """Return the position of the pass that gives each primitive its precision; None: there is none."""
    return next((i for i, step in enumerate(pipeline) if Property.ASSIGNED in established_by(step)), None)


def gradient_errors(
    joint: GraphModule, stages: Sequence[Stage], context: Context, make: Callable[[GraphModule], Any]
) -> GradientErrors:
    """Return the relative errors of a step of the lowered program against the joint graph in FP32.

    Args:
        joint: the joint graph, before precisions were assigned.
        stages: the stages of the pipeline, the lowered graphs last.
        context: the request; ``step`` has the values of the joint graph's placeholders.
        make: makes the program of one graph.
    """
    assert context.step is not None
    bench = Bench(joint, context.step)
    run = StepRun(joint, stages[-1][1], context.step, bench.tangents, make)
    errors = bench.compare(run.outputs())
    return tuple((judged.name, error) for judged, error in zip(bench.judged, errors, strict=True))
