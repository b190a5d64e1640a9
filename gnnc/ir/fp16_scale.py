"""Power of two that brings the values of a tensor into the range of fp16: gradients are mostly below it."""

import torch
from torch import Tensor

from gnnc.ir.op import Cost, Op, define, nbytes, numel

_EXPONENT = 15
"""Exponent that the largest value gets: fp16 ends below 2^16."""
_LARGEST = 126


def fp16_scale_reference(x: Tensor) -> Tensor:
    """Return the power of two that brings the largest magnitude of ``x`` to at least 2^14, and below 2^15.

    Args:
        x: floating, of any shape.

    Returns:
        float32 ``[]``; finite also where ``x`` is not, 2^126 where all of ``x`` is 0.
    """
    largest = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    _, exponent = torch.frexp(largest)
    power = (_EXPONENT - exponent).clamp(max=_LARGEST).float()
    return torch.exp2(torch.where(largest == 0, _LARGEST, power))


FP16_SCALE = define(
    Op(
        name="fp16_scale",
        schema="(Tensor x) -> Tensor",
        kind="precision",
        features=("x",),
        result_dtype=torch.float32,
        step="quantize",
        label="{x}_power",
        reference=fp16_scale_reference,
        fake=lambda x: x.new_empty((), dtype=torch.float32),
        cost=lambda x: Cost(nbytes(x), numel(x)),
        samples=lambda: [
            (torch.tensor([[1e-6, -3e-9], [0.0, 2e-8]]),),
            (torch.zeros(3, 4),),
            (torch.empty(0, 4),),
        ],
        error_inputs=list,
        no_gradient="rounding has no gradient",
    )
)
