"""Printed programs, summaries, explanations and drawings of a compiled model."""
