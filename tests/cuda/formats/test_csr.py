"""CSR and transpose on a CUDA device: as the reference, in little memory, whatever the ids are."""

import operator
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from architectures import ARCHITECTURES
from cuda_cases import compiled_without_spills
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import gnnc
from gnnc.ir.structure import csr_reference, csr_transpose_reference, degree_reference
from gnnc.runtime.cuda.formats import sort
from gnnc.runtime.cuda.formats.csr import StreamHooks, csr, csr_transpose, csr_with_loops, degree
from gnnc.runtime.cuda.formats.keys import RUNS, FormatKey
from gnnc.runtime.cuda.formats.sort import Kernels, RowsKernel, digits_for, rows_of
from gnnc.runtime.cuda.formats.tensor_cache import attached, cached, cached_tensors, launching
from gnnc.runtime.structure.runner import StructureRunner

EDGES = (1, 31, 8191, 8192, 8193, 50_000)
NODES = (1, 7, 256, 257, 513, 65_536, 65_537, 2**18 + 1, 2**24 + 3, 2**27 + 1)
WORKSPACE = 24
"""Bytes an edge beside the result."""
NARROWEST, WIDEST = ("int32_t", 8, False), ("int64_t", 9, True)
"""Kernels of a sort by their ids, the bits of a digit, and whether loops are added."""


@pytest.mark.first(1)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("architecture", "ids", "bits", "loops"),
    [
        *[("sm_90", *case) for case in product(("int64_t", "int32_t"), (8, 9), (False, True))],
        *[(other, *case) for other in ("sm_80", "sm_100") for case in (WIDEST, NARROWEST)],
    ],
)
def test_no_kernel_spills(architecture: str, ids: str, bits: int, loops: bool) -> None:
    kernels, names = compiled_without_spills(architecture, Kernels, ids, bits, loops)
    assert len(names) == len(kernels.count) + len(kernels.scatter) + 2 == 8


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernel_for_rows_does_not_spill(architecture: str) -> None:
    _, names = compiled_without_spills(architecture, RowsKernel)
    assert len(names) == 1


def test_passes_and_the_bits_of_their_digits() -> None:
    wanted = {0: (1, 8), 1: (1, 8), 2: (1, 8), 2**8: (1, 8), 2**8 + 1: (1, 9), 2**9 + 1: (2, 8)}
    wanted |= {2**16: (2, 8), 2**16 + 1: (2, 9), 2**18: (2, 9), 2**18 + 1: (3, 8)}
    assert {n: digits_for(n) for n in wanted} == wanted
    for bits in range(1, 33):
        passes, width = digits_for(2**bits)
        assert passes * width >= bits > (passes - 1) * width


def edges(count: int, num_src: int, num_dst: int, skew: float = 2.5) -> tuple[Tensor, Tensor]:
    """Sources, and destinations of which a few have many edges."""
    dst = (torch.rand(count, dtype=torch.float64) ** skew * num_dst).long()
    return torch.randint(num_src, (count,)), dst


def assert_is_reference(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for actual, wanted in zip(got, want, strict=True):
        assert actual.dtype == wanted.dtype and torch.equal(actual.cpu(), wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("nodes", NODES)
def test_csr_is_that_of_the_reference(nodes: int, count: int, dtype: torch.dtype) -> None:
    """Edges of a row in the caller's order: the sort is stable. There are as many nodes as ids can name."""
    nodes = min(nodes, torch.iinfo(dtype).max)
    src, dst = edges(count, 1000, nodes)
    want = csr_reference(src, dst, 1000, nodes)
    assert_is_reference(csr(src.to(dtype).cuda(), dst.to(dtype).cuda(), 1000, nodes), want)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 5000])
@pytest.mark.parametrize("nodes", [1, 7, 256, 65_536])
def test_every_node_gets_one_edge_to_itself(nodes: int, count: int, dtype: torch.dtype) -> None:
    """Behind its others, in the place of those that it has."""
    src, dst = edges(count, nodes, nodes)
    src[::3] = dst[::3]
    keep, loop = src != dst, torch.arange(nodes)
    want = csr_reference(torch.cat([src[keep], loop]), torch.cat([dst[keep], loop]), nodes, nodes)
    places = torch.cat([keep.nonzero().squeeze(1), count + loop])[want[2]]
    got = csr_with_loops(src.to(dtype).cuda(), dst.to(dtype).cuda(), nodes)
    assert_is_reference(got, (*want[:2], places))
    assert count == 0 or attached(got[0], RUNS).edges == got[1].shape[0]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_graph_without_nodes_gets_no_edge(dtype: torch.dtype) -> None:
    nothing = torch.empty(0, dtype=dtype).cuda()
    rowptr, *rest = csr_with_loops(nothing, nothing, 0)
    assert rowptr.tolist() == [0] and [each.numel() for each in rest] == [0, 0]


