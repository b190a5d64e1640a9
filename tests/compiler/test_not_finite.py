"""A NaN or infinite row of the input shows in the rows where eager shows it, or is our error."""

import math

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gnnc

MODELS = {
    "gcn": lambda: GCN(8, 16, 2, 7),
    "sage-max": lambda: GraphSAGE(8, 16, 2, 7, aggr="max"),
    "gat": lambda: GAT(8, 16, 2, 7, heads=2),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("precision", "check"), [("fp32", "scale"), ("bf16", "scale"), ("int8", "scale"), ("int8", "off")]
)
@torch.no_grad()
def test_models(name: str, precision: str, check: str) -> None:
    model, x, edge_index = MODELS[name]().eval(), torch.randn(40, 8), torch.randint(40, (2, 60))
    edge_index[1].clamp_(max=35)
    fast = gnnc.compile(model, precision, backend="cpu", check_finite=check)
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[int(edge_index[0, 3]), 2] = bad
        if (precision, check) == ("int8", "scale"):
            with pytest.raises(gnnc.PrecisionError, match="not finite"):
                fast(spoilt, edge_index)
            continue
        want = model(spoilt, edge_index).isfinite().all(1)
        assert want.any() and not want.all()
        assert torch.equal(fast(spoilt, edge_index).isfinite().all(1), want)
    assert fast(x, edge_index).isfinite().all()
