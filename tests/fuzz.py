"""Random graphs and primitives against the reference: `python tests/fuzz.py --seed 0 --count 10000`.

A case is made from its number alone, so `--seed N --count 1` runs one again. With `--library` the
kernels come from another build, such as one with sanitizers (`make asan`). With `--hostile`, every hostile
call of `support/hostile.py` runs first; the file that the option names then holds the label of the last one.
"""

import argparse
import random
import sys
import time
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnc
from gnnc.errors import GraphError
from gnnc.precision import BF16, FP32, INT8
from gnnc.runtime.cpu import library

sys.path.append(str(Path(__file__).resolve().parent / "support"))

from fuzz_cases import CASES, Case, Draw, bad_index
from hostile import hostile_calls, random_call
from kernel_graphs import threads
from random_programs import SIZES, WIDTHS, Recipe, check


def program(d: Draw) -> None:
    """A program of up to five ops, through every pass from `assign` on."""
    steps = tuple(tuple(d.rng.randrange(1000) for _ in range(4)) for _ in range(d.rng.randint(1, 5)))
    recipe = Recipe(d.one(WIDTHS), d.maybe(0.3), steps, d.rng.randint(1, 4))  # type: ignore[arg-type]
    check(recipe, d.one(SIZES), d.one((FP32, BF16, INT8)), d.maybe())


class Layers(nn.Module):
    """Three kinds of aggregation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((GCNConv(7, 16), GATConv(16, 4, heads=2), SAGEConv(8, 7, aggr="max")))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


@cache
def compiled(device: str = "cpu") -> tuple[nn.Module, Any]:
    """The model in float64, since eager FP32 loses digits on a hub of 20 000 edges, and compiled in FP32."""
    torch.manual_seed(0)
    model = Layers().eval()
    return deepcopy(model).double(), gnnc.compile(deepcopy(model).to(device), "fp32", backend=device)


def model(d: Draw, device: str = "cpu") -> None:
    """A compiled model equals eager, or refuses an index that is no node."""
    eager, fast = compiled(device)
    g = d.graph(d.one((1, 2, 7, 40, 300)))
    edge_index, x = torch.stack([g.src, g.dst]), d.floats(g.num_dst, 7)
    if g.num_edges and d.maybe():
        at = (d.rng.randrange(2), d.rng.randrange(g.num_edges))
        edge_index[at] = bad_index(d, g.num_dst, torch.int64)
    with torch.no_grad():
        if not g.num_edges or (0 <= int(edge_index.min()) and int(edge_index.max()) < g.num_dst):
            got = fast(x.to(device), edge_index.to(device)).cpu()
            want = eager(x.double(), edge_index)
            assert float((got - want).norm()) <= 1e-4 * float(want.norm()) + 1e-12
            return
        try:
            fast(x.to(device), edge_index.to(device))
        except GraphError:
            return
    raise AssertionError("an index out of range was taken")


def hostile(d: Draw) -> None:
    """A direct call of an op with two arguments spoilt ends in an error or a result."""
    random_call(d.rng).run()


EVERY: tuple[Case, ...] = (*CASES, *CASES, *CASES, program, program, model, hostile, hostile)


def kind_of(number: int) -> Case:
    return random.Random(f"case {number}").choice(EVERY)


def run(seed: int, count: int) -> Counter[str]:
    """Run the cases ``seed .. seed + count``; return how many of each kind ran.

    Raises:
        RuntimeError: a case failed; names its number and its kind.
    """
    library.load()
    done: Counter[str] = Counter()
    for number in range(seed, seed + count):
        case, d = kind_of(number), Draw(number)
        try:
            with threads(d.one((1, 2, 4))):
                case(d)
        except Exception as error:
            raise RuntimeError(f"case {number}, {case.__name__}: {error}") from error
        done[case.__name__] += 1
    return done


def run_hostile(note: Path) -> int:
    """Run every hostile call; return their number. The file holds the label of the call that runs."""
    library.load()
    calls = 0
    for call in hostile_calls():
        note.write_text(call.label)
        call.run()
        calls += 1
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=200, help="how many cases")
    parser.add_argument("--library", type=Path, help="the kernels to load in place of gnnc's own")
    parser.add_argument("--hostile", type=Path, metavar="FILE", help="run hostile calls; FILE names the last")
    options = parser.parse_args()
    if options.library is not None:
        library.PATH = options.library.resolve()
    start = time.monotonic()
    if options.hostile is not None:
        print(f"{run_hostile(options.hostile)} hostile calls in {time.monotonic() - start:.0f} s", flush=True)
    done = run(options.seed, options.count)
    counts = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    seconds = time.monotonic() - start
    print(f"{library.load()}, {library.PATH.name}: {sum(done.values())} cases in {seconds:.0f} s")
    print(counts)


if __name__ == "__main__":
    main()
