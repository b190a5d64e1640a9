"""Stages of a body: what a warp computes once for an edge and keeps in shared memory, as C++ declarations.

``csrc/cuda/sparse/edge_stages.cuh`` runs them. The layout of the shared memory is made here: where the
results of each stage lie, which weights find room, and how many warps a block has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gnnc.runtime.row_program.build import Refusal

AT = "int64_t row, int64_t source, int64_t edge, const float* results"
"""Parameters that tell an edge, and the results of its stages."""
TILE = 16
"""``gnnc::kTile``."""
VECTOR = 16
"""Bytes that a thread loads at once, at most."""
_EDGE_BYTES = 20
"""Bytes of an edge in ``gnnc::TileEdges``."""
_MOST_WEIGHTS = 48 * 1024
"""Bytes of weights in shared memory."""
_MOST_SHARED = 96 * 1024
"""Bytes of shared memory of a block: two blocks a multiprocessor."""
_MOST_WARPS = 8
_STREAMED = 64
"""Columns of a product of 16 bits whose sums a warp holds: ``HalfProduct::kTogether``."""
_VECTOR_BYTES = 320
"""Bytes of a vector of constants in shared memory: four parts, ``gnnc::kVectorPitch`` words apart."""
_NARROW = 16
"""Columns of results that a warp reduces from shared memory: ``TileColumns::kNarrow``."""


@dataclass(slots=True)
class Stage:
    """Value of a body that is computed once an edge.

    Attributes:
        outputs: columns of the value.
        functions: C++ functions of the stage, by the name of the template that they are instances of.
        reads: numbers of the stages whose results it reads, and names of the rows.
    """

    outputs: int
    functions: dict[str, str]
    reads: set[int | str] = field(default_factory=set)

    frees_early: ClassVar[bool] = False
    """Set where what the stage reads has been read before it stores results."""

    @property
    def operand_bytes(self) -> int:
        """Return the bytes of an edge's operand in shared memory."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weight in shared memory."""
        return 0

    def type_of(self, to: int, weights_at: int) -> str:
        """Return the C++ type, given the places of the results (a word) and of the weight (a byte)."""
        return f"Stored<{self.outputs}, {to}>"


@dataclass(slots=True)
class SumStage(Stage):
    """Sum, or mean, over columns.

    Attributes:
        terms: values that are added up.
        divisor: number that the sum is divided by.
    """

    terms: int = 1
    divisor: int = 1

    def type_of(self, to: int, weights_at: int) -> str:
        """Return the C++ type."""
        return f"ColumnSum<{self.terms}, {self.outputs}, {to}, {self.divisor}>"


@dataclass(slots=True)
class ProductStage(Stage):
    """Product of a row of the edge with a weight.

    Attributes:
        inputs: columns of the operand.
        type: C++ type of 16 bits in which the operands are multiplied; None for FP32.
    """

    inputs: int = 1
    type: str | None = None

    frees_early: ClassVar[bool] = True

    @property
    def operand_bytes(self) -> int:
        """Return the bytes of an edge's operand; of 16 bits, one that is read once is not stored."""
        if self.type is not None:
            return 2 * _up(self.inputs, 16) if _up(self.outputs, 16) > _STREAMED else 0
        words = _up(self.inputs, 4)
        return 4 * (words if words % 8 == 4 else words + 4)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weight."""
        if self.type is not None:
            return 2 * _up(self.outputs, 16) * (_up(self.inputs, 16) + 8)
        return _up(4 * _up(self.inputs, 4) * (self.outputs | 1), 16)

    def type_of(self, to: int, weights_at: int) -> str:
        """Return the C++ type."""
        sizes = f"{self.inputs}, {self.outputs}, {to}, {weights_at}"
        return f"FullProduct<{sizes}>" if self.type is None else f"HalfProduct<{self.type}, {sizes}>"


@dataclass(frozen=True, slots=True)
class Row:
    """Rows of an operand that are copied to shared memory.

    Attributes:
        name: name of the operand.
        nbytes: bytes of a row.
        stride: bytes from one row to the next.
    """

    name: str
    nbytes: int
    stride: int

    @property
    def piece(self) -> int:
        """Return the bytes that a thread copies at once; 0 where rows are not aligned for any."""
        return next((piece for piece in (VECTOR, 4) if self.nbytes % piece == 0 == self.stride % piece), 0)

    @property
    def words(self) -> int:
        """Return the words of a row in shared memory."""
        return _up(self.nbytes, 16) // 4

    def type_of(self, to: int) -> str:
        """Return the C++ type, given the first word of the row."""
        of_sources = "true" if self.name[0] == "j" else "false"
        return f"Fetched<{of_sources}, {self.nbytes}, {self.stride}, {self.piece}, {to}>"


@dataclass(frozen=True, slots=True)
class Block:
    """Block of threads that runs stages.

    Attributes:
        warps: warps of a block.
        nbytes: bytes of its dynamic shared memory.
    """

    warps: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Shared memory of a body's stages.

    Attributes:
        places: first word of the results of each stage in an edge's row.
        rows_at: first word of each copied row there.
        weights_at: first byte of the weight of each stage; -1: read where it lies.
        pitch: words of a row.
        operand_bytes: bytes of an edge's operand.
        vectors_at: first byte of the vectors of constants, behind the weights.
        weight_bytes: bytes of all weights and vectors.
        block: the block of threads.
    """

    places: tuple[int, ...]
    rows_at: tuple[int, ...]
    weights_at: tuple[int, ...]
    pitch: int
    operand_bytes: int
    vectors_at: int
    weight_bytes: int
    block: Block


