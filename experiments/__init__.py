"""Experiments: the shipped checkpoint and its training, benchmarks, GPU runs, results."""
