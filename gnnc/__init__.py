"""Compiles graph neural networks to low precision."""
