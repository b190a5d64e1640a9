"""Building row programs by hand, and what the tests of the dense kernels share."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gnnc.runtime.cpu import library
from gnnc.runtime.row_program.opcodes import Op

WIDTHS = (1, 7, 16, 47, 64, 100, 602)
ROWS = (0, 1, 5, 1000)

Arguments = tuple[list[int], list[Tensor], list[float], list[Tensor]]


@dataclass
class Program:
    """Collects instructions and what they name; `arguments` are the last four of every kernel."""

    code: list[int] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    consts: list[float] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)

    def add(self, op: Op, a: int = 0, b: int = 0, c: int = 0) -> "Program":
        self.code += (int(op), a, b, c)
        return self

    def operand(self, *tensors: Tensor) -> int:
        self.operands += tensors
        return len(self.operands) - len(tensors)

    def const(self, value: float) -> int:
        self.consts.append(value)
        return len(self.consts) - 1

    def out(self, tensor: Tensor) -> int:
        self.outs.append(tensor)
        return len(self.outs) - 1

    @property
    def arguments(self) -> Arguments:
        return self.code, self.operands, self.consts, self.outs


def store(out: Tensor) -> Program:
    """The program that only writes its rows as FP32."""
    program = Program()
    return program.add(Op.STORE_F32, program.out(out))


def gemm(
    x: Tensor,
    scale: Tensor | None,
    w: Tensor | list[Tensor],
    is_kn: bool | list[bool],
    mode: int,
    program: Program,
) -> None:
    library.load()
    weights = w if isinstance(w, list) else [w]
    layouts = is_kn if isinstance(is_kn, list) else [is_kn]
    torch.ops.gnnc_cpu.gemm(x, scale, weights, layouts, mode, *program.arguments)


def map_rows(x: Tensor, scale: Tensor | None, program: Program) -> None:
    library.load()
    torch.ops.gnnc_cpu.map(x, scale, *program.arguments)


def padded(rows: int, width: int, value: int = 99) -> Tensor:
    """An int8 matrix with rows padded to 64 bytes, full of what a kernel must overwrite."""
    return torch.full((rows, (width + 63) // 64 * 64), value, dtype=torch.int8)[:, :width]


def padding(q: Tensor) -> Tensor:
    """Return the bytes between the width and the end of each row."""
    rows, width = q.shape
    whole = q.as_strided((rows, (width + 63) // 64 * 64), ((width + 63) // 64 * 64, 1))
    return whole[:, width:]


def random_int8(rows: int, width: int) -> Tensor:
    q = padded(rows, width, 0)
    return q.copy_(torch.randint(-127, 128, (rows, width)))


def row_scale(x: Tensor) -> Tensor:
    """amax / 127 of each row, 0 where that is not a normal float."""
    amax = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    scale = amax / 127
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.zeros_like(scale), scale)


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """clamp(rint(x / scale), -127, 127), by the reciprocal."""
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return (x * inverse).round().clamp(-127, 127).to(torch.int8)


def error(got: Tensor, want: Tensor) -> float:
    """RMS of the error relative to the RMS of what was wanted, in float64."""
    if not want.numel():
        return 0.0
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def strided(x: Tensor, extra: int = 16) -> Tensor:
    """Return the same values with gaps between the rows."""
    wide = torch.full((x.shape[0], x.shape[1] + extra), float("nan"), dtype=x.dtype)
    return wide[:, : x.shape[1]].copy_(x)


def bits(*tensors: Tensor) -> list[bytes]:
    return [t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors]
