"""Fix fields of a policy in a search: ``attention=host``, ``cache=kv@host,act@host``, ``bits.kv=8``.

Fields have the names of a policy file, with a dot before a part. Values are JSON or plain words. If the search chooses
a field, only the given value remains; another field gets the value in every policy.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS
from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.policy import BITS, CacheShares, Placement, Policy
from policy_search.search import SearchSettings
from policy_search.search_problem import NATIVE, OTHERS, Space

#: Field of a policy -> field of ``Space`` with its choices.
CHOICES = {
    "attention": "attention", "schedule": "schedules", "hidden": "hidden",
    "bits.weights": "weights_bits", "bits.kv": "kv_bits", "bits.act": "act_bits", "experts.batch": "experts",
}  # fmt: skip
FIELDS = (*CHOICES, *OTHERS, "weights", "cache", "max_mini_batch_tokens", "max_batch")
ELSEWHERE = {
    "name": "a search names what it finds itself",
    "version": "it is the file format's",
    "selection": "--selection infinigen(…) allows one",
}
_BETWEEN = re.compile(r",(?![^()]*\))")  # a comma outside the brackets of both(…)


def with_kept(settings: SearchSettings, texts: Iterable[str]) -> SearchSettings:
    """Return settings with which a search keeps each FIELD=VALUE of ``texts``. Raise InputError for a field that is
    unknown, cannot be fixed or is given twice, and for an invalid value."""
    kept: dict[str, Any] = {}
    for text in texts:
        field, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and field and value):
            raise InputError(f"--keep {text!r}: write FIELD=VALUE, like attention=host or cache.act@disk=0")
        if field in kept:
            raise InputError(f"--keep {field} is given twice")
        kept[field] = value
    tables: dict[str, dict] = {}
    for field, value in kept.items():
        group, dot, part = field.partition(".")
        if reason := ELSEWHERE.get(group):
            raise InputError(f"--keep {field}: {reason}")
        if dot and group in ("weights", "cache", "embedding"):
            tables.setdefault(group, {})[part] = _number(field, value)
        elif field in ("weights", "cache", "embedding"):
            table = _table(value)
            if table is None and field == "cache" and not _BETWEEN.search(value):
                table = {value: 1.0}
            elif table is None and field == "cache":
                settings = replace(settings, space=_with_entries(settings.space, value))
                continue
            if table is None and value not in TIERS:
                raise InputError(f'--keep {field}={value}: write shares, like {field}={{"device": 0.5, "host": 0.5}}')
            tables[field] = {part: _number(field, share) for part, share in (table or {value: 1.0}).items()}
        else:
            settings = _with_field(settings, field, value)
    for group, table in tables.items():
        settings = {"weights": _with_weights, "cache": _with_cache, "embedding": _with_embedding}[group](
            settings, table, group in kept
        )
    if ATTENDED_ENTRY in kept.get("cache", "") and NATIVE not in settings.space.kv_bits:
        raise InputError(f"--keep cache: the host attends to {ATTENDED_ENTRY} in native bits only, but bits.kv is kept")
    return settings


def _with_field(settings: SearchSettings, field: str, text: str) -> SearchSettings:
    """Return the settings with a field fixed that has a single value."""
    value, space = _value(text), settings.space
    if field == "attention" and isinstance(value, dict):
        raise InputError(
            f"--keep attention={text}: the host's share is that of a cache entry: write --keep "
            f'cache={ATTENDED_ENTRY},kv@host to let the search choose it, or cache={{"entry": share, …}}'
        )
    if field in CHOICES:
        free_bits = field.startswith("bits") and not space.lossless
        choices = BITS if free_bits else getattr(space, CHOICES[field])
        if value not in choices:
            lossy = " (fewer bits change the tokens: add --lossy)" * (field.startswith("bits") and space.lossless)
            raise InputError(f"{unknown(f'value of --keep {field}', value, map(str, choices))}{lossy}")
        return replace(settings, space=replace(space, **{CHOICES[field]: (value,)}))
    if field in OTHERS:
        Policy(**{field: value})  # raises for an invalid value
        both = () if (field, value) == ("static_cache", True) else space.both  # a static cache allows no both(…)
        return replace(settings, space=replace(space, both=both, kept=(*space.kept, (field, value))))
    if field in ("max_mini_batch_tokens", "max_batch"):
        Policy(**{field: value})
        return replace(settings, batch=value) if field == "max_batch" else replace(settings, mini_batch_tokens=(value,))
    raise unknown("field of --keep", field, [*FIELDS, "weights.device", "cache.act@host"])


def _with_embedding(settings: SearchSettings, table: dict, whole: bool) -> SearchSettings:
    placed = _placement("embedding", table if whole else asdict(Placement(device=1.0)) | table)
    return replace(settings, space=replace(settings.space, kept=(*settings.space.kept, ("embedding", placed))))


def _with_weights(settings: SearchSettings, table: dict, whole: bool) -> SearchSettings:
    """Return the settings with fixed shares of the weights, for any tiers. ``whole``: tiers that are not given are 0.
    Raise InputError for an unknown tier, for shares that do not add up, and for the host's share alone."""
    if strange := next((tier for tier in table if tier not in TIERS), None):
        raise unknown("tier of --keep weights", strange, TIERS)
    if whole or sum(table.values()) == 1:
        table = dict.fromkeys(TIERS, 0.0) | table
    if len(table) == 2:
        table[next(tier for tier in TIERS if tier not in table)] = 1.0 - sum(table.values())
    if len(table) == 3:
        _placement("weights", table)
    elif "host" in table:
        raise InputError(f"--keep weights.host={table['host']:g}: say weights.device or weights.disk as well")
    return replace(settings, weights_device=table.get("device"), weights_disk=table.get("disk"))


