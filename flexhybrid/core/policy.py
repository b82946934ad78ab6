"""The policy: one frozen, strict value that says what is stored where and how the work is ordered.

Every system of the papers is such a value. Its text form is JSON; unknown or contradictory fields are refused by name.
An executor or cost function refuses by itself what it does not support.
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
WHOLE_BATCH = 1 << 30  #: tokens of a mini-batch that no batch reaches: one mini-batch
BITS = (_NATIVE_BITS, 8, 4, 2, 1)  #: stored widths: the compute dtype's, or packed
#: Elements of a row of weights or ACT that share a scale and a zero point, both float16; of KV and ACT: ``kv_group``
#: and ``act_group`` of ``ModelShape``.
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
    """Shares of bytes over the three tiers."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    def check(self, where: str) -> None:
        _check_shares(vars(self), where)


@dataclass(frozen=True)
class Bits:
    """Stored width of each kind of data: "native" (the compute dtype), or 8, 4, 2 or 1 (group-wise asymmetric)."""

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
        """Stored bytes per element, with ``bytes_per_element`` in the compute dtype; groups are the model's."""

        def stored(bits, group: int = GROUP_ELEMENTS) -> float:
            return bytes_per_element if bits == _NATIVE_BITS else bits / 8 + 4 / group

        return ElementBytes(
            bytes_per_element, stored(self.weights), stored(self.kv, kv_group), stored(self.act, act_group)
        )


class ElementBytes(NamedTuple):
    """Bytes an element: in computing, and as weights, KV and ACT are stored and moved (scales and zeros included)."""

    compute: int
    weights: float
    kv: float
    act: float


@dataclass(frozen=True)
class Selection:
    """Which cached tokens an iteration reads. ``method`` "none" needs no other field."""

    method: str = "none"
    budget: float | None = None  #: heavy_hitter: share of the prompt that is kept
    alpha: float | None = None  #: speculative: scores above max - alpha are fetched; infinite: all, up to max_fraction
    partial_ratio: float | None = None  #: speculative: share of the columns in the partial weights
    max_fraction: float | None = None  #: speculative: most of the cache that is ever fetched
    pool: float | None = None  #: speculative: share of the cache the pool may hold; or ``pool_bytes``
    victim: str | None = None  #: speculative: fifo, lru or counter
    partial_keys: str | None = None  #: speculative: tier of the partial keys
    #: first layers that keep and look at all tokens; None: none for heavy_hitter, ``first_choosing``'s for speculative
    whole_layers: int | None = None
    #: speculative: share of a context that the other layers are expected to fetch, for predictions; None: InfiniGen's
    expected_fraction: float | None = None
    #: speculative, instead of ``pool``: bytes of keys and values that the requests of a wave may hold together; each
    #: holds an equal share of its own (``core.context.selection.with_pool_share``)
    pool_bytes: int | None = None
    #: speculative: columns for prediction are chosen per "batch" (a mini-batch, as in the paper; None: this) or per
    #: "request" (its tokens are then independent of the others)
    columns: str | None = None

    _NEEDS = {
        "none": (),
        "heavy_hitter": ("budget",),
        "speculative": ("alpha", "partial_ratio", "max_fraction", "pool", "victim", "partial_keys"),
    }

    _FREE = ("whole_layers", "expected_fraction", "pool_bytes", "columns")  # that a speculative selection may have

    def check(self) -> None:
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


#: Fields of a policy that are records of their own.
_PARTS = {"weights": Placement, "embedding": Placement, "bits": Bits, "selection": Selection}


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class CacheShares(Mapping[str, float]):
    """Cache entry -> share of each request's tokens, sorted by entry. Immutable and hashable, unlike a dict."""

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

#: Fields of a policy that are words or flags -> what they may be.
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


