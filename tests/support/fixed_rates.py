"""Rates of a machine that does not exist: integers are four times as fast as floats, bf16 twice."""

from gnnc.cost.model import ALONE, FAMILIES, KNOTS, Rates

SPEED = {
    "fp32": 1.0, "bf16": 0.5, "int8": 0.25, "int8.tensor": 0.25, "int8.row_pow2": 0.3, "int8.row": 0.4,
}  # fmt: skip

_TABLE = {
    "launch": 1e-6,
    "row": 1e-9,
    "step": 1e-10,
    "quantize": 1e-10,
    "exp": 1e-9,
    "body": 1e-9,
    **{f"dot.{mode}": 1e-9 * speed for mode, speed in SPEED.items()},
    **{f"edge.{mode}": 1e-8 * speed for mode, speed in SPEED.items()},
    **{f"gather.{mode}@{k}": 1e-10 for mode in SPEED for k in range(len(KNOTS))},
    **{f"{way}@{k}": 1e-10 for way in ("read", "write") for k in range(len(KNOTS))},
}

FIXED = Rates({family: _TABLE for family in (*FAMILIES, "edge_softmax", ALONE)}, "cpu", "no machine", 0.0)
