"""What the assembler makes of the gathers: no load of a step waits for one that was started before it.

A warp has six scoreboards; a load names the one that it holds until its data is there, and whatever
needs a value waits until all loads on that value's scoreboard are through. This reads the control bits
of sm_90's machine code, which NVIDIA does not document: bits 110 to 112 of an instruction are its
scoreboard, 116 to 121 those it waits for.
"""

import struct
from functools import cache
from typing import NamedTuple

import pytest
from cuda_sparse import SPMM_SOURCE, AttentionConfig, SddmmConfig, SpmmConfig
from slow import slow_but

from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.cubin import kernels

pytestmark = pytest.mark.usefixtures("compiler")

LOAD, OF_16_BYTES, PAST_L1, BRANCH, ALWAYS = 0x981, 6, 3, 0x947, 7
APART = 40
"""Instructions between two gathers of one step, at most."""


class Instruction(NamedTuple):
    """What matters of one.

    Attributes:
        gathers: whether it loads 16 bytes from memory into registers, and not past L1 (parts of rows).
        always: whether no predicate decides if it does anything.
        branches: whether it may go on elsewhere.
        holds: the scoreboard of its result, None where it has none.
        waits: scoreboards that must be free before it starts.
    """

    gathers: bool
    always: bool
    branches: bool
    holds: int | None
    waits: frozenset[int]


def instructions(code: bytes) -> list[Instruction]:
    """Decode 16 bytes an instruction."""
    found = []
    for low, high in struct.iter_unpack("<QQ", code):
        board, waits = high >> 46 & 7, high >> 52 & 63
        gathers = low & 0xFFF == LOAD and high >> 9 & 7 == OF_16_BYTES and high >> 13 & 3 != PAST_L1
        waited = frozenset(b for b in range(6) if waits >> b & 1)
        found.append(
            Instruction(
                gathers, low >> 12 & 15 == ALWAYS, low & 0xFFF == BRANCH, board if board < 6 else None, waited
            )
        )
    return found


def steps_of(code: list[Instruction]) -> list[list[int]]:
    """Return where gathers are that lie close to each other, with no branch between them."""
    steps: list[list[int]] = [[]]
    for place in (i for i, instruction in enumerate(code) if instruction.gathers):
        if steps[-1]:
            since = code[steps[-1][-1] + 1 : place]
            if len(since) >= APART or any(instruction.branches for instruction in since):
                steps.append([])
        steps[-1].append(place)
    return steps


def largest_step(code: list[Instruction]) -> list[int]:
    """Return where the gathers are of which most lie close to each other."""
    return max(steps_of(code), key=len)


def false_waits(code: list[Instruction], gathers: list[int]) -> list[int]:
    """Return the places, from the first gather to the last, that wait for one of them."""
    held: set[int | None] = set()
    found = []
    for place in range(gathers[0], gathers[-1] + 1):
        if code[place].waits & held:
            found.append(place)
            held -= code[place].waits
        if place in gathers:
            held.add(code[place].holds)
    return found


@cache
def machine_code(source: str, name: str) -> list[Instruction]:
    """Compile one kernel for sm_90."""
    (code,) = kernels(nvrtc.compile_source(source, (name,), "sm_90").cubin).values()
    return instructions(code)


