"""The emulator computes what a GPU does, and finds what one hides."""

from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import gnnc
from gnnc.runtime import cuda

try:
    cuda.load_compiler()
except gnnc.BackendError as error:
    pytest.skip(f"CUDA programs cannot be compiled here: {error}", allow_module_level=True)


from cuda_launch import Module, address

from emulator import EmulatorError, emulated
from emulator.compiler import ptx_of
from emulator.ptx import PtxError, translate

SEEDS = 12


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated():
        yield


def kernel(body: str, parameters: str = "int* out", before: str = "") -> Callable[..., None]:
    """Compile a kernel; return what launches it on tensors."""
    includes = '#include "common/copies.cuh"\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n'
    head = f"{includes}using namespace gnnc;\n"
    module = Module(f"{head}{before}\n__global__ void f({parameters}) {{ {body} }}", ("f",))

    def run(*tensors: Tensor, grid: int = 1, block: int = 64, seed: int = 0) -> None:
        with emulated(seed):
            module.launch("f", grid, block, *map(address, tensors))

    return run


def ints(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


EXCHANGE = "__shared__ int word[64]; const int i = threadIdx.x; word[i] = i; %s out[i] = word[i ^ 33];"


@pytest.mark.slow
def test_threads_of_a_block_wait_for_each_other() -> None:
    run, want = kernel(EXCHANGE % "__syncthreads();"), torch.arange(64, dtype=torch.int32) ^ 33
    for seed in range(SEEDS):
        out = ints(64)
        run(out, seed=seed)
        assert torch.equal(out, want)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("instead", ["", "__syncwarp();"])
def test_a_wait_that_is_missing_shows(instead: str) -> None:
    run, want, wrong = kernel(EXCHANGE % instead), torch.arange(64, dtype=torch.int32) ^ 33, 0
    for seed in range(SEEDS):
        out = ints(64)
        run(out, seed=seed)
        wrong += not torch.equal(out, want)
    assert wrong > SEEDS // 2


@pytest.mark.first(1)
@pytest.mark.parametrize(("wait", "some"), [("wait_for_copies();", False), ("", True)])
def test_copies_that_nobody_waits_for_are_late(wait: str, some: bool) -> None:
    body = f"""
    __shared__ int4 v[64];
    start_copy(v + threadIdx.x, from + threadIdx.x); {wait}
    out[threadIdx.x] = v[threadIdx.x].x;
    """
    run, source = kernel(body, "int* out, const int4* from"), torch.arange(256, dtype=torch.int32)
    out = ints(64)
    run(out, source)
    assert (out != source[::4]).any() == some


def test_the_same_seed_is_the_same_order() -> None:
    run, outs = kernel("out[atomicAdd(out + 64, 1)] = threadIdx.x;"), []
    for seed in (1, 1, 2):
        out = ints(65)
        run(out, seed=seed)
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert all(torch.equal(out[:64].sort().values, torch.arange(64, dtype=torch.int32)) for out in outs)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 16) __syncwarp(); else out[0] = __any_sync(~0u, 1);", "do not come"),
        ("out[0] = __shfl_sync(0xffffu, 1, 20);", "do not come|no member|does not take part"),
        ("if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);", "does not take part"),
        ('asm volatile("st.global.v2.u32 [%0], {1, 2};" ::"l"(out + 1));', "not aligned"),
        ("__trap();", "trapped"),
        ("out[threadIdx.x + 65] = 1;", "no tensor's"),
        ("__shared__ int v[64]; v[threadIdx.x + 1] = out[0]; __syncthreads(); out[1] = v[3];", "no tensor's"),
    ],
)
def test_what_no_kernel_may_is_an_error(body: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        kernel(body)(torch.zeros(64, dtype=torch.int64).view(torch.int32))


def test_threads_that_have_left_are_not_waited_for() -> None:
    out = ints(64)
    kernel("if (threadIdx.x % 3 == 0) return; __syncthreads(); out[threadIdx.x] = 1;")(out)
    assert int(out.sum()) == 42


def test_blocks_one_after_another_and_beside_each_other() -> None:
    out = ints(100)
    kernel("if (threadIdx.x == 0) atomicAdd(out + blockIdx.x, 1 + gridDim.x);")(out, grid=100)
    assert (out == 101).all()


def test_shuffles_and_votes() -> None:
    body = """
    const int i = threadIdx.x;
    out[i] = __shfl_up_sync(~0u, i, 3); out[64 + i] = __shfl_down_sync(~0u, i, 3, 8);
    out[128 + i] = __shfl_xor_sync(~0u, i, 5); out[192 + i] = __shfl_sync(~0u, i, i + 1, 16);
    out[256 + i] = __ballot_sync(~0u, i % 3 == 0); out[320 + i] = __all_sync(~0u, i < 32);
    out[384 + i] = __reduce_max_sync(~0u, i * 7 % 32); out[448 + i] = __match_any_sync(~0u, i % 4);
    """
    out, i = ints(512), torch.arange(64)
    kernel(body)(out)
    lane, warp = i % 32, i // 32 * 32
    ballot = [sum(1 << j for j in range(32) if (j + w) % 3 == 0) for w in (0, 32)]
    want = [
        torch.where(lane < 3, i, i - 3),
        torch.where(i % 8 < 5, i + 3, i),
        warp + (lane ^ 5),
        i // 16 * 16 + (i + 1) % 16,
        torch.tensor(ballot).repeat_interleave(32),
        (i < 32).long(),
        torch.full((64,), 31),
        torch.tensor([sum(1 << j for j in range(k, 32, 4)) for k in range(4)]).repeat(16),
    ]
    assert torch.equal(out.long() & 0xFFFFFFFF, torch.cat(want) & 0xFFFFFFFF)


@pytest.mark.slow
def test_floats_of_16_bits() -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    run = kernel(
        "const int i = blockIdx.x * 64 + threadIdx.x; out[i] = __half2float(__ushort_as_half(in[i]));"
        "out[65536 + i] = __bfloat162float(__ushort_as_bfloat16(in[i]));",
        "float* out, const unsigned short* in",
    )
    wide = torch.zeros(2 * 65536)
    run(wide, every, grid=1024)
    want = torch.cat([every.view(torch.float16).float(), every.view(torch.bfloat16).float()])
    assert torch.equal(wide.nan_to_num(7), want.nan_to_num(7))

    given = torch.cat(
        [wide, torch.randn(65536) * 2.0 ** torch.randint(-30, 20, (65536,)), torch.tensor([65519.0, 65520])]
    )
    given = torch.nn.functional.pad(given, (0, -given.numel() % 64))
    back = torch.zeros(2, given.numel(), dtype=torch.int16)
    kernel(
        f"const int i = blockIdx.x * 64 + threadIdx.x; out[i] = __half_as_ushort(__float2half_rn(in[i]));"
        f"out[{given.numel()} + i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));",
        "unsigned short* out, const float* in",
    )(back, given, grid=given.numel() // 64)
    for got, want in zip(back, (given.half(), given.bfloat16()), strict=True):
        assert torch.equal(got.view(want.dtype).nan_to_num(7), want.nan_to_num(7))


def test_integers() -> None:
    body = """
    const unsigned a = in[threadIdx.x], b = in[64 + threadIdx.x]; int* to = out + threadIdx.x * 10;
    asm("prmt.b32 %0, %1, %2, 0x7a41;" : "=r"(to[0]) : "r"(a), "r"(b));
    to[1] = __dp4a((int)a, (int)b, 5); to[2] = __dp2a_hi((int)a, (int)b, 5); to[3] = __popc(a);
    to[4] = __clz(a >> 9); to[5] = __brev(a); to[6] = (int)a >> 5; to[7] = __mulhi((int)a, (int)b);
    to[8] = (int)a / ((int)b >> 20 | 1); to[9] = __ffs(a & b & 0xff);
    """
    given, out = torch.randint(-(2**31), 2**31, (128,), dtype=torch.int32), ints(640)
    kernel(body, "int* out, const unsigned* in")(out, given)

    def signed(v: int, bits: int) -> int:
        v &= (1 << bits) - 1
        return v - (1 << bits) if v >> (bits - 1) else v

    for i in range(64):
        a, b = int(given[i]) & 0xFFFFFFFF, int(given[64 + i]) & 0xFFFFFFFF
        both = a | b << 32
        byte = [both >> 8 * k & 255 for k in range(8)]
        sign = 255 if byte[2] & 128 else 0
        perm = byte[1] | byte[4] << 8 | sign << 16 | byte[7] << 24
        dot = 5 + sum(signed(a >> 8 * k, 8) * signed(b >> 8 * k, 8) for k in range(4))
        two = 5 + sum(signed(a >> 16 * k, 16) * signed(b >> 16 + 8 * k, 8) for k in range(2))
        low, high = signed(a, 32), signed(b, 32)
        quotient = abs(low) // abs(high >> 20 | 1) * (1 if (low < 0) == (high < 0) else -1)
        bits = [a.bit_count(), 32 - (a >> 9).bit_length(), int(f"{a:032b}"[::-1], 2)]
        want = [perm, dot, two, *bits, low >> 5, low * high >> 32, quotient]
        some = a & b & 0xFF
        want.append((some & -some).bit_length())
        assert [int(v) & 0xFFFFFFFF for v in out[10 * i : 10 * i + 10]] == [v & 0xFFFFFFFF for v in want]


def test_rules_of_rounding() -> None:
    body = """
    const float a = in[threadIdx.x], b = in[64 + threadIdx.x]; float* to = out + threadIdx.x * 4;
    to[0] = __fadd_rz(a, b); to[1] = __fmul_rz(a, b); to[2] = __fmaf_rd(a, b, b); to[3] = __fdiv_rn(a, b);
    """
    given, out = torch.randn(128) * 2.0 ** torch.randint(-20, 20, (128,)), torch.zeros(64, 4)
    kernel(body, "float* out, const float* in")(out, given)
    for i in range(64):
        a, b = (Fraction(float(given[i + at])) for at in (0, 64))
        want = [toward_zero(a + b), toward_zero(a * b), around(a * b + b)[0]]
        want.append(min(around(a / b), key=lambda v: abs(Fraction(v) - a / b)))
        assert out[i].tolist() == want


def toward_zero(exact: Fraction) -> float:
    """The float next to a number that is not larger."""
    return around(exact)[exact < 0]


def around(exact: Fraction) -> tuple[float, float]:
    """The largest float that is not above a number, and the least that is not below."""
    float_ = torch.tensor(float(exact))
    below = float_ if Fraction(float(float_)) <= exact else float_.nextafter(torch.tensor(-torch.inf))
    above = below if Fraction(float(below)) == exact else below.nextafter(torch.tensor(torch.inf))
    return float(below), float(above)


def test_products_of_matrices() -> None:
    body = """
    const int i = threadIdx.x; unsigned a[4], b[2]; int c[4] = {1, 2, 3, 4};
    for (int j = 0; j < 4; ++j) a[j] = x[(i / 4 + 8 * (j % 2)) * 8 + i % 4 + 4 * (j / 2)];
    for (int j = 0; j < 2; ++j) b[j] = y[(i / 4) * 8 + i % 4 + 4 * j];
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int j = 0; j < 4; ++j) out[(i / 4 + 8 * (j / 2)) * 8 + i % 4 * 2 + j % 2] = c[j] - (j + 1);
    """
    x, y = (torch.randint(-128, 128, (rows, 32), dtype=torch.int8) for rows in (16, 8))
    out = torch.zeros(16, 8, dtype=torch.int32)
    kernel(body, "int* out, const unsigned* x, const unsigned* y")(out, x, y, block=32)
    assert torch.equal(out, x.int() @ y.int().T)


@pytest.mark.parametrize("order", ["", ".trans"])
def test_loads_of_matrices(order: str) -> None:
    body = f"""
    __shared__ alignas(16) unsigned short rows[64];
    const int i = threadIdx.x; unsigned word;
    rows[i] = in[i]; rows[i + 32] = in[i + 32]; __syncwarp();
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(rows + i % 8 * 8));
    asm volatile("ldmatrix.sync.aligned.m8n8.x1{order}.shared.b16 {{%0}}, [%1];" : "=r"(word) : "r"(from));
    out[i] = word;
    """
    given, out = torch.arange(64, dtype=torch.int16).view(8, 8), torch.zeros(32, dtype=torch.int32)
    kernel(body, "unsigned* out, const unsigned short* in")(out, given, block=32)
    assert torch.equal(out.view(torch.int16).view(8, 8), given.T if order else given)


def test_what_is_not_translated_is_named() -> None:
    text, _ = ptx_of('__global__ void f(int* out) { asm volatile("nanosleep.u32 5;"); *out = 1; }', ("f",))
    with pytest.raises(PtxError, match="an unknown instruction: nanosleep"):
        translate(text)
