"""The intermediate representation: primitives as ``torch.library`` ops, and the metadata of graphs.

Importing this package registers every op under ``torch.ops.gnnc``.
"""

from gnnc.ir import (
    attention_backward,
    bit_planes,
    body_attention_backward,
    dense,
    fp16_scale,
    groups,
    message,
    qsddmm,
    quantized,
    relu,
    row_scale,
    self_loops,
    sparse,
    structure,
)
from gnnc.ir.body import body_inputs, body_text, evaluate_body, parse_body
from gnnc.ir.op import REGISTRY, Cost, ErrorInput, Op, op_of
from gnnc.ir.qtype import QType
from gnnc.ir.source import Source, is_weight, source_of

__all__ = [
    "REGISTRY",
    "Cost",
    "ErrorInput",
    "Op",
    "QType",
    "Source",
    "attention_backward",
    "bit_planes",
    "body_attention_backward",
    "body_inputs",
    "body_text",
    "dense",
    "evaluate_body",
    "fp16_scale",
    "is_weight",
    "groups",
    "message",
    "op_of",
    "parse_body",
    "qsddmm",
    "quantized",
    "relu",
    "row_scale",
    "self_loops",
    "source_of",
    "sparse",
    "structure",
]
