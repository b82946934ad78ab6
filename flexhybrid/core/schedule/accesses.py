"""What the tasks of a position read and write: slots of buffers, bytes of weight slots, blocks of pools.

Dependencies follow from these alone (``dependencies.py``), including which buffers are double and which single.
"""

from functools import cache

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, Pool
from flexhybrid.core.schedule.positions import Position
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Access
from flexhybrid.core.wave import Wave


@cache
def cell(name: str, number: int, part: int | None = None) -> Access:
    """Return the access to a slot of a buffer, or a mini-batch's own data; ``part``: a layer, or a chunk of a
    prompt."""
    return Access((name,) if part is None else (name, part), number, number + 1)


@cache
def bytes_of_slot(slot: int, start: int, end: int) -> tuple[Access, ...]:
    """Return the access to bytes [start, end) of a weight slot, () if empty. Byte 0 is the first streamed one."""
    return (Access(("weights", slot), start, end),) if start < end else ()


def host_hidden(step: MiniBatchStep) -> Access:
    return cell("host_hidden", step.mini_batch, step.chunk)


#: Single buffers: only the compute resource uses them, and it runs its tasks in order. CAPTURE doubles the attention
#: buffer; with one compute stream a second one would be unused.
GENERATED = cell("generated", 0)
QKV = cell("qkv", 0)
ATTENTION = cell("attention", 0)
ATTENDED = cell("attended", 0)
LOGITS = cell("logits", 0)
PLAIN = (cell("plain_weights", 0),)
PLAIN_ACT = cell("plain_act", 0)
PLAIN_KV = cell("plain_kv", 0)


class AccessMap:
    """The accesses of a wave's positions, by name."""

    def __init__(self, wave: Wave):
        self.wave = wave
        self.on_host = wave.policy.host_attends
        shape, layers = wave.shape, range(wave.shape.num_layers)
        self._streamed_from = [wave.placed_of(layer).streamed_from for layer in layers]
        self._sources = [shape.source_of(layer) for layer in layers]  # of keys and values
        self._keeps_states = [(state := shape.state_of(layer)) is not None and bool(state.tensors) for layer in layers]
        # Repeated in every iteration: the blocks of (pool, mini-batch), and the pools that a context is read from.
        self._extents: dict[tuple[str, int, bool], tuple[int, int]] = {}
        self._pools: dict[tuple, tuple[Access, ...]] = {}

    def ranks(self, position: Position) -> Access:
        k = position.step.mini_batch
        return cell("ranks", k, position.layer)

    def weights(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """Return the streamed bytes of the position's layer within [start, end)."""
        first = self._streamed_from[position.layer]
        return bytes_of_slot(position.weight_slot, max(start, first) - first, end - first)

    def matrices(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """Return what a product reads of the layer: the streamed bytes, or their unpacked form."""
        return PLAIN if "dequantize_weights" in position.works else self.weights(position, start, end)

    def hidden(self, position: Position) -> Access:
        k = position.step.mini_batch
        if self.wave.policy.hidden == "device":
            return cell("hidden", k, position.step.chunk)
        return cell("hidden", position.slot)

    def state(self, position: Position) -> Access:
        """Return the kept states of a mini-batch's requests in the position's layer."""
        return cell("states", position.step.mini_batch, position.layer)

    def computed_states(self, position: Position) -> tuple[Access, ...]:
        """Return the states that the layer updates: the link's buffer, or the device's own; () without states."""
        if "store_state" in position.works:
            return (cell("state_buffer", position.slot),)
        return (self.state(position),) if self._keeps_states[position.layer] else ()

    def qkv(self, position: Position) -> Access:
        """Return the QKV buffer: one, or two if the next mini-batch projects early."""
        return cell("qkv", position.slot) if self.on_host else QKV

    def attended(self, position: Position) -> Access:
        """Return the attention output: two with attention on the host, because its output for the next mini-batch
        arrives while this one is finished. A single buffer would block the link, and the weights queued on it."""
        return cell("attended", position.slot) if self.on_host else ATTENDED

    def pools(self, position: Position, representation: str, tier: str) -> tuple[Access, ...]:
        """Return the pools of a tier that hold the position's context."""
        step = position.step
        common = {segment.entry for segment in step.shared_segments if segment.tier == tier}
        key = step.mini_batch, position.layer, representation, tier, tuple(sorted(common))
        if key not in self._pools:
            own = [s.entry for s in step.segments if s.representation == representation and s.tier == tier]
            self._pools[key] = self._pools_of(position, own, representation, common)
        return self._pools[key]

    def attended_pools(self, position: Position) -> tuple[Access, ...]:
        """Return the pools that the host attends to beside the device."""
        on_host = [segment for common in position.step.commons for segment in common.on_host]
        key = position.step.mini_batch, position.layer, "attended", "host", bool(on_host)
        if key not in self._pools:
            self._pools[key] = self._pools_of(position, [ATTENDED_ENTRY], "kv", {ATTENDED_ENTRY} if on_host else set())
        return self._pools[key]

    def _pools_of(
        self, position: Position, entries: list[str], representation: str, common: set[str]
    ) -> tuple[Access, ...]:
        """Return the pools of entries; of those in ``common`` the shared blocks too."""
        return tuple(
            self.pool(position, entry, representation, shared)
            for shared, of in ((False, entries), (True, [entry for entry in entries if entry in common]))
            for entry in of
        )

    def pool(self, position: Position, entry: str, representation: str, shared: bool = False) -> Access:
        """Return the blocks of a mini-batch in one layer of a pool, or all ``shared`` ones. A layer that borrows keys
        and values uses the lender's."""
        space = entry if "(" not in entry else f"{entry}.{representation}"
        name, k = entry, len(self.wave.blocks)
        if not shared:
            name, k = Pool(entry, position.step.window).name, position.step.mini_batch
        of_whole = position.step.whole  # layers that drop nothing have pools of their own size
        extent = self._extents.get((name, k, of_whole))
        if extent is None:
            batch = of_whole and self.wave.whole or self.wave
            part = (self.wave.shared.blocks if shared else batch.blocks[k]).pools[name]
            extent = self._extents[name, k, of_whole] = part.first, part.first + part.num_blocks
        return Access((space, self._sources[position.layer]), *extent)
