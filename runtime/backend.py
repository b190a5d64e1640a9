"""The registry of backends, and the services that the rest of the compiler uses from one.

Each backend is a folder beside this file and one line of ``_REGISTRY``.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from gnnc.errors import BackendError
from gnnc.ir.describe import reads_edges
from gnnc.ir.format import CSR, Format
from gnnc.ir.nodes import is_gnnc, is_view
from gnnc.runtime import registry
from gnnc.runtime.program.executable import Executable
from gnnc.runtime.structure.hooks import BuildHooks
from gnnc.runtime.structure.kernels import choice_of
from gnnc.runtime.structure.runner import StructureRunner
from gnnc.target import Target

_READS = ("aten.item.default", "aten._local_scalar_dense.default")
"""Ops that read a number out of a tensor."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of kernels, with the functions that make programs of them.

    Attributes:
        target: the facts of it that passes may know; its ``lowering``, ``rates`` and ``timer`` are not set.
        chain: registry names to ask, in order; the last one takes whatever is left.
        executable: makes a program of a lowered graph.
        description: one line for people, such as the instruction set, or the name of the GPU.
        device: the GPU that its programs are for; None where there need not be one.
        device_types: types of the devices that tensors of a call may be on; empty: any.
        is_runnable: whether its programs run on this machine; False for a backend that only compiles.
        structure_hooks: makes the callbacks of its device in a structure program; None: there are none.
    """

    target: Target
    chain: tuple[str, ...]
    executable: Callable[..., Executable] = Executable
    description: str = ""
    device: torch.device | None = None
    device_types: frozenset[str] = frozenset()
    is_runnable: bool = True
    structure_hooks: Callable[[], BuildHooks] | None = None

    @property
    def name(self) -> str:
        """Name of the backend, as given to ``gnnc.compile``."""
        return self.target.name

    def __reduce__(self) -> tuple[Callable[..., "Backend"], tuple[Any, ...]]:
        return get_backend, (self.name, self.device)

    def structure_program(self, structure: GraphModule) -> StructureRunner:
        """Return a program of a structure graph that runs the backend's kernels."""
        hooks = None if self.structure_hooks is None else self.structure_hooks()
        return StructureRunner(structure, self._choose_to_run, hooks)

    def _choose_to_run(self, node: Node) -> registry.Choice | None:
        """Return the kernel that computes a structure node here; choose it if ``lower`` did not."""
        if not self.is_runnable or not is_gnnc(node):
            return None
        return choice_of(node) or self.choose_structure(node)

    def choose_structure(self, node: Node) -> registry.Choice:
        """Return the kernel for a primitive of a structure graph."""
        return registry.choose(node, self.chain, registry.structure_kind_of(node))

    def needs_launch(self, node: Node) -> bool:
        """Return whether a node computes, unlike views, picked results and arithmetic on sizes."""
        if node.op not in ("call_function", "call_module"):
            return False
        if isinstance(node.meta.get("val"), torch.SymInt | int):
            return str(node.target) in _READS
        return node.target is not operator.getitem and not is_view(node)

    def choose(self, node: Node) -> registry.Choice:
        """Return the kernel for a node; a fused submodule may find none and be taken apart."""
        takes_fused = self.chain if self.chain[0] == "reference" else self.chain[:1]
        return registry.choose(node, takes_fused if node.op == "call_module" else self.chain)

    def choose_later(self, node: Node, present: registry.Choice, arithmetic: str) -> registry.Choice:
        """Return the kernel of an arithmetic for a node, of those that are asked after the present one."""
        assert present.kernel is not None
        return registry.choose_later(node, self.chain, present.kernel, arithmetic)

    def formats(self, node: Node) -> Sequence[Format]:
        """Return the formats that the kernel of a lowered node can read; none if it reads no edges."""
        choice = choice_of(node)
        if choice is None or choice.kernel is None or not reads_edges(node):
            return ()
        formats = getattr(choice.kernel.implementation, "formats", None)
        return (CSR,) if formats is None else formats(choice.plan, node)

    def refuse(self, node: Node, declined: Sequence[tuple[str, str]]) -> NoReturn:
        """Raise BackendError: no kernel takes the node, with every candidate's reason."""
        registry.refuse(node, declined, self.name)


Factory = Callable[..., Backend]
"""Returns a backend for the device of a model (None: unknown), and for an option if it takes one."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The entry of a backend in the registry.

    Attributes:
        factory: the factory, or ``module:function`` of it, which is imported when the backend is first asked
            for: the CUDA backend is not imported on a machine without CUDA.
        takes_option: whether ``name:option`` is a name too; the factory gets the option, or "", as its
            second argument.
    """

    factory: Factory | str
    takes_option: bool = False

    def create(self, device: torch.device | None, option: str) -> Backend:
        """Return the backend for a device and an option."""
        factory = self.factory
        if isinstance(factory, str):
            module, _, function = factory.partition(":")
            factory = getattr(import_module(module), function)
        return factory(device, option) if self.takes_option else factory(device)


_REGISTRY = {
    "cpu": Registration("gnnc.runtime.cpu.backend:create"),
    "reference": Registration("gnnc.runtime.reference.backend:create"),
    "cuda": Registration("gnnc.runtime.cuda.backend:create"),
    "cuda-offline": Registration("gnnc.runtime.cuda.backend:create_offline", takes_option=True),
}


def register_backend(name: str, factory: Factory) -> None:
    """Register a backend, so that ``gnnc.compile(model, backend=name)`` finds it.

    Args:
        name: a new name, without a colon.
        factory: returns the backend for the device of a model (a ``torch.device``, or None where that is
            unknown); raises BackendError where the backend cannot run.

    Raises:
        ValueError: the name is taken, or has a colon.
    """
    if name in backend_names() or ":" in name:
        raise ValueError(f"{name!r} is the name of another backend, or has a colon: choose another name")
    _REGISTRY[name] = Registration(factory)


def backend_names() -> tuple[str, ...]:
    """Return the names that ``get_backend`` takes, ``auto`` first."""
    return ("auto", *_REGISTRY)


def get_backend(name: str, device: torch.device | None = None) -> Backend:
    """Return a backend that can run on this machine.

    Args:
        name: one of ``backend_names()``; ``cuda-offline:sm_90`` compiles for one architecture.
        device: where the model is; ``auto`` takes the backend that is named like the type of that device,
            else ``cpu``, and ``cuda`` is for that GPU, or for the current one where the model is on none of
            this machine.

    Raises:
        BackendError: there is none of this name, or it cannot run here.
    """
    base, _, option = name.partition(":") if isinstance(name, str) else ("", "", "")
    if base == "auto" and not option:
        base = device.type if device is not None and device.type in _REGISTRY else "cpu"
    entry = _REGISTRY.get(base)
    if entry is None or (option and not entry.takes_option):
        raise BackendError(f"unknown backend {name!r}; choose one of {', '.join(map(repr, backend_names()))}")
    return entry.create(device, option)
