"""The graphs of one program: their order, and that passes, texts and pictures walk all of them."""

from dataclasses import dataclass
from typing import ClassVar

import hand_graphs
import pytest
from torch.fx import GraphModule

from gnnc.errors import VerifyError
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context, run_pass, run_passes
from gnnc.report.drawing import to_networkx
from gnnc.report.printing import format_program
from gnnc.report.text import ProgramReport, count_quantized, header_lines, summary_text
from gnnc.torch_private import rename


def three() -> Parts:
    return Parts(
        structure=hand_graphs.structure(),
        forward=hand_graphs.fused_layer(),
        backward=hand_graphs.float_layer(),
    )


@dataclass(frozen=True)
class Rename:
    """Names the output of one graph."""

    name: ClassVar[str] = "rename"

    def run(self, gm: GraphModule, ctx: Context) -> GraphModule:
        rename(next(iter(gm.graph.nodes)), "renamed")
        return gm


@dataclass(frozen=True)
class DropSources:
    """Breaks the parts that it names: their placeholders lose their sources."""

    parts: tuple[str, ...]
    name: ClassVar[str] = "drop-sources"

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        for part, gm in parts:
            if part in self.parts:
                del next(iter(gm.graph.nodes)).meta["source"]
        return parts


def test_parts_come_in_the_order_in_which_they_run() -> None:
    assert [name for name, _ in three()] == ["structure", "forward", "backward"]
    assert [name for name, _ in three().per_call()] == ["forward", "backward"]
    assert [name for name, _ in Parts(forward=hand_graphs.float_layer())] == ["forward"]


def test_a_graph_pass_runs_on_copies_of_the_graphs_of_a_call() -> None:
    before = three()
    ((name, after),) = run_passes(before, [Rename()], Context())
    assert name == "rename"
    assert after.structure is before.structure
    for (_, new), (_, old) in zip(after.per_call(), before.per_call(), strict=True):
        assert next(iter(new.graph.nodes)).name == "renamed"
        assert next(iter(old.graph.nodes)).name != "renamed"


@pytest.mark.parametrize("part", ["structure", "backward"])
def test_every_part_that_a_pass_changes_is_verified(part: str) -> None:
    before = three()
    with pytest.raises(VerifyError, match=rf"drop-sources \({part}\)"):
        run_pass(DropSources((part,)), before)
    assert all("source" in next(iter(gm.graph.nodes)).meta for _, gm in before)


def test_texts_and_graphs_walk_all_parts() -> None:
    text = format_program(three())
    found = [text.index(f"\ndef {name}(") for name in ("structure", "compute", "backward")]
    assert found == sorted(found)
    parts = {data["part"] for _, data in to_networkx(three()).nodes(data=True)}
    assert parts == {"structure", "compute", "backward"}


def test_reports_count_the_ops_of_all_parts_that_run_at_every_call() -> None:
    report = ProgramReport(model="GCN", precision="int8", backend="cpu", parts=three())
    assert header_lines(report)[0].startswith("quantized 2 of 4 ops (gemm 1/2, spmm 1/2)")
    lines = summary_text(report).splitlines()
    assert any(line.startswith("qgemm") for line in lines) and any(line.startswith("gemm") for line in lines)
    assert str(count_quantized([])) == "quantized 0 of 0 ops, 0 of 0 weights"
