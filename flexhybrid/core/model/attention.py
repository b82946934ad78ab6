"""Kinds of attention: window, scaling and other properties of a layer's attention, from config.json."""

import math
from dataclasses import dataclass
from pathlib import Path

from flexhybrid.core.errors import InputError, check, is_number, shown

#: Name in ``layer_types`` of a config.json -> whether such layers have the model's window.
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class AttentionKind:
    """Attention of a layer. The defaults are softmax(q·k / sqrt(d)) over all earlier tokens."""

    window: int | None = None  #: most tokens that a token attends to, with itself; None: all
    scaling: float | None = None  #: factor of scores; None: d^-0.5
    softcap: float | None = None  #: c: scores become c·tanh(score / c) before the mask; None: no cap
    sinks: bool = False  #: each head has a learned score without a value, which counts in its softmax's sum

    def check(self, where: str) -> None:
        """Raise InputError for an impossible field. ``where``: beginning of the message."""
        window = self.window
        count = window is None or isinstance(window, int) and not isinstance(window, bool) and window >= 1
        check(f"{where}sliding_window", window, count, "a whole number >= 1")
        for name in ("scaling", "softcap"):
            value = getattr(self, name)
            positive = value is None or is_number(value) and 0 < value < math.inf
            check(f"{where}{name} of attention", value, positive, "a positive number")
        check(f"{where}sinks of attention", self.sinks, isinstance(self.sinks, bool), "true or false")


#: Attention with all defaults.
PLAIN = AttentionKind()


def kinds_from_config(config: dict, path: Path, num_layers: int) -> tuple[AttentionKind, ...]:
    """Return the attention of a model like Llama, as in transformers: one kind for all layers, or one for each. Absent
    fields have transformers' defaults. Raise InputError for a wrong ``layer_types``."""
    model_type, kinds = config.get("model_type"), (PLAIN,)
    if model_type in ("mistral", "phi3"):
        return (AttentionKind(config.get("sliding_window", 4096 if model_type == "mistral" else None)),)
    if model_type not in ("qwen2", "qwen3") or not config.get("use_sliding_window", False):
        return kinds
    sliding, layers = AttentionKind(config.get("sliding_window", 4096)), config.get("layer_types")
    if layers is None:
        first = config.get("max_window_layers", 28)
        layers = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    known = isinstance(layers, list) and len(layers) == num_layers and all(name in LAYER_TYPES for name in layers)
    if not known:
        raise InputError(
            f"{path}: layer_types {shown(layers)} must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}"
        )
    kinds = tuple(sliding if LAYER_TYPES[name] else PLAIN for name in layers)
    return kinds[:1] if len(set(kinds)) == 1 else kinds
