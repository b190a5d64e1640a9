"""Capture: a call of a model becomes a functional torch.fx graph of ATen calls."""

from gnnc.capture.export import Captured, capture

__all__ = ["Captured", "capture"]