@dataclass(frozen=True)
class Policy:
    """All that may differ between two systems. Shares are of tokens (cache) or of bytes inside every layer (weights).

    ``cache`` maps ``kv@TIER``, ``act@TIER``, ``both(kv@TIER,act@TIER)``, ``attended(kv@host)`` and ``tok`` to their
    share of each request's tokens. ``max_mini_batch_tokens`` bounds the padded tokens of a mini-batch (CAPTURE: 8,192).
    """

    name: str = "custom"
    weights: Placement = Placement(host=1.0)
    embedding: Placement = Placement(device=1.0)  #: token and position tables and the output head
    cache: Mapping[str, float] = CacheShares({"kv@host": 1.0})
    hidden: str = "device"
    #: tier of recurrent states; auto: device if the whole cache is there, else host
    states: str = "auto"
    bits: Bits = Bits()
    schedule: str = "column"
    max_mini_batch_tokens: int = 8192
    max_batch: int | None = None
    #: requests into mini-batches: by length in even parts, in order of arrival, or "balance", by CAPTURE's F_b
    packing: str = "balanced"
    selection: Selection = Selection()
    #: where decode steps attend; {"host": s, "device": 1 - s}: the host to a share s of ``kv@host``, while the device
    #: attends to the rest. The share is kept in ``cache``, as ``attended(kv@host)``.
    attention: str | Mapping[str, float] = "device"
    #: recomputing waits for W_K and W_V alone; kv_act_first: and ACT crosses the link before the layer's other weights;
    #: natural: it waits for the whole layer
    weight_order: str = "kv_first"
    #: rule of both(…), how many leading tokens are recomputed (``core.context.split``); or paper, paper_prompt
    split: str = "pipeline"
    static_cache: bool = False  #: a load brings all that a request has reserved (transformers' offloaded static cache)
    overlap: Overlap = "full"  #: or "step": a barrier after each mini-batch of a layer; "none": one task at a time
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
        if not isinstance(self.cache, Mapping) or not self.cache:
            raise InputError('policy: cache must map representations to shares, like {"kv@host": 1.0}')
        for key in self.cache:
            if not isinstance(key, str) or not CACHE_KEY.fullmatch(key):
                raise InputError(
                    f"policy: unknown cache entry {key!r}; known: kv@TIER, act@TIER, both(kv@TIER,act@TIER), "
                    f"{ATTENDED_ENTRY}, tok with TIER one of {', '.join(TIERS)}"
                )
        _check_shares(self.cache, "cache")
        if isinstance(self.attention, Mapping):
            self._share_attention(self.attention)
        object.__setattr__(self, "cache", CacheShares(self.cache))
        for name, choices in _CHOICES.items():
            _check_choice(getattr(self, name), choices, name)
        bound, most = self.max_mini_batch_tokens, self.max_batch
        check("policy: max_mini_batch_tokens", bound, _is_count(bound), "a whole number >= 1")
        check("policy: max_batch", most, most is None or _is_count(most), "a whole number >= 1")
        if self.attention == "host":
            for key in self.cache:
                if key not in ("kv@host", "kv@disk"):
                    raise InputError(f"policy: attention on the host reads kv@host and kv@disk, but cache names {key}")

    def _share_attention(self, shares: Mapping[str, float]) -> None:
        """Divide ``kv@host`` between attention on the host and on the device by these shares."""
        if not {*shares} <= {"host", "device"}:
            raise InputError(f"policy: attention names {', '.join(map(str, shares))}; it may name host and device")
        _check_shares(shares, "attention")
        on_host, held = shares.get("host", 0.0), self.cache.get("kv@host", 0.0)
        if on_host and not held or ATTENDED_ENTRY in self.cache:
            raise InputError(f"policy: attention is a share of kv@host, but cache is {dict(self.cache)}")
        divided = {"kv@host": held * (1 - on_host), ATTENDED_ENTRY: held * on_host}
        if 0 < on_host < 1:
            object.__setattr__(self, "cache", {**self.cache, **divided})
        object.__setattr__(self, "attention", "host" if on_host == 1 else "device")

    def share(self, representation: str) -> float:
        """Share of tokens held as ``kv``, ``act``, ``both`` or ``tok``, over all tiers."""
        return sum(s for key, s in self.cache.items() if representation_of(key) == representation)

    @property
    def cache_entries(self) -> tuple[str, ...]:
        """The representations in use, ACT before KV: the order of shares of zero does not matter."""
        return tuple(sorted(key for key, share in self.cache.items() if share > 0))

    @property
    def host_attends(self) -> bool:
        """Return whether the host attends in decode steps: to all of the context, or to ``attended(kv@host)``."""
        return self.attention == "host" or ATTENDED_ENTRY in self.cache_entries

    @property
    def attending_tier(self) -> str:
        """Return where decode steps attend, in words: "device", "host" or "device and host"."""
        return "device and host" if self.host_attends and self.attention == "device" else str(self.attention)

    @property
    def attends_from_disk(self) -> bool:
        """Return whether the host attends to blocks that it reads from the disk."""
        return self.attention == "host" and "kv@disk" in self.cache_entries

    @property
    def state_tier(self) -> str:
        """The tier of the states of recurrent layers: device or host."""
        if self.states != "auto":
            return self.states
        held = [entry for entry in self.cache_entries if entry != "tok"]
        return "device" if held and all(entry.endswith("@device") for entry in held) else "host"

    @property
    def cut(self) -> str:
        """How a batch is cut, in words."""
        tokens = self.max_mini_batch_tokens
        return "all in one mini-batch" if tokens >= WHOLE_BATCH else f"mini-batches of {tokens} tokens"

    @property
    def lossless(self) -> bool:
        """Return whether the policy must give the same tokens as every other lossless one."""
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
        """Plain data; an infinite alpha is the text "inf", for which JSON has no number."""
        data: dict = asdict(self)
        data["cache"] = dict(self.cache)
        if self.selection.alpha == math.inf:
            data["selection"]["alpha"] = "inf"
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def with_field(self, field: str, value) -> Policy:
        """Return the policy with a field by its name in ``to_dict``, a part behind a dot ("weights.device"), at another
        value. Of shares the others change in proportion. Raise InputError for an unknown field or a wrong value."""
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
        """The inverse of to_dict; missing fields take their defaults. Raises InputError by field name."""
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
        """Read a JSON file. Raises InputError that names the file."""
        data = load_json(path, "policy file ", object_pairs_hook=named_once)
        try:
            policy = Policy.from_dict(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if not data.keys() - {"name", "version"}:
            raise InputError(f'{path}: the policy is empty; name at least its cache, like "cache": {{"kv@host": 1.0}}')
        return policy
