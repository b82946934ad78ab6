"""The policy: a frozen value that says what is stored where, and how the work is ordered.

Every system of the papers is a policy. Its text form is JSON. Unknown or contradictory fields raise InputError.
Executor and cost functions reject policies that they do not support.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, CACHE_KEY, TIERS, representation_of
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.files import load_json, named_once, parse_json

FORMAT_VERSION = 1
_NATIVE_BITS = "native"
WHOLE_BATCH = 1 << 30  #: a mini-batch size in tokens that no batch exceeds
BITS = (_NATIVE_BITS, 8, 4, 2, 1)  #: stored widths: native is the compute dtype's; the others are packed
#: Most elements of a row that share a scale and a zero point, both float16. Groups of KV and ACT can be smaller:
#: ``kv_group`` and ``act_group`` of ``ModelShape``.
GROUP_ELEMENTS = 64


def _refuse_unknown(cls, data, where: str) -> None:
    if not isinstance(data, dict):
        raise InputError(f"policy: {where} must be an object, not {data!r}")
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            raise InputError(f"policy: unknown field {where}.{key}; known: {', '.join(known)}")


def _check_choice(value, choices, where: str) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):  # 1 is not True, 8.0 not 8
        raise InputError(f"policy: {where} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def _check_shares(shares: Mapping[str, float], where: str) -> None:
    for key, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InputError(f"policy: {where}[{key}] is {share!r}; a share is a number from 0 to 1")
    if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
        raise InputError(f"policy: the shares of {where} add up to {sum(shares.values()):g}, not 1")


@dataclass(frozen=True)
class Placement:
    """Shares of bytes in the three tiers."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    def check(self, where: str) -> None:
        """Raise InputError unless these are shares that add up to 1. ``where``: the field's name for the message."""
        _check_shares(vars(self), where)


@dataclass(frozen=True)
class Bits:
    """Stored bits of each kind of data: "native" (the compute dtype's), or 8, 4, 2 or 1 (packed, asymmetric, by
    group)."""

    weights: str | int = _NATIVE_BITS
    kv: str | int = _NATIVE_BITS
    act: str | int = _NATIVE_BITS

    def check(self) -> None:
        for f in fields(self):
            _check_choice(getattr(self, f.name), BITS, f"bits.{f.name}")

    @property
    def native(self) -> bool:
        return all(getattr(self, f.name) == _NATIVE_BITS for f in fields(self))

    def element_bytes(self, bytes_per_element: int, kv_group: int, act_group: int = GROUP_ELEMENTS) -> ElementBytes:
        """Return the stored bytes per element. ``bytes_per_element``: of the compute dtype; ``kv_group`` and
        ``act_group``: elements that share a scale and a zero point."""

        def stored(bits, group: int = GROUP_ELEMENTS) -> float:
            return bytes_per_element if bits == _NATIVE_BITS else bits / 8 + 4 / group

        kv, act = stored(self.kv, kv_group), stored(self.act, act_group)
        return ElementBytes(bytes_per_element, stored(self.weights), kv, act)


class ElementBytes(NamedTuple):
    """Bytes per element of the compute dtype, and of weights, KV and ACT as stored, with scales and zero points."""

    compute: int
    weights: float
    kv: float
    act: float


