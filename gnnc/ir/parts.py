"""The graphs of one program, and the order in which they run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

STRUCTURE, FEATURES, FORWARD, BACKWARD = "structure", "features", "forward", "backward"

BACKWARD_LAYER = "(backward)"
"""End of the layer of a node that computes gradients: ``conv1 (backward)``."""
GRADIENTS = "gradients"
"""Key of a graph's ``meta``: sources of the placeholders whose gradients are its last outputs, in order."""
DIFFERENTIABLE = "differentiable"
"""Key of a graph's ``meta``: the numbers of the outputs that depend on a value whose gradient is wanted."""
RESULTS = "results"
"""Key of the forward graph's ``meta``: how many of its outputs are the caller's; the others are saved."""
SAVED = "saved"
"""Key of the forward graph's ``meta``: position among its outputs of each saved value, by its name."""

KEPT_WIDE = "kept_wide"
"""Key of a saved value's ``meta``: why it is FP32 where matrices are saved in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The graphs of one program.

    Attributes:
        structure: the graph that runs once per distinct input graph; its results are cached, and are
            placeholders of the other parts. None where nothing depends on the graph alone, or before
            ``hoist`` has split it off.
        features: the graph that runs once per distinct feature matrix; its results are cached, and are
            placeholders of the other parts. None where no quantized values of arguments are cached.
        forward: the graph that runs at every call.
        backward: the graph that computes gradients; None in inference.
    """

    structure: GraphModule | None = None
    features: GraphModule | None = None
    forward: GraphModule
    backward: GraphModule | None = None

    def __iter__(self) -> Iterator[tuple[str, GraphModule]]:
        """Yield (name, graph) of every part that there is, in the order in which they run."""
        for name in (STRUCTURE, FEATURES, FORWARD, BACKWARD):
            graph = getattr(self, name)
            if graph is not None:
                yield name, graph

    def per_call(self) -> Iterator[tuple[str, GraphModule]]:
        """Yield (name, graph) of the parts that run at every call."""
        return ((name, graph) for name, graph in self if name in (FORWARD, BACKWARD))

    def map(self, function: Callable[[str, GraphModule], GraphModule]) -> "Parts":
        """Return the parts with ``function(name, graph)`` in the place of each graph."""
        return Parts(**{name: function(name, graph) for name, graph in self})
