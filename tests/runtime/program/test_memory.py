"""Output memory is reused, and never while anybody can still see it."""

import gc
import threading
import weakref
from unittest import mock

import pytest
import torch

from gnnc.errors import GnncError
from gnnc.runtime.cuda.memory import CudaArena, CudaArenaPool
from gnnc.runtime.program import memory as pool_module
from gnnc.runtime.program.memory import ALIGNMENT, HUGE_PAGE, SMALL_OUTPUT, ArenaPool, OutputPool, Region

BIG = (512, 128)


def test_memory_comes_back_when_the_tensor_is_gone():
    pool = OutputPool()
    first = pool.take(BIG, torch.float32)
    address = first.data_ptr()
    del first
    gc.collect()
    assert pool.take(BIG, torch.float32).data_ptr() == address


HOLDERS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:5, ::2],
    "numpy": lambda tensor: tensor.numpy(),
    "detached": lambda tensor: tensor.detach(),
    "list": lambda tensor: list(tensor.unbind())[0],
}


@pytest.mark.first(1)
@pytest.mark.parametrize("keep", HOLDERS)
def test_memory_stays_while_something_sees_it(keep):
    pool = OutputPool()
    held = HOLDERS[keep](pool.take(BIG, torch.float32).fill_(7))
    gc.collect()
    for _ in range(4):
        pool.take(BIG, torch.float32).fill_(0)
    assert (torch.as_tensor(held) == 7).all()


def test_rows_are_aligned_and_every_dtype_is_served():
    pool = OutputPool()
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int64):
        tensor = pool.take((1024, 256), dtype)
        assert tensor.dtype == dtype and tensor.shape == (1024, 256)
        assert tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.first(1)
