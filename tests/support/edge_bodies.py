"""Runs bodies by ``gnnc_cpu.edge_body``."""

import math

import torch
from kernel_graphs import Graph, ops
from torch import Tensor

from gnnc.runtime.cpu.edge_ops import translate

Groups = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Operands of destinations, sources and edges, and constants."""


def edge_body(g: Graph, body: str, reduce: str | None, groups: Groups, shape: tuple[int, ...]) -> Tensor:
    """Return what a body computes; ``reduce`` is empty for ``edge_map``, None for ``edge_sum``."""
    out = torch.full(shape, math.nan)
    ops().edge_body(*arguments(g, body, reduce, groups), _rows(out))
    return out


def arguments(g: Graph, body: str, reduce: str | None, groups: Groups) -> tuple[object, ...]:
    """Return the arguments of the op but for the last, in which it writes."""
    named = {f"{kind}{n}": t for kind, group in zip("ijec", groups, strict=True) for n, t in enumerate(group)}
    steps = translate(body, named, None if reduce is None else tuple(filter(None, reduce.split(","))))
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
