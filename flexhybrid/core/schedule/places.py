"""What the tasks of a position read and write: slots of buffers, bytes of weight slots, blocks of pools.

Two tasks depend on each other where these overlap (core/dependencies.py), so that each fact about which buffer is
double and which is single stands here.
"""

from functools import cache

from flexhybrid.core.context.cache_entries import Pool
from flexhybrid.core.schedule.positions import Position
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Access
from flexhybrid.core.wave import Wave


@cache
def cell(name: str, number: int, part: int | None = None) -> Access:
    """One slot of a buffer, or what belongs to one mini-batch; ``part``: in one layer, or one chunk of a prompt."""
    return Access((name,) if part is None else (name, part), number, number + 1)


@cache
def bytes_of_slot(slot: int, start: int, end: int) -> tuple[Access, ...]:
    """Bytes [start, end) of a weight slot; nothing where there are none. The slot's first byte is the first one that is
    streamed of the layer in it."""
    return (Access(("weights", slot), start, end),) if start < end else ()


def host_hidden(step: MiniBatchStep) -> Access:
    return cell("host_hidden", step.mini_batch, step.chunk)


#: Buffers of which there is one, used by the compute resource alone: its first-in-first-out order guards them. The
#: attention buffer is one of them; CAPTURE doubles it, but with one compute stream a second one would never be used.
GENERATED = cell("generated", 0)
QKV = cell("qkv", 0)
ATTENTION = cell("attention", 0)
ATTENDED = cell("attended", 0)
LOGITS = cell("logits", 0)
PLAIN = (cell("plain_weights", 0),)
PLAIN_ACT = cell("plain_act", 0)
PLAIN_KV = cell("plain_kv", 0)


class AccessMap:
    """What a wave's positions read and write, by name."""

    def __init__(self, wave: Wave):
        self.wave = wave
        self.on_host = wave.policy.attention == "host"
        shape, layers = wave.shape, range(wave.shape.num_layers)
        self._streamed_from = [wave.placed_of(layer).streamed_from for layer in layers]
        self._sources = [shape.source_of(layer) for layer in layers]  # of keys and values
        self._keeps_states = [(state := shape.state_of(layer)) is not None and bool(state.tensors) for layer in layers]
        # What every iteration names anew: the blocks of (pool, mini-batch), and the pools that a mini-batch's context
        # in a layer is read from.
        self._extents: dict[tuple[str, int], tuple[int, int]] = {}
        self._pools: dict[tuple, tuple[Access, ...]] = {}

    def ranks(self, position: Position) -> Access:
        k = position.step.mini_batch
        return cell("ranks", k, position.layer)

    def weights(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """Streamed bytes of the position's layer within [start, end)."""
        first = self._streamed_from[position.layer]
        return bytes_of_slot(position.weight_slot, max(start, first) - first, end - first)

    def matrices(self, position: Position, start: int, end: int) -> tuple[Access, ...]:
        """What a product reads of the layer: the streamed bytes themselves, or what was made of them."""
        return PLAIN if "dequantize_weights" in position.works else self.weights(position, start, end)

    def hidden(self, position: Position) -> Access:
        k = position.step.mini_batch
        if self.wave.policy.hidden == "device":
            return cell("hidden", k, position.step.chunk)
        return cell("hidden", position.slot)

    def state(self, position: Position) -> Access:
        """The states of a mini-batch's requests in the position's layer, where they are kept."""
        return cell("states", position.step.mini_batch, position.layer)

    def computed_states(self, position: Position) -> tuple[Access, ...]:
        """The states that the layer reads and changes: those that the link brings and takes, or those of the device;
        none where it has none."""
        if "store_state" in position.works:
            return (cell("state_buffer", position.slot),)
        return (self.state(position),) if self._keeps_states[position.layer] else ()

    def qkv(self, position: Position) -> Access:
        """One buffer does for one compute resource; two where the next mini-batch projects early."""
        return cell("qkv", position.slot) if self.on_host else QKV

    def attended(self, position: Position) -> Access:
        """The same of what attention gives: the host's output for a mini-batch comes while the one before it is
        finished. One place for both would let the link, and the weights behind it in its queue, wait for that."""
        return cell("attended", position.slot) if self.on_host else ATTENDED

    def pools(self, position: Position, representation: str, tier: str) -> tuple[Access, ...]:
        """The pools of a tier that the position's context is read from."""
        step = position.step
        common = {segment.entry for segment in step.shared_segments if segment.tier == tier}
        key = step.mini_batch, position.layer, representation, tier, tuple(sorted(common))
        if key not in self._pools:
            own = [s.entry for s in step.segments if s.representation == representation and s.tier == tier]
            self._pools[key] = tuple(
                self.pool(position, entry, representation, shared)
                for shared, entries in ((False, own), (True, [entry for entry in own if entry in common]))
                for entry in entries
            )
        return self._pools[key]

    def pool(self, position: Position, entry: str, representation: str, shared: bool = False) -> Access:
        """The blocks of a mini-batch in one layer of a pool, side by side; or all ``shared`` ones. A layer that borrows
        keys and values has those of their layer."""
        space = entry if "(" not in entry else f"{entry}.{representation}"
        name, k = entry, len(self.wave.blocks)
        if not shared:
            name, k = Pool(entry, position.step.window).name, position.step.mini_batch
        extent = self._extents.get((name, k))
        if extent is None:
            part = (self.wave.shared.blocks if shared else self.wave.blocks[k]).pools[name]
            extent = self._extents[name, k] = part.first, part.first + part.num_blocks
        return Access((space, self._sources[position.layer]), *extent)
