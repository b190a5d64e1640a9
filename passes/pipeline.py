"""The pipeline: the passes that turn a captured model into kernels, in order."""

from gnnc.passes.assign import Assign
from gnnc.passes.base import Pass
from gnnc.passes.cache import Cache
from gnnc.passes.exact_values import ExactValues
from gnnc.passes.fuse import Fuse
from gnnc.passes.gradient_sums import GradientSums
from gnnc.passes.hoist import Hoist
from gnnc.passes.inline_edges import InlineEdges
from gnnc.passes.int32_columns import Int32Columns
from gnnc.passes.join_bodies import JoinBodies
from gnnc.passes.join_sums import JoinSums
from gnnc.passes.joint import Joint
from gnnc.passes.lower import Lower
from gnnc.passes.narrow_edges import NarrowEdges
from gnnc.passes.nodes_first import NodesFirst
from gnnc.passes.normalize import Normalize
from gnnc.passes.partition import Partition
from gnnc.passes.quantize import Quantize
from gnnc.passes.raise_ import Raise
from gnnc.passes.reorder import Reorder
from gnnc.passes.select_format import SelectFormat
from gnnc.passes.self_loops import SelfLoops
from gnnc.passes.share_steps import ShareSteps
from gnnc.passes.static_features import StaticFeatures

PIPELINE: tuple[Pass, ...] = (
    Normalize(),  # one spelling for each computation, so that raise finds the regions
    NodesFirst(),  # where nodes are another dimension than the first, they become the first
    Raise(),  # gathers, scatters and softmaxes become primitives over a CSR
    Hoist(),  # computations on the graph alone leave: they run once a graph
    Reorder(),  # linear before or after aggregation; separable weights leave the sparse kernel
    Joint(),  # gradients, where they are wanted; what they need of the graph alone leaves, too
    GradientSums(),  # gradients that are only added up are added edge by edge
    SelfLoops(),  # a sort drops and adds self loops by itself
    Int32Columns(),  # orders that kernels read as int32 are converted once a graph
    ExactValues(),  # what comparisons, selections and cosines read is not rounded
    Assign(),  # a precision for every primitive
    Quantize(),  # scales and quantized values go in, primitives take integers
    Cache(),  # each tensor is quantized once
    NarrowEdges(),  # what products and sums of edges read in 16 bits is stored in 16 bits
    StaticFeatures(),  # features that stay are quantized once a training run
    Partition(),  # forward and backward become graphs of their own
    ShareSteps(),  # what bodies of gradients compute alike is stored, where kernels run one body a pass
    InlineEdges(),  # edge values that bodies alone read are computed in these bodies
    JoinBodies(),  # bodies of the same edges run in one pass over them
    JoinSums(),  # a product over all edges adds up its sides, too
    Fuse(),  # producer, elementwise and requantization become one call
    Lower(),  # every call gets its kernel
    SelectFormat(),  # every kernel that reads edges gets the formats that may serve it
)
"""The default pipeline of ``gnnc.compile``; ``joint`` and ``partition`` act where gradients are wanted."""