@pytest.mark.parametrize("supported", [True, False])
def test_large_buffers_start_at_a_huge_page_where_the_system_has_them(monkeypatch, supported):
    if not supported:
        monkeypatch.delattr(pool_module.mmap, "MADV_HUGEPAGE", raising=False)
    elif not hasattr(pool_module.mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no MADV_HUGEPAGE")
    pool = OutputPool()
    tensor = pool.take((HUGE_PAGE // 4, 2), torch.float32)
    assert tensor.data_ptr() % (HUGE_PAGE if supported else ALIGNMENT) == 0
    tensor.fill_(3)
    view = tensor[-1]
    del tensor
    gc.collect()
    assert (view == 3).all()


def test_more_memory_than_there_is_gets_our_error():
    with pytest.raises(GnncError, match="GiB at once"):
        OutputPool().take((1 << 56,), torch.int8)


def test_small_and_empty_outputs_do_not_use_the_pool():
    pool = OutputPool()
    assert pool.take((0, 7), torch.float32).shape == (0, 7)
    assert pool.take((3, 7), torch.float32).nbytes < SMALL_OUTPUT
    gc.collect()
    assert pool.idle_bytes == 0


def test_idle_memory_is_bounded_and_the_longest_idle_goes_first():
    size = 512 * 128 * 4
    pool = OutputPool(limit=3 * size)
    tensors = [pool.take(BIG, torch.float32) for _ in range(8)]
    del tensors[:]
    assert pool.idle_bytes <= 3 * size


def test_clear_drops_idle_memory_and_what_comes_back_later():
    pool = OutputPool()
    held = pool.take(BIG, torch.float32)
    pool.clear()
    del held
    gc.collect()
    assert pool.idle_bytes == 0


def test_outputs_work_under_inference_mode_and_outside():
    pool = OutputPool()
    with torch.inference_mode():
        inside = pool.take(BIG, torch.float32).fill_(1)
    del inside
    outside = pool.take(BIG, torch.float32)
    outside.fill_(2).requires_grad_()
    assert (outside == 2).all()


def test_threads_never_share_a_buffer():
    pool, errors = OutputPool(), []

    def work(mark: int) -> None:
        for _ in range(50):
            tensor = pool.take(BIG, torch.float32).fill_(mark)
            if not bool((tensor == mark).all()):
                errors.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def layout(rows: int) -> tuple[Region, ...]:
    return (
        Region(0, torch.float32, (rows, 5), (8, 1)),
        Region(1, torch.int8, (rows, 5), (64, 1)),
        Region(0, torch.float32, (rows,), (1,)),
    )


def test_arena_is_laid_out_for_the_sizes_of_the_call():
    arenas = ArenaPool(layout)
    arena = arenas.acquire((10,))
    padded, quantized, flat = arena.tensors
    assert padded.stride() == (8, 1) and quantized.stride() == (64, 1)
    assert padded.data_ptr() == flat.data_ptr() != quantized.data_ptr()
    assert quantized.data_ptr() % ALIGNMENT == 0
    arenas.release(arena)
    assert arenas.acquire((10,)) is arena
    assert arena.tensors[0] is padded


def test_two_calls_at_once_have_arenas_of_their_own():
    arenas = ArenaPool(layout)
    first, second = arenas.acquire((10,)), arenas.acquire((10,))
    assert first.tensors[0].data_ptr() != second.tensors[0].data_ptr()


def test_memory_is_flat_over_many_sizes():
    arenas = ArenaPool(layout)
    seen = set()
    for rows in [1000, *range(1, 1000, 37), 0]:
        arena = arenas.acquire((rows,))
        arenas.release(arena)
        seen.add(arenas.idle_bytes)
    assert len(seen) == 1
    arenas.clear()
    assert arenas.idle_bytes == 0


def test_arena_made_in_inference_mode_serves_calls_outside():
    arenas = ArenaPool(layout)
    with torch.inference_mode():
        arenas.release(arenas.acquire((10,)))
    arenas.acquire((10,)).tensors[0].zero_()


def test_two_programs_share_arenas() -> None:
    def first(rows: int) -> tuple[Region, ...]:
        return (Region(0, torch.float32, (rows, 4), (4, 1)),)

    def second(rows: int) -> tuple[Region, ...]:
        whole = Region(0, torch.bfloat16, (rows, 16), (16, 1))
        return whole, Region(1, torch.float32, (rows,), (1,))

    forward, backward = ArenaPool(first), ArenaPool(second)
    backward.share(forward)
    arena = forward.acquire((1000,))
    forward.release(arena)
    assert backward.acquire((1000,)) is arena
    assert [tuple(t.shape) for t in arena.tensors] == [(1000, 16), (1000,)]
    backward.release(arena)
    again = forward.acquire((1000,)).tensors
    assert [tuple(t.shape) for t in again] == [(1000, 4)]
    assert forward.idle_bytes == 0
    other = backward.acquire((1000,))  # while the first program runs
    assert other.tensors[0].data_ptr() != again[0].data_ptr()
    forward.release(arena), backward.release(other)
    assert forward.idle_bytes == arena.nbytes + other.nbytes and backward.idle_bytes == 0


def test_memory_that_another_program_needed_larger_is_given_back() -> None:
    small, large = ArenaPool(layout), ArenaPool(lambda rows: layout(100 * rows))
    large.share(small)
    arena = small.acquire((1000,))
    outgrown = weakref.ref(arena.tensors[0])
    small.release(arena)
    taken = large.acquire((1000,)).tensors[0].data_ptr()
    assert outgrown() is None, "no program holds the smaller memory"
    large.release(arena)
    assert small.acquire((1000,)).tensors[0].data_ptr() == taken


def other_layout(rows: int) -> tuple[Region, ...]:
    return (Region(0, torch.float32, (rows, 4), (4, 1)), Region(1, torch.float32, (rows, 2), (2, 1)))


def test_two_programs_share_the_memory_of_an_arena_and_keep_what_each_recorded():
    """Arenas of a GPU are told apart by stream and lie in memory of torch; these lie on the CPU."""
    arena, first, second = CudaArena(torch.device("cpu"), 0, captured=False), object(), object()
    arena.lay_out((10,), layout)
    arena.lay_out((10,), other_layout)
    arena.lay_out((10,), layout)  # the buffers have grown
    held = arena.nbytes
    arena.last = first
    arena.lay_out((10,), other_layout)
    assert arena.last is None and arena.nbytes == held
    arena.last = second
    for chosen, state in ((layout, first), (other_layout, second)):
        arena.lay_out((10,), chosen)
        assert arena.last is state
    arena.lay_out((9,), layout)
    assert arena.last is None, "recorded for other sizes"
    arena.lay_out((1000,), other_layout)
    arena.lay_out((9,), layout)
    assert arena.last is None, "recorded with addresses of smaller buffers"
    assert arena.nbytes < 1000 * (8 + 4) * 4 + 100 * 64


def test_pools_of_a_gpu_take_arenas_from_each_other():
    pools = [CudaArenaPool(each, torch.device("cuda", 0)) for each in (layout, other_layout)]
    pools[1].share(pools[0])
    arena = CudaArena(torch.device("cpu"), 7, captured=False)
    arena.lay_out((10,), layout)
    pools[0].release(arena)
    assert pools[1].idle_bytes == 0 < pools[0].idle_bytes
    with mock.patch("gnnc.runtime.cuda.memory.raw_stream", return_value=7):
        assert pools[1].acquire_idle((10,)) is arena
    assert [tuple(t.shape) for t in arena.tensors] == [(10, 4), (10, 2)] and pools[0].idle_bytes == 0
