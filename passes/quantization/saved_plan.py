"""Chosen precisions as plain data: layer to op to precision, written and read as JSON."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import fx
from torch.fx import Node

from gnnc.errors import PrecisionError, UnsupportedError
from gnnc.ir.nodes import op_name
from gnnc.ir.op import op_of
from gnnc.passes.base import Context
from gnnc.passes.quantization.body_products import has_products
from gnnc.passes.quantization.number_formats import Option, options_of

VERSION = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Precisions by layer and op.

    Attributes:
        layers: layer to op to an option for each time the layer runs that op, in order.
    """

    layers: Mapping[str, Mapping[str, tuple[Option, ...]]]

    @staticmethod
    def of(gm: fx.GraphModule) -> "Plan":
        """Return the plan that ``assign`` has written into a graph."""
        found: dict[str, dict[str, tuple[Option, ...]]] = defaultdict(dict)
        for node in gm.graph.nodes:
            op, precision = op_of(node), node.meta.get("precision")
            if op is None or precision is None:
                continue
            layer = found[node.meta.get("layer", "") or ""]
            layer[op.name] = (*layer.get(op.name, ()), Option(precision, node.meta.get("granularity")))
        return Plan(found)

    def to_json(self) -> str:
        """Return the text that ``load`` reads."""
        layers = {
            layer: {op: _texts(options) for op, options in ops.items()} for layer, ops in self.layers.items()
        }
        return json.dumps({"version": VERSION, "layers": layers}, indent=2) + "\n"

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PrecisionError: the file is missing, is not a plan, or names an unknown precision.
        """
        if not isinstance(path, str | os.PathLike):
            raise PrecisionError(
                f"plan takes the path of a file that save_plan(path) wrote, got {type(path).__name__}"
            )
        try:
            data = json.loads(_text(Path(path)))
        except (OSError, ValueError, RecursionError) as error:
            raise PrecisionError(
                f"plan {str(path)!r} cannot be read ({error}): write one with compiled.save_plan(path)"
            ) from error
        if not isinstance(data, dict) or data.get("version") != VERSION or not _is_table(data.get("layers")):
            raise PrecisionError(
                f"plan {str(path)!r} is not a plan of version {VERSION}: write one with "
                "compiled.save_plan(path)"
            )
        return Plan({layer: _parse(layer, ops) for layer, ops in data["layers"].items()})

    def resolve(self, primitives: Iterable[Node], ctx: Context) -> dict[Node, Option]:
        """Return the option of each primitive that the plan names.

        Raises:
            PrecisionError: a layer or op that the model does not have, another number of them, or an
                option that the op does not have.
            UnsupportedError: a precision that the backend does not have.
        """
        nodes: dict[str, dict[str, list[Node]]] = defaultdict(lambda: defaultdict(list))
        for node in primitives:
            op = op_of(node)
            assert op is not None
            nodes[node.meta.get("layer", "") or ""][op.name].append(node)
        found: dict[Node, Option] = {}
        for layer, ops in self.layers.items():
            if layer not in nodes:
                raise PrecisionError(f"[gnnc.assign] plan: {_unknown('layer', layer, nodes)}")
            for name, options in ops.items():
                found |= _match(layer, name, options, nodes[layer], ctx)
        return found


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise OSError("it is no file")
    return path.read_text(encoding="utf-8")


def _texts(options: tuple[Option, ...]) -> str | list[str]:
    return str(options[0]) if len(options) == 1 else [str(option) for option in options]


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


def _parse(layer: str, ops: Mapping[str, Any]) -> dict[str, tuple[Option, ...]]:
    parsed = {}
    for name, value in ops.items():
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise PrecisionError(f"plan: {layer!r} {name!r} is {value!r}, not the name of a precision")
        parsed[name] = tuple(map(Option.parse, texts))
    return parsed


def _match(
    layer: str, name: str, options: tuple[Option, ...], nodes: Mapping[str, list[Node]], ctx: Context
) -> dict[Node, Option]:
    if name not in nodes:
        raise PrecisionError(f"[gnnc.assign] plan: in layer {layer!r}, {_unknown('op', name, nodes)}")
    if len(options) not in (1, len(nodes[name])):
        raise PrecisionError(
            f"[gnnc.assign] plan: layer {layer!r} runs {name!r} {len(nodes[name])} times, and the plan has "
            f"{len(options)} precisions for it"
        )
    spread = options * len(nodes[name]) if len(options) == 1 else options
    matched = dict(zip(nodes[name], spread, strict=True))
    for node, option in matched.items():
        _check(layer, name, node, option, ctx)
    return matched


def _check(layer: str, name: str, node: Node, option: Option, ctx: Context) -> None:
    if option.precision.name not in ctx.target.supported:
        have = ", ".join(sorted(ctx.target.supported))
        raise UnsupportedError(
            f"[gnnc.assign] plan: backend {ctx.target.name!r} has no {option.precision.name} kernels yet; "
            f"it has {have}"
        )
    known = list(options_of(node, ctx, option.precision))
    # of a message without products, some backends gather rows in low precision
    is_body = has_products(node) or op_name(node) == "message"
    known += [Option(option.precision)] if is_body else []
    if option in known or (
        option.granularity is None and any(o.precision == option.precision for o in known)
    ):
        return
    examples = "" if ctx.examples is not None else " without example_inputs"
    raise PrecisionError(
        f"[gnnc.assign] plan: {name!r} of layer {layer!r} cannot be {str(option)!r}{examples}; it can be "
        f"{', '.join(map(repr, map(str, known)))}"
    )


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=3, cutoff=0.3) or names[:8]
    return (
        f"the model has no {kind} {name!r} with a precision; close: {', '.join(map(repr, close)) or 'none'}"
    )
