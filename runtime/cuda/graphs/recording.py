"""The text of a program that records its launches, and what of it a call like an earlier one leaves out.

In steady state a call brings a new x: weights, structure and temporaries are where they were. What
follows from those alone (run tables, contiguous forms, staging memory, most arguments of most
launches) was worked out by an earlier call and stands in the graph that it left, see
``replay.Held``; such a call runs the few lines that depend on its inputs, and hands over addresses.
"""

import re
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from gnnc.ir.source import source_of
from gnnc.runtime.cuda.emitter import CudaEmitter, LaunchText
from gnnc.runtime.cuda.formats.tables import KEPT
from gnnc.runtime.program.executable import listed, program

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*) = (\w*)(.*)")


@dataclass(frozen=True, slots=True)
class Recording:
    """A program that calls ``launch.record`` and, at its end, ``replay``; or ``again`` with what is held.

    Attributes:
        source: its text.
        patches: launch, and position among its arguments, of every address that a call brings.
    """

    source: str
    patches: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Parts:
    """The parts of a program, as texts.

    Attributes:
        key: what must be equal to the earlier call's: addresses of weights and constants, plain values.
        structure: tensors that must be the same objects.
        fresh: variables that depend on the inputs.
        fixed: the assignment of every other variable, by name.
        scratch: those of them that hold memory for the launches alone.
        kept: those of them that live as long as the structure.
        lines: the assignments to fresh variables.
        patches: launch, position among its arguments, and text of each argument that is fresh.
        read: fixed variables that launches read, or that something kept was made of.
    """

    key: list[str] = field(default_factory=list)
    structure: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    fixed: dict[str, str] = field(default_factory=dict)
    scratch: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    patches: list[tuple[int, int, str]] = field(default_factory=list)
    read: dict[str, None] = field(default_factory=dict)

    def depends(self, text: str) -> bool:
        """Whether an expression depends on the inputs."""
        return not self.fresh.isdisjoint(_NAME.findall(text))

    def note_read(self, text: str) -> None:
        """Remember the fixed variables of an expression."""
        self.read.update(dict.fromkeys(name for name in _NAME.findall(text) if name in self.fixed))

    @property
    def aliases(self) -> list[str]:
        """Variables that must be memory of fixed tensors, not copies of it that die with the call."""
        return [name for name in self.read if name not in self.scratch and name not in self.kept]

    @property
    def again(self) -> list[str]:
        """The assignments that a call runs: to what is fresh, and to what that is made of."""
        needed: list[str] = []
        pending = list(reversed(self.lines))
        while pending:
            text = pending.pop(0)
            if text not in needed:
                needed.append(text)
                names = _NAME.findall(text.partition(" = ")[2])
                pending += [self.fixed[name] for name in names if name in self.fixed]
        order = [*self.fixed.values(), *self.lines]
        return [text for text in order if text in needed]


def recording(emitter: CudaEmitter, results: list[str]) -> Recording | None:
    """Return the recording form of a program; None where it is more than launches.

    Args:
        emitter: has written the program.
        results: texts of the outputs.
    """
    if not emitter.is_launches:
        return None
    parts = _split(emitter, results)
    outputs = f"({listed(results)})"
    body = ["recorded = []", *[emitter.recorded(text) for text, _ in emitter.body]]
    if parts is None:
        return Recording(program(emitter, [*body, "replay(recorded, arena, None)"], outputs), ())
    memory = f"({listed(parts.aliases)}), ({listed(parts.scratch)})"
    key = f"({listed(parts.key)})"
    same = [f"held.structure[{i}]() is {name}" for i, name in enumerate(parts.structure)]
    early = [
        "held = arena.held",
        f"if {' and '.join(['held is not None', f'held.key == {key}', *same])}:",
        *[f"    {line}" for line in parts.again],
        f"    again(arena, held, ({listed(text for _, _, text in parts.patches)}))",
        f"    return {outputs}",
        f"fixed = Fixed({key}, ({listed(parts.structure)}))",
    ]
    late = f"replay(recorded, arena, fixed, {memory})"
    return Recording(
        program(emitter, [*early, *body, late], outputs),
        tuple((number, position) for number, position, _ in parts.patches),
    )


def _split(emitter: CudaEmitter, results: list[str]) -> _Parts | None:
    """Sort the lines of a program; None where calls may differ in more than addresses."""
    parts = _Parts()
    for node in emitter.graph_module.graph.find_nodes(op="placeholder"):
        _sort_input(parts, node, emitter.exact(node))
    launches = 0
    for text, _ in emitter.body:
        if emitter.is_launch(text):
            if not _sort_launch(parts, emitter.launches[launches], launches):
                return None
            launches += 1
        elif not _sort_line(parts, emitter, text):
            return None
    return None if any(name in parts.fixed for text in results for name in _NAME.findall(text)) else parts


def _sort_input(parts: _Parts, node: Node, name: str) -> None:
    source = source_of(node)
    if source is None or source.kind == "input":
        parts.fresh.add(name)
    elif not isinstance(node.meta.get("val"), Tensor):
        parts.key.append(name)
    elif source.kind == "structure":
        parts.structure.append(name)
    else:
        parts.key += [f"{name}.data_ptr()", f"{name}.is_contiguous()"]


def _sort_line(parts: _Parts, emitter: CudaEmitter, text: str) -> bool:
    """Sort an assignment in; whether it is one."""
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        return False
    name, function, rest = match.groups()
    if function == "take" or parts.depends(function + rest):
        if not set(parts.scratch).isdisjoint(_NAME.findall(function + rest)):
            return False  # the memory that it is a view of would be another one in every call
        parts.fresh.add(name)
        parts.lines.append(text)
        return True
    parts.fixed[name] = text
    if function in ("empty", "counters"):
        parts.scratch.append(name)
    elif any(emitter.constants.get(function) is kept for kept in KEPT):
        parts.kept.append(name)
        parts.note_read(rest)
    return True


def _sort_launch(parts: _Parts, launch: LaunchText, number: int) -> bool:
    """Sort a launch in; whether inputs are no more than single arguments of it."""
    if parts.depends(launch.grid):
        return False
    position = 0
    for text in launch.values:
        is_several = text.startswith("*")
        if not parts.depends(text):
            parts.note_read(text)
        elif is_several:
            return False
        else:
            parts.patches.append((number, position, text))
        position += launch.count - len(launch.values) + 1 if is_several else 1
    return True
