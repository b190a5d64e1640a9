"""The pipeline: one visible tuple, in the order in which a model becomes kernels."""

from gnnc.passes.assign import Assign
from gnnc.passes.base import Pass
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.hoist import Hoist
from gnnc.passes.lower import Lower
from gnnc.passes.normalize import Normalize
from gnnc.passes.quantize import Quantize
from gnnc.passes.raise_ import Raise
from gnnc.passes.reorder import Reorder

PIPELINE: tuple[Pass, ...] = (
    Normalize(),  # one spelling for each thing, so that raise sees regions and not noise
    Raise(),  # gathers, scatters and softmaxes become primitives over a CSR
    Hoist(),  # what depends on the graph alone runs once a graph
    Reorder(),  # linear before or after aggregation; separable weights leave the sparse kernel
    Assign(),  # a precision for every primitive
    Quantize(),  # scales and codes go in, primitives take integers
    Cache(),  # each tensor is quantized once
    Fuse(),  # producer, elementwise and requantization become one call
    Lower(),  # every call gets its kernel
)
