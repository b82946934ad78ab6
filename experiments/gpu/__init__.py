"""Measurements that need a GPU."""