@dataclass(frozen=True)
class Selection:
    """Which cached tokens an iteration reads. The method "none" reads all and needs no other field."""

    method: str = "none"  #: none, heavy_hitter or speculative
    budget: float | None = None  #: heavy_hitter: share of the prompt that is kept
    #: speculative: tokens with scores above max - alpha are loaded; infinite: all, up to max_fraction
    alpha: float | None = None
    partial_ratio: float | None = None  #: speculative: share of the columns in the partial weights
    max_fraction: float | None = None  #: speculative: largest share of a context that is loaded
    pool: float | None = None  #: speculative: share of the cache that is kept; or ``pool_bytes``
    victim: str | None = None  #: speculative: rule for dropped tokens, fifo, lru or counter
    partial_keys: str | None = None  #: speculative: tier of the partial keys
    #: number of first layers that keep and attend to all tokens (default: 0 for heavy_hitter, WHOLE_LAYERS of
    #: ``core.context.selection`` for speculative)
    whole_layers: int | None = None
    #: speculative: expected share of a context that the other layers load, for predictions; None: InfiniGen's
    expected_fraction: float | None = None
    #: speculative, instead of ``pool``: bytes of keys and values that all requests of a wave may keep. Each request
    #: keeps an equal share of its tokens (``core.context.selection.with_pool_share``)
    pool_bytes: int | None = None
    #: speculative: columns for prediction are chosen per "batch" (a mini-batch, as in the paper; default) or per
    #: "request" (its tokens are then independent of other requests)
    columns: str | None = None

    _NEEDS = {
        "none": (),
        "heavy_hitter": ("budget",),
        "speculative": ("alpha", "partial_ratio", "max_fraction", "pool", "victim", "partial_keys"),
    }

    _FREE = ("whole_layers", "expected_fraction", "pool_bytes", "columns")  # optional for a speculative selection

    def check(self) -> None:
        """Raise InputError for a missing or wrong field, and for one that the method does not have."""
        _check_choice(self.method, tuple(self._NEEDS), "selection.method")
        needed = self._NEEDS[self.method]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "method":
                continue
            if f.name in needed and value is None and not (f.name == "pool" and self.pool_bytes is not None):
                raise InputError(f"policy: selection {self.method} needs selection.{f.name}")
            free = self.method == "speculative" and f.name in self._FREE
            free = free or self.method == "heavy_hitter" and f.name == "whole_layers"
            if f.name not in needed and value is not None and not free:
                raise InputError(f"policy: selection {self.method} does not take selection.{f.name}")
            if value is not None and f.name in ("budget", "partial_ratio", "max_fraction", "pool", "expected_fraction"):
                _check_shares({f.name: value, "rest": 1 - value if _is_number(value) else value}, "selection")
        given = self.alpha is None or _is_number(self.alpha) and self.alpha >= 0
        check("policy: selection.alpha", self.alpha, given, 'a number >= 0, or "inf"')
        count, size, least = self.whole_layers, self.pool_bytes, int(self.method == "speculative")
        given = count is None or _is_count(count) or type(count) is int and count == least
        whole = f"a whole number >= {least}{': nothing guesses for the first layer' if least else ''}"
        check("policy: selection.whole_layers", count, given, whole)
        check("policy: selection.pool_bytes", size, size is None or _is_count(size), "a whole number of bytes >= 1")
        if size is not None and self.pool is not None:
            raise InputError("policy: selection.pool and selection.pool_bytes both limit the pool; give one of them")
        if self.victim is not None:
            _check_choice(self.victim, ("fifo", "lru", "counter"), "selection.victim")
        if self.partial_keys is not None:
            _check_choice(self.partial_keys, TIERS, "selection.partial_keys")
        if self.columns is not None:
            _check_choice(self.columns, ("batch", "request"), "selection.columns")


@dataclass(frozen=True)
class Experts:
    """How experts are computed in decode steps. In prompts, each mini-batch has its experts by itself."""

    #: 0: for each mini-batch by itself; 1: once for all mini-batches of a layer; n: for n parts of the mini-batches
    batch: int = 0

    def check(self) -> None:
        check("policy: experts.batch", self.batch, type(self.batch) is int and self.batch >= 0, "a whole number >= 0")


#: Fields of a policy that are records of their own.
_PARTS = {"weights": Placement, "embedding": Placement, "bits": Bits, "selection": Selection, "experts": Experts}


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class CacheShares(Mapping[str, float]):
    """Cache entry -> share of each request's tokens: an immutable, hashable mapping, sorted by entry."""

    def __init__(self, shares: Mapping[str, float]):
        self._shares = dict(sorted(shares.items()))

    def __getitem__(self, entry: str) -> float:
        return self._shares[entry]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def __hash__(self) -> int:
        return hash(tuple(self._shares.items()))

    def __repr__(self) -> str:
        return repr(self._shares)


#: Which tasks may run at the same time.
Overlap = Literal["full", "step", "none"]

#: Field of a policy -> its possible values, for words and flags.
_CHOICES = {
    "hidden": TIERS,
    "states": ("auto", "device", "host"),
    "schedule": ("column", "row"),
    "packing": ("balanced", "fifo", "balance"),
    "attention": ("device", "host"),
    "weight_order": ("kv_first", "kv_act_first", "natural"),
    "split": ("pipeline", "paper", "paper_prompt"),
    "static_cache": (True, False),
    "overlap": get_args(Overlap),
    "version": (FORMAT_VERSION,),
}


def _shared_attention(
    cache: Mapping[str, float], shares: Mapping[str, float]
) -> tuple[Mapping[str, float], Literal["device", "host"]]:
    """Return the cache and the place of attention that ``shares`` of host and device mean: they divide ``kv@host``."""
    if not {*shares} <= {"host", "device"}:
        raise InputError(f"policy: attention names {', '.join(map(str, shares))}; it may name host and device")
    _check_shares(shares, "attention")
    on_host, held = shares.get("host", 0.0), cache.get("kv@host", 0.0)
    if ATTENDED_ENTRY in cache:
        raise InputError(f"policy: attention has shares, and cache names {ATTENDED_ENTRY} too: give one of the two")
    if on_host and not held:
        raise InputError(
            f"policy: shares of attention divide kv@host, and cache is {dict(cache)}: give kv@host a share"
        )
    if 0 < on_host < 1:
        return {**cache, "kv@host": held * (1 - on_host), ATTENDED_ENTRY: held * on_host}, "device"
    return cache, "host" if on_host else "device"


