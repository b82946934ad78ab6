"""Attention through a table of blocks in plain torch, in place of launches of Triton's kernels."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS


def launch(query, memories, table, rule, given, partial) -> None:
    """Stand in for ``attend_triton.launch``, by indices and products; the host waits for nothing."""
    (batch, heads, d), (target, sums) = query.shape, given
    groups, device = table.groups, query.device
    index = table.starts[:-1, None] + torch.arange(table.most, device=device)
    here = index < table.starts[1:, None]
    index = torch.where(here, index, 0)
    place, kind = table.places[index][:, None, :, None], torch.where(here, table.kinds[index], 0)[:, None, :, None]
    token, head = torch.arange(BLOCK_TOKENS, device=device), torch.arange(groups, device=device)[:, None, None]
    seen = (token >= (kind >> 8 & 31)) & (token < (kind >> 3 & 31))  # [B, 1, n, 16]
    head_major = (kind >> 13 & 1) == 1
    row = torch.where((kind >> 14 & 1) == 1, 2 * groups * d + heads * d, 2 * groups * d)
    keys_at = place + torch.where(
        head_major, head * BLOCK_TOKENS * d + token * d, head * d + token * row
    )  # [B, G, n, 16]
    values_at = keys_at + torch.where(head_major, groups * BLOCK_TOKENS * d, groups * d)
    element = torch.arange(d, device=device)

    def read(at: torch.Tensor) -> torch.Tensor:
        """Return elements [B, G, n · 16, d] in float32, with zeros in places that no query sees."""
        found = torch.zeros((*at.shape, d), dtype=memories[0].dtype, device=device)
        for number, memory in enumerate(memories):
            mine = ((kind & 7) == number) & seen
            values = memory.view(-1)[torch.where(mine, at, 0)[..., None] + element]
            found = torch.where(mine[..., None], values, found)
        return found.flatten(2, 3).float()

    scores = torch.matmul(query.unflatten(1, (groups, -1)).float(), read(keys_at).transpose(-1, -2)) * rule.scaling
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = torch.where(seen.flatten(2)[:, :, None], scores, -torch.inf)
    logarithm = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sums is not None:
        sums.copy_(logarithm.view(batch, heads))
    if rule.sinks_H is not None:
        logarithm = torch.logaddexp(logarithm, rule.sinks_H.float().view(1, groups, -1, 1))
    weights = torch.exp(scores - torch.where(logarithm == -torch.inf, 0.0, logarithm))
    if partial is not None:
        partial.fill_(0)
    target.copy_(torch.matmul(weights, read(values_at)).view(batch, heads, d))


#: The same as one operation that takes addresses and constants, as a kernel does: what the table says, how far it goes
#: as well, is read when it runs.
LIBRARY = torch.library.Library("flexhybrid_oracles", "DEF")
LIBRARY.define(
    "attend(Tensor query, Tensor[] memories, Tensor starts, Tensor places, Tensor kinds, Tensor? sinks, int groups, "
    "float scaling, float? softcap, Tensor(a!) target, Tensor(b!)? sums, Tensor(c!)? partial) -> ()"
)


def _attend(query, memories, starts, places, kinds, sinks, groups, scaling, softcap, target, sums, partial) -> None:
    starts = starts[: len(query) + 1]
    table = SimpleNamespace(starts=starts, places=places, kinds=kinds, groups=groups, most=int(starts.diff().max()))
    launch(
        query,
        memories,
        table,
        SimpleNamespace(scaling=scaling, softcap=softcap, sinks_H=sinks),
        (target, sums),
        partial,
    )


LIBRARY.impl("attend", _attend, "CPU")


def launch_by_address(query, memories, table, rule, given, partial) -> None:
    """Stand in for ``attend_triton.launch`` by an operation that reads the table when it runs."""
    where = (query, list(memories), table.starts, table.places, table.kinds, rule.sinks_H)
    torch.ops.flexhybrid_oracles.attend(*where, table.groups, rule.scaling, rule.softcap, *given, partial)
