"""Runs bodies by ``gnnc_cpu.edge_body``."""

import math
from collections.abc import Sequence

import torch
from kernel_graphs import Graph, ops
from torch import Tensor

from gnnc.runtime.cpu.edge_ops import translate
from gnnc.runtime.cpu.parts import Part

Groups = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Operands of destinations, sources and edges, and constants."""


def edge_body(g: Graph, body: str, reduce: str | None, groups: Groups, shape: tuple[int, ...]) -> Tensor:
    """Return what a body computes; ``reduce`` is empty for ``edge_map``, None for ``edge_sum``."""
    (out,) = edge_bodies(g, body, [_part(reduce)], groups, [shape])
    return out


def edge_bodies(
    g: Graph, body: str, parts: Sequence[Part], groups: Groups, shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Return several results of a body."""
    outs = [torch.full(shape, math.nan) for shape in shapes]
    ops().edge_body(*arguments_of(g, body, parts, groups), [_rows(out) for out in outs])
    return outs


def arguments(g: Graph, body: str, reduce: str | None, groups: Groups) -> tuple[object, ...]:
    """Return the arguments of the op but for the last, in which it writes one result."""
    return arguments_of(g, body, [_part(reduce)], groups)


def _part(reduce: str | None) -> Part:
    if reduce is None:
        return Part("all")
    return Part("rows", tuple(reduce.split(","))) if reduce else Part("edges")


def arguments_of(g: Graph, body: str, parts: Sequence[Part], groups: Groups) -> tuple[object, ...]:
    """Return the arguments of the op but for the last, in which it writes."""
    named = {f"{kind}{n}": t for kind, group in zip("ijec", groups, strict=True) for n, t in enumerate(group)}
    steps = translate(body, named, parts)
    *rows, consts, ids = steps.operands
    given = [[_rows(named[name]) for name in part] for part in rows]
    return (
        g.rowptr,
        g.col,
        *given,
        *([named[name] for name in part] for part in (consts, ids)),
        *steps.flat().values(),
    )


def _rows(t: Tensor) -> Tensor:
    return t.flatten(1) if t.dim() > 1 else t.view(-1, 1)
