"""The pipeline: passes of one's own between any two passes, and properties instead of names of passes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from shared_captures import shared_captures
from torch.fx import GraphModule
from zoo import build, random_graph

import gnnc
from gnnc.passes import PIPELINE, Context, Pass, Property
from gnnc.passes.assign import Assign
from gnnc.passes.base import first_with

INPUTS = random_graph(60, 300)


@dataclass(frozen=True)
class NegateTwice:
    """relu(x) -> neg(neg(relu(x))): a rewrite that changes the graph and not its values."""

    name: str = "negate-twice"

    def run(self, gm: GraphModule, ctx: Context) -> GraphModule:
        neg = torch.ops.aten.neg.default
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            with gm.graph.inserting_after(node):
                first = gm.graph.call_function(neg, (node,))
            with gm.graph.inserting_after(first):
                second = gm.graph.call_function(neg, (first,))
            node.replace_all_uses_with(second, delete_user_cb=lambda user, first=first: user is not first)
            ctx.note(node, "negated twice")
        return gm


@dataclass(frozen=True)
class OwnAssign:
    """The pass ``assign`` under another name."""

    name: ClassVar[str] = "own-assign"
    establishes: ClassVar[frozenset[Property]] = frozenset({Property.ASSIGNED})

    def run(self, gm: GraphModule, ctx: Context) -> GraphModule:
        return Assign().run(gm, ctx)


def compiled(pipeline: tuple[Pass, ...], precision: str = "fp32", **options: Any) -> gnnc.CompiledModel:
    return gnnc.compile(build("gcn"), precision, pipeline=pipeline, example_inputs=INPUTS, **options)


@pytest.fixture(scope="module")
def gcn() -> Iterator[torch.nn.Module]:
    """A model that is traced once for all pipelines."""
    with shared_captures():
        yield build("gcn")


@pytest.mark.first(1)
@pytest.mark.parametrize("place", range(1, len(PIPELINE)))
@torch.no_grad()
def test_a_pass_joins_the_pipeline_at_any_place(place: int, gcn: torch.nn.Module) -> None:
    pipeline = (*PIPELINE[:place], NegateTwice(), *PIPELINE[place:])
    options: dict[str, Any] = {"example_inputs": INPUTS, "backend": "reference"}
    model = gnnc.compile(gcn, "fp32", pipeline=pipeline, **options)
    assert torch.equal(model(*INPUTS), gnnc.compile(gcn, "fp32", **options)(*INPUTS))
    assert [name for name, _ in model.stages][place + 1] == "negate-twice"
    assert "negated twice" in model.explain() or place > 7


def test_a_pass_under_another_name_serves_auto_and_the_plan(rates: None, tmp_path: Path) -> None:
    pipeline = tuple(OwnAssign() if isinstance(step, Assign) else step for step in PIPELINE)
    compiled(pipeline, "auto", error_budget=0.02).save_plan(tmp_path / "own.json")
    compiled(PIPELINE, "auto", error_budget=0.02).save_plan(tmp_path / "plan.json")
    own, plan = (json.loads((tmp_path / name).read_text()) for name in ("own.json", "plan.json"))
    assert own == plan and plan["layers"]


def test_properties_hold_from_the_pass_that_establishes_them_on() -> None:
    stages = compiled(PIPELINE)._captured().snapshots
    names = {id(parts.forward): name for name, parts in stages}
    first = {prop: names[id(first_with(prop, stages))] for prop in Property}
    assert first == {
        Property.NORMALIZED: "normalize",
        Property.ASSIGNED: "assign",
        Property.LOWERED: "lower",
    }
    assert set(Property) == stages[-1][1].forward.meta["properties"]


def test_the_default_pipeline_is_that_of_inference() -> None:
    assert all(replace(step) == step for step in PIPELINE)  # type: ignore[type-var]
