"""Times the matrix products of the CUDA backend beside their floor and torch's.

    python benchmarks/cuda_gemm.py [--only cora facebook ...] [--forms fp16 int8 ...]

Every product is a compiled model of one layer, or of two that share the quantized values of x (the form
"quantized"); times are those of its kernels, by torch.profiler. The floor is x, the weight and the FP32
result once each at the bandwidth of a device copy. The peer is cuBLAS or cuBLASLt through torch on operands
that are already in the narrow type (``torch.mm``, ``torch._int_mm``), which writes 16 bits or int32: the
conversion of x to that type, and the scales, bias and next type of the result, are separate kernels, and not
in its time.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from cuda_kernels import copy_gbs, machine, median_ms
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
    "eight heads": (169343, 128, 512),
}
RESULTS = Path(__file__).resolve().parent / "results" / "cuda-gemm.json"
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FORMS = ("fp16", "bf16", "int8", "quantized")


class TwoLayers(nn.Module):
    """Two layers that read one x, which is therefore quantized once."""

    def __init__(self, inner: int, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(inner, out, bias=False)
        self.second = nn.Linear(inner, out, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of both layers."""
        return self.first(x), self.second(x)


def model_of(form: str, inner: int, out: int) -> tuple[nn.Module, str]:
    """Return the layers and the precision whose products read x in a form."""
    model = TwoLayers(inner, out) if form == "quantized" else nn.Linear(inner, out, bias=False)
    return model.eval(), "int8" if form == "quantized" else form


def floor_us(form: str, rows: int, inner: int, out: int) -> float:
    """Return the microseconds of moving x, weight and result once."""
    row = (inner + 31) // 32 * 32 + 4 if form == "quantized" else 4 * inner
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
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(calls):
            compiled(x)
        torch.cuda.synchronize()
    times_of: dict[str, list[float]] = {}
    for event in trace.events() or ():
        if event.device_type.name == "CUDA":
            name = event.name.removeprefix("void ").partition("<")[0]
            times_of.setdefault(name, []).append(event.time_range.elapsed_us())
    return {name: statistics.median(times) for name, times in times_of.items()}


def peer_us(form: str, rows: int, inner: int, out: int) -> float:
    """Return the time of torch's product, in microseconds; columns are rounded up to a multiple of eight."""
    inner, out = (-(-size // 8) * 8 for size in (inner, out))
    if form in HALVES:
        x, w = (torch.randn(n, inner, device="cuda", dtype=HALVES[form]) for n in (rows, out))
        return 1e3 * median_ms(lambda: torch.mm(x, w.t()))
    x, w = (torch.randint(-127, 128, (n, inner), device="cuda", dtype=torch.int8) for n in (rows, out))
    return 1e3 * median_ms(lambda: torch._int_mm(x, w.t()))


def row(form: str, rows: int, inner: int, out: int) -> dict[str, float]:
    """Return the recorded figures of one product."""
    times_of = times(form, rows, inner, out)
    result = {
        "product_us": times_of.pop("gnnc::gemm", 0.0),
        "floor_us": floor_us(form, rows, inner, out),
        "weight_us": times_of.pop("gnnc::pack_weights", 0.0),
        "others_us": sum(times_of.values()),
        "torch_us": peer_us(form, rows, inner, out),
    }
    return {name: round(us, 1) for name, us in result.items()}


def main() -> None:
    """Print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    print("| x | form | product, µs | floor | weight | others | torch |\n" + "| --- " * 7 + "|")
    for name in args.only:
        shape = "{} x {} to {}".format(*SHAPES[name])
        results[name] = {form: row(form, *SHAPES[name]) for form in args.forms}
        for form, figures in results[name].items():
            print(f"| {name}, {shape} | {form} | {' | '.join(map(str, figures.values()))} |", flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
