"""Pools, buffers and landing strips of an engine, allocated once from the sizes that the budget check added up."""

from __future__ import annotations

import torch

from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import NUM_SLOTS, BufferSizes
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.work import MIN_KV_GEN_ROWS
from flexhybrid.runtime.host_memory import HostMemory


class Buffers:
    """Every tensor that outlives a task. All start at zero: padding is masked, but must never be NaN.

    Block layouts: kv [2, G, 16, d], so that a block's keys of one head are contiguous; act [16, h].
    ``pools[kind]`` is [layer, block, …]; one block id serves all layers.
    """

    def __init__(self, shape: ModelShape, sizes: BufferSizes, dtype: torch.dtype, device: torch.device):
        self.shape, self.sizes = shape, sizes
        self.host_memory = HostMemory(pinned=device.type == "cuda")
        groups, d = shape.num_kv_heads, shape.head_dim
        block = {"kv": (2, groups, BLOCK_TOKENS, d), "act": (BLOCK_TOKENS, shape.hidden)}
        row = {"kv": (shape.kv_width,), "act": (shape.hidden,)}

        def on_device(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def on_host(*size: int) -> torch.Tensor:
            return self.host_memory.zeros(size, dtype)

        self.pools: dict[str, torch.Tensor] = {}
        self.staging: dict[str, torch.Tensor] = {}
        self.strips: dict[str, torch.Tensor] = {}
        for kind, blocks in sizes.pool_blocks.items():
            representation, tier = kind.split("@")
            make = on_device if tier == "device" else on_host
            self.pools[kind] = make(shape.num_layers, blocks, *block[representation])
            self.staging[kind] = on_device(NUM_SLOTS, sizes.staged_rows[kind], *row[representation])
            if tier == "host":
                self.strips[kind] = on_host(NUM_SLOTS, sizes.staged_rows[kind], *row[representation])
        self.act_buffer = on_device(NUM_SLOTS, sizes.act_buffer_blocks, *block["act"])
        self.kv_buffer = on_device(NUM_SLOTS, sizes.kv_buffer_blocks, *block["kv"])
        generated = max(sizes.act_buffer_blocks * BLOCK_TOKENS, MIN_KV_GEN_ROWS) if sizes.act_buffer_blocks else 0
        self.generated = on_device(generated, shape.kv_width)
        self.attention = on_device(2, sizes.attention_tokens * groups * d)

    def attention_views(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, G, T, d] over the attention buffer."""
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        used = batch * groups * tokens * d
        keys, values = self.attention[0, :used], self.attention[1, :used]
        return keys.view(batch, groups, tokens, d), values.view(batch, groups, tokens, d)
