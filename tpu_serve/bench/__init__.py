"""Latency benchmarks."""
