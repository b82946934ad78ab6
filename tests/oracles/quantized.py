"""Group-wise quantisation in plain numpy, from its definition: each group by itself, without packed bytes."""

from __future__ import annotations

import numpy as np


def round_trip(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Return float32 rows [..., n] as read back from ``bits`` bits in groups of ``group`` elements. Minimum: largest
    float16 not above the smallest element; scale: nearest float16 to the span of codes; float32 arithmetic."""
    groups = np.asarray(rows, dtype=np.float32).reshape(*rows.shape[:-1], -1, group)
    lowest, highest = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    minimum = lowest.astype(np.float16)
    minimum = np.where(minimum > lowest, np.nextafter(minimum, np.float16(-np.inf)), minimum).astype(np.float32)
    levels = np.float32(2**bits - 1)
    scale = ((highest - minimum) / levels).astype(np.float16).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(np.clip((groups - minimum) * inverse, 0, levels))
    return (codes * scale + minimum).reshape(rows.shape)


def group_of_heads(head_dim: int) -> int:
    """Return the group size of keys or values: the largest divisor of a head's width up to 64."""
    for size in range(min(head_dim, 64), 0, -1):
        if head_dim % size == 0:
            return size
    raise ValueError(f"a head has {head_dim} elements")
