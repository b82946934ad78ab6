"""Parameters of rotary positions in config.json, with old names (rope_theta, rope_scaling) or those of transformers 5
(rope_parameters)."""

from dataclasses import dataclass
from pathlib import Path

from flexhybrid.core.errors import InputError, NotBuiltIn, check, is_number, shown

#: rope_type -> its required numbers. ``Rope`` has the optional ones.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotation of queries and keys by position, with transformers' names. None: the type's
    default."""

    theta: float = 10_000.0  #: pair i of a head of size d rotates by theta^(-2i/d) per position
    type: str = "default"  #: a key of ROPE_TYPES
    factor: float = 1.0
    original_max_positions: float | None = None  #: yarn, llama3: context length of pre-training
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  #: yarn: the ends of the ramp are rounded to whole dimensions


def scaled_positions(positions: int, kind: object, factor: float | None, original: float | None) -> int:
    """Return the positions of a model with a scaled rotation, as vLLM derives them.

    Linear scaling multiplies ``max_position_embeddings``, YaRN the context length of pre-training. With other types, or
    without ``factor``, the configuration has the extended positions.
    """
    if kind not in ("linear", "yarn") or factor is None:
        return positions
    return int((original or positions if kind == "yarn" else positions) * factor)


def rope_from_config(config: dict, path: Path, max_positions: int) -> Rope:  # noqa: C901 (a field after the other)
    """Return the rotation of a config.json, read as transformers reads it.

    Raise InputError for a missing or impossible number. Raise NotBuiltIn for another type, such as longrope, and for a
    rotation of a part of a head or with different parameters for layers.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    check(f"{path}: rope_scaling", given, isinstance(given, dict), "an object")
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        raise NotBuiltIn(f"{path}: rotary parameters of their own for {', '.join(nested)} are not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    known = ("default",) if config.get("model_type") == "phi3" else ROPE_TYPES  # Phi-3's "yarn" is longrope
    if not isinstance(kind, str) or kind not in known:
        raise NotBuiltIn(f"{path}: rope_type {shown(kind)} is not supported; can: {', '.join(ROPE_TYPES)}")
    for where in (given, config):
        if where.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise NotBuiltIn(f"{path}: partial_rotary_factor {shown(where['partial_rotary_factor'])} is not supported")

    def number(key: str, where: dict, what: str) -> float | None:
        value = where.get(key)
        if key in _OPTIONAL[1:] and value == 0:  # transformers reads 0 as not given
            return None
        positive = value is None or is_number(value) and 0 < value < 2**63
        check(f"{path}: {what}", value, positive, "a positive number")
        return value

    numbers = {}
    for key in (*dict.fromkeys(("factor", *ROPE_TYPES[kind])), *_OPTIONAL):
        numbers[key] = number(key, given, f"{key} of rope_type {kind}")
        if key in ROPE_TYPES[kind] and numbers[key] is None:
            raise InputError(f"{path}: rope_type {kind} needs {key}")
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise InputError(
            f"{path}: high_freq_factor {numbers['high_freq_factor']} of rope_type llama3 must be above "
            f"low_freq_factor {numbers['low_freq_factor']}"
        )
    original = None
    if kind in ("yarn", "llama3"):
        key = "original_max_position_embeddings"
        original = number(key, config, key) or number(key, given, key) or max_positions
    if numbers["factor"] is None:
        numbers["factor"] = max_positions / original if kind == "yarn" and original else 1.0
    theta = given.get("rope_theta", config.get("rope_theta", Rope.theta))
    check(f"{path}: rope_theta", theta, is_number(theta) and 1 < theta < 2**63, "a number above 1, below 2^63")
    truncate = given.get("truncate", True)
    check(f"{path}: truncate of rope_type {kind}", truncate, isinstance(truncate, bool), "true or false")
    return Rope(theta=theta, type=kind, original_max_positions=original, truncate=truncate, **numbers)
