"""Joint graphs of the models of the zoo: traced in train(), with gradients of all parameters."""

import functools
from dataclasses import dataclass

import torch
from zoo import ZOO, prepared
from zoo_layers import LAYERS

from gnnc.capture.export import capture
from gnnc.compiler.training import want_gradients
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context, run_passes
from gnnc.passes.pipeline import PIPELINE
from gnnc.precision import Precision
from gnnc.runtime.backend import get_backend

NAMES = [step.name for step in PIPELINE]


@dataclass(frozen=True)
class Joint:
    """A model's graphs around ``joint``.

    Attributes:
        name: the model.
        before: the graphs that ``joint`` gets.
        after: the graphs that it makes.
    """

    name: str
    before: Parts
    after: Parts


@functools.lru_cache(maxsize=1)
def joint_graph(name: str) -> Joint:
    """Return the graphs of a model of the zoo; the last one is remembered."""
    entry = (ZOO | LAYERS)[name]
    model = prepared(entry).requires_grad_(True).train()
    args, kwargs = entry.arguments(40, 90, 0)
    captured = capture(model, args, kwargs, with_gradients=True)
    want_gradients(model, captured)
    stages = dict(_run(Parts(forward=captured.graph_module), "normalize", "joint", "fp32"))
    return Joint(name, stages["reorder"], stages["joint"])


def lowered_to(joint: Joint, precision: str) -> Parts:
    """Return a joint graph whose primitives have a precision: the stage ``cache``; remembers the last."""
    return _lowered(joint.name, precision)


@functools.lru_cache(maxsize=3)
def _lowered(name: str, precision: str) -> Parts:
    return dict(_run(joint_graph(name).after, "self_loops", "cache", precision))["cache"]


def partitioned(joint: Joint, precision: str) -> Parts:
    """Return the forward graph and the backward graph of a joint graph: the stage ``partition``."""
    return dict(_run(joint.after, "self_loops", "partition", precision))["partition"]


def _run(parts: Parts, first: str, last: str, precision: str) -> list[tuple[str, Parts]]:
    steps = PIPELINE[NAMES.index(first) : NAMES.index(last) + 1]
    context = Context(target=get_backend("cpu").target, precision=Precision.parse(precision))
    with torch.no_grad():
        return run_passes(parts, steps, context)