@dataclass(frozen=True, slots=True)
class Fragment:
    """C++ of a value that is computed from a product in registers.

    Attributes:
        width: columns of the value.
        held: pairs of fragments of the weight that a thread holds in registers, at most.
        statements: statements of the function that computes it.
        vectors: C++ element in ``column`` of each vector of constants that the function reads.
    """

    width: int
    held: int
    statements: tuple[str, ...]
    vectors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Functor:
    """C++ struct whose call operator computes a body.

    Attributes:
        text: members, stages and call operator.
        operands: names of the operands that the members point to, in order.
        width: columns of an edge's value.
        block: block of threads that runs the stages; None where there are none.
    """

    text: str
    operands: tuple[str, ...]
    width: int
    block: Block | None


@dataclass(frozen=True, slots=True)
class Side:
    """Value of a body that lies in shared memory, one row an edge.

    Attributes:
        columns: columns of the value.
        place: C++ constant of the functor that holds the first word of the value in an edge's row.
        type: C++ type of an element.
    """

    columns: int
    place: str
    type: str = "float"


def layout_of(
    stages: Sequence[Stage],
    read_at_the_end: set[int | str],
    width: int,
    values: int,
    rows: Sequence[Row] = (),
    vectors: int = 0,
) -> Layout:
    """Return the shared memory of a body.

    Args:
        stages: the stages, in order.
        read_at_the_end: numbers of the stages, and names of the rows, that the body's values read.
        width: columns of the body's values.
        values: number of these values.
        rows: rows of operands that are copied to shared memory.
        vectors: number of vectors of constants that fragments are computed with.

    Raises:
        Refusal: there is no room for one warp.
    """
    places, rows_at, words = _places(stages, rows, read_at_the_end)
    pitch = words + (8 - words) % 16
    weights_at, weight_bytes = [], 0
    for stage in stages:
        fits = weight_bytes + stage.weight_bytes <= _MOST_WEIGHTS
        weights_at.append(weight_bytes if fits else -1)
        weight_bytes += stage.weight_bytes if fits else 0
    vectors_at, weight_bytes = weight_bytes, weight_bytes + vectors * _VECTOR_BYTES
    narrow = 4 * width * values if width <= _NARROW else 0
    operand = _up(max([narrow, *(stage.operand_bytes for stage in stages)]), 16)
    warp_bytes = TILE * (_EDGE_BYTES + 4 * pitch + operand)
    for warps in range(_MOST_WARPS, 0, -1):
        nbytes = weight_bytes + warps * warp_bytes
        if nbytes <= _MOST_SHARED:
            block = Block(warps, nbytes)
            shared = pitch, operand, vectors_at, weight_bytes
            return Layout(tuple(places), tuple(rows_at), tuple(weights_at), *shared, block)
    raise Refusal(f"the stages of the body take {warp_bytes} bytes of shared memory for {TILE} edges")


