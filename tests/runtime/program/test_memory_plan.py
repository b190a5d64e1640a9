"""Memory plan: regions are made once, and buffers share slots only where their lives do not meet."""

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gnnc.runtime.program.launches import Expr, variable
from gnnc.runtime.program.memory_plan import END, Buffer, MemoryPlan, assign_slots

WIDTH = 20


def rows() -> torch.SymInt:
    return ShapeEnv().create_unbacked_symint()


def test_a_region_of_one_shape_is_one_tensor():
    plan = MemoryPlan()
    buffer = plan.add(Buffer((9, WIDTH), 24, torch.float32, 0, 1))
    sizes = [variable("n0"), Expr("20")]
    first = plan.region(buffer, sizes, (24, 1))
    assert first == plan.region(buffer, sizes, (24, 1)) == variable("t0")
    assert plan.region(buffer, [Expr("180")], (1,)) == variable("t1")
    assert [(r.shape, r.stride) for r in plan.regions] == [("(n0, 20,)", "(24, 1,)"), ("(180,)", "(1,)")]
    assert plan.region(buffer, [], ()) == variable("t2") and plan.regions[2].shape == "()"
    assert plan.names == ["t0", "t1", "t2"]


def test_a_buffer_that_is_kept_lives_to_the_end():
    plan = MemoryPlan()
    first, second = (plan.add(Buffer((9, WIDTH), WIDTH, torch.float32, i, i)) for i in range(2))
    for buffer in (first, second):
        plan.region(buffer, [Expr("9"), Expr("20")], (WIDTH, 1))
    plan.keep("t0")
    plan.keep("out_3")
    assert first.last == END and second.last == 1


def test_buffers_whose_lives_meet_lie_in_different_slots():
    first = Buffer((9, WIDTH), WIDTH, torch.float32, 0, 2)
    second = Buffer((9, WIDTH), WIDTH, torch.float32, 2, 3)
    third = Buffer((9, WIDTH), WIDTH, torch.float32, 3, 4)
    assign_slots([first, second, third])
    assert first.slot != second.slot and third.slot == first.slot


def test_a_buffer_that_grows_with_the_graph_shares_with_its_like():
    count = rows()
    large = Buffer((count, 16 * WIDTH), 16 * WIDTH, torch.float32, 1, 2)
    weight = Buffer((1, 5000), 5000, torch.int8, 1, 1)
    between = Buffer((count, WIDTH), WIDTH, torch.float32, 2, 3)
    small = [Buffer((count, WIDTH), WIDTH, torch.float32, step, step + 1) for step in (3, 4, 5)]
    other = Buffer((1, 7), 7, torch.int8, 4, 4)
    assign_slots([large, weight, between, *small, other])
    assert len({large.slot, weight.slot, between.slot}) == 3
    assert {buffer.slot for buffer in small} == {large.slot, between.slot}
    assert small[0].slot == large.slot and other.slot == weight.slot


def test_slots_are_numbered_by_size_and_those_of_fixed_size_come_last():
    """The arena of two programs has for each number the larger slot of both."""
    count = rows()
    weight = Buffer((1, 90_000_000), 90_000_000, torch.int8, 0, 9)
    small = Buffer((count, WIDTH), WIDTH, torch.float32, 1, 9)
    large = Buffer((count, 4 * WIDTH), 4 * WIDTH, torch.float32, 2, 9)
    assign_slots([weight, small, large])
    assert [large.slot, small.slot, weight.slot] == [0, 1, 2]
