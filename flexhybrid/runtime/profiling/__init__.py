"""Measured times of this machine: kernels, links, disks, and the processor time that others take."""