def _with_cache(settings: SearchSettings, table: dict, whole: bool) -> SearchSettings:
    """Return the settings with fixed shares of the cache. If all given shares are 0, only exclude these entries.
    ``whole``: all entries are given. Raise InputError for an unknown entry, and for shares that do not add up to 1."""
    Policy(cache={entry: 1.0 for entry in list(table)[:1]} | dict.fromkeys(list(table)[1:], 0.0))  # checks the names
    kept = {entry: share for entry, share in table.items() if share > 0}
    if not kept and not whole:
        space = settings.space
        entries, both = (tuple(e for e in allowed if e not in table) for allowed in (space.entries, space.both))
        return replace(settings, space=replace(space, entries=entries, both=both))
    if not math.isclose(sum(kept.values()), 1.0, abs_tol=1e-6):
        said = ", ".join(f"{entry} {share:g}" for entry, share in kept.items())
        raise InputError(f"--keep cache: {said} add up to {sum(kept.values()):g}; say where all of the tokens are")
    return replace(settings, space=replace(_with_entries(settings.space, ",".join(kept)), mix=CacheShares(kept)))


def _with_entries(space: Space, text: str) -> Space:
    """Return the space with only these cache entries, whose shares are free."""
    names = [name.strip() for name in _BETWEEN.split(text)]
    Policy(cache={name: float(not place) for place, name in enumerate(names)})  # raises for an unknown entry
    both = tuple(name for name in names if name.startswith("both"))
    return replace(space, entries=tuple(name for name in names if name not in both), both=both)


def _placement(field: str, table: dict) -> Placement:
    if strange := next((tier for tier in table if tier not in TIERS), None):
        raise unknown(f"tier of --keep {field}", strange, TIERS)
    placed = Placement(**table)
    placed.check(field)
    return placed


def _table(text: str) -> dict | None:
    """Return the shares of a JSON object or of a list ``name:share,name:share``; None for another text."""
    value = _value(text)
    if isinstance(value, dict):
        return value
    parts = [part.rpartition(":") for part in _BETWEEN.split(text)]
    return {name.strip(): share for name, _, share in parts} if all(colon for _, colon, _ in parts) else None


def _number(field: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise InputError(f"--keep {field}={value}: a share is a number from 0 to 1")
    return number


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
