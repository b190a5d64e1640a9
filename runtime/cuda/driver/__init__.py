"""The CUDA driver layer: NVRTC compilation, launches, streams and readbacks."""
