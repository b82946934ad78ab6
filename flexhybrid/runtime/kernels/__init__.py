"""Kernels: attention, rotation, quantisation, sampling."""
