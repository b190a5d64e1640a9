"""Parts of the `reorder` pass: rewrites that move linear layers and edge weights."""