@pytest.mark.cuda
@pytest.mark.parametrize(("src", "dst"), [(900, 3), (3, -1), (-1, -1), (2**40, 2**40)])
def test_an_id_out_of_range_is_found_among_self_loops(src: int, dst: int) -> None:
    sources, destinations = edges(20_000, 900, 900)
    sources[12_345], destinations[12_345] = src, dst
    with pytest.raises(gnnc.GraphError, match=r"\[12345\] = .* 0\.\.899"):
        csr_with_loops(sources.cuda(), destinations.cuda(), 900)
    torch.cuda.synchronize()


@pytest.mark.cuda
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_the_transpose_is_that_of_the_reference(count: int) -> None:
    for num_src, num_dst in ((1, 1), (300, 70_000), (70_000, 300)):
        rowptr, col, _ = csr_reference(*edges(count, num_src, num_dst), num_src, num_dst)
        want = csr_transpose_reference(rowptr, col, num_src)
        assert_is_reference(csr_transpose(rowptr.cuda(), col.cuda(), num_src), want)
        rows = torch.repeat_interleave(torch.arange(num_dst), rowptr.diff()).int()
        assert_is_reference((rows_of(rowptr.cuda(), count),), (rows,))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 1, 255, 256, 700])
def test_rows_of_offsets_of_any_type_and_stride(rows: int) -> None:
    """Rows without edges among them, at the end, and all of them."""
    for most in (0, 1, 40):
        degree = torch.randint(most + 1, (rows,)) * (torch.rand(rows) < 0.7)
        rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)]).cuda()
        want = torch.repeat_interleave(torch.arange(rows), degree).int()
        for each in (rowptr, rowptr.int(), torch.stack([rowptr, rowptr], 1)[:, 0]):
            assert_is_reference((rows_of(each, len(want)),), (want,))


def test_degrees_are_those_of_the_reference() -> None:
    for rowptr in (torch.tensor([0, 2, 2, 7]), torch.tensor([0])):
        assert torch.equal(degree(rowptr), degree_reference(rowptr))
        assert degree(rowptr).dtype is degree_reference(rowptr).dtype


@pytest.mark.cuda
def test_strided_ids_and_other_streams() -> None:
    src, dst = edges(20_000, 500, 900)
    want = csr_reference(src, dst, 500, 900)
    pairs = torch.stack([src, dst], 1).cuda()
    assert_is_reference(csr(pairs[:, 0], pairs[:, 1], 500, 900), want)
    assert_is_reference(csr(pairs[:, 0].int(), pairs[:, 1], 500, 900), want)
    wide = pairs.t().contiguous()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_is_reference(csr(wide[0], wide[1], 500, 900), want)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [-1, -(2**40), 900, 2**31, 2**40])
@pytest.mark.parametrize("row", ["src", "dst"])
def test_an_id_out_of_range_is_named(row: str, bad: int) -> None:
    src, dst = edges(20_000, 900, 900)
    (src if row == "src" else dst)[12_345] = bad
    with pytest.raises(gnnc.GraphError, match=rf"{row}\[12345\] = {bad} is not .* 0\.\.899"):
        csr(src.cuda(), dst.cuda(), 900, 900)
    torch.cuda.synchronize()


def test_too_many_edges_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort, "MOST_EDGES", 3)
    ids, found = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(gnnc.BackendError, match="a graph of 4 edges"):
        sort.sort_edges(ids, ids, 1, 1, found)
    with pytest.raises(gnnc.BackendError, match="a graph of 5 edges"):
        sort.sort_edges(ids[:3], ids[:3], 2, 2, found, loops=True)


