"""Arguments of kernels, read off the graph: the same for every backend."""