def _places(
    stages: Sequence[Stage], rows: Sequence[Row], read_at_the_end: set[int | str]
) -> tuple[list[int], list[int], int]:
    """Return the first word of each stage's results and of each row, and the words of all.

    Results take the place of what no later stage reads.
    """
    last: dict[int | str, int] = {number: number for number, _ in enumerate(stages)}
    last |= {row.name: -1 for row in rows}
    for number, stage in enumerate(stages):
        last |= dict.fromkeys(stage.reads, number)
    last |= dict.fromkeys(read_at_the_end, len(stages))
    spans: dict[int | str, tuple[int, int]] = {}
    words = 0
    for row in rows:
        spans[row.name] = words, words + row.words
        words += row.words
    for number, stage in enumerate(stages):
        free_from = number if stage.frees_early else number - 1
        begin, size = 0, _up(stage.outputs, 4)
        for first, past in sorted(span for value, span in spans.items() if last[value] > free_from):
            if begin + size <= first:
                break
            begin = max(begin, past)
        spans[number] = begin, begin + size
        words = max(words, begin + size)
    return [spans[number][0] for number, _ in enumerate(stages)], [spans[row.name][0] for row in rows], words


def declared(
    stages: Sequence[Stage],
    rows: Sequence[Row],
    layout: Layout,
    fragment: Fragment | None,
    operands: Sequence[str],
) -> list[str]:
    """Return the declarations of a body's stages, and of the rows that they read from shared memory."""
    reads_edges = any(name[0] == "e" for name in operands)
    placed = list(zip(rows, layout.rows_at, strict=True))
    fetched = ", ".join(f"gnnc::{row.type_of(to)}" for row, to in placed)
    types = [
        f"gnnc::{stage.type_of(to, at)}"
        for stage, to, at in zip(stages, layout.places, layout.weights_at, strict=True)
    ]
    lines = [
        f"static constexpr bool kReadsEdges = {'true' if reads_edges else 'false'};",
        f"using Rows = gnnc::Rows<{fetched}>;",
        *(f"static constexpr int {row_of(row.name)} = {to};" for row, to in placed),
        "template <int kNumber> __device__ const char* base() const {",
        *(
            f"  if constexpr (kNumber == {number}) {{ return reinterpret_cast<const char*>({row.name}); }}"
            for number, row in enumerate(rows)
        ),
        "}",
        f"using Stages = gnnc::Stages<{', '.join(types)}>;",
        f"static constexpr int kWarps = {layout.block.warps}, kWeightBytes = {layout.weight_bytes};",
        f"static constexpr int kPitch = {layout.pitch}, kOperandBytes = {layout.operand_bytes};",
        *(
            f"static constexpr int {place_of(number)} = {place};"
            for number, place in enumerate(layout.places)
        ),
    ]
    for name, head in (
        ("column", f"column({AT}, int column)"),
        ("term", f"term({AT}, int column, int k)"),
        ("weight", "weight(int k, int column)"),
        ("bias", "bias(int column)"),
    ):
        lines.append(f"template <int kStage> __device__ float {head} const {{")
        lines += [
            f"  if constexpr (kStage == {number}) {{ {stage.functions[name]} }}"
            for number, stage in enumerate(stages)
            if name in stage.functions
        ]
        lines.append("}")
    return lines + _declared_fragment(fragment, layout)


def _declared_fragment(fragment: Fragment | None, layout: Layout) -> list[str]:
    """Return the declarations of a value that is computed from a product in registers."""
    vectors = () if fragment is None else fragment.vectors
    lines = [
        f"static constexpr bool kInFragments = {'false' if fragment is None else 'true'};",
        f"static constexpr int kVectors = {len(vectors)}, kVectorsAt = {layout.vectors_at};",
        f"static constexpr int kHeld = {0 if fragment is None else fragment.held};",
        f"static constexpr int kVectorWidth = {0 if fragment is None else fragment.width};",
    ]
    if vectors:
        lines.append("template <int kNumber> __device__ float vector(int column) const {")
        lines += [
            f"  if constexpr (kNumber == {number}) {{ return {element}; }}"
            for number, element in enumerate(vectors)
        ]
        lines.append("}")
    if fragment is not None:
        taken = "int column, float product, const float* vectors, float* values"
        lines += [f"__device__ void fragment({AT}, {taken}) const {{", *fragment.statements, "}"]
    return lines


def place_of(stage: int) -> str:
    """Return the C++ constant that holds the first word of a stage's results."""
    return f"kAt{stage}"


def row_of(operand: str) -> str:
    """Return the C++ constant that holds the first word of an operand's copied row."""
    return f"kRow_{operand}"


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
