"""Read a checkpoint's generation_config.json: tokens that end an answer, and sampling parameters."""

from pathlib import Path

from flexhybrid.core.errors import InputError, check, is_integer, shown
from flexhybrid.core.files import load_json

FILE = "generation_config.json"
#: Field of the file -> name of our sampling parameter. As in vLLM, ``do_sample`` is ignored.
SAMPLING = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
SAMPLING["max_new_tokens"] = "max_tokens"
#: Sources of default sampling parameters: "auto" is the checkpoint's file, "none" (in vLLM: "vllm") no file.
SOURCES = ("auto", "none")


def generation_config(folder: Path) -> dict:
    """Return the fields of a checkpoint's file that are not null; {} without a file. Raise InputError if it is not a
    JSON object."""
    path = folder / FILE
    if not path.is_file():
        return {}
    fields = load_json(path)
    if not isinstance(fields, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def default_sampling(folder: Path, source: str = "auto") -> dict:
    """Return the default sampling parameters of requests, by the names of ``SamplingParams``. ``source``: one of
    SOURCES, or vLLM's "vllm" for "none". Raise InputError for another source."""
    check("generation_config", source, source in (*SOURCES, "vllm"), '"auto" (the checkpoint\'s file) or "none"')
    fields = generation_config(folder) if source == "auto" else {}
    return {SAMPLING[name]: value for name, value in fields.items() if name in SAMPLING}


def end_tokens(folder: Path | None, *configured) -> tuple[int, ...]:
    """Return the token ids that end an answer, as in transformers; () if none is known.

    They are those of the checkpoint's file, else the first of ``configured`` (eos_token_id of config.json and of its
    parts). Chat models have several: the end of a turn and the end of the text. Raise InputError if the file's are not
    token ids.
    """
    own = generation_config(folder).get("eos_token_id") if folder else None
    tokens = next((tokens for tokens in (own, *configured) if tokens is not None and tokens != []), ())
    ids = tuple(tokens) if isinstance(tokens, (list, tuple)) else (tokens,)
    if folder and tokens is own and not all(is_integer(token) and token >= 0 for token in ids):
        raise InputError(f"{folder / FILE}: eos_token_id is {shown(tokens)}; it must be a token id or a list of them")
    return ids
