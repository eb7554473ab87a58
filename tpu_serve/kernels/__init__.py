"""Pallas kernels, one folder each."""
