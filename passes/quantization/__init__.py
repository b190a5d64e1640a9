"""Parts of the `assign` and `quantize` passes: number formats, plans and observed ranges."""
