"""Parts of the `assign` and `quantize` passes: number formats, saved plans, observed ranges, bf16."""
