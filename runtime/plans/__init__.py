"""What kernels are given, read off the graph: the same for every backend."""