KERNELS = {
    "int8": (8, SPMM_SOURCE, SpmmConfig("i8", 64).name("StoreBytes<64>")),
    "int8 powers": (4, SPMM_SOURCE, SpmmConfig("i8", 64, scale="power").name()),
    "int8 row scales": (8, SPMM_SOURCE, SpmmConfig("i8", 64, scale="row").name()),
    "int8 row scales, whole lines": (8, SPMM_SOURCE, SpmmConfig("i8", 128, scale="row").name()),
    "int8 row scales, half a line": (4, SPMM_SOURCE, SpmmConfig("i8", 32, scale="row").name()),
    "int8 edge weights": (8, SPMM_SOURCE, SpmmConfig("i8", 64, value="real", scale="row").name()),
    "int8 edge weights, one scale": (8, SPMM_SOURCE, SpmmConfig("i8", 64, value="real").name()),
    "int8 weights a head": (
        8,
        SPMM_SOURCE,
        SpmmConfig("i8", 64, value="real", scale="row", heads=4).name(),
    ),
    "int8 weights a head, one scale": (8, SPMM_SOURCE, SpmmConfig("i8", 64, value="real", heads=4).name()),
    "int8 weights a head, whole lines": (
        8,
        SPMM_SOURCE,
        SpmmConfig("i8", 128, value="real", scale="row", heads=8).name(),
    ),
    "int8 weights a head, with gaps": (
        8,
        SPMM_SOURCE,
        SpmmConfig("i8", 21, value="real", scale="row", heads=3).name(),
    ),
    "fp16": (8, SPMM_SOURCE, SpmmConfig("f16", 64).name()),
    "fp16, a last piece with 1 column": (8, SPMM_SOURCE, SpmmConfig("f16", 41).name()),
    "fp16, a last piece with 7 columns": (8, SPMM_SOURCE, SpmmConfig("f16", 47).name()),
    "fp16 edge weights": (8, SPMM_SOURCE, SpmmConfig("f16", 64, value="real").name()),
    "fp32": (8, SPMM_SOURCE, SpmmConfig("f32", 64).name()),
    "int8, staged": (4, SPMM_SOURCE, SpmmConfig("i8", 64).name("StoreBytes<64>", form="spmm_staged")),
    "int8 powers, staged": (4, SPMM_SOURCE, SpmmConfig("i8", 64, scale="power").name(form="spmm_staged")),
    "int8 row scales, staged": (4, SPMM_SOURCE, SpmmConfig("i8", 64, scale="row").name(form="spmm_staged")),
    "fp16, staged": (4, SPMM_SOURCE, SpmmConfig("f16", 64).name(form="spmm_staged")),
    "fp32, staged": (4, SPMM_SOURCE, SpmmConfig("f32", 64).name(form="spmm_staged")),
    "int8, slices": (8, SPMM_SOURCE, SpmmConfig("i8", 602).name(form="spmm_sliced")),
    "fp16, slices": (8, SPMM_SOURCE, SpmmConfig("f16", 602).name(form="spmm_sliced")),
    "fp32, slices": (8, SPMM_SOURCE, SpmmConfig("f32", 602).name(form="spmm_sliced")),
    "int8 weights, slices": (8, SPMM_SOURCE, SpmmConfig("i8", 602, value="real").name(form="spmm_sliced")),
    "int8 row scales, slices": (8, SPMM_SOURCE, SpmmConfig("i8", 602, scale="row").name(form="spmm_sliced")),
    "int8 weights and row scales, slices": (
        8,
        SPMM_SOURCE,
        SpmmConfig("i8", 602, value="real", scale="row").name(form="spmm_sliced"),
    ),
    "int8, staged slices": (4, SPMM_SOURCE, SpmmConfig("i8", 602).name(form="spmm_staged")),
    "attention int8": (4, AttentionConfig.source(), AttentionConfig("i8", 64, 4, True, False).names()[0]),
    "attention fp16": (4, AttentionConfig.source(), AttentionConfig("f16", 64, 4, True, False).names()[0]),
    "sddmm int8": (8, '#include "sparse/sddmm.cuh"', SddmmConfig("i8", 64).name()),
}


OF_EACH_FORM = ("int8", "int8, staged", "int8, slices", "attention int8", "sddmm int8")


@pytest.mark.first(1)
@pytest.mark.parametrize("kernel", slow_but(OF_EACH_FORM, list(KERNELS)))
def test_gathers_of_a_step_are_started_before_one_is_waited_for(kernel: str) -> None:
    """Of a kernel that has code of its own for steps whose edges are all there, the other may wait once."""
    step, source, name = KERNELS[kernel]
    code = machine_code(source, name)
    steps = [gathers for gathers in steps_of(code) if len(gathers) == step]
    whole = [gathers for gathers in steps if all(code[place].always for place in gathers)]
    assert len(largest_step(code)) == step
    assert not any(false_waits(code, gathers) for gathers in whole or steps)
    assert all(len(false_waits(code, gathers)) <= 1 for gathers in steps)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kernel", slow_but(OF_EACH_FORM, [name for name in KERNELS if not name.startswith("sddmm")])
)
def test_no_step_is_cut(kernel: str) -> None:
    """SDDMM has code of its own for steps whose edges are all there; others the assembler cuts in two."""
    step, source, name = KERNELS[kernel]
    assert {len(places) for places in steps_of(machine_code(source, name)) if len(places) > 1} == {step}


def test_a_load_that_needs_the_one_before_is_a_wait() -> None:
    source = """
    __global__ void chase(const int4* __restrict__ next, int4* out) {
      int4 at = __ldg(next + threadIdx.x);
      at = __ldg(next + (at.x ^ at.y ^ at.z ^ at.w));
      at = __ldg(next + (at.x ^ at.y ^ at.z ^ at.w));
      out[threadIdx.x] = at;
    }
    """
    code = machine_code(source, "chase")
    gathers = largest_step(code)
    assert len(gathers) == 3 and len(false_waits(code, gathers)) == 2
