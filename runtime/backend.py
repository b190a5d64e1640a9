"""Backends by name, and what the rest of the compiler asks of them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from gnnc.errors import BackendError
from gnnc.ir.nodes import is_view
from gnnc.runtime import registry
from gnnc.runtime.program.executable import Executable
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import CUDA_NARROW_ROWS, Target

NAMES = ("auto", "cpu", "reference", "cuda", "cuda-offline")
OFFLINE = ("sm_80", "sm_90", "sm_100")
"""Architectures that ``cuda-offline`` compiles for; ``cuda-offline:sm_90`` names one."""


_READS = ("aten.item.default", "aten._local_scalar_dense.default")
"""Ops that read a number out of a tensor."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of kernels that can be asked for.

    Attributes:
        target: the facts of it that passes may know; its ``lowering``, ``rates`` and ``timer`` are not set.
        chain: registry names to ask, in order; the last one takes whatever is left.
        prepare_structure: adapts a structure graph to a lowered compute graph.
        use_kernels: swaps the backend's kernels into a structure program.
        executable: makes a program of a lowered graph.
        description: one line for people, such as the instruction set, or the name of the GPU.
        device: the GPU that its programs are for; None where there need not be one.
    """

    target: Target
    chain: tuple[str, ...]
    prepare_structure: Callable[[GraphModule, GraphModule], GraphModule]
    use_kernels: Callable[[StructureRunner], None]
    executable: Callable[..., Executable] = Executable
    description: str = ""
    device: torch.device | None = None

    @property
    def name(self) -> str:
        """Name of the backend, as given to ``gnnc.compile``."""
        return self.target.name

    def __reduce__(self) -> tuple[Callable[..., "Backend"], tuple[Any, ...]]:
        return get_backend, (self.name, self.device)

    def structure_program(self, structure: GraphModule) -> StructureRunner:
        """Return a program of a structure graph that runs the backend's kernels."""
        runner = StructureRunner(structure)
        self.use_kernels(runner)
        return runner

    def needs_launch(self, node: Node) -> bool:
        """Whether a node computes: views, picked results and arithmetic on sizes come for free."""
        if node.op not in ("call_function", "call_module"):
            return False
        if isinstance(node.meta.get("val"), torch.SymInt | int):
            return str(node.target) in _READS
        return node.target is not operator.getitem and not is_view(node)

    def choose(self, node: Node) -> registry.Choice:
        """Return the kernel for a node; a fused submodule may find none and be taken apart."""
        takes_fused = self.chain if self.chain[0] == "reference" else self.chain[:1]
        return registry.choose(node, takes_fused if node.op == "call_module" else self.chain)

    def refuse(self, node: Node, declined: Sequence[tuple[str, str]]) -> NoReturn:
        """Raise BackendError: no kernel takes the node, with every candidate's reason."""
        registry.refuse(node, declined, self.name)


def get_backend(name: str, device: torch.device | None = None) -> Backend:
    """Return a backend that can run on this machine.

    Args:
        name: one of ``NAMES``.
        device: where the model is; ``auto`` takes the backend of that device, and ``cuda`` is for that GPU,
            or for the current one where the model is on none of this machine.

    Raises:
        BackendError: there is none of this name, or it cannot run here.
    """
    base, _, architecture = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base not in NAMES or (architecture and base != "cuda-offline"):
        raise BackendError(f"unknown backend {name!r}; choose one of {', '.join(map(repr, NAMES))}")
    if base == "auto":
        base = "cuda" if device is not None and device.type == "cuda" else "cpu"
    if base == "cuda":
        return _cuda(device)
    if base == "cuda-offline":
        return _cuda_offline(name, (architecture,) if architecture else OFFLINE)
    return {"reference": _reference, "cpu": _cpu}[base]()


def _reference() -> Backend:
    import gnnc.runtime.reference  # noqa: F401  registers its kernel

    return Backend(
        target=Target("reference", frozenset({"fp32", "fp16", "bf16", "int8"})),
        chain=("reference",),
        prepare_structure=lambda compute, structure: structure,
        use_kernels=lambda runner: None,
        description="plain PyTorch, one op at a time",
    )


def _cpu() -> Backend:
    import gnnc.runtime.reference  # noqa: F401  runs what the C++ kernels leave
    from gnnc.runtime.cpu import library, structure
    from gnnc.runtime.cpu.lowering import KERNEL_FILES  # noqa: F401  registers the kernels
    from gnnc.runtime.structure.int32_columns import narrow_columns

    return Backend(
        target=Target("cpu", frozenset({"fp32", "bf16", "int8"})),
        chain=("cpu", "reference"),
        prepare_structure=narrow_columns,
        use_kernels=structure.use_kernels,
        description=f"C++ kernels, {library.load()}",
    )


_CUDA_TARGET = Target(
    name="cuda",
    precisions=frozenset({"fp32", "fp16", "bf16", "int8"}),
    joint_products=False,
    joint_messages=False,
    edge_products=False,
    tensor_scales=True,
    narrow_rows=CUDA_NARROW_ROWS,
)


def _cuda(device: torch.device | None) -> Backend:
    import gnnc.runtime.reference  # noqa: F401  runs what the kernels leave, as torch's CUDA ops
    from gnnc.runtime import cuda
    from gnnc.runtime.cuda.executable import CudaExecutable
    from gnnc.runtime.cuda.formats import csr
    from gnnc.runtime.cuda.lowering import KERNEL_FILES  # noqa: F401  registers the kernels

    compiler = cuda.load()  # says what is missing before anything asks for a GPU
    gpu = _gpu(device)
    return Backend(
        target=_CUDA_TARGET,
        chain=("cuda", "reference"),
        prepare_structure=csr.prepare,
        use_kernels=csr.use_kernels,
        executable=CudaExecutable,
        description=f"CUDA kernels, {torch.cuda.get_device_name(gpu)}, {compiler}",
        device=gpu,
    )


def _gpu(device: torch.device | None) -> torch.device:
    """Return a GPU with its number: the current one where the device is none of this machine's."""
    if device is None or device.type != "cuda" or device.index not in range(torch.cuda.device_count()):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _cuda_offline(name: str, architectures: tuple[str, ...]) -> Backend:
    import gnnc.runtime.reference  # noqa: F401
    from gnnc.runtime import cuda
    from gnnc.runtime.cuda.lowering import KERNEL_FILES  # noqa: F401
    from gnnc.runtime.cuda.offline import OfflineExecutable
    from gnnc.runtime.structure.int32_columns import narrow_columns

    return Backend(
        target=replace(_CUDA_TARGET, name=name),
        chain=("cuda", "reference"),
        prepare_structure=narrow_columns,
        use_kernels=lambda runner: None,
        executable=partial(OfflineExecutable, architectures=architectures),
        description=f"compiles for {', '.join(architectures)} without a device, {cuda.load_compiler()}",
    )
