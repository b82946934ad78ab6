"""The job of ``flexhybrid accuracy``: perplexity, greedy tokens and attention of policies on a text.

Each text is cut into a prompt and an answer. The answer's tokens are fed to the executor one by one, so that every
token is predicted from the policy's own cache (``flexhybrid.scoring``). The reference is the full cache on the device
in the compute dtype. Policies are compared on the same texts. Their 95 % intervals come from a bootstrap over whole
documents (``bootstrap``), because texts of one document are alike.
"""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from flexhybrid import shipped
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.selection import first_choosing, kept_tokens
from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import write_by_rename
from flexhybrid.core.policy import Policy, Selection
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.accuracy import bootstrap
from flexhybrid.jobs.accuracy.attention_watch import FullCache, Seen
from flexhybrid.jobs.compare.report import Report
from flexhybrid.jobs.options import AccuracyOptions
from flexhybrid.jobs.paths import check_writable
from flexhybrid.jobs.progress import Progress
from flexhybrid.llm import LLM
from flexhybrid.runtime.process_settings import threads_for, torch_threads
from flexhybrid.scoring import Score, score
from sim.presets import resident

FULL_CACHE = "full_cache"  #: name of the reference
CHUNK_TOKENS = 256  #: positions per row of the table by position
DOCUMENT_END = "\f"  #: separates the documents of a text file


