"""The target of a compilation: the facts and services of a backend that passes may use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.fx import GraphModule, Node

from gnnc.cost.model import Rates
from gnnc.ir.format import CSR, Format


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """Row widths up to which int8 does not pay where edges gather rows.

    A gather costs one request for every sector or line, however little of it is read, and one more for a
    scale of the row. FP32 therefore stays where it takes no more requests than int8 does, and bf16, whose
    error is at most half of that of 8 bits with one scale a row, is used where it takes no more.

    Attributes:
        fp32_bytes: bytes of an FP32 row up to which aggregations and edge products stay FP32.
        columns: columns up to which int8 rows take as long as bf16 rows whatever their scales are; columns
            of one head, where edges have one value a head.
        scaled_columns: columns up to which int8 rows do that do not share one scale.
        scaled_extremes: whether int8 pays, at some width, for a maximum or minimum of rows that do not share
            one scale.
        dot_columns: columns up to which int8 rows do for a dot product of both ends, each with its scale.
        body_attention: whether int8 pays for attention that computes its logits from the rows that it sums,
            or with features of edges.
        trained_attention: whether it does for attention with logits of rows in training.
    """

    fp32_bytes: int = 64
    columns: int = 0
    scaled_columns: int = 0
    scaled_extremes: bool = True
    dot_columns: int = 0
    body_attention: bool = True
    trained_attention: bool = True

    def pays(self, granularity: str, reduce: str, columns: int, head: int) -> bool:
        """Return whether int8 makes an aggregation faster than bf16.

        Args:
            granularity: ``tensor``, ``row_pow2`` or ``row``.
            reduce: ``sum``, ``mean``, ``max`` or ``min``.
            columns: number of columns of a row.
            head: columns of one head, or of a row where edges have one value or none.
        """
        if head <= self.columns:
            return False
        if granularity == "tensor":
            return True
        return columns > self.scaled_columns and (self.scaled_extremes or reduce in ("sum", "mean"))


CUDA_NARROW_ROWS = NarrowRows(
    fp32_bytes=16,
    columns=8,
    scaled_columns=32,
    scaled_extremes=False,
    dot_columns=16,
    body_attention=False,
    trained_attention=False,
)
"""Rows begin on 16 bytes, and a sector is 32: measured on an H200 (docs/decisions/022 and 049)."""


class ChosenKernel(Protocol):
    """A registered kernel, as passes see it."""

    @property
    def name(self) -> str:
        """Name that printed programs show."""
        ...

    @property
    def arithmetic(self) -> str:
        """Name of its order of operations: kernels of one name compute the same bits of a body."""
        ...


class KernelChoice(Protocol):
    """The outcome of asking the kernels of a backend for one node."""

    @property
    def kernel(self) -> ChosenKernel | None:
        """The kernel that takes the node, or None if all declined."""
        ...

    @property
    def declined(self) -> Sequence[tuple[str, str]]:
        """(kernel name, reason) of those asked before it."""
        ...


class Lowering(Protocol):
    """The kernel selection and code generation of a backend."""

    def needs_launch(self, node: Node) -> bool:
        """Return whether a node computes something, unlike a view or arithmetic on sizes."""
        ...

    def choose(self, node: Node) -> KernelChoice:
        """Return the kernel for a node; its ``kernel`` is None where every candidate declined."""
        ...

    def choose_later(self, node: Node, present: KernelChoice, arithmetic: str) -> KernelChoice:
        """Return the kernel of an arithmetic for a node, of those that are asked after the present one."""
        ...

    def choose_structure(self, node: Node) -> KernelChoice:
        """Return the kernel for a primitive of a structure graph."""
        ...

    def formats(self, node: Node) -> Sequence[Format]:
        """Return the formats that the kernel of a lowered node can read; none if it reads no edges."""
        ...

    def refuse(self, node: Node, declined: Sequence[tuple[str, str]]) -> NoReturn:
        """Raise BackendError: no kernel takes the node, with every candidate's reason."""
        ...

    @property
    def executable(self) -> Callable[..., Callable[..., Any]]:
        """The class (or function) that makes a callable program of a lowered graph."""
        ...

    def structure_program(self, structure: GraphModule) -> Callable[..., tuple[Any, ...]]:
        """Return a program of a structure graph that runs the backend's kernels."""
        ...


class MeasuredTimes(Protocol):
    """The times of a program on a device."""

    @property
    def seconds(self) -> float:
        """Seconds of one call."""
        ...

    @property
    def launches(self) -> Mapping[str, float]:
        """Seconds of each launch, by node name."""
        ...


