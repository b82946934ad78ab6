"""Where weights and caches lie: checkpoints, host memory, the disk."""
