"""Share steps: what several bodies of the backward graph compute is computed once, and stored for every edge.

The gradient of each operand of a body runs that body again. Where kernels run one body a pass over the edges,
a value that several bodies compute becomes the result of an ``edge_map``, if to compute it again costs more
than to write and to read it. The stored rows are fp16 or bf16 if a product in 16 bits reads them or is among
the steps that compute them, unless a function such as a cosine depends on them. What a comparison depends on
is not stored: the gradient of a maximum compares values with those of the forward pass, bit by bit.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import (
    COMPARISONS,
    EDGES,
    GROUPS,
    KINDS,
    body_text,
    stand_in,
    step_work,
    tensors_of,
)
from gnnc.ir.exact_reads import reads_exactly
from gnnc.ir.graph import placeholders
from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import (
    ancestors,
    argument,
    cast_dtype,
    descendants,
    is_view,
    op_name,
    reached,
    set_argument,
    unpack,
)
from gnnc.ir.op import has_body
from gnnc.ir.parts import Parts
from gnnc.ir.source import is_structure, source_of
from gnnc.ir.sparse import REDUCTIONS
from gnnc.ir.vjp import exchange_ends
from gnnc.passes.base import Context
from gnnc.passes.edges.rowwise import NARROW
from gnnc.passes.rewrite.assumed_sizes import FLOPS_A_BYTE
from gnnc.passes.rewrite.node_builder import NodeBuilder
from gnnc.passes.rewrite.structure_edit import drop_results
from gnnc.passes.rewrite.transposes import Edges, Transposes
from gnnc.torch_private import LazyGraphModule

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_LOW = (torch.float16, torch.bfloat16)
Groups = tuple[list[Node], ...]


@dataclass(frozen=True, slots=True)
class ShareSteps:
    """Store what several bodies of gradients compute, where that costs less than to compute it again."""

    name: ClassVar[str] = "share_steps"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the backend asks for it, and the backward graph has two bodies."""
        return ctx.target.stored_steps and parts.backward is not None and len(_bodies(parts.backward)) > 1

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with fewer steps in the bodies of its backward graph."""
        gm = parts.backward
        assert gm is not None
        transposes, sums = Transposes(gm, parts), dict[Node, Node]()
        for edges, members in _by_edges(gm, transposes).items():
            steps = SharedSteps(members)
            if steps.stored:
                sums |= _rewrite(steps, edges, NodeBuilder(gm), transposes, ctx)
        for node, made in sums.items():  # last: until here the members' operands are the nodes as they were
            node.replace_all_uses_with(made)
        gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        unread = {source.name for node in placeholders(gm) if not node.users and is_structure(node)
                  if (source := source_of(node)) is not None}  # fmt: skip
        if unread:
            drop_results(parts, unread)
        return parts


def _bodies(gm: fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if has_body(node)]


@dataclass(frozen=True, slots=True)
class Member:
    """Op with a body, as if it went over the edges of a CSR and not of its transpose.

    Attributes:
        node: the op.
        text: its body; rows of the destinations of the CSR are ``i0, i1, ...``.
        groups: its operands; those of edges are in the order of the CSR.
        by_source: whether it goes over the transpose.
    """

    node: Node
    text: str
    groups: Groups
    by_source: bool


def _by_edges(gm: fx.GraphModule, transposes: Transposes) -> dict[Edges, list[Member]]:
    """Return the ops with bodies by the CSR that they or their transposes go over."""
    found: dict[Edges, list[Member]] = {}
    for node in _bodies(gm):
        of = transposes.of(node)
        dst, src, edge, const = unpack(node, *GROUPS.values())
        text = argument(node, "body")
        if of is None:
            member = Member(node, text, (dst, src, edge, const), False)
            found.setdefault(unpack(node, "rowptr", "col"), []).append(member)
            continue
        in_order = [transposes.in_order(value) for value in edge]
        if None not in in_order:
            member = Member(node, exchange_ends(text), (src, dst, in_order, const), True)
            found.setdefault(of, []).append(member)
    return found


class SharedSteps:
    """Decisions which values of some bodies are stored for every edge.

    Args:
        members: the ops, over one CSR.

    Attributes:
        members: the ops.
        results: for each op the nodes of its results in a graph of the steps of all.
        stored: the nodes whose values are stored, in order.
        reasons: why each is stored.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self._joint = JointBody()
        self.results = [self._joint.add(member.text, member.groups) for member in members]
        self._nodes = list(self._joint.graph.nodes)
        self._joint.graph.output([result for results in self.results for result in results])
        self._tensors = self._shapes()
        self._exact = self._read_by(lambda node: op_name(node) in COMPARISONS)
        self._low = self._behind_low_products()
        self._absolute = self._read_by(reads_exactly)
        self.reasons: dict[Node, str] = {}
        self.stored = self._decide()

    def _shapes(self) -> dict[Node, torch.Tensor]:
        module = LazyGraphModule({}, self._joint.graph, "Body")
        names = [node for node in self._nodes if node.op == "placeholder"]
        return tensors_of(
            module, [stand_in(str(node.target), self._joint.operand(node)[1].meta["val"]) for node in names]
        )

    def _read_by(self, reads: Callable[[Node], bool]) -> set[Node]:
        """Return the values that a step for which ``reads`` holds depends on."""
        readers = [node for node in self._nodes if node.op == "call_function" and reads(node)]
        return ancestors(arg for node in readers for arg in node.all_input_nodes)

    def _behind_low_products(self) -> set[Node]:
        """Return the values that depend on operands of 16 bits, as those of products are."""
        low = [node for node in self._nodes if node in self._tensors and self._tensors[node].dtype in _LOW]
        return descendants(low)

    def _is_branch(self, node: Node) -> bool:
        """Return whether a value has many columns and several readers: a single one is stored instead."""
        value = self._tensors.get(node)
        if value is None or node.op != "call_function" or is_view(node) or node in self._exact:
            return False
        readers = sum(user.op != "output" for user in node.users) + len(self._returned_by(node))
        of_edges = value.dim() > 1 and value.shape[0] == EDGES and value.is_floating_point()
        return readers > 1 and of_edges and prod(value.shape[1:]) > NARROW

    def _returned_by(self, node: Node) -> set[int]:
        return {number for number, results in enumerate(self.results) if node in results}

    def _decide(self) -> list[Node]:
        """Return the values to store, each of which counts as one reader of what it is computed from.

        Values are judged from the last one on, as if no other before them were stored. One that is then cheap
        to compute from others that are stored is not.
        """
        stored = set[Node]()
        readers = self._readers(stored, lambda node, of: self._is_branch(node) and self._pays(node, of, ()))
        for node in self._nodes:
            if node in stored and not self._pays(node, readers[node], stored - {node}):
                stored.remove(node)
        readers = self._readers(stored)
        self.reasons = {node: self._reason(node, len(readers[node]), stored) for node in stored}
        return [node for node in self._nodes if node in stored]

    def _readers(
        self, stored: set[Node], is_stored: Callable[[Node, frozenset[Any]], bool] | None = None
    ) -> dict[Node, frozenset[Any]]:
        """Return what reads each value: numbers of ops, and stored values; add to ``stored`` on the way."""
        readers: dict[Node, frozenset[Any]] = {}
        for node in reversed(self._nodes):
            of = set[Any](self._returned_by(node))
            for user in node.users:
                of |= {user} if user in stored else readers.get(user, frozenset())
            readers[node] = frozenset(of)
            if is_stored is not None and is_stored(node, readers[node]):
                stored.add(node)
        return readers

    def _pays(self, node: Node, readers: frozenset[Any], known: Collection[Node]) -> bool:
        """Return whether to store a value costs less than to compute it for each reader, from known ones."""
        again = (len(readers) - 1) * self._work(node, known) / FLOPS_A_BYTE
        return again > self._bytes(node) * (len(readers) + 1)

    def _bytes(self, node: Node) -> int:
        return self._dtype(node).itemsize * prod(self._tensors[node].shape[1:])

    def _reason(self, node: Node, readers: int, stored: set[Node]) -> str:
        dtype = str(self._dtype(node)).removeprefix("torch.")
        work = self._work(node, stored - {node})
        return (
            f"computed once for {readers} bodies, and stored for every edge: to compute it again costs as "
            f"much as {work / FLOPS_A_BYTE:.0f} bytes, a row in {dtype} has {self._bytes(node)}"
        )

    def _dtype(self, node: Node) -> torch.dtype:
        """Return the dtype to store a value in: that of the products that read it, or that it comes from."""
        value = self._tensors[node]
        if value.dtype != torch.float32 or node in self._absolute:
            return value.dtype
        casts = {dtype for user in node.users if (dtype := cast_dtype(user)) in _LOW}
        if len(casts) == 1:
            return casts.pop()  # type: ignore[return-value]
        return torch.bfloat16 if not casts and node in self._low else torch.float32

    def _work(self, node: Node, known: Collection[Node]) -> float:
        """Return the operations of a value behind operands and known values."""
        behind = _cone(node.all_input_nodes, known) - set(known)
        return sum(step_work(step, self._tensors) for step in behind | {node})

    def conversion(self, node: Node) -> torch.dtype | None:
        """Return the dtype that a value is converted to before it is stored, or None."""
        dtype = self._dtype(node)
        return None if dtype == self._tensors[node].dtype else dtype

    def first_reader(self, node: Node) -> Node:
        """Return the first op whose body computes a value."""
        return next(
            member.node
            for member, results in zip(self.members, self.results, strict=True)
            if node in _cone(results, ())
        )

    def readers_of_stored(self) -> Iterator[int]:
        """Yield the numbers of the ops whose bodies read or return stored values."""
        for number, results in enumerate(self.results):
            if any(node in self.stored for node in _cone(results, self.stored)):
                yield number

    def body(
        self, results: list[Node], values: Mapping[Node, Node], dtype: torch.dtype | None
    ) -> tuple[str, Groups]:
        """Return a body that computes some nodes, and its operands.

        Args:
            results: the nodes.
            values: the stored values, which the body reads.
            dtype: dtype to which the one result is converted; None: the results stay as they are.
        """
        cone = _cone(results, values)
        writer = _Writer()
        for node in (node for node in self._nodes if node in cone):
            if node in values:
                writer.read_stored(node, values[node], self._tensors[node].dtype)
            elif node.op == "placeholder":
                writer.copies[node] = writer.read(*self._joint.operand(node))
            else:
                writer.copy(node)
        return writer.text(results, dtype), writer.groups


