"""Experiments: benchmarks, small models of a cascade, GPU runs, peers, studies, reproduced papers, results."""

import functools
from pathlib import Path

CHECKPOINTS = Path(__file__).parent / "checkpoints"  #: models that only experiments use


def token_ids(text: str) -> list[int]:
    """Return a text's token ids by the tokenizer that all checkpoints of this repository share."""
    return tokenizer()(text, verbose=False)["input_ids"]


@functools.cache
def tokenizer():
    """Return the tokenizer that all checkpoints of this repository share."""
    from flexhybrid import shipped
    from flexhybrid.requests import load_tokenizer

    tokenizer = load_tokenizer(shipped.CHECKPOINT)
    if tokenizer is None:
        raise FileNotFoundError(f"{shipped.CHECKPOINT} has no tokenizer")
    return tokenizer
