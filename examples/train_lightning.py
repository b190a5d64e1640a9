"""Trains a GCN on Cora through gnnc in PyTorch Lightning: `python examples/train_lightning.py`.

`pip install ".[examples]"` in a clone brings Lightning.
"""

import argparse
from typing import Any

import torch
from cora import gcn, load
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import gnnc

try:
    import pytorch_lightning as lightning
except ModuleNotFoundError as error:
    if error.name != "pytorch_lightning":
        raise
    raise SystemExit('this example needs PyTorch Lightning: pip install ".[examples]" in the clone') from None


class Classifier(lightning.LightningModule):
    """A compiled model with its loss and optimizer; a batch is the whole graph."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model = gnnc.compile(model, precision)

    def training_step(self, data: Data, _: int) -> Tensor:
        """Return the loss on the training nodes."""
        logits = self.model(data.x, data.edge_index)
        loss = nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        self.log("loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, data: Data, _: int) -> None:
        """Measure the accuracy on the validation nodes."""
        self._log_accuracy("val", data, data.val_mask)

    def test_step(self, data: Data, _: int) -> None:
        """Measure the accuracy on the test nodes."""
        self._log_accuracy("test", data, data.test_mask)

    def configure_optimizers(self) -> Any:
        """Return Adam over the parameters of the model."""
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)

    def _log_accuracy(self, name: str, data: Data, mask: Tensor) -> None:
        hits = self.model(data.x, data.edge_index).argmax(-1) == data.y
        self.log(name, 100.0 * hits[mask].float().mean(), prog_bar=True, batch_size=1)


def main() -> None:
    """Train, and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16", "int8"])
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    graph = DataLoader([load()], batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    classifier = Classifier(gcn(), options.precision)
    trainer.fit(classifier, graph, graph)
    trainer.test(classifier, graph)


if __name__ == "__main__":
    main()
