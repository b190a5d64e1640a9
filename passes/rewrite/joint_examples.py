"""Example values of a joint graph: those of the forward graph, of its structure, and gradients of outputs."""

from typing import Any

from torch import fx

from gnnc.ir.graph import placeholders
from gnnc.ir.parts import DIFFERENTIABLE
from gnnc.ir.source import Source, source_of
from gnnc.passes.base import Context
from gnnc.passes.rewrite.boundary import refresh_examples
from gnnc.passes.search.assumed_loss import loss_gradient
from gnnc.passes.search.sensitivity import Bench


def joint_examples(
    forward: fx.GraphModule, joint: fx.GraphModule, structure: fx.GraphModule | None, ctx: Context
) -> None:
    """Replace the values of the forward graph's placeholders, ``ctx.examples``, by the joint graph's.

    The gradients of outputs are those of an assumed loss, ``passes.search.assumed_loss``.

    Args:
        forward: the graph that the joint graph was made of.
        joint: the joint graph.
        structure: the structure graph that the joint graph reads, if any.
        ctx: the request.
    """
    assert ctx.examples is not None
    named: dict[Source | None, Any] = dict(
        zip(map(source_of, placeholders(forward)), ctx.examples, strict=True)
    )
    outputs = Bench(forward, ctx.examples).outputs
    for number in joint.meta.get(DIFFERENTIABLE, ()):
        named[Source("tangent", str(number))] = loss_gradient(outputs[number], number)
    for node in placeholders(joint):
        source = source_of(node)
        if source is not None and source.kind == "constant":
            named.setdefault(source, node.meta["value"])
    if structure is not None:
        refresh_examples(joint, structure, named, ctx)
    else:
        ctx.examples = tuple(named[source_of(node)] for node in placeholders(joint))
