"""Random programs over the primitives on a CUDA device: as the reference and the CPU kernels compute them.

Compiling a program takes seconds, running it nothing: each runs on several graphs.
"""

import random
from typing import Any

import fuzz
import pytest
import torch
from cuda_cases import on_device
from gnn_graphs import arguments, relative_error, run_all
from random_programs import WIDTHS, Program, Recipe, scales
from torch.fx import GraphModule

from gnnc.passes.assign import Assign
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.quantize import Quantize
from gnnc.precision import Precision
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.checks import OutOfRange
from gnnc.runtime.program.executable import Executable
from gnnc.target import Target

SIZES = ((23, 90), (1, 0), (7, 0), (1, 3), (5, 12), (2, 700), (400, 3000))
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 1e-2, "int8": 3e-2}
SEEDS = range(48)


def recipe_of(seed: int) -> Recipe:
    """A program of up to seven ops; three of four serve every graph."""
    rng = random.Random(f"program {seed}")
    steps = tuple(tuple(rng.randrange(1000) for _ in range(4)) for _ in range(rng.randint(2, 7)))
    return Recipe(rng.choice(WIDTHS), seed % 4 > 0, steps, rng.randint(1, 4))  # type: ignore[arg-type]


def options_of(precision: str, name: str) -> dict[str, Any]:
    backend = get_backend(name)
    facts = backend.target
    target = Target(
        facts.name,
        facts.precisions,
        joins_products=facts.joins_products,
        lowering=backend,
    )
    return {"precision": Precision.parse(precision), "target": target}


def quantized(recipe: Recipe, device: str, examples: tuple[Any, ...] | None, **options: Any) -> GraphModule:
    """The program as ``quantize`` leaves it, on values of a device."""
    graph = Program(recipe, SIZES[0], device).graph
    return run_all(graph, (Assign(min_row_bytes=0), Quantize()), examples=examples, **options)[0]


def executable(graph: GraphModule, **options: Any) -> Executable:
    lowered, _ = run_all(graph, (Cache(), Fuse(), Lower()), **options)
    return options["target"].lowering.executable(lowered)


@torch.no_grad()
def check(seed: int, precision: str, backend: str, device: str) -> None:
    """Compare a backend with the reference on the CPU, where divisions are divisions."""
    recipe, options = recipe_of(seed), options_of(precision, backend)
    examples = arguments(Program(recipe, SIZES[0]).graph, *SIZES[0]) if seed % 2 else None
    reference = quantized(recipe, "cpu", examples, **options)
    there = tuple(value.to(device) for value in examples) if examples else None
    run = executable(quantized(recipe, device, there, **options), **options)
    for sizes in SIZES if recipe.symbolic else SIZES[:1]:
        plain = Program(recipe, SIZES[0]).graph
        values = (*arguments(plain, *sizes), *scales(reference))
        want = reference(*values)
        try:
            got = run(*(on_device(values) if device == "cuda" else values))
        except OutOfRange:
            assert examples is not None and sizes != SIZES[0], "static scales suit what they were taken with"
            continue
        assert [t.shape for t in got] == [t.shape for t in want], sizes
        if not all(t.isfinite().all() for t in want):
            assert precision == "fp16" and sizes != SIZES[0], (
                "only sums of large graphs leave the range of fp16"
            )
            continue
        error = relative_error([t.cpu() for t in got], want)
        assert error < TOLERANCE[precision], (sizes, error)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_the_cpu_and_the_reference_agree(seed: int, precision: str) -> None:
    check(seed, precision, "cpu", "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("seed", SEEDS)
def test_cuda_and_the_reference_agree(seed: int, precision: str) -> None:
    check(seed, precision, "cuda", "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("part", range(4))
def test_random_graphs_and_ids(part: int) -> None:
    """Hubs, loops, duplicates, no edges, and ids out of range, through one compiled model."""
    for number in range(part * 200, part * 200 + 200):
        try:
            fuzz.model(fuzz.Draw(number), "cuda")
        except Exception as error:
            raise AssertionError(f"fuzz.model(fuzz.Draw({number}), 'cuda'): {error}") from error
