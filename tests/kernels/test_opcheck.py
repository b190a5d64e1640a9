"""The C++ ops write what their schemas say that they write, and nothing else.

They fill tensors that they are given, stand in no graph and have no gradient: of `opcheck`'s tests, only that
of the schema has a meaning for them.
"""

import pytest
import torch
from hostile import cpu_samples
from kernel_graphs import ops
from torch.library import opcheck

OVER_A_CSR = {"spmm", "sddmm", "edge_softmax", "edge_softmax_backward", "softmax_sum", "attention"} | {
    "attention_backward_rows",
    "attention_backward_columns",
    "edge_body",
}
IN_BOTH = OVER_A_CSR | {"replay"}


def _registered(namespace: str) -> set[str]:
    ops()
    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    return {name.partition("::")[2] for name in schemas if name.startswith(f"{namespace}::")}


def test_every_registered_op_has_a_case() -> None:
    assert _registered("gnnc_cpu") == set(cpu_samples())


def test_programs_have_the_ops_over_a_csr_without_the_checks_of_ids() -> None:
    assert _registered("gnnc_cpu_valid") == IN_BOTH


@pytest.mark.parametrize("name", cpu_samples())
def test_schema(name: str) -> None:
    spaces = [ops(), torch.ops.gnnc_cpu_valid] if name in IN_BOTH else [ops()]
    for sample in cpu_samples(width=64)[name]:  # opcheck copies arguments without the padding of int8 rows
        for space in spaces:
            op = getattr(space, name).default
            assert opcheck(op, sample, test_utils="test_schema") == {"test_schema": "SUCCESS"}
