"""The text part of a model that also takes pictures or sound: a decoder with equal answers to texts.

Its config.json has a ``text_config``; its weights have the whole model's names, ``model.language_model.layers.0…`` or
``language_model.model.layers.0…``, instead of ``model.layers.0…``.
"""

from __future__ import annotations

SENSES = ("vision", "audio")
PART = "language_model."  #: of names in a checkpoint of the whole model
#: What the whole model's configuration says of its text part too.
OF_THE_WHOLE = ("dtype", "eos_token_id", "tie_word_embeddings")


def takes_more_than_text(config) -> bool:
    """Return whether a configuration has a part for pictures or sound."""
    return any(sense in name for name in vars(config) if name.endswith("_config") for sense in SENSES)


def text_part(config):
    """Return the configuration of the text part, None without one."""
    text = config.get_text_config()
    if text is config or not getattr(text, "model_type", None):
        return None
    for field in OF_THE_WHOLE:
        if getattr(config, field, None) is not None:
            setattr(text, field, getattr(config, field))
    return text


def own_name(name: str) -> str:
    """Return the text part's own name for a tensor of the whole model's checkpoint."""
    return name.replace(PART, "", 1)
