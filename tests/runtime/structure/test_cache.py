"""The structure cache: what it keeps, what it notices, what it costs."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from gnnc.runtime.structure.cache import StructureCache


class Counter:
    """A build function that counts its calls."""

    def __init__(self, *inputs: Tensor) -> None:
        self.inputs = [weakref.ref(tensor) for tensor in inputs]
        self.calls = 0

    def __call__(self) -> tuple[Tensor, ...]:
        self.calls += 1
        return tuple(ref() * 2 for ref in self.inputs)  # type: ignore[operator]


def edges(count: int = 8) -> Tensor:
    return torch.arange(2 * count).reshape(2, count)


def test_same_tensor_is_built_once_and_gives_the_same_object():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    first = cache.get((edge_index, 5), build)
    assert cache.get((edge_index, 5), build) is first
    assert build.calls == 1


def test_other_integers_are_another_entry():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index, 5), build)
    cache.get((edge_index, 6), build)
    assert build.calls == 2


def test_edit_in_place_is_seen():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index,), build)
    edge_index[0, 0] = 7
    (out,) = cache.get((edge_index,), build)
    assert build.calls == 2 and out[0, 0] == 14


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_makes_its_parameters_other_ones_and_leaves_the_rest(fused: bool):
    cache, weight, learned = StructureCache(), torch.rand(8), torch.nn.Parameter(torch.zeros(8))
    values = learned.detach()
    weigh, learn = Counter(weight), Counter(values)
    learned.grad = torch.ones(8)
    optimizer = torch.optim.Adam([learned], lr=0.1, fused=fused)
    for calls in (1, 2):
        for _ in range(2):
            cache.get((weight,), weigh)
            cache.get((values,), learn)
        assert (weigh.calls, learn.calls) == (1, calls)
        optimizer.step()


def test_edit_through_a_view_is_seen():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index,), build)
    edge_index[0].zero_()
    cache.get((edge_index,), build)
    assert build.calls == 2


def test_fresh_views_of_one_base_are_found_and_their_edits_seen():
    cache, base = StructureCache(), edges()
    build = Counter(base)
    cache.get((base.t(),), build)
    cache.get((base.t(),), build)
    assert build.calls == 1
    cache.get((base[:, 1:],), build)
    assert build.calls == 2
    base.add_(1)
    cache.get((base.t(),), build)
    assert build.calls == 3


def test_new_memory_behind_the_same_tensor_is_seen():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index,), build)
    edge_index.data = edges() + 1
    (out,) = cache.get((edge_index,), build)
    assert build.calls == 2 and torch.equal(out, (edges() + 1) * 2)


def test_memory_at_a_freed_address_is_other_memory():
    cache, edge_index = StructureCache(), edges()
    for step in range(50):
        edge_index.data = edges() + step  # where the memory of the step before lay, or of the one before that
        (out,) = cache.get((edge_index,), Counter(edge_index))
        assert torch.equal(out, (edges() + step) * 2)


def test_memory_that_comes_back_to_a_tensor_may_hold_something_else():
    cache, edge_index, staging = StructureCache(), edges(), [edges(), edges()]
    views = [edge_index, edge_index[:, 1:]]
    for step in range(6):
        edge_index.data = staging[step % 2].add_(step)
        views[1].data = staging[step % 2][:, 1:]
        for view in views:
            (out,) = cache.get((view,), Counter(view))
            assert torch.equal(out, view * 2)
            assert cache.get((view,), Counter(view))[0] is out


def test_memory_that_another_cache_saw_leave_is_no_longer_known():
    one, two, edge_index, staging = StructureCache(), StructureCache(), edges(), [edges(), edges()]
    for step in range(4):
        edge_index.data = staging[step % 2].add_(step)
        cache = (one, two)[step % 2]
        assert torch.equal(cache.get((edge_index,), Counter(edge_index))[0], edge_index * 2)


def test_views_of_other_strides_are_told_apart():
    cache, square = StructureCache(), torch.arange(16).reshape(4, 4)
    for view in (square, square.t(), square, square.t()):
        (out,) = cache.get((view,), lambda: (view.clone(),))  # noqa: B023
        assert torch.equal(out, view)
    assert len(cache) == 2


def test_memory_that_is_read_as_another_dtype_is_another_value():
    cache, ids = StructureCache(), torch.arange(8)
    for dtype in (torch.int64, torch.uint64, torch.int64):
        ids.data = ids.data.view(dtype)
        (out,) = cache.get((ids,), lambda: (ids.clone(),))
        assert out.dtype == dtype and torch.equal(out, ids)


def test_an_entry_is_that_of_its_tensors_alone():
    cache, edge_index = StructureCache(), torch.arange(8)
    entry = cache.entry((edge_index,), Counter(edge_index))
    assert entry.is_of([edge_index]) and not entry.is_of([edge_index.detach()])


def test_freed_tensor_takes_its_entry_along():
    cache, edge_index = StructureCache(), edges()
    cache.get((edge_index,), Counter(edge_index))
    alive = weakref.ref(edge_index)
    del edge_index
    assert alive() is None, "the cache holds the user's tensor"
    assert len(cache) == 0 and cache.nbytes == 0


def test_a_dropped_cache_frees_what_it_holds():
    cache, edge_index = StructureCache(), edges()
    held = weakref.ref(cache.get((edge_index,), Counter(edge_index))[0])
    gc.disable()
    try:
        del cache
        assert held() is None
    finally:
        gc.enable()


def test_reused_address_is_not_mistaken_for_the_old_graph():
    cache = StructureCache()
    for step in range(200):
        edge_index = edges() + step
        (out,) = cache.get((edge_index,), Counter(edge_index))
        assert torch.equal(out, edge_index * 2)
        del edge_index


def test_output_that_aliases_an_input_is_copied():
    cache, edge_index = StructureCache(), edges()
    alive = weakref.ref(edge_index)
    (src,) = cache.get((edge_index,), lambda: (alive()[0],))
    edge_index[0, 0] = 99
    assert src[0] == 0
    del edge_index
    assert alive() is None


def test_inference_tensors_are_compared_by_content():
    cache = StructureCache()
    with torch.inference_mode():
        edge_index = edges() + 0
        build = Counter(edge_index)
        cache.get((edge_index,), build)
        cache.get((edge_index,), build)
        assert build.calls == 1
        edge_index[1, -1] += 1
        (out,) = cache.get((edge_index,), build)
        assert build.calls == 2 and torch.equal(out, edge_index * 2)
        edge_index[1, -1] -= 1
        edge_index[0, 0] += 1
        cache.get((edge_index,), build)
        assert build.calls == 3
        assert not out.is_inference()


def test_an_edit_while_the_value_is_built_is_seen_by_the_next_call():
    cache = StructureCache()
    with torch.inference_mode():
        edge_index = edges() + 0

    def build() -> tuple[Tensor]:
        out = edge_index * 2
        with torch.inference_mode():
            edge_index.add_(1)
        return (out,)

    cache.get((edge_index,), build)
    assert torch.equal(cache.get((edge_index,), Counter(edge_index))[0], edge_index * 2)


def test_normal_tensor_in_inference_mode_is_found_by_version():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index,), build)
    with torch.inference_mode():
        cache.get((edge_index,), build)
        assert build.calls == 1
        edge_index.add_(1)
        cache.get((edge_index,), build)
        assert build.calls == 2


def test_thousand_mini_batches_keep_memory_flat():
    one = 2 * 64 * 8
    cache = StructureCache(byte_budget=10 * one)
    batches = []
    for _ in range(1000):
        batches.append(edges(64))
        cache.get((batches[-1],), Counter(batches[-1]))
        assert cache.nbytes <= 10 * one
    assert len(cache) == 10
    build = Counter(batches[-1])
    cache.get((batches[-1],), build)
    assert build.calls == 0, "the newest entries stay"


def test_thousand_freed_mini_batches_leave_nothing():
    cache = StructureCache()
    for _ in range(1000):
        batch = edges(64)
        cache.get((batch,), Counter(batch))
    del batch
    gc.collect()
    assert cache.nbytes == 0


def test_what_is_made_of_outputs_later_counts_too():
    one, tables = 2 * 64 * 8, {}
    cache = StructureCache(5 * one, derived=lambda tensor: tables.get(id(tensor), ()))
    graphs = [edges(64) for _ in range(4)]
    for graph in graphs:
        (out,) = cache.get((graph,), Counter(graph))
        table = torch.empty(2 * 64)
        tables[id(out)] = table, table.view(2, 64)
    assert len(cache) == 3, "four with the tables of three are more than the budget"
    assert cache.nbytes == 3 * one + 3 * one // 2


def test_use_protects_from_eviction():
    kept, cache = edges(64), StructureCache(byte_budget=3 * 2 * 64 * 8)
    build, others = Counter(kept), [edges(64) for _ in range(10)]
    for other in others:
        cache.get((kept,), build)
        cache.get((other,), Counter(other))
    assert build.calls == 1


def test_entry_larger_than_the_budget_still_serves_the_next_call():
    cache, edge_index = StructureCache(byte_budget=1), edges(64)
    build = Counter(edge_index)
    for _ in range(3):
        cache.get((edge_index,), build)
    assert build.calls == 1


def test_clear_forgets():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index,), build)
    cache.clear()
    assert cache.nbytes == 0
    cache.get((edge_index,), build)
    assert build.calls == 2


def test_what_is_rebuilt_is_the_callers_alone_until_it_is_put():
    cache, edge_index = StructureCache(), edges(64)
    first, again, other = (Counter(edge_index) for _ in range(3))
    (old,) = cache.get((edge_index,), first)
    old = weakref.ref(old)
    entry, put = cache.rebuild((edge_index,), again)
    assert again.calls == 1 and old() is None and len(cache) == 0
    (others,) = cache.get((edge_index,), other)
    assert other.calls == 1 and others is not entry.outputs[0]
    put()
    assert cache.get((edge_index,), first)[0] is entry.outputs[0]
    assert (first.calls, len(cache), cache.nbytes) == (1, 1, 2 * 64 * 8)


def test_an_error_while_building_leaves_the_cache_usable():
    cache, edge_index = StructureCache(), edges()

    def fail() -> tuple[Tensor, ...]:
        raise ValueError("bad graph")

    for _ in range(2):
        try:
            cache.get((edge_index,), fail)
        except ValueError as error:
            assert "bad graph" in str(error)
        else:
            raise AssertionError("the error was swallowed")
    assert len(cache) == 0
    cache.get((edge_index,), Counter(edge_index))
    assert len(cache) == 1


def test_four_threads_never_see_another_graphs_values():
    cache = StructureCache(byte_budget=4 * 2 * 64 * 8)
    shared, wrong = [edges(64) + i for i in range(8)], []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(400):
            pick = int(torch.randint(16, (), generator=generator))
            graph = shared[pick] if pick < 8 else edges(64) + pick
            (out,) = cache.get((graph,), Counter(graph))
            if not torch.equal(out, graph * 2):
                wrong.append(pick)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.nbytes <= 4 * 2 * 64 * 8


def test_copies_start_empty():
    cache, edge_index = StructureCache(byte_budget=123, min_entries=2), edges()
    cache.get((edge_index,), Counter(edge_index))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (len(other), other.byte_budget, other.min_entries) == (0, 123, 2)


def test_a_hit_costs_microseconds():
    cache, edge_index = StructureCache(), edges()
    build = Counter(edge_index)
    cache.get((edge_index, 5), build)

    def seconds() -> float:
        start = time.perf_counter()
        for _ in range(1000):
            cache.get((edge_index, 5), build)
        return (time.perf_counter() - start) / 1000

    # Measured at 1.7 microseconds; the bound leaves room for a busy machine.
    assert min(seconds() for _ in range(7)) < 20e-6
