"""The cost model, the receptive-field metric and the quantization-error metrics."""
