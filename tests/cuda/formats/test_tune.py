"""Cuts of a graph by measurement: what is tried, what is chosen, and who takes it from when to when."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_models import MODELS, given
from cuda_cases import error, on_device
from torch import Tensor

import gnnc
from gnnc.runtime.cuda.driver.launch import Launcher
from gnnc.runtime.cuda.formats import tune
from gnnc.runtime.cuda.formats.keys import EDGE_ORDER, PADDED_COLUMNS, RUNS, FormatKey, run_table_key
from gnnc.runtime.cuda.formats.run_table import MOST_PART, Cut, candidates, cut_for
from gnnc.runtime.cuda.formats.tables import RunTable, SumTable
from gnnc.runtime.cuda.formats.tensor_cache import (
    attach,
    cached,
    cached_tensors,
    cached_values,
    detach_all_but,
)
from gnnc.runtime.cuda.formats.tune import Trials, Tuned, Wanted, choose
from gnnc.runtime.cuda.formats.window_table import window_cut_for
from gnnc.runtime.cuda.graphs import cuda_graph

SIZES = {
    "cora": (2_708, 10_556),
    "arxiv": (169_343, 2_332_486),
    "products": (2_449_029, 123_718_280),
    "reddit": (232_965, 114_615_892),
    "empty": (0, 0),
    "a hub": (1, 2**40),
}


# What is tried, and what is chosen


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("windowed", [False, True])
def test_candidates_are_few_and_the_models_is_the_first(name: str, windowed: bool) -> None:
    runs = cut_for(*SIZES[name], 132)._replace(chunk=32 if SIZES[name][0] > 10**6 else 0)
    model, other = runs, window_cut_for(*SIZES[name])
    if windowed:
        model, other = other, runs
    cuts = candidates(model, other)
    assert cuts[0] == model and cuts[-1] == other and candidates(model) == cuts[:-1]
    assert 4 <= len(cuts) == len(set(cuts)) <= 8
    assert all(8 <= cut.short <= min(cut.part, MOST_PART // 2) and cut.part <= MOST_PART for cut in cuts)
    assert all(cut.windowed == windowed for cut in cuts[:-1])


def test_sizes_are_halved_and_doubled_and_so_are_turns() -> None:
    model = Cut(512, 128, chunk=32)
    cuts = [(cut.part, cut.short, cut.chunk) for cut in candidates(model)[1:]]
    sizes = [(256, 128, 32), (1024, 128, 32), (512, 64, 32), (512, 256, 32)]
    assert cuts == [*sizes, (512, 128, 16), (512, 128, 64)]
    assert [cut[:2] for cut in candidates(Cut(256, 8, entries=1, chunk=0))[1:]] == [
        (128, 8),
        (512, 8),
        (256, 16),
    ]
    assert [cut.entries for cut in candidates(Cut(256, 8, entries=1, chunk=0))] == [1] * 4


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ((1.0, 1.0, 1.0), 0),
        ((1.0, 0.985, 1.2), 0),  # noise
        ((1.0, 0.97, 0.96), 2),
        ((1.0, 0.96, 0.97), 1),
        ((0.0060, 0.0056), 0),  # events tell no better
        ((0.0060, 0.0054), 1),
        ((1.0, float("inf"), 0.9), 2),
        ((1.0,), 0),
    ],
)
def test_another_cut_is_taken_where_it_is_faster_by_more_than_noise(
    milliseconds: tuple[float, ...], chosen: int
) -> None:
    assert choose([each / 1e3 for each in milliseconds]) == chosen


def test_the_text_has_both_cuts_and_both_times() -> None:
    cuts = Cut(512, 128, chunk=32), Cut(256, 128, chunk=32), window_cut_for(*SIZES["products"])
    tuned = Tuned(("convs.0 fused_1", "convs.1 fused_2"), 64, cuts, (1e-3, 1.2e-3, 0.8e-3))
    assert tuned.cut == cuts[2] and str(tuned) == (
        "convs.0 fused_1, convs.1 fused_2, rows of 64 bytes: model runs, part 512, short 128, 32 at a time: "
        "1.0000 ms; fastest of 2 others windowed, part 512, short 128: 0.8000 ms; the measured cut is used"
    )
    tuned = tuned._replace(seconds=(1e-3, 1.2e-3, 1.1e-3))
    assert tuned.cut == cuts[0] and str(tuned).endswith("1.1000 ms; the model's cut is used")


def keys(tensor: Tensor) -> set[FormatKey]:
    """Return the keys of the values that are cached on a tensor."""
    return set(vars(tensor).get("gnnc_formats", ()))


def test_a_tensor_keeps_another_value_and_drops_what_is_not_needed() -> None:
    class Made:
        def __init__(self, *held: Tensor) -> None:
            self.tensors = held

    tensor, shared, own = torch.ones(2), torch.ones(3), torch.ones(4)
    cached(tensor, EDGE_ORDER, lambda: own)
    cached(tensor, PADDED_COLUMNS, lambda: None)
    cached(tensor, RUNS, lambda: Made(shared, own))
    cached(tensor, run_table_key(64), lambda: Made(torch.ones(5)))
    attach(tensor, run_table_key(32), Made(shared))
    detach_all_but(tensor, {id(shared)})
    assert keys(tensor) == {EDGE_ORDER, PADDED_COLUMNS, RUNS, run_table_key(32)}
    assert {id(each) for each in cached_tensors(tensor)} == {id(shared), id(own)}


# What it does to calls. Times are what a test wants: those of the emulator say nothing.


class Rig:
    """Says which cuts are fast, and sees the tables that are built.

    Attributes:
        prefers: whether launches take half the time by a cut.
        built: every table that was built to be tried.
        meanwhile: is called with every measurement.
    """

    def __init__(self) -> None:
        self.prefers: Callable[[Cut], bool] = lambda cut: False
        self.built: list[weakref.ref[Any]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def build(self, wanted: Wanted, cut: Cut) -> Any:
        table = BUILD(wanted, cut)
        if table is not None:
            vars(table)["cut"] = cut
            self.built.append(weakref.ref(table))
        return table

    def seconds(self, trials: Trials, wanted: Wanted, table: Any) -> float:
        self.meanwhile()
        return 1e-3 if cut_of(table) is None or not self.prefers(cut_of(table)) else 5e-4


BUILD = Wanted.build


def cut_of(table: Any) -> Cut | None:
    """The cut of a table that was built to be tried; None: it is the model's."""
    return vars(table).get("cut")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig()
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(Wanted, "build", lambda wanted, cut: rig.build(wanted, cut))
    monkeypatch.setattr(Trials, "seconds", lambda trials, wanted, table: rig.seconds(trials, wanted, table))
    return rig


