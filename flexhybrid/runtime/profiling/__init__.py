"""Measured times of this machine: kernels, links, disks."""
