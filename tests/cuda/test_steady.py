"""What calls that replay run again, and what they leave out (``gnnc/runtime/cuda/steady.py``)."""

import re

import pytest
import torch
from cuda_cases import lowered
from torch import Tensor, nn

import gnnc
from gnnc.runtime.cuda.replay import Fixed

pytestmark = pytest.mark.usefixtures("compiler")


def steady_lines(source: str) -> list[str]:
    """The lines that a call like an earlier one runs."""
    lines = [line.strip() for line in source.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("if held is not None"))
    return lines[first + 1 : lines.index("recorded = []")]


@pytest.mark.parametrize("name", ["gcn", "sage-mean", "gin", "gat", "graphconv", "batch-norm", "models.GCN"])
def test_a_call_hands_over_what_is_made_of_its_input_and_its_output(name: str) -> None:
    recording = lowered(name, "int8", "cuda-offline:sm_90")._last.executable.recording
    assert recording is not None
    *lines, held, result = steady_lines(recording.source)
    assert sum("take(" in line for line in lines) == 1
    assert not any(word in " ".join(lines) for word in ("runs_of", "empty(", "record(", "bias", "weight"))
    assert held.startswith("held((") and held.count("data_ptr()") == len(recording.patches)
    assert result.startswith("return (out_")
    names = set(re.findall(r"\b[a-z]+_\d+\b", " ".join(lines)))
    defined = set(re.findall(r"\b[a-z]\w*_\d+\b", recording.source.split("\n")[0]))
    made = {line.split(" = ")[0] for line in lines}
    bound = {name for name in names if name.rpartition("_")[0] in ("op", "view", "aligned", "dtype")}
    assert names <= defined | made | bound


def test_launches_and_arguments_of_the_patches_are_those_of_the_inputs() -> None:
    recording = lowered("gcn", "int8", "cuda-offline:sm_90")._last.executable.recording
    lines = [line.strip() for line in recording.source.splitlines()]
    launches = [line for line in lines if ".record(" in line]
    held = next(line for line in lines if line.startswith("held(("))
    addresses = held.partition("((")[2].partition("), arena")[0].strip(", ").split(", ")
    for (launch, position), address in zip(recording.patches, addresses, strict=True):
        _, _, *values = launches[launch].partition(".record(")[2].removesuffix(")").split(", ")
        # `*runs.fields` stands for five arguments.
        spread = [name for value in values for name in ([value] * 5 if value.startswith("*") else [value])]
        assert spread[position] == address


class Positive(nn.Module):
    """Works on the rows that begin with a positive number: how many there are is known in mid-program."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x[x[:, 0] > 0]).relu()
        return self.second(h[h[:, 0] > 0])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_torch_waits_for_launches_that_write_memory_of_a_late_size(precision: str) -> None:
    """A recorded program launches at its end, when torch has read what it reads."""
    compiled = gnnc.compile(Positive().eval(), precision, backend="cuda-offline:sm_90")
    with torch.no_grad(), pytest.raises(gnnc.BackendError, match="compiles for a device that is not here"):
        compiled(torch.randn(40, 16))
    executable = compiled._last.executable
    assert "= empty((" in executable.source and executable.recording is None


def test_what_is_fixed_is_the_same_tensors_not_equal_ones() -> None:
    rowptr, weight = torch.arange(5), torch.ones(3)
    fixed = Fixed((weight.data_ptr(), True), (rowptr,))
    assert fixed.is_of((weight.data_ptr(), True), (rowptr,))
    assert not fixed.is_of((weight.data_ptr(), False), (rowptr,))
    assert not fixed.is_of((weight.data_ptr(), True), (rowptr.clone(),))
    assert fixed.is_like(Fixed((weight.data_ptr(), True), (rowptr,)))
    assert fixed.holds([weight, weight.contiguous(), rowptr, 3, torch.empty(0)])
    assert not fixed.holds([weight.clone()])


def test_what_is_fixed_keeps_no_graph_alive() -> None:
    rowptr = torch.arange(5)
    fixed = Fixed((), (rowptr,))
    again = Fixed((), (rowptr,))
    del rowptr
    assert not fixed.is_of((), (torch.arange(5),)) and not fixed.is_like(again)