@dataclass(frozen=True)
class Policy:
    """A policy: everything in which two systems may differ. The possible values are in ``_CHOICES``."""

    name: str = "custom"
    weights: Placement = Placement(host=1.0)  #: shares of the bytes of every layer
    embedding: Placement = Placement(device=1.0)  #: token and position tables and the output head
    #: ``kv@TIER``, ``act@TIER``, ``both(kv@TIER,act@TIER)`` or ``tok`` -> share of each request's tokens
    cache: Mapping[str, float] = CacheShares({"kv@host": 1.0})
    hidden: str = "device"  #: tier of hidden states between layers
    #: tier of recurrent states; auto: device if the whole cache is there, else host
    states: str = "auto"
    bits: Bits = Bits()
    schedule: str = "column"
    max_mini_batch_tokens: int = 8192  #: most padded tokens of a mini-batch (CAPTURE: 8,192)
    max_batch: int | None = None  #: most requests that run together; None: no limit
    #: how requests are packed into mini-batches. balanced: by length, in even parts; fifo: in order of arrival;
    #: balance: by CAPTURE's algorithm, which keeps the imbalance F_b small
    packing: str = "balanced"
    selection: Selection = Selection()
    experts: Experts = Experts()  #: how experts are computed; other layers are not affected
    #: where decode steps attend. {"host": s, "device": 1 - s}: the host attends to the share s of ``kv@host``, and the
    #: device to the other tokens; the share is kept in ``cache``, as ``attended(kv@host)``
    attention: str | Mapping[str, float] = "device"
    #: weights that recomputation from ACT waits for. kv_first: only W_K and W_V; kv_act_first: the same, and ACT
    #: crosses the link before the layer's other weights; natural: the whole layer
    weight_order: str = "kv_first"
    #: rule for the number of leading tokens of both(…) that are recomputed (``core.context.split``)
    split: str = "pipeline"
    static_cache: bool = False  #: loads copy all reserved blocks (transformers' offloaded static cache)
    #: full: loads, stores and compute overlap; step: the same, with a barrier after each position; none: one task at a
    #: time
    overlap: Overlap = "full"
    version: int = FORMAT_VERSION

    def __post_init__(self):
        check("policy: name", self.name, isinstance(self.name, str), "a text")
        for name, kind in _PARTS.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(
                    f"policy: {name} is {getattr(self, name)!r}; write {name}={kind.__name__}(…), or give all of it to "
                    "Policy.from_dict"
                )
        self.weights.check("weights")
        self.embedding.check("embedding")
        self.bits.check()
        self.selection.check()
        self.experts.check()
        if not isinstance(self.cache, Mapping) or not self.cache:
            raise InputError('policy: cache must map representations to shares, like {"kv@host": 1.0}')
        for key in self.cache:
            if not isinstance(key, str) or not CACHE_KEY.fullmatch(key):
                raise InputError(
                    f"policy: unknown cache entry {key!r}; known: kv@TIER, act@TIER, both(kv@TIER,act@TIER), "
                    f"{ATTENDED_ENTRY}, tok with TIER one of {', '.join(TIERS)}"
                )
        _check_shares(self.cache, "cache")
        cache, attention = self.cache, self.attention
        if isinstance(attention, Mapping):
            cache, attention = _shared_attention(cache, attention)
        elif self.attention not in ("device", "host"):
            wanted = 'device, host or shares such as {"host": 0.5, "device": 0.5}'
            raise InputError(f"policy: attention is {self.attention!r}; it must be {wanted}")
        object.__setattr__(self, "cache", CacheShares(cache))
        object.__setattr__(self, "attention", attention)
        for name, choices in _CHOICES.items():
            _check_choice(getattr(self, name), choices, name)
        bound, most = self.max_mini_batch_tokens, self.max_batch
        check("policy: max_mini_batch_tokens", bound, _is_count(bound), "a whole number >= 1")
        check("policy: max_batch", most, most is None or _is_count(most), "a whole number >= 1")
        if self.experts.batch and (self.schedule != "column" or self.hidden != "device"):
            raise InputError(
                f"policy: experts.batch is {self.experts.batch}, with schedule {self.schedule} and hidden "
                f"{self.hidden}; experts for several mini-batches need schedule column and hidden device"
            )
        if self.attention == "host":
            for key in self.cache:
                if key not in ("kv@host", "kv@disk"):
                    raise InputError(f"policy: attention on the host reads kv@host and kv@disk, but cache names {key}")

    def share(self, representation: str) -> float:
        """Return the share of tokens kept as ``kv``, ``act``, ``both`` or ``tok``, in all tiers."""
        return sum(s for key, s in self.cache.items() if representation_of(key) == representation)

    @property
    def cache_entries(self) -> tuple[str, ...]:
        """Return the entries with a share above 0, sorted, so that ACT comes before KV."""
        return tuple(sorted(key for key, share in self.cache.items() if share > 0))

    @property
    def host_attends(self) -> bool:
        """Return whether the host attends in decode steps, to the whole context or to ``attended(kv@host)``."""
        return self.attention == "host" or self.splits_attention

    @property
    def splits_attention(self) -> bool:
        """Return whether host and device attend to parts of the same context."""
        return ATTENDED_ENTRY in self.cache_entries

    @property
    def attending_tier(self) -> str:
        """Return in words where decode steps attend: "device", "host" or "device and host"."""
        return "device and host" if self.splits_attention else str(self.attention)

    @property
    def attends_from_disk(self) -> bool:
        """Return whether attention on the host reads blocks from the disk."""
        return self.attention == "host" and "kv@disk" in self.cache_entries

    @property
    def state_tier(self) -> str:
        """Return the tier of recurrent states: device or host."""
        if self.states != "auto":
            return self.states
        held = [entry for entry in self.cache_entries if entry != "tok"]
        return "device" if held and all(entry.endswith("@device") for entry in held) else "host"

    @property
    def cut(self) -> str:
        """Return in words how a batch is cut into mini-batches."""
        tokens = self.max_mini_batch_tokens
        return "all in one mini-batch" if tokens >= WHOLE_BATCH else f"mini-batches of {tokens} tokens"

    @property
    def lossless(self) -> bool:
        """Return whether the policy is lossless: native bits and no selection of tokens."""
        return self.selection.method == "none" and self.bits.native

    @property
    def stays_on_device(self) -> bool:
        """Return whether only new tokens cross the host link."""
        return self.weights.device == 1 and self.context_stays(self.cache_entries)

    def context_stays(self, entries: Iterable[str]) -> bool:
        """Return whether, with these cache entries, no context and no hidden state crosses the host link."""
        on_device = all(entry.endswith("@device") for entry in entries if entry != "tok")
        return on_device and self.hidden == "device" and self.attention == "device"

    def to_dict(self) -> dict:
        """Return the policy as plain data. An infinite alpha becomes the text "inf", because JSON has no infinity."""
        data: dict = asdict(self)
        data["cache"] = dict(self.cache)
        if self.selection.alpha == math.inf:
            data["selection"]["alpha"] = "inf"
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def with_field(self, field: str, value) -> Policy:
        """Return the policy with another value of a field, or of its part after a dot ("weights.device"). If the part
        is a share, the other shares change in proportion. Raise InputError for an unknown field or a wrong value."""
        data, (name, _, part) = self.to_dict(), field.partition(".")
        if name not in data or bool(part) != isinstance(data[name], dict):
            raise InputError(f"policy: {field!r} is no field that has one value")
        if part and name in ("weights", "embedding", "cache"):
            check(f"policy: {field}", value, _is_number(value) and 0 <= value <= 1, "a share, from 0 to 1")
            others = {key: share for key, share in data[name].items() if key != part and share}
            others = others or {"kv@host" if name == "cache" else "host": 1.0}
            left = (1.0 - value) / sum(others.values())
            value = {part: value} | {key: left * share for key, share in others.items()}
            data[name] = {key: share for key, share in value.items() if share}
        else:
            data[name] = {**data[name], part: value} if part else value
        return Policy.from_dict(data)

    @staticmethod
    def from_dict(data: dict) -> Policy:
        """Return the policy of plain data (``to_dict``); missing fields have their defaults. Raise InputError for an
        unknown field or a wrong value."""
        _refuse_unknown(Policy, data, "policy")
        data = dict(data)
        for key, cls in _PARTS.items():
            if key in data:
                _refuse_unknown(cls, data[key], key)
                infinite = {"alpha": math.inf} if cls is Selection and data[key].get("alpha") == "inf" else {}
                data[key] = cls(**data[key] | infinite)
        if isinstance(data.get("overlap"), bool):  # files of version 1 from before it was a text
            data["overlap"] = "full" if data["overlap"] else "none"
        return Policy(**data)

    @staticmethod
    def from_json(text: str) -> Policy:
        return Policy.from_dict(parse_json(text, "policy", object_pairs_hook=named_once))

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Read a policy file; its name is the file's by default. Raise InputError, with the file, for broken JSON, a
        wrong field or an empty policy."""
        data = load_json(path, "policy file ", object_pairs_hook=named_once)
        try:
            policy = Policy.from_dict({"name": Path(path).stem, **data} if isinstance(data, dict) else data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if not data.keys() - {"name", "version"}:
            raise InputError(f'{path}: the policy is empty; name at least its cache, like "cache": {{"kv@host": 1.0}}')
        return policy
