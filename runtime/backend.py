"""Backends by name, and what the rest of the compiler asks of them."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gnnc.errors import BackendError
from gnnc.runtime import registry
from gnnc.runtime.emitter import is_view
from gnnc.runtime.structure_runner import StructureRunner

NAMES = ("auto", "cpu", "reference", "cuda")


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of kernels that can be asked for.

    Attributes:
        name: as given to ``gnnc.compile``.
        precisions: names of the precisions that it has kernels for.
        chain: registry names to ask, in order; the last one takes whatever is left.
        prepare_structure: adapts a structure graph to a lowered compute graph.
        use_kernels: swaps the backend's kernels into a structure program.
        description: one line for people, such as the instruction set.
        joint_products: whether one kernel multiplies a matrix with several weights.
    """

    name: str
    precisions: frozenset[str]
    chain: tuple[str, ...]
    prepare_structure: Callable[[GraphModule, GraphModule], GraphModule]
    use_kernels: Callable[[StructureRunner], None]
    description: str = ""
    joint_products: bool = True

    def __reduce__(self) -> tuple[Callable[[str], "Backend"], tuple[str]]:
        return get_backend, (self.name,)

    def needs_launch(self, node: Node) -> bool:
        """Whether a node computes: views, picked results and arithmetic on sizes come for free."""
        if node.op not in ("call_function", "call_module"):
            return False
        if isinstance(node.meta.get("val"), torch.SymInt | int):
            return "_local_scalar_dense" in str(node.target)
        return node.target is not operator.getitem and not is_view(node)

    def choose(self, node: Node) -> registry.Choice:
        """Return the kernel for a node; a fused submodule may find none and be taken apart."""
        takes_fused = self.chain if self.chain[0] == "reference" else self.chain[:1]
        return registry.choose(node, takes_fused if node.op == "call_module" else self.chain)

    def require(self, node: Node, choice: registry.Choice) -> registry.Kernel:
        """Return the chosen kernel, or raise BackendError with every candidate's reason."""
        return registry.require(node, choice, self.name)


def get_backend(name: str) -> Backend:
    """Return a backend that can run on this machine.

    Raises:
        BackendError: there is none of this name, it is not built, or it cannot run here.
    """
    if name not in NAMES:
        raise BackendError(f"unknown backend {name!r}; choose one of {', '.join(map(repr, NAMES))}")
    if name == "reference":
        return _reference()
    if name == "cuda":
        from gnnc.runtime import cuda

        cuda.load()
    return _cpu()


def _reference() -> Backend:
    import gnnc.runtime.reference  # noqa: F401  registers its kernel

    return Backend(
        name="reference",
        precisions=frozenset({"fp32", "bf16", "int8"}),
        chain=("reference",),
        prepare_structure=lambda compute, structure: structure,
        use_kernels=lambda runner: None,
        description="plain PyTorch, one op at a time",
    )


def _cpu() -> Backend:
    import gnnc.runtime.reference  # noqa: F401  runs what the C++ kernels leave
    from gnnc.runtime.cpu import library, structure
    from gnnc.runtime.cpu.lowering import KERNEL_FILES  # noqa: F401  registers the kernels

    return Backend(
        name="cpu",
        precisions=frozenset({"fp32", "bf16", "int8"}),
        chain=("cpu", "reference"),
        prepare_structure=structure.narrow_columns,
        use_kernels=structure.use_kernels,
        description=f"C++ kernels, {library.load()}",
    )
