"""CUDA graphs: recording a program's launches and replaying them."""
