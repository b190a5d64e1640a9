"""Parts of `assign` for `precision="auto"`: sensitivities, costs and the exact choice of options."""