def _joins_all(dtype: torch.dtype, columns: int, widths: Sequence[int]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Target:
    """All that passes may know of a backend: facts, and the services that need its runtime.

    Attributes:
        name: name of the backend, as given to ``gnnc.compile``.
        precisions: names of the precisions that it has kernels for.
        rounded: names of further precisions, without kernels: operands are rounded to them, and kernels
            of FP32 compute.
        slower: names of the precisions that run slower than FP32 on this machine.
        joins_products: whether one kernel multiplies a matrix with several weights, in a dtype, for so many
            columns of the matrix and of each product.
        joint_bodies: whether one kernel computes several bodies in one pass over the edges, sums by source
            among them.
        joint_sums: whether its kernel of a product over all edges adds up the rows of its sides, too.
        stored_steps: whether what several bodies of gradients compute is stored for every edge, where that
            costs less: its kernels run one body a pass, and store rows of 16 bits.
        narrow_edges: whether its kernels store values of edges in 16 bits, where their readers round them.
        body_products: precisions, beside FP32, in which its kernels of bodies multiply by a weight.
        rounds_body_rows: whether its kernels of bodies gather rows of sources in 16 bits.
        tensor_scales: whether the kernel of a product computes the one scale of its result on the way.
        epilogue_scales: whether each of its row programs does so.
        gradient_steps: kinds of the steps of gradients that its row programs have, such as masks, derivatives
            of activations, and sums of all rows (``gnnc.ir.row_steps.GRADIENT_STEPS``).
        sums_in_maps: whether, of its row programs, those without an aggregation and without a product but one
            in FP32 alone have a sum of all rows.
        row_bodies: whether a kernel computes rows element by element: masks, concatenations.
        row_bodies_in_16_bits: whether that kernel stores rows of 16 bits, too.
        widens_operands: whether its row programs read matrices of 16 bits, where a cast to FP32 stands.
        fused_gemm_tn: whether its product over all rows rounds FP32 rows as it loads them, and divides the
            result by a number of the device.
        attention_bodies: whether its kernel of attention computes logits from the rows at both ends, of 16
            bits or quantized where those of the sum are.
        attention_features: whether that kernel has dot products and sums of edge features, for so many heads,
            columns of a head and features, and rows of a dtype.
        attention_backward: columns of a head, at most, of its ``gnnc.attention_backward``; 0: no kernel.
        body_attention_backward: columns of a head, at most, of its ``gnnc.body_attention_backward``; 0: no
            kernel.
        quantized_attention_gradients: whether that kernel reads quantized rows.
        static_features: whether its programs keep the quantized values of arguments that stay the same.
        quantized_columns: columns of the widest FP32 row that a product reads once to quantize; None: any.
        least_quantized_columns: columns of the narrowest row that a product multiplies as integers.
        narrow_rows: row widths up to which int8 does not pay where edges gather rows.
        sorts_with_loops: whether its sort of edges drops self loops and adds one for every node.
        int32_columns: whether its kernels read the columns of an aggregation as int32.
        formats: the structure formats that its kernels read.
        lowering: selects kernels and generates code; None: graphs stay as they are and run in PyTorch.
        rates: returns the rates of this machine, measured now if need be, for ``auto``; None: not measured.
        timer: times an executable on its arguments; None where ``auto`` goes by predictions alone.
    """

    name: str = "reference"
    precisions: frozenset[str] = frozenset({"fp32", "bf16", "int8"})
    rounded: frozenset[str] = frozenset()
    slower: frozenset[str] = frozenset()
    joins_products: Callable[[torch.dtype, int, Sequence[int]], bool] = _joins_all
    joint_bodies: bool = False
    joint_sums: bool = False
    stored_steps: bool = False
    narrow_edges: bool = False
    body_products: frozenset[str] = frozenset()
    rounds_body_rows: bool = False
    tensor_scales: bool = False
    epilogue_scales: bool = False
    gradient_steps: frozenset[str] = frozenset()
    sums_in_maps: bool = False
    row_bodies: bool = False
    row_bodies_in_16_bits: bool = False
    widens_operands: bool = False
    fused_gemm_tn: bool = False
    attention_bodies: bool = False
    attention_features: Callable[[int, int, int, torch.dtype], bool] | None = None
    attention_backward: int = 0
    body_attention_backward: int = 0
    quantized_attention_gradients: bool = False
    static_features: bool = False
    quantized_columns: int | None = None
    least_quantized_columns: int = 0
    narrow_rows: NarrowRows = NarrowRows()
    sorts_with_loops: bool = False
    int32_columns: bool = False
    formats: tuple[Format, ...] = (CSR,)
    lowering: Lowering | None = None
    rates: Callable[[], Rates] | None = None
    timer: Callable[[Any, Sequence[Any]], MeasuredTimes] | None = None

    @property
    def supported(self) -> frozenset[str]:
        """Names of the precisions that a model can be compiled in, with kernels or by rounding."""
        return self.precisions | self.rounded
