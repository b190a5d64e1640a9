"""Registry of kernels: candidates register here, and a node's kernel is chosen once, at compile time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from torch.fx import GraphModule, Node

from gnnc.errors import BackendError
from gnnc.ir.nodes import arguments, qtype_of
from gnnc.ir.op import op_of
from gnnc.ir.qtype import QType
from gnnc.torch_private import OpOverload, schema

_Class = TypeVar("_Class", bound=type)

STRUCTURE = "structure:"
"""Prefix of the kinds of nodes of a structure graph."""


@dataclass(frozen=True, slots=True)
class Decline:
    """The answer of a kernel that does not take a node.

    Attributes:
        reason: one clause that completes "the kernel declined: ...".
    """

    reason: str


class Implementation(Protocol):
    """The interface of a kernel file.

    ``plan`` is pure and reads only what is fixed at compile time (targets, dtypes, widths);
    ``emit`` writes the call that the plan describes.
    """

    @staticmethod
    def plan(node: Node) -> Any:
        """Return a plan for ``emit``, or a ``Decline``."""
        ...

    @staticmethod
    def emit(plan: Any, node: Node, emitter: Any) -> None:
        """Write the launch of ``node`` into a program."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A registered kernel.

    Attributes:
        name: name of the kernel, shown in printed programs.
        backend: name of the kernel's backend.
        kinds: kinds of nodes that it can run (`kind_of`, `structure_kind_of`); ``"*"`` stands for all of a
            compute graph, ``"structure:*"`` for all of a structure graph.
        priority: candidates are asked from the highest to the lowest.
        elements: the quantized types that it computes with (``QType.element``); None: any.
        implementation: ``plan`` and ``emit``.
        arithmetic: name of the order of operations in which it computes values of bodies: kernels of one name
            compute the same bits.
    """

    name: str
    backend: str
    kinds: tuple[str, ...]
    priority: int
    elements: Collection[str] | None
    implementation: type[Implementation]
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of asking every candidate for one node.

    Attributes:
        kernel: the kernel that takes the node, or None if all declined.
        plan: the result of the kernel's ``plan``.
        declined: (kernel name, reason) of each kernel asked before.
    """

    kernel: Kernel | None
    plan: Any
    declined: tuple[tuple[str, str], ...]


BYTES = ("int8", "e4m3", "e5m2")
"""Quantized types with a value in each byte."""

_KERNELS: dict[str, list[Kernel]] = {}


def kernel(
    *kinds: str,
    backend: str,
    name: str,
    priority: int = 0,
    elements: Collection[str] | None = (),
    arithmetic: str | None = None,
) -> Callable[[_Class], _Class]:
    """Register a class with ``plan`` and ``emit`` as a kernel.

    Args:
        kinds: kinds of nodes that the kernel can run, see `kind_of`.
        backend: name of the backend.
        name: unique within the backend.
        priority: higher is asked first.
        elements: the quantized types that it computes with, such as ``int8``; None: any.
        arithmetic: see ``Kernel``; None: that of the backend.

    Raises:
        ValueError: the backend already has a kernel of this name.
    """

    def register(implementation: _Class) -> _Class:
        entries = _KERNELS.setdefault(backend, [])
        if any(entry.name == name for entry in entries):
            raise ValueError(f"backend {backend!r} already has a kernel {name!r}")
        entries.append(
            Kernel(name, backend, kinds, priority, elements, implementation, arithmetic or backend)
        )
        entries.sort(key=lambda entry: -entry.priority)
        return implementation

    return register


def kernels(backend: str) -> tuple[Kernel, ...]:
    """Return the kernels of a backend, in the order in which they are asked."""
    return tuple(_KERNELS.get(backend, ()))


def kind_of(node: Node) -> str:
    """Return the kind of a node: ``fused:<kind>``, ``gnnc.<op>`` or ``aten.<op>``."""
    if node.op == "call_module":
        return f"fused:{node.meta.get('kind', 'map')}"
    target = node.target
    if isinstance(target, OpOverload):
        return schema(target).name.replace("::", ".")
    return f"python.{getattr(target, '__name__', target)}"


def structure_kind_of(node: Node) -> str:
    """Return the kind of a node of a structure graph: ``structure:gnnc.<op>``.

    Structure kernels are functions that a ``StructureRunner`` calls, not text of a program.
    """
    return f"{STRUCTURE}{kind_of(node)}"


def choose(node: Node, backends: Iterable[str], kind: str | None = None) -> Choice:
    """Ask the kernels of these backends, in order, and return the first that takes the node.

    Args:
        node: the node.
        backends: names of backends.
        kind: kind of the node, by default ``kind_of(node)``.
    """
    return _first(node, _candidates(backends, kind_of(node) if kind is None else kind))


def choose_later(node: Node, backends: Iterable[str], present: Kernel, arithmetic: str) -> Choice:
    """Return the first kernel of an arithmetic that takes the node, of those that are asked after another.

    Args:
        node: the node.
        backends: names of backends.
        present: the other kernel.
        arithmetic: see ``Kernel``.
    """
    candidates = list(_candidates(backends, kind_of(node)))
    later = candidates[candidates.index(present) + 1 :]
    return _first(node, (entry for entry in later if entry.arithmetic == arithmetic))


def _candidates(backends: Iterable[str], kind: str) -> Iterator[Kernel]:
    anything = f"{STRUCTURE}*" if kind.startswith(STRUCTURE) else "*"
    for backend in backends:
        for entry in kernels(backend):
            if kind in entry.kinds or anything in entry.kinds:
                yield entry


def _first(node: Node, candidates: Iterable[Kernel]) -> Choice:
    qtypes = _qtypes(node)
    declined = []
    for entry in candidates:
        plan = _refused_qtype(entry, qtypes) or entry.implementation.plan(node)
        if not isinstance(plan, Decline):
            return Choice(entry, plan, tuple(declined))
        declined.append((entry.name, plan.reason))
    return Choice(None, None, tuple(declined))


def _refused_qtype(entry: Kernel, qtypes: Iterable[QType]) -> Decline | None:
    for qtype in qtypes:
        if entry.elements is not None and qtype.element not in entry.elements:
            return Decline(f"no {entry.backend} kernel for {qtype}")
    return None


def _qtypes(node: Node) -> dict[QType, None]:
    """Return the quantized types that a node, or the nodes of its submodule, read, compute or name."""
    found: dict[QType, None] = {}
    for part in _nodes_of(node):
        values = (qtype_of(value) for value in (part, *part.all_input_nodes))
        named = arguments(part).get("qtype") if op_of(part) is not None else None
        found.update(dict.fromkeys(qtype for qtype in values if qtype is not None))
        found.update({} if named is None else {QType.parse(named): None})
    return found


def _nodes_of(node: Node) -> list[Node]:
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return [node]
    module = owner.get_submodule(str(node.target))
    return list(module.graph.nodes) if isinstance(module, GraphModule) else [node]


def refuse(node: Node, declined: Sequence[tuple[str, str]], backend: str) -> NoReturn:
    """Raise BackendError for a node that every kernel declined; the message lists them and why."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or "none is registered"
    layer = node.meta.get("layer") or "the model"
    raise BackendError(
        f"backend {backend!r} has no kernel for {node.name} ({kind_of(node)}) in {layer}: {reasons}"
    )
