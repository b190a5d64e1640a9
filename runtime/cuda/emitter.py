"""Writes CUDA programs: the common emitter, and launches of kernel instances."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import first_operand, is_result, is_view
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.runtime.cuda.driver.kernel_set import BLOCK, KernelSet
from gnnc.runtime.cuda.driver.nan_flag import NanFlag
from gnnc.runtime.plans.spmm import Plan
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import (
    Argument,
    Counters,
    Expr,
    Launch,
    Let,
    Operand,
    Unpacked,
    count_of,
    expr,
    literal,
    variable,
)
from gnnc.runtime.program.values import round_up, width_of
from gnnc.runtime.registry import Choice
from gnnc.runtime.row_program.build import argument_of

_SECTOR = 32  # bytes that global memory moves at least
_VECTOR = 16  # bytes that a thread loads at most
_LINE = 128  # bytes that L1 looks up at once
MOST_WHOLE = 256
"""Bytes of a row, at most, that a warp sums at a time where it could in slices: ``gnnc::kMostWhole``."""


class CudaEmitter(Emitter):
    """Program of one graph under construction, and the kernels that it launches.

    Attributes:
        kernel_set: the kernels.
        nan_flag: the flag that kernels raise for NaN and infinity.
        weighted: nodes whose quantized rows hold their weights, where there is room (``gnnc::weight_place``).
        windowed_sums: by columns of edges, the sums over them that may read a window table.
    """

    IN_ORDER: ClassVar[frozenset[str]] = frozenset(
        {"gemm", "gemm_fp32", "cublas", "rowmap", "layer_norm", "layer_norm_backward"}
        | {"batch_norm", "batch_norm_backward"}
    )

    def __init__(self, graph_module: GraphModule, *, check_finite: bool, offline: bool) -> None:
        super().__init__(graph_module, check_finite=check_finite)
        self.kernel_set = KernelSet()
        self.weighted: set[Node] = set()
        self._aligned: set[Expr] = set()
        self.windowed_sums: dict[Node, set[Node]] = {}
        self.nan_flag = NanFlag(offline=offline)

    @staticmethod
    def padded(width: int, dtype: torch.dtype, *, gathered: bool = True, windowed: bool = False) -> int:
        """Return the elements from one row to the next, of memory of the arena.

        Rows start on a sector, gathered ones on a line if that adds half at most, short ones on 16 bytes.
        Rows that a kernel may sum by windows start on a line however much that adds, if they have more than
        half of one: the kernel reads windows line by line, and far rows from DRAM (docs/decisions/022).
        """
        if dtype.itemsize > 4:
            return width
        nbytes = width * dtype.itemsize
        lines = round_up(nbytes, _LINE)
        if gathered and (2 * lines <= 3 * nbytes or (windowed and 2 * nbytes > _LINE)):
            return lines // dtype.itemsize
        return round_up(nbytes, _VECTOR if nbytes <= _VECTOR else _SECTOR) // dtype.itemsize

    def stride_for(self, node: Node, width: int) -> int:
        """Return the elements from one row to the next, of a value in the arena, for its readers."""
        dtype, gathered = node.meta["val"].dtype, not self.is_read_in_order(node)
        return self.padded(width, dtype, gathered=gathered, windowed=self.has_windowed_sum(node))

    def prelude(self) -> list[Let]:
        """Return the assignment of the stream that everything of a call runs on."""
        return [Let("stream", Expr("arena.stream"))]

    def matrix(self, node: Node, width: int | None = None) -> Expr:
        """Return the value as rows ``[-1, width]`` that start where kernels can load 16 bytes."""
        base = self._base(node)
        rows = super().matrix(node, width)
        key = width_of(node) if width is None else width
        if _is_given(base) and rows not in self._aligned:
            rows = self.let_call("a", self.bind(aligned, "aligned"), [rows])
            self._aligned.add(rows)
            self._value(base).matrix[key] = rows
        return rows

    def row_stride(self, node: Node, width: int | None = None) -> int:
        """Return the elements from one row of ``matrix(node, width)`` to the next."""
        width = width_of(node) if width is None else width
        buffer = self._arena_buffer(self._base(node))
        if buffer is not None and buffer.shape[1] == width:
            return int(buffer.stride)
        dtype = self._base(node).meta["val"].dtype
        return self.padded(width, dtype) if dtype in BYTE_DTYPES else width

    def stride_outside_arena(self, stride: int, width: int, dtype: torch.dtype) -> int:
        """Return the stride that ``row_stride`` gives such rows."""
        if stride == width:
            return width
        return self.padded(width, dtype) if dtype in BYTE_DTYPES else width

    def has_row_weights(self, node: Node) -> bool:
        """Return whether each row of ``matrix(node)`` holds its weight behind it (``gnnc::weight_place``)."""
        base, width = self._base(node), width_of(node)
        buffer = self._arena_buffer(base)
        has_room = width % _VECTOR > 0 and buffer is not None and buffer.stride >= round_up(width, _VECTOR)
        return has_room and base in self.weighted and width_of(base) == width

    def has_windowed_sum(self, node: Node) -> bool:
        """Return whether a kernel may sum rows of a value by windows (``csrc/cuda/sparse/staged.cuh``)."""

        def sums(user: Node) -> bool:
            choice = user.meta.get("choice")
            if not isinstance(choice, Choice):
                return is_view(user) and self.has_windowed_sum(user)
            plan = choice.plan
            return isinstance(plan, Plan) and plan.is_plain_sum and argument_of(user, plan.x) is node

        return any(sums(user) for user in node.users)

    def counters(self, count: Expr) -> Expr:
        """Return a tensor of ``count`` integers that are 0 before and after every kernel."""
        name = self.fresh("arrived")
        self.append(Counters(name, count))
        return variable(name)

    def launch(
        self,
        kernel: str,
        grid: Operand,
        values: Sequence[Argument],
        *,
        block: int = BLOCK,
        shared: int = 0,
        resident: bool = False,
    ) -> None:
        """Write the launch of an instance of a kernel template.

        Args:
            kernel: C++ name with template arguments.
            grid: number of blocks.
            values: eight-byte arguments; pointers to memory that the kernel writes are of ``Expr.written``.
            block: threads a block, or ``AS_COMPILED``.
            shared: bytes of dynamic shared memory.
            resident: launch no more blocks than run at a time, which share the work.
        """
        launcher = self.kernel_set.launcher(
            kernel, count_of(values), block=block, shared=shared, resident=resident
        )
        launcher = self.bind(launcher, "launch")
        arguments = tuple(value if isinstance(value, Unpacked) else literal(value) for value in values)
        self.append(Launch(launcher.text, literal(grid), arguments))

    def nan_flag_arguments(self, node: Node) -> list[Operand]:
        """Return the two arguments that make a ``step::NanFlag`` for a node."""
        # A constant: with the address in its text, no program would have the same text in another process.
        address = self.bind(self.nan_flag.address, "watch")
        return [address, self.nan_flag.add(node.meta.get("layer", ""))]

    def check_values(self, node: Node, values: Expr) -> None:
        """Write a launch that looks for NaN and infinity in a tensor; nothing waits for the result."""
        values = self.let("values", expr("{}.float().contiguous()", values))
        count = expr("{}.numel()", values)
        grid = expr("min({}, 1024)", expr("({} + {}) // {}", count, BLOCK - 1, BLOCK))
        self.launch("gnnc::check_finite", grid, [pointer(values), count, *self.nan_flag_arguments(node)])

    def check_values_in_range(self, node: Node, values: Expr) -> None:
        """Write nothing: no call waits for the largest value."""


def _is_given(node: Node) -> bool:
    """Return whether the layout of a value's memory is given: an input, or a result of torch."""
    node = first_operand(node) if is_result(node) else node
    choice = node.meta.get("choice")
    return node.op == "placeholder" or (isinstance(choice, Choice) and choice.kernel.backend == "reference")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if its memory does not begin on 16 bytes."""
    return tensor if tensor.data_ptr() % _VECTOR == 0 else tensor.clone()


def blocks(rows: Operand, per_block: int) -> Expr:
    """Return the number of blocks of a launch over rows."""
    return literal(rows) if per_block == 1 else expr("({} + {}) // {}", rows, per_block - 1, per_block)


def pointer(tensor: Expr | None) -> Expr:
    """Return the address of a tensor, 0 for None."""
    return Expr("0") if tensor is None else expr("{}.data_ptr()", tensor)


def length(tensor: Expr) -> Expr:
    """Return the size of the first dimension of a tensor."""
    return expr("{}.shape[0]", tensor)


def lanes_for(width: int, columns: int = 4) -> int:
    """Return the number of threads that share a row, so that each has ``columns`` of it, in runs of four."""
    return min(32, 1 << max(0, math.ceil(math.log2(max(1, math.ceil(width / columns))))))
