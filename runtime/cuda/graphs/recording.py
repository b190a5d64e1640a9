"""Recording form of a program: it records its launches, or updates the addresses of a recorded graph.

Most calls bring a new x, while weights, structure and temporaries are where they were. The values that
follow from those alone (run tables, contiguous forms, staging memory, most arguments of most launches)
were computed by an earlier call and stand in the graph that it left, see ``cuda_graph.PatchedGraph``; a
later call runs only the statements that depend on its inputs, and passes addresses.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Node

from gnnc.ir.source import source_of
from gnnc.runtime.cuda.emitter import CudaEmitter
from gnnc.runtime.cuda.formats.tables import CACHED
from gnnc.runtime.program.executable import program
from gnnc.runtime.program.launches import (
    Allocate,
    Assignment,
    Call,
    Columns,
    Counters,
    Expr,
    Launch,
    Statement,
    Take,
    Unpacked,
    View,
    count_of,
    listed,
    tuple_of,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording form of a program: it calls ``launch.record``, and ``replay`` or ``again`` at its end.

    Attributes:
        source: text of the program.
        patches: launch, and position among its arguments, of every address that a call brings.
    """

    source: str
    patches: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Parts:
    """The statements of a program, sorted by whether they depend on the inputs of a call.

    Attributes:
        key: expressions that must equal the earlier call's: addresses of weights and constants, plain values.
        structure: tensors that must be the same objects.
        fresh: variables that depend on the inputs.
        fixed: the statement that sets every other variable, by name.
        scratch: fixed variables that hold memory for the launches alone.
        cached: fixed variables that live as long as the structure.
        statements: the statements that set fresh variables.
        patches: launch, position among its arguments, and expression of each argument that is fresh.
        read: fixed variables that launches read, or that something cached was made of.
    """

    key: list[str] = field(default_factory=list)
    structure: list[str] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    fixed: dict[str, Statement] = field(default_factory=dict)
    scratch: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    patches: list[tuple[int, int, Expr]] = field(default_factory=list)
    read: dict[str, None] = field(default_factory=dict)

    def depends(self, names: Iterable[str]) -> bool:
        """Return whether one of these variables depends on the inputs."""
        return not self.fresh.isdisjoint(names)

    def note_read(self, names: Iterable[str]) -> None:
        """Remember those of these variables that are fixed."""
        self.read.update(dict.fromkeys(name for name in names if name in self.fixed))

    @property
    def aliases(self) -> list[str]:
        """Variables that must be memory of fixed tensors, not copies of it that die with the call."""
        return [name for name in self.read if name not in self.scratch and name not in self.cached]

    @property
    def again(self) -> list[Statement]:
        """The statements that a call runs: those of fresh variables, and those that they depend on."""
        needed: list[Statement] = []
        pending = list(self.statements)
        while pending:
            statement = pending.pop()
            if statement not in needed:
                needed.append(statement)
                pending += [self.fixed[name] for name in statement.reads if name in self.fixed]
        order = [*self.fixed.values(), *self.statements]
        return [statement for statement in order if statement in needed]


def recording(emitter: CudaEmitter, results: list[Expr]) -> Recording | None:
    """Return the recording form of a program; None where torch reads or writes memory of launches.

    Args:
        emitter: has written the program.
        results: the outputs.
    """
    body = [statement for statement, _ in emitter.body]
    if obstacle(emitter) is not None:
        return None
    parts = _split(emitter, body, results)
    outputs = tuple_of(results).text
    lines = ["recorded = []", *[s.recorded if isinstance(s, Launch) else s.text for s in body]]
    if parts is None:
        return Recording(program(emitter, [*lines, "replay(recorded, arena, None)"], outputs), ())
    memory = f"({listed(parts.aliases)}), ({listed(parts.scratch)})"
    key = f"({listed(parts.key)})"
    same = [f"held.structure[{i}]() is {name}" for i, name in enumerate(parts.structure)]
    early = [
        "held = arena.held",
        f"if {' and '.join(['held is not None', f'held.key == {key}', *same])}:",
        *[f"    {statement.text}" for statement in parts.again],
        f"    again(arena, held, ({listed(address.text for _, _, address in parts.patches)}))",
        f"    return {outputs}",
        f"fixed = Fixed({key}, ({listed(parts.structure)}))",
    ]
    late = f"replay(recorded, arena, fixed, {memory})"
    return Recording(
        program(emitter, [*early, *lines, late], outputs),
        tuple((number, position) for number, position, _ in parts.patches),
    )


