"""Which kernel runs a node: candidates register here, the choice is made once, at compile time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from torch.fx import Node

from gnnc.errors import BackendError
from gnnc.torch_private import OpOverload, schema

_Class = TypeVar("_Class", bound=type)

STRUCTURE = "structure:"
"""Prefix of the kinds of nodes of a structure graph."""


@dataclass(frozen=True, slots=True)
class Decline:
    """A kernel's answer that it does not take a node.

    Attributes:
        reason: one clause that completes "the kernel declined: ...".
    """

    reason: str


class Implementation(Protocol):
    """What a kernel file provides.

    ``plan`` is pure and looks only at what is fixed at compile time (targets, dtypes, widths);
    ``emit`` writes the call that the plan describes.
    """

    @staticmethod
    def plan(node: Node) -> Any:
        """Return what ``emit`` needs, or a ``Decline``."""
        ...

    @staticmethod
    def emit(plan: Any, node: Node, emitter: Any) -> None:
        """Write the launch of ``node`` into a program."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A registered kernel.

    Attributes:
        name: shown in printed programs.
        backend: the backend that it belongs to.
        kinds: what it can be asked to run (`kind_of`, `structure_kind_of`); ``"*"`` is anything of a compute
            graph, ``"structure:*"`` anything of a structure graph.
        priority: candidates are asked from the highest to the lowest.
        implementation: ``plan`` and ``emit``.
    """

    name: str
    backend: str
    kinds: tuple[str, ...]
    priority: int
    implementation: type[Implementation]


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of asking every candidate for one node.

    Attributes:
        kernel: the kernel that takes the node, or None if all declined.
        plan: what its ``plan`` returned.
        declined: (kernel name, reason) of those asked before it.
    """

    kernel: Kernel | None
    plan: Any
    declined: tuple[tuple[str, str], ...]


_KERNELS: dict[str, list[Kernel]] = {}


def kernel(*kinds: str, backend: str, name: str, priority: int = 0) -> Callable[[_Class], _Class]:
    """Register a class with ``plan`` and ``emit`` as a kernel.

    Args:
        kinds: what it can be asked to run, see `kind_of`.
        backend: name of the backend.
        name: unique within the backend.
        priority: higher is asked first.

    Raises:
        ValueError: the backend already has a kernel of this name.
    """

    def register(implementation: _Class) -> _Class:
        entries = _KERNELS.setdefault(backend, [])
        if any(entry.name == name for entry in entries):
            raise ValueError(f"backend {backend!r} already has a kernel {name!r}")
        entries.append(Kernel(name, backend, kinds, priority, implementation))
        entries.sort(key=lambda entry: -entry.priority)
        return implementation

    return register


def kernels(backend: str) -> tuple[Kernel, ...]:
    """Return the kernels of a backend, in the order in which they are asked."""
    return tuple(_KERNELS.get(backend, ()))


def kind_of(node: Node) -> str:
    """Name what a node asks for: ``fused:<kind>``, ``gnnc.<op>`` or ``aten.<op>``."""
    if node.op == "call_module":
        return f"fused:{node.meta.get('kind', 'map')}"
    target = node.target
    if isinstance(target, OpOverload):
        return schema(target).name.replace("::", ".")
    return f"python.{getattr(target, '__name__', target)}"


def structure_kind_of(node: Node) -> str:
    """Name what a node of a structure graph asks for: ``structure:gnnc.<op>``.

    Structure kernels are functions that a ``StructureRunner`` calls, not text of a program.
    """
    return f"{STRUCTURE}{kind_of(node)}"


def choose(node: Node, backends: Iterable[str], kind: str | None = None) -> Choice:
    """Ask the kernels of these backends, in order, and return the first that takes the node.

    Args:
        node: the node.
        backends: names of backends.
        kind: what the node asks for; None: as ``kind_of`` says.
    """
    kind = kind_of(node) if kind is None else kind
    anything = f"{STRUCTURE}*" if kind.startswith(STRUCTURE) else "*"
    declined = []
    for backend in backends:
        for entry in kernels(backend):
            if kind not in entry.kinds and anything not in entry.kinds:
                continue
            plan = entry.implementation.plan(node)
            if not isinstance(plan, Decline):
                return Choice(entry, plan, tuple(declined))
            declined.append((entry.name, plan.reason))
    return Choice(None, None, tuple(declined))


def refuse(node: Node, declined: Sequence[tuple[str, str]], backend: str) -> NoReturn:
    """Raise BackendError for a node that every kernel declined; the message lists them and why."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or "none is registered"
    layer = node.meta.get("layer") or "the model"
    raise BackendError(
        f"backend {backend!r} has no kernel for {node.name} ({kind_of(node)}) in {layer}: {reasons}"
    )
