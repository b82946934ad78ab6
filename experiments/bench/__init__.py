"""Benchmarks: every figure that has a bar."""