def _cone(results: Iterable[Node], ends: Collection[Node]) -> set[Node]:
    """Return the nodes that some nodes are computed from, themselves among them, down to ``ends``."""
    return reached(results, lambda node: () if node in ends else node.all_input_nodes)


class _Writer:
    """Writer of a body from steps of others.

    Attributes:
        groups: the operands by kind.
        copies: the nodes of the body for those that it computes.
        _rounded: the operand and the dtype of each stored value that it reads.
    """

    def __init__(self) -> None:
        self.groups: Groups = ([], [], [], [])
        self.copies: dict[Node, Node] = {}
        self._graph = fx.Graph()
        self._rounded: dict[Node, tuple[Node, torch.dtype]] = {}

    def read(self, kind: int, operand: Node) -> Node:
        """Add an operand of a kind; return its placeholder."""
        self.groups[kind].append(operand)
        return self._graph.placeholder(f"{KINDS[kind]}{len(self.groups[kind]) - 1}")

    def read_stored(self, node: Node, value: Node, dtype: torch.dtype) -> None:
        """Read a stored value of a node, which other steps take in ``dtype``."""
        stored = value.meta["val"].dtype
        self._rounded[node] = self.read(KINDS.index("e"), value), stored
        self.copies[node] = self._converted(self._rounded[node][0], dtype, stored)

    def copy(self, node: Node) -> None:
        """Add a step; one that rounds a stored value to the dtype that it is stored in is that value."""
        first = next(iter(node.all_input_nodes), None)
        rounded = None if first is None else self._rounded.get(first)
        if rounded is not None and cast_dtype(node) == rounded[1]:
            self.copies[node] = rounded[0]
        else:
            self.copies[node] = self._graph.node_copy(node, self.copies.__getitem__)

    def _converted(self, node: Node, dtype: torch.dtype | None, own: torch.dtype | None = None) -> Node:
        if dtype is None or dtype == own:
            return node
        return self._graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})

    def text(self, results: list[Node], dtype: torch.dtype | None) -> str:
        """Return the text of the body, whose results are converted to ``dtype``."""
        found = [self._converted(self.copies[node], dtype) for node in results]
        self._graph.output(found if len(found) > 1 else found[0])
        self._graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        return body_text(self._graph)


