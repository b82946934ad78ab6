"""Thresholds and skips of a cascade: fitted confidence, Algorithm 1 and 2, the exact search."""
