"""Errors of the gradients that a training program computes, measured on a step of the examples."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from gnnc.compiler.example_run import StepRun
from gnnc.passes.base import Context, Stage
from gnnc.passes.search.sensitivity import Bench

GradientErrors = tuple[tuple[str, float], ...]
"""Relative L2 errors against FP32, each with the name of its output or gradient."""


def measures_gradients(pipeline: Sequence[Any]) -> bool:
    """Return whether a pass asks for the errors of gradients, as ``Partition(save_bits=4)`` does."""
    return any(getattr(step, "measures_gradients", False) for step in pipeline)


def gradient_errors(
    joint: GraphModule, stages: Sequence[Stage], context: Context, make: Callable[[GraphModule], Any]
) -> GradientErrors:
    """Return the relative errors of a step of the lowered program against the joint graph in FP32.

    Args:
        joint: the joint graph of the stage before precisions are assigned.
        stages: the stages of the pipeline, the lowered graphs last.
        context: the request; ``step`` has the values of the joint graph's placeholders.
        make: makes the program of one graph.
    """
    assert context.step is not None
    bench = Bench(joint, context.step)
    run = StepRun(joint, stages[-1][1], context.step, bench.tangents, make)
    errors = bench.compare(run.outputs())
    return tuple((judged.name, error) for judged, error in zip(bench.judged, errors, strict=True))
