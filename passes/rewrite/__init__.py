"""Helpers that passes use to edit a graph: new nodes, merged structures, groups of nodes."""