def obstacle(emitter: CudaEmitter) -> str | None:
    """Return what keeps a program from being recorded, or None: it is launches alone.

    A recorded program makes its launches at its end, when all other statements have run: nothing but launches
    may read or write the memory that launches write.
    """
    memory = set(emitter.memory.names)
    for statement, node in emitter.body:
        if isinstance(statement, Take | Allocate | Counters):
            memory.add(statement.result)
        elif isinstance(statement, Launch) or memory.isdisjoint(statement.reads):
            continue
        elif isinstance(statement, View | Columns):
            memory.add(statement.result)
        else:
            return f"{_named(node)} reads or writes in PyTorch what kernels write"
    return None


def _named(node: Node | None) -> str:
    if node is None:
        return "the program"
    layer = node.meta.get("layer")
    return f"{node.name} of {layer}" if layer else node.name


def _split(emitter: CudaEmitter, body: Iterable[Statement], results: list[Expr]) -> _Parts | None:
    """Sort the statements of a program; None where calls may differ in more than addresses."""
    parts = _Parts()
    for node in emitter.graph_module.graph.find_nodes(op="placeholder"):
        _sort_input(parts, node, emitter.exact(node).text)
    launches = 0
    for statement in body:
        if isinstance(statement, Launch):
            if not _sort_launch(parts, statement, launches):
                return None
            launches += 1
        elif not _sort_statement(parts, emitter, statement):
            return None
    return None if any(name in parts.fixed for result in results for name in result.reads) else parts


def _sort_input(parts: _Parts, node: Node, name: str) -> None:
    source = source_of(node)
    if source is None or source.kind in ("input", "tangent", "saved", "seed"):
        parts.fresh.add(name)
    elif not isinstance(node.meta.get("val"), Tensor):
        parts.key.append(name)
    elif source.kind == "structure":
        parts.structure.append(name)
    else:
        parts.key += [f"{name}.data_ptr()", f"{name}.is_contiguous()"]


def _sort_statement(parts: _Parts, emitter: CudaEmitter, statement: Statement) -> bool:
    """Sort a statement in; return whether it sets a variable to what a later call may use again."""
    if not isinstance(statement, Assignment | Call) or statement.result is None:
        return False
    name = statement.result
    if isinstance(statement, Take) or parts.depends(statement.reads):
        if not set(parts.scratch).isdisjoint(statement.reads):
            return False  # a view of scratch memory, which is another one in every call
        parts.fresh.add(name)
        parts.statements.append(statement)
        return True
    parts.fixed[name] = statement
    if isinstance(statement, Allocate | Counters):
        parts.scratch.append(name)
    elif isinstance(statement, Call) and emitter.constants[statement.function] in CACHED:
        parts.cached.append(name)
        parts.note_read(statement.reads)
    return True


def _sort_launch(parts: _Parts, launch: Launch, number: int) -> bool:
    """Sort a launch in; return whether the inputs are no more than single arguments of it."""
    if parts.depends(launch.grid.reads):
        return False
    position = 0
    for argument in launch.arguments:
        value = argument.of if isinstance(argument, Unpacked) else argument
        if not parts.depends(value.reads):
            parts.note_read(value.reads)
        elif isinstance(argument, Unpacked):
            return False
        else:
            parts.patches.append((number, position, value))
        position += count_of([argument])
    return True
