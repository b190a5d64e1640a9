"""Training through what wraps a compiled model: torch.compile, DDP, autocast, checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv
from training_steps import CLASSES, EDGES, WIDTH, Net, X, assert_alike, compare, directed_graph

import gnnc


class Checkpointed(nn.Module):
    """Two layers, of which the first is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(WIDTH, 8), GCNConv(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Any = checkpoint(self.first, x, edge_index, use_reentrant=False)
        return self.second(h.relu(), edge_index)


class Reentrant(Checkpointed):
    """A checkpoint that runs its function without gradients, and again with them; dropout in it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h: Any = checkpoint(self.dropped, x * self.second.bias.mean().exp(), edge_index, use_reentrant=True)
        return self.second(h.relu(), edge_index)

    def dropped(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.dropout(self.first(x, edge_index), 0.3, self.training)


def squared(call: Any, owner: nn.Module) -> None:
    call(X, EDGES).square().sum().backward()


@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_a_model_with_a_checkpoint(make: type[nn.Module]) -> None:
    model = make().train()

    def step(call: Any, owner: nn.Module) -> None:
        torch.manual_seed(0)
        squared(call, owner)

    compare(model, gnnc.compile(model, "fp32"), step)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compile() -> None:
    model = Net().train()
    eager = copy.deepcopy(model)
    squared(torch.compile(model, backend="gnnc", options={"precision": "fp32"}), model)
    squared(eager, eager)
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert_alike(parameter.grad, expected.grad)


def test_autocast_gives_the_dtypes_of_eager() -> None:
    model = Net().train()
    eager = copy.deepcopy(model)
    compiled = gnnc.compile(model, "fp32")
    dtypes, gradients = [], []
    for call in (compiled, eager):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(X, EDGES)
            loss = out.float().square().sum()
        loss.backward()
        dtypes.append(out.dtype)
    for owner in (model, eager):
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in owner.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in owner.parameters() if p.grad is not None]))
    assert dtypes[0] == dtypes[1]
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999


def train_a_share(rank: int, folder: str) -> None:
    """Run a step on the graph of a rank, and store the averaged gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = sharded_model()
    wrapped = DistributedDataParallel(gnnc.compile(model, "fp32"))
    wrapped(*directed_graph(seed=rank)).square().mean().backward()
    torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded_model() -> nn.Module:
    """Return a model without statistics of a batch, which each rank has of its own."""
    torch.manual_seed(0)
    model = Net()
    model.norm = nn.LayerNorm(8)  # pyright: ignore[reportAttributeAccessIssue]
    return model.train()


@pytest.mark.slow
def test_ddp_averages_the_gradients(tmp_path: Path) -> None:
    spawn(train_a_share, args=(str(tmp_path),), nprocs=2)
    expected = []
    for seed in (0, 1):
        eager = sharded_model()
        eager(*directed_graph(seed=seed)).square().mean().backward()
        expected.append([p.grad for p in eager.parameters()])
    for rank in (0, 1):
        for found, *shares in zip(torch.load(tmp_path / f"{rank}.pt"), *expected, strict=True):
            assert_alike(found, sum(shares) / 2)
