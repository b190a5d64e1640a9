"""The structure cache and the runner that computes graph structure once per distinct graph."""
