"""The mark of cases that torch 2.11 cannot export: sizes that depend on values, which later versions can."""

import pytest
import torch

import gnnc

NOT_IN_2_11 = pytest.mark.xfail(
    torch.__version__.startswith("2.11."),
    raises=gnnc.GnncError,
    strict=True,
    reason="torch 2.11 cannot export sizes that depend on values here",
)
