"""Bit planes: unsigned quantized values of few bits, packed bit by bit."""

import torch
from torch import Tensor

from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel, size_expr

_NO_GRADIENT = "integers have no gradient"


def _random(rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 128, (rows, width), generator=generator, dtype=torch.int8)


def pack_reference(q: Tensor, bits: int) -> Tensor:
    """Split unsigned quantized values into bit planes (QGTC section 4.2, 3D-stacked bit compression).

    Args:
        q: integer ``[N, F]``; the low ``bits`` bits of each value are taken.
        bits: number of planes, 1..8.

    Returns:
        uint8 ``[bits, N, ceil(F / 8)]``; bit ``c % 8`` of byte ``c // 8`` belongs to column ``c``.
    """
    check(q.dim() == 2 and 1 <= bits <= 8, "pack", lambda: f"want [N, F] and 1..8 bits, got {bits}")
    padded = torch.nn.functional.pad(q.to(torch.int32), (0, -q.shape[1] % 8))
    groups = padded.reshape(q.shape[0], padded.shape[1] // 8, 8)
    weights = (1 << torch.arange(8, device=q.device)).to(torch.int32)
    planes = [(((groups >> b) & 1) * weights).sum(-1) for b in range(bits)]
    return torch.stack(planes).to(torch.uint8)


PACK = define(
    Op(
        name="pack",
        schema="(Tensor q, int bits) -> Tensor",
        kind="precision",
        features=("q",),
        label="{q}_planes",
        reference=pack_reference,
        fake=lambda q, bits: q.new_empty((bits, q.shape[0], (q.shape[1] + 7) // 8), dtype=torch.uint8),
        cost=lambda q, bits: Cost(nbytes(q) + numel(q) * bits / 8, numel(q) * bits),
        samples=lambda: [(_random(5, 7), 3), (_random(2, 16), 8), (_random(0, 3), 1)],
        error_inputs=lambda: [ErrorInput((_random(5, 7), 9), "1..8 bits")],
        no_gradient=_NO_GRADIENT,
    )
)


def unpack_reference(planes: Tensor, bits: int, width: int) -> Tensor:
    """Join bit planes back into unsigned quantized values.

    Args:
        planes: uint8 ``[bits, N, ceil(width / 8)]`` from ``pack``.
        bits: number of planes.
        width: number of columns.

    Returns:
        uint8 ``[N, width]``.
    """
    check(
        planes.dim() == 3 and planes.shape[0] == bits,
        "unpack",
        lambda: f"want {bits} planes [bits, N, W], got {tuple(planes.shape)}",
    )
    positions = torch.arange(8, device=planes.device, dtype=torch.uint8)
    ones = (planes[..., None] >> positions) & 1
    flat = ones.reshape(bits, planes.shape[1], planes.shape[2] * 8)[..., :width].to(torch.int32)
    weights = (1 << torch.arange(bits, device=planes.device)).to(torch.int32)
    return (flat * weights[:, None, None]).sum(0).to(torch.uint8)


UNPACK = define(
    Op(
        name="unpack",
        schema="(Tensor planes, int bits, SymInt width) -> Tensor",
        kind="precision",
        features=("planes",),
        reference=unpack_reference,
        fake=lambda planes, bits, width: planes.new_empty((planes.shape[1], width), dtype=torch.uint8),
        cost=lambda planes, bits, width: Cost(
            nbytes(planes) + size_expr(planes.shape[1]) * size_expr(width), numel(planes) * 8
        ),
        samples=lambda: [
            (pack_reference(_random(5, 7), 3), 3, 7),
            (pack_reference(_random(0, 3), 1), 1, 3),
        ],
        error_inputs=lambda: [ErrorInput((torch.zeros(2, 3, 1, dtype=torch.uint8), 3, 7), "want 3 planes")],
        no_gradient=_NO_GRADIENT,
    )
)
