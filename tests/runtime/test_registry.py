"""Kernels are asked once, in order of priority, and every refusal is kept."""

import pytest
import torch
from hand_graphs import Builder
from torch.fx import Graph

from gnnc.errors import BackendError
from gnnc.runtime import registry
from gnnc.runtime.registry import Decline, choose, kernel, kind_of, refuse


@pytest.fixture
def scratch(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", {})


def node(target=torch.ops.aten.relu.default):
    graph = Graph()
    return graph.call_function(target, (graph.placeholder("x"),))


def add_kernel(name, priority, answer, *kinds, elements=()):
    class Implementation:
        @staticmethod
        def plan(node):
            return answer

        @staticmethod
        def emit(plan, node, emitter): ...

    kernel(*kinds, backend="test", name=name, priority=priority, elements=elements)(Implementation)


def test_the_highest_priority_that_takes_the_node_wins(scratch):
    add_kernel("slow", 0, "slow plan", "aten.relu")
    add_kernel("fast", 5, "fast plan", "aten.relu")
    add_kernel("picky", 9, Decline("x is too wide"), "aten.relu")
    choice = choose(node(), ["test"])
    assert choice.kernel.name == "fast" and choice.plan == "fast plan"
    assert choice.declined == (("picky", "x is too wide"),)


def test_kernels_of_other_ops_are_not_asked(scratch):
    add_kernel("gemm", 5, "plan", "gnnc.gemm")
    assert choose(node(), ["test"]).kernel is None


def test_backends_are_asked_in_order(scratch):
    add_kernel("any", -1, "plan", "*")
    assert choose(node(), ["absent", "test"]).kernel.name == "any"


def test_when_all_decline_the_error_says_why(scratch):
    add_kernel("picky", 9, Decline("x is too wide"), "aten.relu")
    asked = node()
    with pytest.raises(BackendError, match=r"no kernel for .*aten\.relu.*picky: x is too wide"):
        refuse(asked, choose(asked, ["test"]).declined, "test")


def test_names_are_unique_in_a_backend(scratch):
    add_kernel("one", 0, "plan", "*")
    with pytest.raises(ValueError, match="already has a kernel 'one'"):
        add_kernel("one", 0, "plan", "*")


def test_kinds_name_fused_submodules_and_ops():
    import gnnc.ir  # noqa: F401

    graph = Graph()
    fused = graph.call_module("fused_0", (graph.placeholder("x"),))
    fused.meta["kind"] = "gemm"
    assert kind_of(fused) == "fused:gemm"
    assert kind_of(node(torch.ops.gnnc.degree.default)) == "gnnc.degree"
    assert kind_of(node()) == "aten.relu"


@pytest.mark.parametrize(("element", "takes"), [("int8", True), ("int4", False), ("uint8", False)])
def test_a_kernel_is_not_asked_for_quantized_types_that_it_does_not_list(scratch, element, takes):
    add_kernel("gemm", 5, "plan", "gnnc.qgemm", elements=("int8",))
    b = Builder()
    x, w = (b.input(name, (5, 8), qtype=f"{element}/row") for name in "xw")
    choice = choose(b.call(torch.ops.gnnc.qgemm, x, w), ["test"])
    assert (choice.kernel is not None) == takes
    assert choice.declined == (() if takes else (("gemm", f"no test kernel for {element}/row"),))
