"""Calibration: train, for one model, what predicts how much a text needs each token."""
