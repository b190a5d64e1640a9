"""Parts of the `raise` pass: regions of per-edge ops and the primitives that replace them."""
