import pytest
from cuda_build import ARCHITECTURES, compile_kernels

WIDTHS = (16, 47, 64, 602)
KINDS = {
    "fp32": "Element::f32, {}, Reduce::sum",
    "fp32 weights": "Element::f32, {}, Reduce::mean, Value::real",
    "fp16": "Element::f16, {}, Reduce::sum",
    "bf16 weights": "Element::bf16, {}, Reduce::sum, Value::real",
    "int8": "Element::i8, {}, Reduce::sum",
    "int8 weights": "Element::i8, {}, Reduce::sum, Value::integer",
    "int8 powers": "Element::i8, {}, Reduce::sum, Value::none, Scale::power",
    "int8 real": "Element::i8, {}, Reduce::sum, Value::real, Scale::row",
    "int8 max": "Element::i8, {}, Reduce::max",
}


def kernel_names(config: str) -> tuple[str, ...]:
    given = f"gnnc::SpmmConfig<{config}>, gnnc::StoreFloat"
    return (f"gnnc::spmm<{given}>", f"gnnc::spmm_combine<{given}>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(architecture: str, kind: str) -> None:
    configs = [KINDS[kind].format(width).replace("Element::", "gnnc::Element::") for width in WIDTHS]
    for scope in ("Reduce", "Value", "Scale"):
        configs = [config.replace(f"{scope}::", f"gnnc::{scope}::") for config in configs]
    names = tuple(name for config in configs for name in kernel_names(config))
    _, report = compile_kernels('#include "spmm.cuh"', names, architecture)
    assert len(report) == len(names)
    assert all(kernel.spilled == 0 and kernel.stack == 0 for kernel in report.values()), report
