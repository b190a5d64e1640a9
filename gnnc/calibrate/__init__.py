"""Calibration: measures the rates of this machine that the cost model predicts with."""
