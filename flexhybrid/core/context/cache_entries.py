"""Cache entries as a policy writes them: ``kv@host``, ``act@device``, ``both(kv@host,act@host)``, ``tok``, and
``attended(kv@host)``, keys and values that the host attends to where they are."""

import re
from functools import cache
from typing import NamedTuple

TIERS = ("device", "host", "disk")
ATTENDED_ENTRY = "attended(kv@host)"
CACHE_KEY = re.compile(
    r"tok|(kv|act)@(device|host|disk)|both\(kv@(device|host|disk),act@(device|host|disk)\)|attended\(kv@host\)"
)


class StoredCopy(NamedTuple):
    """One stored copy of a token's context: ``representation`` "kv" or "act", and the tier that holds it."""

    entry: str  #: the cache entry it belongs to
    representation: str
    tier: str

    @property
    def space(self) -> str:
        """Name of its pool: the entry itself, or for both(…) the entry and the representation."""
        return self.entry if "(" not in self.entry else f"{self.entry}.{self.representation}"


class Pool(NamedTuple):
    """The blocks of a cache entry in one kind of layers: with unlimited sight (``window`` None), or a window."""

    entry: str
    window: int | None

    @property
    def name(self) -> str:
        return self.entry if self.window is None else f"{self.entry}, window {self.window}"


@cache
def representation_of(entry: str) -> str:
    """Return kv, act, both or tok."""
    return re.split(r"[@(]", entry.removeprefix("attended("))[0]


@cache
def stored_copies(entry: str) -> tuple[StoredCopy, ...]:
    """Return the stored parts of a token: one, two for both(…) (ACT first), none for tok."""
    pairs = re.findall(r"(kv|act)@(device|host|disk)", entry)
    return tuple(sorted(StoredCopy(entry, representation, tier) for representation, tier in pairs))


@cache
def parts(entries: tuple[str, ...]) -> tuple[StoredCopy, ...]:
    """The parts of several entries, in their order."""
    return tuple(part for entry in entries for part in stored_copies(entry))
