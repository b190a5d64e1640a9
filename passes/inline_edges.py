"""Inline edges: a value of edges that bodies of the same edges read is computed in these bodies.

``raise`` stores edge values of few columns, such as distances, for whoever reads them. Where the readers are
bodies, the value needs no launch and no memory: the kernel of a body computes it on the way, and that of
several bodies in one pass once. A value stays stored where something else reads it, too, such as a softmax,
and where to compute it again for each reader costs more than to store it.

Programs with a backward graph stay as they are: gradients compare values of the two graphs bit by bit, and
what the backward graph reads is stored in any case.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.body import GROUPS, body_text, body_work, name_operands, parse_body, values_of
from gnnc.ir.joint_body import JointBody
from gnnc.ir.nodes import (
    argument,
    arguments,
    holds_tensor,
    outputs_of,
    set_argument,
    shape_of,
    unpack,
    value_of,
)
from gnnc.ir.op import has_body
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.passes.edges.rowwise import row_inputs
from gnnc.passes.rewrite.assumed_sizes import FLOAT_BYTES, FLOPS_A_BYTE
from gnnc.target import Lowering

aten, gnnc = torch.ops.aten, torch.ops.gnnc

_OF_ENDS = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor}
"""The step of a body that computes an ``sddmm``, by its ``op``."""


class _Body(NamedTuple):
    """The computation of an edge value, as a body.

    Attributes:
        text: text of the body.
        groups: the operands by kind.
    """

    text: str
    groups: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class InlineEdges:
    """Compute edge values in the bodies that read them, where nothing else does."""

    name: ClassVar[str] = "inline_edges"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether kernels compute several bodies in one pass, and the program has no gradients."""
        bodies = (node for node in parts.forward.graph.nodes if has_body(node))
        return ctx.target.joint_bodies and parts.backward is None and any(bodies)

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with fewer edge values."""
        gm, lowering = parts.forward, ctx.target.lowering
        for node in reversed(list(gm.graph.nodes)):
            readers = list(node.users)
            body = _body_of(node) if readers and all(map(has_body, readers)) else None
            if body is not None and _pays(node, body, readers) and _inline(node, body, readers, lowering):
                names = ", ".join(reader.name for reader in readers)
                ctx.note(node, f"computed where it is read, by the bodies of {names}")
                gm.graph.erase_node(node)
        return parts


def _body_of(node: Node) -> _Body | None:
    """Return the body that computes an edge value, if there is one."""
    if not isinstance(value_of(node), torch.Tensor) or value_of(node).dtype != torch.float32:
        return None
    if node.target is gnnc.edge_map.default:
        return _Body(argument(node, "body"), unpack(node, *GROUPS.values()))
    if node.target is gnnc.sddmm.default:
        a, b, op = unpack(node, "a", "b", "op")
        step = _OF_ENDS.get(op)
        if step is None or {value_of(a).dtype, value_of(b).dtype} != {torch.float32}:
            return None
        return _Body(f"t0 = {_name(step)}(i0, j0); return t0", ([a], [b], [], []))
    return _body_of_rows(node)


def _body_of_rows(node: Node) -> _Body | None:
    """Return the body of an ATen op that computes each row of its result of the same row of its operands.

    The number of rows is a symbol, so that no argument of the op is this number.
    """
    rows = row_inputs(node)
    if not rows or set(rows) != set(node.all_input_nodes) or isinstance(shape_of(node)[0], int):
        return None
    if not all(map(holds_tensor, rows)):  # an op with several results
        return None
    graph, operands = fx.Graph(), list(dict.fromkeys(rows))
    inputs = {operand: graph.placeholder(f"e{number}") for number, operand in enumerate(operands)}
    graph.output(graph.node_copy(node, inputs.__getitem__))
    return _Body(body_text(graph), ([], [], operands, []))


def _name(step: Any) -> str:
    return f"{step.namespace}.{step.__name__}"


def _pays(node: Node, body: _Body, readers: list[Node]) -> bool:
    """Return whether to compute a value for each reader costs no more than to write and to read it."""
    if len(readers) == 1:
        return True
    work = body_work(body.text, values_of(name_operands(body.groups)))
    again = (len(readers) - 1) * work / FLOPS_A_BYTE
    return again <= FLOAT_BYTES * prod(int(size) for size in shape_of(node)[1:]) * (len(readers) + 1)


def _inline(node: Node, body: _Body, readers: list[Node], lowering: Lowering | None) -> bool:
    """Let all readers compute a value; return False, and leave them, where the best kernel declines one."""
    done: list[tuple[Node, _Body]] = []
    for reader in readers:
        before = _Body(argument(reader, "body"), unpack(reader, *GROUPS.values()))
        if not _reads_edges_of(reader, node):
            break
        done.append((reader, before))
        _set_body(reader, _merged(reader, node, body))
        if lowering is not None and lowering.choose(reader).declined:
            break
    else:
        return True
    for reader, before in done:
        _set_body(reader, before)
    return False


def _reads_edges_of(reader: Node, node: Node) -> bool:
    """Return whether a body reads a value as one of its edges alone, in the order of its own CSR."""
    dst, src, edge, const = unpack(reader, *GROUPS.values())
    if node not in edge or node in (*dst, *src, *const):
        return False
    own = arguments(node)
    return "rowptr" not in own or unpack(node, "rowptr", "col") == unpack(reader, "rowptr", "col")


def _merged(reader: Node, node: Node, body: _Body) -> _Body:
    """Return the body of a reader, behind that of an edge value that it reads."""
    joint, text = JointBody(), argument(reader, "body")
    joint.provide(node, joint.add(*body)[0])
    results = joint.add(text, unpack(reader, *GROUPS.values()))
    several = isinstance(outputs_of(parse_body(text).graph), list | tuple)
    return _Body(joint.text(results if several else results[0]), joint.operands)


def _set_body(reader: Node, body: _Body) -> None:
    set_argument(reader, "body", body.text)
    for name, group in zip(GROUPS.values(), body.groups, strict=True):
        set_argument(reader, name, list(group))
