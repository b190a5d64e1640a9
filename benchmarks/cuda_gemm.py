"""Times the matrix products of the CUDA backend beside their floor.

    python benchmarks/cuda_gemm.py [--only cora facebook ...] [--forms fp16 int8 ...]

Every product is a compiled model of one layer, or of two that share the codes of x; times are those of
its kernels, by torch.profiler. The floor is x, the weight and the FP32 result once each at the bandwidth
of a device copy.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from cuda_kernels import copy_gbs
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gnnc

SHAPES = {
    "cora": (2708, 1433, 64),
    "facebook": (22470, 4714, 64),
    "arxiv": (169343, 128, 64),
    "reddit": (232965, 602, 64),
    "products": (2449029, 100, 64),
    "products, second layer": (2449029, 64, 64),
    "products, last layer": (2449029, 64, 47),
}
FORMS = ("fp16", "bf16", "int8", "codes")


class Two(nn.Module):
    """Two layers of one x, which is therefore quantized once."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(inner, out, bias=False)
        self.second = nn.Linear(inner, out, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both results."""
        return self.first(x), self.second(x)


def model_of(form: str, inner: int, out: int) -> tuple[nn.Module, str]:
    """Return the layers and the precision that give products of x in a form."""
    model = Two(inner, out) if form == "codes" else nn.Linear(inner, out, bias=False)
    return model.eval(), "int8" if form == "codes" else form


def floor_us(form: str, rows: int, inner: int, out: int) -> float:
    """Return the time of moving everything once."""
    row = (inner + 31) // 32 * 32 + 4 if form == "codes" else 4 * inner
    return (rows * (row + 4 * out) + 4 * inner * out) / copy_gbs() / 1e3


@torch.no_grad()
def times(form: str, rows: int, inner: int, out: int, calls: int = 10) -> dict[str, float]:
    """Return the median time of each kernel family in microseconds, by the beginning of its name."""
    model, precision = model_of(form, inner, out)
    compiled = gnnc.compile(model.cuda(), precision)
    x = torch.randn(rows, inner, device="cuda")
    for _ in range(3):
        compiled(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(calls):
            compiled(x)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name.removeprefix("void ").partition("<")[0]
            found.setdefault(name, []).append(event.time_range.elapsed_us())
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    given = parser.parse_args()
    print(
        "| x | form | product, µs | floor, µs | weight, µs | others |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in given.only:
        rows, inner, out = SHAPES[name]
        for form in given.forms:
            found = times(form, rows, inner, out)
            product, weight = found.pop("gnnc::gemm", 0.0), found.pop("gnnc::pack_weight", 0.0)
            others = ", ".join(f"{each.split('::')[-1]} {us:.1f}" for each, us in found.items())
            size = f"{name}, {rows} x {inner} to {out}"
            floor = floor_us(form, rows, inner, out)
            print(f"| {size} | {form} | {product:.1f} | {floor:.1f} | {weight:.1f} | {others} |", flush=True)


if __name__ == "__main__":
    main()
