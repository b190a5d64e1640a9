import pytest
import torch
from torch import fx

from gnnc.ir.nodes import (
    argument,
    arguments,
    aten_name,
    first_operand,
    is_pointwise,
    is_view,
    op_name,
    operand,
    outputs_of,
    set_argument,
    shape_of,
    shape_or_none,
    unpack,
    with_arguments,
)

aten = torch.ops.aten


def node(target) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"),))


@pytest.mark.parametrize(
    "op", [aten.leaky_relu.default, aten.hardswish.default, aten.relu.default, aten.elu.default]
)
def test_activations_are_pointwise_on_every_torch(op) -> None:
    assert is_pointwise(node(op))


@pytest.mark.parametrize("target", [aten.sum.default, aten.mm.default, torch.relu])
def test_other_targets_are_not(target) -> None:
    assert not is_pointwise(node(target))


@pytest.mark.parametrize("op", [aten.view.default, aten.squeeze.dim, aten.flatten.using_ints])
def test_ops_that_give_another_shape_are_views(op) -> None:
    assert is_view(node(op))


@pytest.mark.parametrize("op", [aten.view.dtype, aten.expand.default, aten.relu.default])
def test_ops_that_give_other_elements_are_not(op) -> None:
    assert not is_view(node(op))


def gemm(*options, **named) -> fx.Node:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    return graph.call_function(torch.ops.gnnc.gemm.default, (x, w, *options), named)


def test_an_argument_is_found_by_position_by_keyword_and_by_default() -> None:
    assert argument(gemm(None, True), "w_is_kn") is True
    assert argument(gemm(w_is_kn=True), "w_is_kn") is True
    assert argument(gemm(), "w_is_kn") is False
    assert argument(node(aten.leaky_relu.default), "negative_slope") == 0.01
    call = gemm(None, w_is_kn=True)
    assert unpack(call, "w", "bias", "w_is_kn") == (call.args[1], None, True)
    assert arguments(call) == {"x": call.args[0], "w": call.args[1], "bias": None, "w_is_kn": True}


def test_a_name_that_the_op_lacks_is_an_error_unless_a_default_is_given() -> None:
    with pytest.raises(ValueError, match=r"gnnc.gemm.default has no parameter 'alpha'; it has \['x', 'w'"):
        argument(gemm(), "alpha")
    assert argument(gemm(), "alpha", 1) == 1
    assert argument(gemm(), "w_is_kn", True) is False, "the schema's default goes before the reader's"


def test_operands_must_be_nodes() -> None:
    call = gemm()
    assert operand(call, "x") is first_operand(call) is call.args[0]
    with pytest.raises(AssertionError):
        operand(call, "bias")


def test_arguments_change_where_they_were_given() -> None:
    by_position, by_keyword, left_out = gemm(None, False), gemm(w_is_kn=False), gemm()
    for call in (by_position, by_keyword, left_out):
        set_argument(call, "w_is_kn", True)
        assert argument(call, "w_is_kn") is True
    assert by_position.args[3] is True and by_keyword.kwargs == left_out.kwargs == {"w_is_kn": True}
    args, kwargs = with_arguments(by_keyword, w=by_keyword.args[0], w_is_kn=False)
    assert (args, kwargs) == ((args[0], args[0]), {"w_is_kn": False})
    assert argument(by_keyword, "w_is_kn") is True, "the node itself stays"


def test_names_of_ops() -> None:
    relu, call = node(aten.add.Tensor), gemm()
    assert (op_name(relu), aten_name(relu)) == ("add", "add.Tensor")
    assert (op_name(call), aten_name(call)) == ("gemm", "")
    assert op_name(first_operand(call)) == "placeholder"


def test_shapes_and_outputs() -> None:
    call = gemm()
    call.meta["val"] = torch.empty(2, 3)
    call.graph.output((call,))
    assert shape_of(call) == shape_or_none(call) == (2, 3)
    assert shape_or_none(first_operand(call)) is None
    assert outputs_of(call.graph) == (call,)