@pytest.mark.cuda
@pytest.mark.parametrize("nodes", [200, 60_000, 2_000_000])
def test_the_workspace(nodes: int) -> None:
    count = 16_000_000
    dst = (torch.rand(count, device="cuda") ** 2 * nodes).long().clamp(max=nodes - 1)
    src = torch.randint(nodes, (count,), device="cuda")
    csr(src[:9], dst[:9], nodes, nodes)  # what torch keeps from a first use is no workspace
    rowptr, col, perm = csr(src, dst, nodes, nodes)
    del perm
    for build in (lambda: csr(src, dst, nodes, nodes), lambda: csr_transpose(rowptr, col, nodes)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = build()
        kept = torch.cuda.memory_allocated() - before
        assert kept >= sum(t.nbytes for t in result)
        assert torch.cuda.max_memory_allocated() - before - kept <= WORKSPACE * count
        del result


class OnDevice(Tensor):
    """A tensor that says it is on a device, and on which streams its memory is used."""

    is_cuda = True
    device = torch.device("cuda:0")
    streams: list[Any]

    def record_stream(self, s: Any) -> None:
        """Note a stream."""
        self.streams = [*getattr(self, "streams", []), s]


def on_device() -> OnDevice:
    return torch.zeros(3).as_subclass(OnDevice)


class Stream:
    """A stream that notes what it waits for, equal to its handle."""

    waits: ClassVar[list[tuple[int, Any]]] = []

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def __eq__(self, other: object) -> bool:
        return self.cuda_stream == other

    def wait_event(self, event: Any) -> None:
        """Note it."""
        self.waits.append((self.cuda_stream, event.of))


class Event:
    """Knows the stream that it was recorded on."""

    def record(self, stream: Stream) -> None:
        """Note the stream."""
        self.of = stream.cuda_stream


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handle of the current stream, and whether it is being captured."""
    now = [1, 0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now[0], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(now[1]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(now[0]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Stream, "waits", [])
    return now


def test_memory_of_tables_is_told_to_streams_that_use_it(current: list[int]) -> None:
    streams, rowptr, table, column = StreamHooks(), on_device(), on_device(), on_device()
    streams.after_build((rowptr, 3))
    streams.after_call((rowptr, 3))
    cached(rowptr, RUNS, lambda: SimpleNamespace(tensors=(table,)))
    cached(rowptr, FormatKey("order"), lambda: column)
    cached(rowptr, FormatKey("nothing"), lambda: None)
    streams.after_call((rowptr, 3))
    assert not any(hasattr(tensor, "streams") for tensor in (rowptr, table, column))
    current[0] = 2
    streams.after_call((rowptr, 3))
    assert [tensor.streams for tensor in (rowptr, table, column)] == [[2], [2], [2]]


def test_a_stream_waits_for_what_another_one_built(current: list[int]) -> None:
    """Also where its call ends before that of the builder, and only for what it uses."""
    streams, one, other = StreamHooks(), on_device(), on_device()
    streams.after_build((one,))
    current[0] = 2
    streams.after_call((one,))
    assert Stream.waits == [(2, 1)] and one.streams == [2]
    streams.after_build((other,))
    streams.after_call((other,))
    assert Stream.waits == [(2, 1)], "not for itself"
    current[0] = 1
    streams.after_call((one,))
    assert Stream.waits == [(2, 1)], "nor for what it does not use"
    streams.after_call((one, other))
    assert Stream.waits == [(2, 1), (1, 2)]


def test_the_callers_tensors_are_left_alone(current: list[int]) -> None:
    streams, built, given = StreamHooks(), on_device(), on_device()
    streams.after_build((built,))
    current[0] = 2
    streams.before_build((given, built))
    assert built.streams == [2] and not hasattr(given, "streams")


def test_the_first_builder_waits_for_the_second_before_that_one_has_called(current: list[int]) -> None:
    streams, one, other = StreamHooks(), on_device(), on_device()
    streams.after_build((one,))
    streams.after_call((one,))
    current[0] = 2
    streams.after_build((other,))
    current[0] = 1
    streams.after_call((other,))
    assert Stream.waits == [(1, 2)] and other.streams == [1]


class Seen(StreamHooks):
    """Notes builds and does nothing."""

    def __init__(self) -> None:
        self.builds: list[tuple[str, int]] = []

    def before_build(self, operands: Sequence[Any]) -> None:
        """Note the number of operands."""
        self.builds.append(("before", len(operands)))

    def after_build(self, results: Sequence[Any]) -> None:
        """Note the number of results."""
        self.builds.append(("after", len(results)))

    def after_call(self, values: Sequence[Any]) -> None:
        """Do nothing."""


def two_parts(hooks: StreamHooks) -> StructureRunner:
    """Return a runner of the order of edges, and of weights in it: the first part is no result."""
    graph, aten = Graph(), torch.ops.aten
    edges, weight = graph.placeholder("edges"), graph.placeholder("weight")
    ends = [graph.call_function(aten.select.int, (edges, 0, row)) for row in range(2)]
    sort = graph.call_function(torch.ops.gnnc.csr.default, (*ends, 3, 3))
    order = graph.call_function(operator.getitem, (sort, 2))
    graph.output((graph.call_function(aten.index.Tensor, (weight, [order])),))
    return StructureRunner(GraphModule(nn.Module(), graph), hooks=hooks)


def test_a_part_waits_for_the_part_that_it_is_made_of() -> None:
    runner = two_parts(hooks := Seen())
    edges, weight = torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.tensor([1.0, 2, 3])
    assert runner(edges, weight)[0].tolist() == [2, 3, 1]
    runner(edges, weight.clone())
    one, other = [("before", 1), ("after", 1)], [("before", 2), ("after", 1)]
    assert hooks.builds == [*one, *other, *other], "the first part is as it was"


def test_nothing_is_built_while_a_graph_is_captured(current: list[int]) -> None:
    streams, built = StreamHooks(), on_device()
    streams.before_build((built,))
    current[1] = 1
    streams.before_build((3, torch.zeros(2)))
    with pytest.raises(gnnc.BackendError, match="once before the capture"):
        streams.before_build((built,))


DEVICE = torch.device("cuda", 0)


def launched() -> OnDevice:
    """Something that a kernel writes."""
    with launching(DEVICE):
        return on_device()


def test_another_stream_waits_for_what_a_call_made_of_a_tensor(current: list[int]) -> None:
    """And for what is made of that in turn; each that it finds."""
    rowptr, col = on_device(), on_device()
    made = cached(rowptr, RUNS, launched)
    whole = SimpleNamespace(tensors=(on_device(),))
    cached(col, FormatKey("sums"), lambda: cached(rowptr, RUNS, launched) is made and whole)
    cached(col, FormatKey("nothing"), lambda: None)
    assert Stream.waits == []
    current[0] = 2
    assert cached(col, FormatKey("nothing"), launched) is None and Stream.waits == []
    assert cached(col, FormatKey("sums"), launched) is whole and Stream.waits == [(2, 1)]
    assert whole.tensors[0].streams == [2] and not hasattr(made, "streams")
    assert cached(rowptr, RUNS, launched) is made and made.streams == [2] and len(Stream.waits) == 2
    current[1] = 1  # a capture comes after a call that waited
    cached(rowptr, RUNS, launched)
    assert len(Stream.waits) == 2


def test_a_third_stream_waits_for_all_that_something_is_made_of(current: list[int]) -> None:
    rowptr, col = on_device(), on_device()
    cached(rowptr, RUNS, launched)
    current[0] = 2
    cached(col, FormatKey("sums"), lambda: (launched(), cached(rowptr, RUNS, launched)) and None)
    assert set(Stream.waits) == {(2, 1)}
    current[0] = 3
    cached(col, FormatKey("sums"), launched)
    assert set(Stream.waits) == {(2, 1), (3, 2), (3, 1)}


def test_nothing_is_launched_for_a_tensor_while_a_graph_is_captured(current: list[int]) -> None:
    rowptr = on_device()
    current[1] = 1
    with pytest.raises(gnnc.BackendError, match="once before the capture"):
        cached(rowptr, RUNS, launched)
    current[1] = 0
    assert cached(rowptr, RUNS, launched) is attached(rowptr, RUNS) is not None


def test_what_failed_to_build_is_built_again(current: list[int]) -> None:
    """And what was launched for it is not waited for by what is built next."""

    def fails() -> None:
        launched()
        raise ValueError

    rowptr = on_device()
    with pytest.raises(ValueError):
        cached(rowptr, RUNS, fails)
    cached(rowptr, RUNS, lambda: rowptr)
    current[0] = 2
    cached(rowptr, RUNS, launched)
    assert Stream.waits == []


def test_what_a_tensor_keeps_is_built_once() -> None:
    tensor, built = torch.zeros(3), torch.ones(2)
    assert cached(tensor, FormatKey("ones"), lambda: built) is built
    assert cached(tensor, FormatKey("ones"), lambda: pytest.fail("built again")) is built
    assert list(cached_tensors(tensor)) == [built]


def test_what_is_kept_by_what_a_tensor_keeps_is_its_own_too() -> None:
    """As tables of padded columns, which the columns keep."""
    tensor, copy, table = torch.zeros(3), torch.zeros(4), torch.ones(2)
    cached(cached(tensor, FormatKey("copy"), lambda: copy), FormatKey("table"), lambda: table)
    assert {id(each) for each in cached_tensors(tensor)} == {id(copy), id(table)}


def test_tables_count_among_the_bytes_of_a_structure() -> None:
    empty = GraphModule(nn.Module(), Graph())
    empty.graph.output(())
    runner = StructureRunner(empty, hooks=StreamHooks())
    edge_index = torch.zeros(2, 5)
    (rowptr,) = runner.cache.get((edge_index,), lambda: (torch.zeros(6),))
    cached(rowptr, RUNS, lambda: SimpleNamespace(tensors=(torch.zeros(10),)))
    assert runner.cache.nbytes == 4 * (6 + 10)
