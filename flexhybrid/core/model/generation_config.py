"""What a checkpoint's generation_config.json asks for: tokens that end an answer, and sampling parameters."""

from pathlib import Path

from flexhybrid.core.errors import InputError, check, is_integer, shown
from flexhybrid.core.files import load_json

FILE = "generation_config.json"
#: Its fields that are sampling parameters, with their names here (as vLLM takes them; it ignores ``do_sample``).
SAMPLING = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
SAMPLING["max_new_tokens"] = "max_tokens"
#: Where the defaults of requests come from: the checkpoint's file, or nowhere (vLLM calls it "vllm").
SOURCES = ("auto", "none")


def generation_config(folder: Path) -> dict:
    """Return the non-null fields of a checkpoint's file; {} without one. Raise InputError unless it is a JSON
    object."""
    path = folder / FILE
    if not path.is_file():
        return {}
    fields = load_json(path)
    if not isinstance(fields, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def default_sampling(folder: Path, source: str = "auto") -> dict:
    """Return the sampling parameters of requests that name none, by the names of ``SamplingParams``.

    ``source``: of SOURCES; vLLM's "vllm" is "none". Raise InputError for another.
    """
    check("generation_config", source, source in (*SOURCES, "vllm"), '"auto" (the checkpoint\'s file) or "none"')
    fields = generation_config(folder) if source == "auto" else {}
    return {SAMPLING[name]: value for name, value in fields.items() if name in SAMPLING}


def end_tokens(folder: Path | None, *configured) -> tuple[int, ...]:
    """Return the token ids that end an answer: the file's or else the first named one of ``configured`` (eos_token_id
    of config.json and its parts), as in transformers; () without any.

    Chat models have several: the end of a turn and the end of the text.
    """
    own = generation_config(folder).get("eos_token_id") if folder else None
    tokens = next((tokens for tokens in (own, *configured) if tokens is not None and tokens != []), ())
    ids = tuple(tokens) if isinstance(tokens, (list, tuple)) else (tokens,)
    if folder and tokens is own and not all(is_integer(token) and token >= 0 for token in ids):
        raise InputError(f"{folder / FILE}: eos_token_id is {shown(tokens)}; it must be a token id or a list of them")
    return ids
