"""The reads and writes of a position's tasks: slots of buffers, bytes of weight slots, and blocks of pools.

All dependencies follow from them (``dependencies.py``). Buffers that have two slots here are double buffers.
"""

from functools import cache

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, Pool
from flexhybrid.core.schedule.positions import Position
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Access
from flexhybrid.core.wave import Wave


@cache
def cell(name: str, number: int, part: int | None = None) -> Access:
    """Return the access to a slot of a buffer, or to data of a mini-batch. ``number``: slot or mini-batch; ``part``:
    layer, or chunk of a prompt."""
    return Access((name,) if part is None else (name, part), number, number + 1)


@cache
def bytes_of_slot(slot: int, start: int, end: int) -> tuple[Access, ...]:
    """Return the access to bytes [start, end) of a weight slot, () if empty. Byte 0 is the first streamed byte."""
    return (Access(("weights", slot), start, end),) if start < end else ()


def host_hidden(step: MiniBatchStep) -> Access:
    """Return the access to a step's hidden states on the host."""
    return cell("host_hidden", step.mini_batch, step.chunk)


#: Single buffers, which only the compute resource uses, one task at a time. CAPTURE doubles the attention buffer, but
#: with one compute stream the second one would be unused.
GENERATED = cell("generated", 0)
QKV = cell("qkv", 0)
ATTENTION = cell("attention", 0)
ATTENDED = cell("attended", 0)
LOGITS = cell("logits", 0)
PLAIN = (cell("plain_weights", 0),)
PLAIN_ACT = cell("plain_act", 0)
PLAIN_KV = cell("plain_kv", 0)


class AccessMap:
    """Makes the accesses of a wave's positions."""

    def __init__(self, wave: Wave):
        self.wave = wave
        self.on_host = wave.policy.host_attends
        shape, layers = wave.shape, range(wave.shape.num_layers)
        self._streamed_from = [wave.placed_of(layer).streamed_from for layer in layers]
        self._sources = [shape.source_of(layer) for layer in layers]
        self._keeps_states = [(state := shape.state_of(layer)) is not None and bool(state.tensors) for layer in layers]
        # Results that repeat in every iteration: (pool, mini-batch, whole) -> blocks [first, end); and of ``pools``.
        self._extents: dict[tuple[str, int, bool], tuple[int, int]] = {}
        self._pools: dict[tuple, tuple[Access, ...]] = {}

    def ranks(self, position: Position) -> Access:
        """Return a selection's ranking of a mini-batch's tokens in the position's layer."""
        k = position.step.mini_batch
        return cell("ranks", k, position.layer)

    def weights(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """Return the streamed bytes of the position's layer that are within [start, end)."""
        first = self._streamed_from[position.layer]
        return bytes_of_slot(position.weight_slot, max(start, first) - first, end - first)

    def matrices(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """Return the streamed bytes within [start, end) as a product reads them: unpacked if they are packed."""
        return PLAIN if "dequantize_weights" in position.works else self.weights(position, start, end)

    def hidden(self, position: Position) -> Access:
        """Return the hidden states of the position's step on the device."""
        k = position.step.mini_batch
        if self.wave.policy.hidden == "device":
            return cell("hidden", k, position.step.chunk)
        return cell("hidden", position.slot)

    def routed(self, position: Position) -> Access:
        """Return the rows of the position's step that wait for experts, and the experts' output for them."""
        return cell("routed", position.step.mini_batch, position.step.chunk)

    def state(self, position: Position) -> Access:
        """Return the recurrent states of a mini-batch's requests in the position's layer, where they are kept."""
        return cell("states", position.step.mini_batch, position.layer)

    def computed_states(self, position: Position) -> tuple[Access, ...]:
        """Return the recurrent states that the layer updates: in a buffer if they are kept on the host, else where they
        are kept; () without states."""
        if "store_state" in position.works:
            return (cell("state_buffer", position.slot),)
        return (self.state(position),) if self._keeps_states[position.layer] else ()

    def qkv(self, position: Position) -> Access:
        """Return the buffer of queries, keys and values. It is double with attention on the host, because the next
        mini-batch projects early."""
        return cell("qkv", position.slot) if self.on_host else QKV

    def attended(self, position: Position) -> Access:
        """Return the buffer of attention's output. It is double with attention on the host, because the output for the
        next mini-batch arrives while this one is finished. A single buffer would block the link, and the loads of
        weights that are queued on it."""
        return cell("attended", position.slot) if self.on_host else ATTENDED

    def pools(self, position: Position, representation: str, tier: str) -> tuple[Access, ...]:
        """Return the blocks in a tier's pools that hold the position's context."""
        step = position.step
        common = {segment.entry for segment in step.shared_segments if segment.tier == tier}
        key = step.mini_batch, position.layer, representation, tier, tuple(sorted(common))
        if key not in self._pools:
            own = [s.entry for s in step.segments if s.representation == representation and s.tier == tier]
            self._pools[key] = self._pools_of(position, own, representation, common)
        return self._pools[key]

    def attended_pools(self, position: Position) -> tuple[Access, ...]:
        """Return the blocks to which the host attends while the device attends to others."""
        on_host = [segment for common in position.step.commons for segment in common.on_host]
        key = position.step.mini_batch, position.layer, "attended", "host", bool(on_host)
        if key not in self._pools:
            self._pools[key] = self._pools_of(position, [ATTENDED_ENTRY], "kv", {ATTENDED_ENTRY} if on_host else set())
        return self._pools[key]

    def _pools_of(self, position: Position, entries: list[str], kept: str, common: set[str]) -> tuple[Access, ...]:
        """Return the blocks in the pools of entries, and the shared blocks of those in ``common``. ``kept``: the
        representation, "kv" or "act"."""
        own = [self.pool(position, entry, kept) for entry in entries]
        return (*own, *(self.pool(position, entry, kept, shared=True) for entry in entries if entry in common))

    def pool(self, position: Position, entry: str, representation: str, shared: bool = False) -> Access:
        """Return the blocks of a mini-batch in one layer of a pool, or all ``shared`` blocks. A layer that borrows keys
        and values uses its source's blocks."""
        space = entry if "(" not in entry else f"{entry}.{representation}"
        name, k = entry, len(self.wave.blocks)
        if not shared:
            name, k = Pool(entry, position.step.window).name, position.step.mini_batch
        whole = position.step.whole  # layers that keep all tokens have pools of another size
        extent = self._extents.get((name, k, whole))
        if extent is None:
            batch = whole and self.wave.whole or self.wave
            part = (self.wave.shared.blocks if shared else batch.blocks[k]).pools[name]
            extent = self._extents[name, k, whole] = part.first, part.first + part.num_blocks
        return Access((space, self._sources[position.layer]), *extent)
