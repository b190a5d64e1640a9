"""Writes CUDA programs: what the common emitter does, and launches of kernels of a unit."""

import math
import re
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import is_view
from gnnc.runtime.cuda.driver.kernel_set import BLOCK, Unit
from gnnc.runtime.cuda.driver.nan_flag import Watch
from gnnc.runtime.plans.spmm import Plan
from gnnc.runtime.program.emitter import Emitter, width_of
from gnnc.runtime.registry import Choice
from gnnc.runtime.row_program.build import argument_of

_LAUNCH = re.compile(r"(launch_\d+)\((.*?), stream, ")
_NAMES = re.compile(r"\b[a-z]\w*")
_REGION = re.compile(r"t\d+")
_ALLOCATIONS = ("take(", "empty(", "counters(")
_VIEW = re.compile(r"\w+\.view\([^()]*(\([^()]*\))*[^()]*\)")
_SECTOR = 32  # bytes that global memory moves at least
_VECTOR = 16  # bytes that a thread loads at most
_LINE = 128  # bytes that L1 looks up at once
_IN_ORDER = {"gemm", "cublas", "rowmap"}  # kernels that read each row of x once, one after the other
MOST_WHOLE = 256
"""Bytes of a row, at most, that a warp sums at a time where it could in slices: ``gnnc::kMostWhole``."""


@dataclass(frozen=True, slots=True)
class LaunchText:
    """A launch as the program says it.

    Attributes:
        grid: text of the number of blocks.
        values: texts of its arguments; one that begins with a star stands for several.
        count: number of its arguments.
    """

    grid: str
    values: tuple[str, ...]
    count: int


