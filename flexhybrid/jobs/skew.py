"""``flexhybrid skew``: prepares a checkpoint for InfiniGen's selection with a sample text."""

from pathlib import Path

from flexhybrid.core.errors import InputError, check, file_errors
from flexhybrid.requests import load_tokenizer
from flexhybrid.runtime.selections.skew import save_skewed
from flexhybrid.runtime.storage.loader import Checkpoint


def skew(model: Path, text: Path, out: Path, most_tokens: int = 2048) -> dict:
    """Skew the checkpoint ``model`` with the first tokens of a text file; write it to the new folder ``out``.

    Raise InputError for a checkpoint without a tokenizer, a text that is empty or cannot be read, or an existing
    folder.
    """
    check("--tokens", most_tokens, most_tokens >= 1, "a whole number >= 1")
    checkpoint = Checkpoint(model)
    if (tokenizer := load_tokenizer(checkpoint.path)) is None:
        raise InputError(f"{model} has no tokenizer files, so no text can be read with it")
    with file_errors(f"read text file {text}"):
        sample = text.read_text(encoding="utf-8")
    tokens = tokenizer(sample, verbose=False)["input_ids"][: min(most_tokens, checkpoint.shape.max_context)]
    if not tokens:
        raise InputError(f"text file {text} is empty")
    save_skewed(checkpoint, tokens, out)
    return {"model": str(model), "text": str(text), "out": str(out), "tokens": len(tokens)}
