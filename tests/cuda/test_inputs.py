"""Bad input on a CUDA device: the errors of the CPU, before a kernel reads memory by it."""

from functools import cache

import pytest
import torch
from bad_arguments import BAD, GOOD, NUM_NODES, Classifier, good
from cuda_cases import error, on_device

import gnnc

pytestmark = pytest.mark.cuda


@cache
def compiled() -> gnnc.CompiledModel:
    torch.manual_seed(0)
    return gnnc.compile(Classifier().eval().cuda(), "int8")


@torch.no_grad()
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    arguments, kind, match = BAD[case]
    expected = compiled()(*on_device(good()))
    with pytest.raises(kind, match=match):
        compiled()(*on_device(arguments))
    assert error(compiled()(*on_device(good())), expected) < 1e-6
    torch.cuda.synchronize()


@torch.no_grad()
@pytest.mark.parametrize("case", GOOD)
def test_unusual_arguments_work(case: str) -> None:
    torch.manual_seed(0)
    x, edge_index, batch = GOOD[case]
    expected = Classifier().eval()(x, edge_index.long(), batch.long())
    got = compiled()(*on_device(GOOD[case])).cpu()
    assert (got - expected).norm() <= 0.06 * expected.norm() + 1e-6


@torch.no_grad()
def test_an_edge_list_that_turns_bad_in_place_is_seen() -> None:
    x, edge_index, batch = on_device(good())
    expected = compiled()(x, edge_index, batch)
    kept = int(edge_index[1, 5])
    edge_index[1, 5] = NUM_NODES
    with pytest.raises(gnnc.GraphError, match=r"edge_index\[1, 5\]"):
        compiled()(x, edge_index, batch)
    edge_index[1, 5] = kept
    assert error(compiled()(x, edge_index, batch), expected) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("calls", [1, 4, 20])
def test_a_model_that_moves_away_from_its_inputs_is_refused(calls: int) -> None:
    model = Classifier().eval().cuda()
    program = gnnc.compile(model, "int8", cuda_graph=True)
    arguments = on_device(good())
    for _ in range(calls):
        expected = program(*arguments)
    model.cpu()
    with pytest.raises(gnnc.InputError, match="is on cpu|model is on cpu"):
        program(*arguments)
    model.cuda()
    assert error(program(*arguments), expected) < 1e-6
    torch.cuda.synchronize()