def _rewrite(
    steps: SharedSteps, edges: Edges, builder: NodeBuilder, transposes: Transposes, ctx: Context
) -> dict[Node, Node]:
    """Insert an ``edge_map`` for each stored value, and let bodies read them.

    Returns:
        The messages that only read a stored value, each with the ``segment_reduce`` that is to replace it.
    """
    values: dict[Node, Node] = {}
    sums: dict[Node, Node] = {}
    for node in steps.stored:
        text, groups = steps.body([node], values, steps.conversion(node))
        layer = steps.first_reader(node).meta["layer"]
        values[node] = builder.call(gnnc.edge_map.default, *edges, text, *groups, layer=layer)
        ctx.note(values[node], steps.reasons[node])
    for number in steps.readers_of_stored():
        member, results = steps.members[number], steps.results[number]
        if len(results) == 1 and results[0] in values and _sums_rows(member.node):
            sums[member.node] = _sum_of_rows(member, values[results[0]], builder, transposes)
        else:
            _let_read(member, steps.body(results, values, None), set(values.values()), builder, transposes)
    return sums


def _sums_rows(node: Node) -> bool:
    return node.target is gnnc.message.default and argument(node, "reduce") in REDUCTIONS


def _sum_of_rows(member: Member, value: Node, builder: NodeBuilder, transposes: Transposes) -> Node:
    """Return the ``segment_reduce`` that computes a message that only reads a stored value."""
    node = member.node
    rowptr, reduce, rows = unpack(node, "rowptr", "reduce", "num_dst")
    perm = transposes.permutation(node, torch.int32) if member.by_source else None
    return builder.call(
        gnnc.segment_reduce.default, rowptr, perm, value, reduce, rows, layer=node.meta["layer"]
    )


def _let_read(
    member: Member, body: tuple[str, Groups], stored: set[Node], builder: NodeBuilder, transposes: Transposes
) -> None:
    """Give an op another body with its operands."""
    node = member.node
    text, (dst, src, edge, const) = body
    if member.by_source:
        known = dict(zip(member.groups[2], unpack(node, "edge")[0], strict=True))
        perm = transposes.permutation(node, torch.int32) if stored.intersection(edge) else None
        text, dst, src = exchange_ends(text), src, dst
        edge = [
            builder.call(aten.index_select.default, value, 0, perm, layer=node.meta["layer"])
            if value in stored
            else known[value]
            for value in edge
        ]
    for name, given in zip(("body", *GROUPS.values()), (text, dst, src, edge, const), strict=True):
        set_argument(node, name, given)