def compiled_and_inputs(
    name: str, precision: str = "int8", *, examples: bool = False, **options: Any
) -> tuple[gnnc.CompiledModel, Tensor, Tensor]:
    torch.manual_seed(0)
    x, edge_index = on_device(given(300, 3000))
    if examples:
        options["example_inputs"] = (x, edge_index)
    return gnnc.compile(MODELS[name]().eval().cuda(), precision, **options), x, edge_index


def structure(compiled: gnnc.CompiledModel) -> list[Tensor]:
    """The tensors of all graphs that are cached, and those that these keep."""
    runner = compiled._dispatch.last.runner
    assert runner is not None
    outputs = [t for entry in runner.cache._entries.values() for t in entry.outputs if isinstance(t, Tensor)]
    return [*outputs, *(each for tensor in outputs for each in cached_tensors(tensor))]


def tables_of(compiled: gnnc.CompiledModel) -> list[Any]:
    """The tables that calls take: those of sums, where a model has sums alone."""
    found = [value for tensor in structure(compiled) for value in cached_values(tensor)]
    sums = [value for value in found if isinstance(value, SumTable)]
    return sums or [value for value in found if isinstance(value, RunTable)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The arguments of all launches, but of graphs that are launched again."""
    words: list[int] = []
    call, record = Launcher.__call__, Launcher.record

    def noted(self: Launcher, grid: int, stream: int, *values: int) -> None:
        words.extend(values if grid else ())
        call(self, grid, stream, *values)

    def recorded(self: Launcher, grid: int, into: list[Any], *values: int) -> None:
        words.extend(values if grid else ())
        record(self, grid, into, *values)

    monkeypatch.setattr(Launcher, "__call__", noted)
    monkeypatch.setattr(Launcher, "record", recorded)
    return words


def addresses(table: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in table.tensors if tensor.numel()}


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GAT", "GIN"])
def test_the_next_call_takes_the_table_that_was_faster(name: str, rig: Rig, launched: list[int]) -> None:
    compiled, x, edge_index = compiled_and_inputs(name, "fp32", cuda_graph=False)
    expected = compiled(x, edge_index)
    before = tables_of(compiled)
    rig.prefers = lambda cut: cut.short == 16
    text = compiled.tune(x, edge_index)
    assert text == compiled.explain() and "Cuts of the graph, measured\n  convs.0 " in text
    assert text.count("model runs, part 256, short 8: 1.0000 ms; fastest of") == len(
        compiled._dispatch.last.tuned
    )
    assert text.count("runs, part 256, short 16: 0.5000 ms; the measured cut is used") == len(
        compiled._dispatch.last.tuned
    )
    after = tables_of(compiled)
    assert after and all(cut_of(table) == Cut(256, 16, entries=1, chunk=0) for table in after)
    old, new = (set().union(*map(addresses, each)) for each in (before, after))
    launched.clear()
    got = compiled(x, edge_index)
    assert new & set(launched) and not (old - new) & set(launched)
    assert error(got, expected) < 1e-6 and error(got, compiled.model(x, edge_index)) < 1e-5
    assert torch.equal(got, compiled(x, edge_index))


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.parametrize("part", [128, 512])
def test_integers_are_added_up_to_the_same_bits(part: int, rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GraphSAGE", examples=True)
    expected = compiled(x, edge_index)
    rig.prefers = lambda cut: cut.part == part
    assert f"part {part}, short 8: 0.5000 ms; the measured" in compiled.tune(x, edge_index)
    assert torch.equal(compiled(x, edge_index), expected)


@pytest.mark.cuda
@torch.no_grad()
def test_nothing_changes_where_the_models_cut_is_the_fastest(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN")
    expected = compiled(x, edge_index)
    text = compiled.tune(x, edge_index)
    assert "the model's cut is used" in text and "the measured cut is used" not in text
    assert [cut_of(table) for table in tables_of(compiled)] == [None, None]
    assert torch.equal(compiled(x, edge_index), expected)


@pytest.mark.cuda
@torch.no_grad()
def test_tables_that_are_not_taken_are_freed(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN")
    compiled(x, edge_index)
    models = [weakref.ref(table) for table in tables_of(compiled)]
    rig.prefers = lambda cut: cut.short == 16
    compiled.tune(x, edge_index)
    gc.collect()
    assert len(rig.built) == 2 * 3 + 2 and not any(ref() for ref in models)
    assert [ref() for ref in rig.built if ref() is not None] == tables_of(compiled)
    found = set().union(*map(keys, structure(compiled)))
    assert found and RUNS not in found


@pytest.mark.cuda
@torch.no_grad()
def test_the_cut_lives_as_long_as_the_graph_is_cached(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN")
    rig.prefers = lambda cut: cut.short == 16
    compiled.tune(x, edge_index)
    expected = compiled(x, edge_index)
    others = edge_index.clone()
    compiled(x, others)
    assert [cut_of(table) is None for table in tables_of(compiled)] == [False, False, True, True]
    del others
    assert [cut_of(table) is None for table in tables_of(compiled)] == [False, False]
    compiled.clear_cache()
    assert "measured" not in compiled.explain()
    assert error(compiled(x, edge_index), expected) < 0.01
    assert [cut_of(table) for table in tables_of(compiled)] == [None, None]
    compiled.tune(x, edge_index)
    edge_index[0, 0] = 7
    compiled(x, edge_index)
    assert [cut_of(table) for table in tables_of(compiled)[-2:]] == [None, None]


@pytest.mark.cuda
@torch.no_grad()
def test_graphs_of_launches_do_not_go_on_with_freed_tables(
    rig: Rig, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, x, edge_index = compiled_and_inputs("GraphSAGE", examples=True, cuda_graph=True)
    plain, _, _ = compiled_and_inputs("GraphSAGE", examples=True, cuda_graph=False)
    made, again = [], cuda_graph.PatchedGraph.__call__
    monkeypatch.setattr(
        cuda_graph.PatchedGraph, "__call__", lambda held, *rest: made.append(held) or again(held, *rest)
    )
    for _ in range(5):
        expected = compiled(x, edge_index)
    assert made and torch.equal(expected, plain(x, edge_index))
    rig.prefers = lambda cut: cut.short == 16
    for each in (compiled, plain):
        each.tune(x, edge_index)
    made.clear(), launched.clear()
    first = compiled(x, edge_index)
    assert not made
    assert set().union(*map(addresses, tables_of(compiled))) <= set(launched)
    for _ in range(4):
        fresh = x.clone()
        assert torch.equal(compiled(fresh, edge_index), first)
    assert made and torch.equal(first, plain(x, edge_index))


@pytest.mark.cuda
@torch.no_grad()
def test_calls_that_are_made_meanwhile_take_tables_of_their_own(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN", cuda_graph=True)
    expected, seen = compiled(x, edge_index), []

    def call() -> None:
        seen.append(torch.equal(compiled(x, edge_index), expected))
        assert [cut_of(table) for table in tables_of(compiled)] == [None, None]

    rig.prefers, rig.meanwhile = lambda cut: cut.short == 16, call
    compiled.tune(x, edge_index)
    assert seen and all(seen)
    assert None not in [cut_of(table) for table in tables_of(compiled)] and len(tables_of(compiled)) == 2
    assert error(compiled(x, edge_index), expected) < 0.01


# Node blocks


def columns(compiled: gnnc.CompiledModel) -> list[int]:
    """Bytes of the columns of the graphs that are cached."""
    found = [t for t in structure(compiled) if any(isinstance(v, SumTable) for v in cached_values(t))]
    return [tensor.untyped_storage().nbytes() for tensor in found]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node blocks pay on small graphs too."""
    monkeypatch.setattr("gnnc.ir.format.LEAST_USES", 0)


@pytest.mark.cuda
@torch.no_grad()
@pytest.mark.usefixtures("near")
@pytest.mark.parametrize("windowed", [False, True])
def test_a_graph_whose_columns_were_given_back_is_cut_anew(windowed: bool, rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GraphSAGE", examples=True)
    expected = compiled(x, edge_index)
    assert columns(compiled) == [0]
    rig.prefers = lambda cut: cut.windowed == windowed and cut.short != 32
    text = compiled.tune(x, edge_index)
    kind = "windowed" if windowed else "runs"
    assert (
        "model windowed, part 256, short 64: 1.0000 ms; fastest of" in text and f"others {kind}, part" in text
    )
    assert [table.staged_blocks > 0 for table in tables_of(compiled)] == [windowed] * 2
    assert columns(compiled) != [0]
    for _ in range(2):
        assert torch.equal(compiled(x, edge_index), expected)
    assert (columns(compiled) == [0]) == windowed


@pytest.mark.cuda
@torch.no_grad()
def test_node_blocks_may_be_chosen_for_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "pays", lambda *given: True)
    compiled, x, edge_index = compiled_and_inputs("GraphSAGE", examples=True)
    expected = compiled(x, edge_index)
    rig.prefers = lambda cut: cut.windowed
    assert "others windowed, part 256, short 64: 0.5000 ms; the measured" in compiled.tune(x, edge_index)
    assert [table.staged_blocks > 0 for table in tables_of(compiled)] == [True, True]
    for _ in range(2):
        assert torch.equal(compiled(x, edge_index), expected)


# What is refused


@pytest.mark.cuda
@torch.no_grad()
def test_bad_arguments_are_refused_as_by_a_call(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN")
    expected = compiled(x, edge_index)
    bad = edge_index.clone()
    bad[0, 5] = 300
    with pytest.raises(gnnc.GraphError, match="300"):
        compiled.tune(x, bad)
    with pytest.raises(gnnc.InputError, match="float64"):
        compiled.tune(x.double(), edge_index)
    with pytest.raises(gnnc.InputError):
        compiled.tune(x)
    assert compiled._dispatch.last.tuned is None and torch.equal(compiled(x, edge_index), expected)


@pytest.mark.cuda
@torch.no_grad()
def test_a_graph_that_the_caller_has_captured_keeps_its_tables(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN", cuda_graph=False)
    compiled(x, edge_index)
    before = tables_of(compiled)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        compiled(x, edge_index)
    with pytest.raises(gnnc.UnsupportedError, match="tune before you capture, or drop"):
        compiled.tune(x, edge_index)
    assert tables_of(compiled) == before
    compiled.clear_cache()
    compiled.tune(x, edge_index)


@pytest.mark.cuda
@torch.no_grad()
def test_a_measurement_that_fails_leaves_the_models_cut(rig: Rig) -> None:
    compiled, x, edge_index = compiled_and_inputs("GCN")
    expected = compiled(x, edge_index)

    def fail() -> None:
        raise RuntimeError("no memory")

    rig.meanwhile = fail
    with pytest.raises(RuntimeError, match="no memory"):
        compiled.tune(x, edge_index)
    assert torch.equal(compiled(x, edge_index), expected)
    assert [cut_of(table) for table in tables_of(compiled)] == [None, None]


# With the clock of the device


@pytest.mark.cuda
@torch.no_grad()
def test_a_model_without_a_graph_has_nothing_to_cut() -> None:
    compiled = gnnc.compile(torch.nn.Linear(24, 8).eval().cuda(), "fp16")
    text = compiled.tune(torch.randn(40, 24, device="cuda"))
    assert "Cuts of the graph, measured\n  none" in text


@pytest.mark.cuda
@torch.no_grad()
def test_gcn_on_cora(cora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ROUNDS", 2)
    torch.manual_seed(0)
    x, edge_index = on_device((cora["x"][:, :24].contiguous() + torch.randn(2708, 24), cora["edge_index"]))
    compiled = gnnc.compile(MODELS["GCN"]().eval().cuda(), "fp32")
    text = compiled.tune(x, edge_index)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    cut = cut_for(2708, edge_index.shape[1] + 2708, processors)  # with self loops
    assert text.count(f"model {cut}: ") == len(compiled._dispatch.last.tuned) == 2
    for tuned in compiled._dispatch.last.tuned:
        assert len(tuned.cuts) == len(tuned.seconds) >= 4
        assert all(0 < seconds < 1 for seconds in tuned.seconds)
    for _ in range(4):
        assert error(compiled(x, edge_index), compiled.model(x, edge_index)) < 1e-5