class CudaEmitter(Emitter):
    """An emitter that knows the program's kernels.

    Attributes:
        unit: the kernels.
        launches: every launch, in order.
        watch: where kernels report NaN and infinity.
        is_launches: whether nothing but our own launches reads what our launches write.
        weighted: nodes whose rows of codes hold their weights, where there is room (``gnnc::weight_place``).
        by_stretch: columns, and the sums over them that may go through a table by stretch.
    """

    def __init__(self, graph_module: GraphModule, *, check_finite: bool, offline: bool) -> None:
        super().__init__(graph_module, check_finite=check_finite)
        self.unit = Unit()
        self.launches: list[LaunchText] = []
        self.is_launches = True
        self.weighted: set[Node] = set()
        self.by_stretch: dict[Node, set[Node]] = {}
        self._written: set[str] = set()
        self.watch = Watch(offline=offline)

    @staticmethod
    def padded(width: int, dtype: torch.dtype, *, gathered: bool = True, by_stretch: bool = False) -> int:
        """Rows start on a sector, gathered ones on a line if that adds half at most, short ones on 16 bytes.

        Rows that a kernel may sum by stretch start on a line however much that adds, if they have more than
        half of one: it reads its windows line by line, and far rows from DRAM (docs/decisions/022).
        """
        if dtype.itemsize > 4:
            return width
        nbytes = width * dtype.itemsize
        lines = round_up(nbytes, _LINE)
        if gathered and (2 * lines <= 3 * nbytes or (by_stretch and 2 * nbytes > _LINE)):
            return lines // dtype.itemsize
        return round_up(nbytes, _VECTOR if nbytes <= _VECTOR else _SECTOR) // dtype.itemsize

    def stride_for(self, node: Node, width: int) -> int:
        """Return the elements from one row of a value of ours to the next, by who reads it."""
        dtype, gathered = node.meta["val"].dtype, not self.is_read_in_order(node)
        return self.padded(width, dtype, gathered=gathered, by_stretch=self.is_summed_by_stretch(node))

    def prelude(self) -> list[str]:
        """The stream that everything of a call runs on."""
        return ["stream = arena.stream"]

    @staticmethod
    def is_launch(text: str) -> bool:
        """Whether a statement is a launch."""
        return _LAUNCH.match(text) is not None

    @staticmethod
    def recorded(text: str) -> str:
        """Return a statement with its launch, if it is one, noted in ``recorded`` instead of made."""
        return _LAUNCH.sub(r"\1.record(\2, recorded, ", text)

    def line(self, text: str) -> None:
        """Append one statement; note whether torch reads in it what a launch has written."""
        super().line(text)
        name, _, value = text.partition(" = ")
        if self.is_launch(text) or not (name == text or value):
            return
        if value.startswith(_ALLOCATIONS):
            self._written.add(name)
            return
        read = set(_NAMES.findall(value or text))
        if any(_REGION.fullmatch(each) or each in self._written for each in read):
            if _VIEW.fullmatch(value):
                self._written.add(name)
            else:
                self.is_launches = False

    def matrix(self, node: Node, width: int | None = None) -> str:
        """As the common emitter's; rows of given tensors start where kernels can load 16 bytes."""
        base = self._base(node)
        text = super().matrix(node, width)
        key = width_of(node) if width is None else width
        value = self._value(base)
        if _is_given(base) and not text.startswith("a_"):
            text = value.matrix[key] = self._assign("a", f"{self.bind(aligned, 'aligned')}({text})")
        return text

    def row_stride(self, node: Node, width: int | None = None) -> int:
        """Return the elements from one row of ``matrix(node, width)`` to the next."""
        width = width_of(node) if width is None else width
        buffer = self._ours(self._base(node))
        if buffer is not None and buffer.shape[1] == width:
            return int(buffer.stride)
        is_codes = self._base(node).meta["val"].dtype == torch.int8
        return self.padded(width, torch.int8) if is_codes else width

    def holds_weights(self, node: Node) -> bool:
        """Whether each row of ``matrix(node)``, of codes, holds its weight (``gnnc::weight_place``)."""
        base, width = self._base(node), width_of(node)
        buffer = self._ours(base)
        has_room = width % _VECTOR > 0 and buffer is not None and buffer.stride >= round_up(width, _VECTOR)
        return has_room and base in self.weighted and width_of(base) == width

    def is_read_in_order(self, node: Node) -> bool:
        """Whether no kernel gathers the rows of a value: then it may be the first to leave L2."""

        def reads_in_order(user: Node) -> bool:
            choice = user.meta.get("choice")
            if not isinstance(choice, Choice):
                return user.op == "output" or self.is_read_in_order(user)
            return choice.kernel is not None and choice.kernel.name in _IN_ORDER

        return all(reads_in_order(user) for user in node.users)

    def is_summed_by_stretch(self, node: Node) -> bool:
        """Whether a kernel may sum rows of a value by stretch (``csrc/cuda/sparse/staged.cuh``)."""

        def sums(user: Node) -> bool:
            choice = user.meta.get("choice")
            if not isinstance(choice, Choice):
                return is_view(user) and self.is_summed_by_stretch(user)
            plan = choice.plan
            return isinstance(plan, Plan) and plan.is_plain_sum and argument_of(user, plan.x) is node

        return any(sums(user) for user in node.users)

    def let(self, hint: str, text: str) -> str:
        """Return a new variable that holds the value of an expression."""
        return self._assign(hint, text)

    def launch(
        self,
        kernel: str,
        grid: str,
        values: list[str],
        *,
        block: int = BLOCK,
        shared: int = 0,
        count: int | None = None,
    ) -> None:
        """Write the launch of an instance of a kernel template.

        Args:
            kernel: C++ name with template arguments.
            grid: text of the number of blocks.
            values: texts of its eight-byte arguments.
            block: threads a block, or ``AS_COMPILED``.
            shared: bytes of dynamic shared memory.
            count: number of the arguments, where a text stands for several.
        """
        launch = self.unit.launch(kernel, count or len(values), block=block, shared=shared)
        self.launches.append(LaunchText(grid, tuple(values), launch.count))
        self.line(f"{self.bind(launch, 'launch')}({grid}, stream, {', '.join(values)})")

    def watched(self, node: Node) -> list[str]:
        """Return the two arguments that make a ``step::Watch`` for a node."""
        # By name: if the text of a program said where memory lies, no program would be known again.
        address = self.bind(self.watch.address, "watch")
        return [address, str(self.watch.add(node.meta.get("layer", "")))]

    def check_values(self, node: Node, name: str) -> None:
        """Look for NaN and infinity in a tensor without waiting for the result."""
        values = self._assign("values", f"{name}.float().contiguous()")
        count = f"{values}.numel()"
        self.launch(
            "gnnc::check_finite",
            f"min(({count} + {BLOCK - 1}) // {BLOCK}, 1024)",
            [f"{values}.data_ptr()", count, *self.watched(node)],
        )


def _is_given(node: Node) -> bool:
    """Whether a value's memory was laid out by somebody else."""
    choice = node.meta.get("choice")
    return node.op == "placeholder" or (isinstance(choice, Choice) and choice.kernel.backend == "reference")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied where its memory does not begin on 16 bytes."""
    return tensor if tensor.data_ptr() % _VECTOR == 0 else tensor.clone()


def blocks(rows: str, per_block: int) -> str:
    """Return the text of a number of blocks."""
    return rows if per_block == 1 else f"({rows} + {per_block - 1}) // {per_block}"


def round_up(number: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``number``."""
    return -(-number // unit) * unit


def pointer(text: str) -> str:
    """Return the text of a tensor's address; ``None`` has address 0."""
    return "0" if text == "None" else f"{text}.data_ptr()"


def lanes_for(width: int, columns: int = 4) -> int:
    """Return how many threads share a row, so that each has so many columns, in runs of four."""
    return min(32, 1 << max(0, math.ceil(math.log2(max(1, math.ceil(width / columns))))))