@dataclass(frozen=True)
class AccuracyRun:
    """The measurements of one policy: arrays [texts, answer tokens], about attention [texts, decode steps, layers]."""

    policy: str
    logprobs: np.ndarray
    greedy: np.ndarray
    cosine: np.ndarray | None  #: None for the full cache, and for attention on the host
    looked_at: np.ndarray | None  #: None as ``cosine``
    moved: float  #: bytes of loaded context over the bytes of all keys and values in the compute dtype
    selection: Selection
    documents: np.ndarray  #: [texts], number of the document of each text

    def by_document(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of ``values`` [texts, ...] over each document, an array [documents]."""
        of_texts = values.reshape(len(values), -1).mean(axis=1)
        return np.array([of_texts[self.documents == document].mean() for document in np.unique(self.documents)])

    @property
    def weights(self) -> np.ndarray:
        """The number of texts of each document."""
        return np.unique(self.documents, return_counts=True)[1]


def accuracy(options: AccuracyOptions, quiet: bool = False) -> dict:
    """Measure every policy; return the record that is also written to ``options.out``.

    Raise InputError, before the first run, if the options cannot work.
    """
    report = Report(quiet)
    names = ("device", "dtype", "hardware", "disk_dir")
    arguments = LLMArguments(options.model or shipped.CHECKPOINT, **{name: getattr(options, name) for name in names})
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM.from_arguments(replace(arguments, policy=policy)))
            for name, policy in _named(options.policies).items()
        }
        full_llm = llms[FULL_CACHE]
        length = options.length or min(full_llm.shape.max_context, 2048)
        prompt = options.prompt_tokens or length // 8
        if not 0 < prompt < length <= full_llm.shape.max_context:
            raise InputError(
                f"texts of {length} tokens with a prompt of {prompt}: texts may have {full_llm.shape.max_context} "
                f"tokens for model {full_llm.shape.name}, and the prompt must be shorter than its text"
            )
        texts = read_texts(full_llm, options.text or shipped.HELD_OUT, length, options.num_texts)
        workload = Workload.uniform(len(texts.ids), prompt, length - prompt)
        for llm in llms.values():
            with llm.waves(workload):
                pass  # the policy is chosen and fits; nothing runs yet
        check_writable(options.out)
        full = FullCache.empty(full_llm.shape, len(texts.ids), length, length - prompt, full_llm.device)
        tokens = len(llms) * len(texts.ids) * (length - prompt)
        with (
            Progress(tokens, FULL_CACHE, "token", quiet) as progress,
            torch_threads(threads_for(full_llm.device.type, full_llm.shape.hidden)),
        ):
            runs = [_run(name, llm, texts, prompt, full, progress) for name, llm in llms.items()]
    chunks = [row for run in runs for row in _chunk_rows(run, runs[0], prompt)]
    result = {
        "model": full_llm.shape.name,
        "dtype": full_llm.problem.dtype,
        "text": str(options.text or "shipped"),
        "num_texts": len(texts.ids),
        "texts_by_document": runs[0].weights.tolist(),
        "length": length,
        "prompt_tokens": prompt,
        "policies": [_policy_row(run, runs[0]) for run in runs],
        "chunks": chunks,
    }
    _show(report, result)
    _write(result, options.out)
    return result


def _named(texts: tuple[str, ...]) -> dict[str, Policy | str]:
    """Return name -> policy of the full cache and of ``texts``, system names and policy files."""
    named: dict[str, Policy | str] = {FULL_CACHE: resident()}
    for text in texts:
        policy = Policy.load(text) if text.endswith(".json") else text
        name = policy.name if isinstance(policy, Policy) else text
        if name in named:
            raise InputError(f"two of the policies to measure are called {name!r}")
        named[name] = policy
    return named


class Texts(NamedTuple):
    """Token ids of texts of one length, and the number of each text's document."""

    ids: list[list[int]]
    documents: np.ndarray


def read_texts(llm: LLM, path: Path, length: int, max_texts: int) -> Texts:
    """Return up to ``max_texts`` texts of ``length`` tokens from a file, each with the beginning-of-sequence token.

    Form feeds separate documents. Each document is cut into consecutive texts, from which evenly spaced ones are taken.
    Raise InputError for a file that cannot be read, or is too short for a single text.
    """
    if llm.tokenizer is None:
        raise InputError(f"{llm.checkpoint.path} has no tokenizer files, so it cannot read a text")
    with file_errors(f"read text file {path}"):
        documents = path.read_text(encoding="utf-8").split(DOCUMENT_END)
    start = [] if (bos := llm.tokenizer.bos_token_id) is None else [bos]
    size, longest, texts, numbers = length - len(start), 0, [], []
    for number, document in enumerate(documents):
        ids = llm.tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        texts += [start + ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        numbers += [number] * (len(texts) - len(numbers))
    if not longest:
        raise InputError(f"{path} is empty")
    if not texts:
        raise InputError(f"{path}: the longest document has {longest} tokens, a text {size}: give a smaller --length")
    count = min(len(texts), max_texts)
    taken = [i * len(texts) // count for i in range(count)]
    return Texts([texts[i] for i in taken], np.array([numbers[i] for i in taken]))


def _run(name: str, llm: LLM, cut: Texts, prompt: int, full: FullCache, progress: Progress) -> AccuracyRun:
    """Score the texts under one policy. The first run, with the full cache, fills ``full``."""
    progress.turn_to(name)
    texts = cut.ids
    seen = Seen.empty(full)

    def watch(executor, members) -> None:
        if name == FULL_CACHE:
            full.record(executor, members)
        else:
            seen.watch(executor, members, full)

    scores: list[Score] = score(llm, texts, len(texts[0]) - prompt, watch, progress.advance)
    llm.close()
    num_steps = len(texts[0]) - prompt - 1
    contexts = prompt + np.arange(num_steps)
    token_bytes = llm.shape.num_layers * llm.shape.kv_token_bytes(llm.problem.bytes_per_element)
    cache_bytes = len(texts) * contexts.sum() * token_bytes
    watched = name != FULL_CACHE and llm.settled_policy.attention == "device"
    return AccuracyRun(
        name,
        np.stack([run.logprobs for run in scores]),
        np.stack([run.greedy for run in scores]),
        seen.cosine.cpu().numpy() if watched else None,
        seen.looked_at.cpu().numpy() if watched else None,
        float(seen.moved_bytes[0] / cache_bytes),
        selection=llm.settled_policy.selection,
        documents=cut.documents,
    )


def _row(run: AccuracyRun, full: AccuracyRun, tokens: slice) -> dict:
    """Return means over a range of the answer's tokens, with the ends of their intervals (None for one document).

    Decode step i gives token i + 1: the prefill gives the first one.
    """
    steps = slice(max(tokens.start or 0, 1) - 1, None if tokens.stop is None else tokens.stop - 1)
    logprobs, reference = run.by_document(run.logprobs[:, tokens]), run.by_document(full.logprobs[:, tokens])
    row = {"policy": run.policy, "perplexity": math.exp(-run.logprobs[:, tokens].mean())}
    row |= _ends("over_full", bootstrap.perplexity_ratio(logprobs, reference, run.weights))
    figures = {
        "agreement": run.greedy[:, tokens] == full.greedy[:, tokens],
        "cosine": None if run.cosine is None else run.cosine[:, steps],
        "looked_at": None if run.looked_at is None else run.looked_at[:, steps],
    }
    for name, values in figures.items():
        found = None
        if values is not None and values.size:  # a range of the first token alone has no decode step
            found = bootstrap.mean(run.by_document(values), run.weights)
        row |= _ends(name, found)
    return row


def _ends(name: str, found: bootstrap.Interval | None) -> dict[str, float | None]:
    """Return a figure and the ends of its interval as cells of a row."""
    value, low, high = found or (None, None, None)
    known = low is not None and not math.isnan(low)
    return {name: value, f"{name}_low": low if known else None, f"{name}_high": high if known else None}


def _policy_row(run: AccuracyRun, full: AccuracyRun) -> dict:
    def by_layer(values: np.ndarray | None) -> list[float] | None:
        return None if values is None else values.mean((0, 1)).tolist()

    lists = {
        "cosine_by_layer": by_layer(run.cosine),
        "looked_at_by_layer": by_layer(run.looked_at),
        "logprob_by_document": run.by_document(run.logprobs).tolist(),
        "agreement_by_document": run.by_document(run.greedy == full.greedy).tolist(),
    }
    row = {**_row(run, full, slice(None)), "moved": run.moved, **lists}
    if run.selection.method == "speculative" and run.looked_at is not None and run.selection.alpha != math.inf:
        chosen = run.looked_at[..., int(first_choosing(run.selection)) :]
        row |= {"alpha": run.selection.alpha, "fetched": float(chosen.mean())}  # for infinigen(expected=accuracy.json)
    return row


def _chunk_rows(run: AccuracyRun, full: AccuracyRun, prompt: int) -> Iterator[dict]:
    """Yield a row for each ``CHUNK_TOKENS`` positions that hold a part of the answer."""
    length = prompt + run.logprobs.shape[1]
    for start in range(prompt // CHUNK_TOKENS * CHUNK_TOKENS, length, CHUNK_TOKENS):
        first, end = max(start, prompt), min(start + CHUNK_TOKENS, length)
        row = _row(run, full, slice(first - prompt, end - prompt))
        yield {"policy": row.pop("policy"), "first": first, "end": end, **row}


def _show(report: Report, result: dict) -> None:
    num_tokens = result["num_texts"] * (result["length"] - result["prompt_tokens"])
    report.say(
        f"{result['model']}, {result['dtype']}: {result['num_texts']} texts of {result['length']} tokens from "
        f"{len(result['texts_by_document'])} documents; the last {result['length'] - result['prompt_tokens']} tokens "
        f"of each are predicted one by one ({num_tokens} in all)\n"
    )
    columns = ["policy", "perplexity", *(f"over_full{end}" for end in ("", "_low", "_high"))]
    columns += ["agreement", "cosine", "looked_at", "moved"]
    rows = pd.DataFrame(result["policies"], columns=pd.Index(columns))
    report.say(_rounded(rows).to_string(index=False))
    chunks = pd.DataFrame(result["chunks"])
    grid = chunks.pivot(index="policy", columns="first", values="perplexity").loc[rows["policy"]]
    grid.columns = [f"{first}-" for first in grid.columns]
    report.say("\nPerplexity by position\n")
    report.say(_rounded(grid.reset_index()).to_string(index=False))
    prompt = result["prompt_tokens"]
    half = int(kept_tokens(Selection("heavy_hitter", budget=0.5), prompt, prompt, prompt))
    report.say(
        f"\nover_full: perplexity / perplexity of {FULL_CACHE}, with its 95 % interval (bootstrap over documents); an\n"
        f"interval around 1 shows no difference. agreement: share of greedy tokens equal to {FULL_CACHE}'s. cosine:\n"
        f"similarity of attention weights to {FULL_CACHE}'s, mean over steps, layers and heads. looked_at: share of\n"
        "the tokens so far that a head attends to. moved: bytes loaded for the context / bytes of all its keys and\n"
        f"values. h2o's budget is a share of the prompt, in blocks of {BLOCK_TOKENS} tokens: h2o(0.5) keeps {half} of\n"
        f"{prompt} tokens here, {half / result['length']:.1%} of a text (--prompt-tokens). Layers 0 and 1 keep all\n"
        "tokens, unless the option whole_layers=0 is given."
    )


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with numbers as texts with four decimals, and missing numbers as empty texts."""
    return table.map(lambda value: value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.4f}")


def _write(result: dict, out: Path) -> None:
    write_by_rename(out / "accuracy.json", json.dumps(result, indent=1))
    policies = pd.DataFrame(result["policies"])
    policies = policies.drop(columns=[name for name in policies if "_by_" in str(name)])
    write_by_rename(out / "accuracy.csv", policies.to_csv(index=False))
    write_by_rename(out / "accuracy-chunks.csv", pd.DataFrame(result["chunks"]).to_csv(index=False))
    from figures import accuracy as draw  # last: a missing library must not lose the results

    draw.by_chunk(out / "accuracy.png", result["chunks"], FULL_CACHE)
