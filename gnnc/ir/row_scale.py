"""Scale of each row of quantized values that share one base scale."""

import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel


def row_scale_reference(base: Tensor, shift: Tensor) -> Tensor:
    """Return ``base / 2^shift``, the scale of each row of ``row_pow2`` values.

    Args:
        base: float32 ``[]``.
        shift: uint8 ``[N]`` from ``row_shift``.

    Returns:
        float32 ``[N]``.

    Raises:
        InputError: ``base`` is not one number.
    """
    _check(base, shift)
    return base * torch.exp2(-shift.float())


def _check(base: Tensor, shift: Tensor) -> None:
    fits = base.dim() == 0 and shift.dim() == 1
    check(
        fits,
        "row_scale",
        lambda: f"want a base [] and shifts [N], got {tuple(base.shape)} and {tuple(shift.shape)}",
    )


def _fake(base: Tensor, shift: Tensor) -> Tensor:
    _check(base, shift)
    return base.new_empty(shift.shape)


ROW_SCALE = define(
    Op(
        name="row_scale",
        schema="(Tensor base, Tensor shift) -> Tensor",
        kind="precision",
        result_dtype=torch.float32,
        label="{shift}_scale",
        reference=row_scale_reference,
        fake=_fake,
        cost=lambda base, shift: Cost(nbytes(base, shift) + numel(shift) * 4, numel(shift)),
        samples=lambda: [
            (torch.tensor(0.03), torch.arange(8, dtype=torch.uint8)),
            (torch.tensor(0.0), torch.empty(0, dtype=torch.uint8)),
        ],
        error_inputs=lambda: [
            ErrorInput((torch.ones(2), torch.zeros(2, dtype=torch.uint8)), r"want a base \[\]")
        ],
        no_gradient="rounding has no gradient",
    )
)
