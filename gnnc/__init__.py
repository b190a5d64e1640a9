"""Compiles graph neural networks to low precision.

``gnnc.compile(model, precision="int8")`` returns a module with the model's signature that computes on
kernels of its own; ``print`` it to read the program.
"""

from gnnc import ir, passes, runtime
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
from gnnc.precision import Precision

__all__ = [
    "BackendError",
    "CaptureError",
    "CompiledModel",
    "GnncError",
    "GraphError",
    "InputError",
    "Precision",
    "PrecisionError",
    "UnsupportedError",
    "VerifyError",
    "compile",
    "ir",
    "passes",
    "runtime",
]
