"""Compiles graph neural networks to low precision.

``gnnc.compile(model, precision="int8")`` returns a module with the model's signature that computes on
kernels of its own; ``print`` it to read the program.
"""

from gnnc import dynamo, ir, passes, runtime
from gnnc.api import CompiledModel, compile
from gnnc.errors import (
    BackendError,
    CaptureError,
    GnncError,
    GraphError,
    InputError,
    PrecisionError,
    UnsupportedError,
    VerifyError,
)
from gnnc.pareto import Pareto, pareto
from gnnc.precision import Precision
from gnnc.quantized_tensor import QuantizedTensor, pack
from gnnc.suggest_bits import suggest_bits
from gnnc.torch_private import register_backend as _register_backend

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "GnncError",
    "GraphError",
    "InputError",
    "Pareto",
    "Precision",
    "PrecisionError",
    "QuantizedTensor",
    "UnsupportedError",
    "VerifyError",
    "__version__",
    "compile",
    "dynamo",
    "ir",
    "pack",
    "pareto",
    "passes",
    "runtime",
    "suggest_bits",
]

_register_backend(dynamo.backend, name="gnnc")
