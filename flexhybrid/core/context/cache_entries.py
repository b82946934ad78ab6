"""Cache entries, with the names of policies: ``kv@host``, ``act@device``, ``both(kv@host,act@host)``, ``tok``, and
``attended(kv@host)``, keys and values to which the host attends."""

import re
from functools import cache
from typing import NamedTuple

TIERS = ("device", "host", "disk")
ATTENDED_ENTRY = "attended(kv@host)"
CACHE_KEY = re.compile(
    r"tok|(kv|act)@(device|host|disk)|both\(kv@(device|host|disk),act@(device|host|disk)\)|attended\(kv@host\)"
)


class StoredCopy(NamedTuple):
    """A stored copy of a token's context. A both(…) entry has two copies."""

    entry: str  #: the cache entry
    representation: str  #: "kv" or "act"
    tier: str

    @property
    def space(self) -> str:
        """Return the name of the copy's memory: the entry, or for both(…) the entry and the representation."""
        return self.entry if "(" not in self.entry else f"{self.entry}.{self.representation}"


class Pool(NamedTuple):
    """The blocks of a cache entry in the layers with one attention window (None: layers that attend to all tokens)."""

    entry: str
    window: int | None

    @property
    def name(self) -> str:
        return self.entry if self.window is None else f"{self.entry}, window {self.window}"


@cache
def representation_of(entry: str) -> str:
    """Return the representation of an entry: kv, act, both or tok."""
    return re.split(r"[@(]", entry.removeprefix("attended("))[0]


@cache
def stored_copies(entry: str) -> tuple[StoredCopy, ...]:
    """Return the stored copies of an entry: one, two for both(…) (ACT first), or none for tok."""
    pairs = re.findall(r"(kv|act)@(device|host|disk)", entry)
    return tuple(sorted(StoredCopy(entry, representation, tier) for representation, tier in pairs))


@cache
def parts(entries: tuple[str, ...]) -> tuple[StoredCopy, ...]:
    """Return the stored copies of several entries, in their order."""
    return tuple(part for entry in entries for part in stored_copies(entry))
