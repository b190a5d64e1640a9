"""Trains a GCN on Cora in PyG, then through gnnc from the same weights: `python examples/train.py`."""

import argparse
import copy
from typing import Any

import torch
from cora import accuracy, gcn, load
from torch import nn
from torch_geometric.data import Data
from tqdm import trange

import gnnc


def fit(model: Any, data: Data, epochs: int, title: str) -> list[float]:
    """Train a model on Cora with Adam; return the loss of every epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    model.train()
    for _ in (bar := trange(epochs, desc=title, unit="epoch")):
        optimizer.zero_grad()
        logits = model(data.x, data.edge_index)
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def main() -> None:
    """Train both, and print losses and accuracies side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    options = parser.parse_args()
    data = load()
    torch.manual_seed(0)
    eager = gcn()
    compiled = gnnc.compile(copy.deepcopy(eager), options.precision)
    for title, model in (("PyG", eager), (f"gnnc {options.precision}", compiled)):
        torch.manual_seed(1)  # the same dropout
        losses = fit(model, data, options.epochs, title)
        score = accuracy(model.eval(), data, data.test_mask)
        print(f"{title}: last loss {losses[-1]:.3f}, test accuracy {score:.1f}%")


if __name__ == "__main__":
    main()
