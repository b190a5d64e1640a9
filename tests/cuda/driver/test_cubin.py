"""What is read in compiled kernels."""

import pytest

from gnnc.runtime.cuda.driver import nvrtc
from gnnc.runtime.cuda.driver.cubin import kernels, waiting_kernels

pytestmark = pytest.mark.usefixtures("compiler")
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
SOURCE = f"""
__global__ void never(const int* from, int* to) {{ *to = *from; }}
__global__ void first(const int* from, int* to) {{ {WAIT} *to = __ldg(from); }}
__global__ void late(const int* from, int* to) {{
  const int v = *static_cast<const volatile int*>(from);
  {WAIT}
  *to = v;
}}
"""
NAMES = ("never", "first", "late")


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_kernels_that_wait_before_they_read(architecture: str) -> None:
    machine = nvrtc.compile_source(SOURCE, NAMES, architecture)
    assert set(kernels(machine.cubin)) == set(machine.symbols.values())
    assert waiting_kernels(machine.cubin) == {machine.symbols["first"]}
