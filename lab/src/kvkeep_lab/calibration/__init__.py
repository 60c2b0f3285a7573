"""Calibration: train, for one model, a network that predicts how much a text needs each token."""
