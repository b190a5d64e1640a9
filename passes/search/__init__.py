"""The search of `precision="auto"`: sensitivities, costs and the exact choice of options."""
