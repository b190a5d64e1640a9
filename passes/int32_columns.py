"""Int32 columns: the order of a segment reduction becomes int32, once a graph, as kernels read it.

A segment reduction goes by the permutation of a CSR, which is int64 for indexing. A kernel reads it as int32,
so without this pass every call converts it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import placeholders
from gnnc.ir.op import op_of
from gnnc.ir.parts import Parts
from gnnc.ir.source import is_structure, source_of
from gnnc.passes.base import Context
from gnnc.passes.rewrite.structure_edit import replacing_results
from gnnc.torch_private import rename, schema

_COLUMNS = {"spmm": "col", "qspmm": "col", "segment_reduce": "perm"}
"""The operand of an aggregation that names the row that each edge reads."""


@dataclass(frozen=True, slots=True)
class Int32Columns:
    """Let the structure graph give int32 where the compute graph reads a value only as columns.

    Only a backend whose kernels read int32 columns asks for this pass.
    """

    name: ClassVar[str] = "int32_columns"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether the backend reads int32 columns, and the forward graph has some that are int64."""
        asked = parts.structure is not None and ctx.target.int32_columns
        return asked and bool(_columns(parts.forward))

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with int32 placeholders, whose values the structure graph converts."""
        gm, columns = parts.forward, _columns(parts.forward)
        with replacing_results(parts) as structure:
            _convert(structure, {_name(node) for node in columns})
        for node in columns:
            node.meta["val"] = node.meta["val"].to(torch.int32)
        _convert_examples(gm, columns, ctx)
        return parts


def _columns(gm: fx.GraphModule) -> list[Node]:
    return [node for node in placeholders(gm) if _is_only_columns(node)]


def _convert(structure: fx.GraphModule, names: set[str]) -> None:
    """Convert results of the structure graph to int32."""
    output = structure.graph.output_node()
    results: Any = output.args[0]
    converted: dict[Node, Node] = {}
    with structure.graph.inserting_before(output):
        for node in results:
            if node.name in names and node not in converted:
                cast = structure.graph.call_function(
                    torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int32}
                )
                rename(cast, f"{node.name}_int32")
                converted[node] = cast
    output.args = (tuple(converted.get(node, node) for node in results),)


def _convert_examples(gm: fx.GraphModule, columns: list[Node], ctx: Context) -> None:
    if ctx.examples is not None:
        pairs = zip(placeholders(gm), ctx.examples, strict=True)
        ctx.examples = tuple(value.int() if node in columns else value for node, value in pairs)


def _name(placeholder: Node) -> str:
    source = source_of(placeholder)
    assert source is not None
    return source.name


def _is_only_columns(node: Node) -> bool:
    """Return whether a placeholder is an int64 result of the structure graph that is read as columns only."""
    value = node.meta.get("val")
    if not is_structure(node) or not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
        return False
    return bool(node.users) and all(_is_columns_of(node, user) for user in node.users)


def _is_columns_of(node: Node, user: Node) -> bool:
    op = op_of(user)
    if op is None or op.name not in _COLUMNS:
        return False
    names = [argument.name for argument in schema(user.target).arguments]  # type: ignore[union-attr]
    given = dict(zip(names, user.args, strict=False)) | dict(user.kwargs)
    return [name for name, value in given.items() if value is node] == [_COLUMNS[op.name]]
