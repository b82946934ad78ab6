"""What ACT, split attention and fewer bits add to the best policy without them, for ten models and eight machines.

Each space of policies is searched by itself. Writes experiments/results/when-act-pays.csv and prints the tables of
docs/when-act-pays.md. It takes about an hour on one core::

    python -m experiments.studies.when_act_pays
"""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.search import FULL, LOSSLESS, SearchResult, SearchSettings, search
from policy_search.search_problem import Space
from sim import catalogue

MODELS = (
    *("opt-6.7b", "opt-30b", "llama-2-7b", "llama-2-13b", "llama-2-70b"),
    *("llama-3-8b", "llama-3-70b", "mistral-7b", "qwen3-8b", "qwen3-32b"),
)
MACHINES = ("t4", "rtx3060-12g", "l4", "rtx4090", "rtx5090", "rtx-a6000", "a100-80g", "h100")
PROMPT_TOKENS, GENERATED_TOKENS = 1024, 128
TIME_LIMIT_S = 30.0  #: of a search; what it has found by then counts
OUT = Path("experiments/results/when-act-pays.csv")


def without(space: Space, word: str) -> Space:
    """Return the space without the cache entries that have ``word`` in their names."""
    entries, both = (tuple(entry for entry in of if word not in entry) for of in (space.entries, space.both))
    return replace(space, entries=entries, both=both)


ON_DEVICE = replace(LOSSLESS, attention=("device",))
#: Name -> space of policies. All but the last keep native bits, and are parts of the first.
SPACES = {
    "lossless": LOSSLESS,
    "without ACT": without(LOSSLESS, "act@"),
    "without split": without(LOSSLESS, ATTENDED_ENTRY),
    "on the device": ON_DEVICE,
    "on the device without ACT": without(ON_DEVICE, "act@"),
    "fewer bits": FULL,
}


def found(model: str, machine: str, space: Space) -> SearchResult | None:
    """Return the best policy of a space, or None if the model does not fit the machine."""
    problem = Problem(shape=shape_by_name(model), dtype="float16", hardware=catalogue.load(machine))
    workload = Workload.uniform(1, PROMPT_TOKENS, GENERATED_TOKENS)
    try:
        return search(problem, workload, SearchSettings(space=space, time_limit=TIME_LIMIT_S))
    except InputError:
        return None


def row_of(pair: tuple[str, str]) -> dict:
    """Return tokens/s of each space's best policy for (model, machine), and the best lossless policy in words."""
    results = {name: result for name, space in SPACES.items() if (result := found(*pair, space))}
    speeds = {name: of.batch * GENERATED_TOKENS / of.prediction["total_s"] for name, of in results.items()}
    lossless = [name for name in speeds if name != "fewer bits"]
    row: dict = dict(zip(("model", "machine"), pair, strict=True)) | speeds
    if not lossless:
        return row
    best = results[max(lossless, key=speeds.__getitem__)]  # not the first if the time limit ended its search
    row["lossless"] = max(speeds[name] for name in lossless)
    cache = " + ".join(f"{share:.0%} {entry}" for entry, share in best.policy.cache.items() if share >= 0.005)
    weights = f"{best.policy.weights.device:.0%}"
    said = {"attention": best.policy.attending_tier, "cache": cache, "weights on the device": weights}
    return row | said | {"batch": best.batch, "limited by": best.prediction["binding"]}


def tables(rows: pd.DataFrame) -> str:
    """Return the gains as markdown, one table a question, with a row a model and a column a machine."""
    gains = {
        "ACT, attention on the device": rows["on the device"] / rows["on the device without ACT"],
        "ACT": rows["lossless"] / rows["without ACT"],
        "split attention": rows["lossless"] / rows["without split"],
        "fewer bits": rows["fewer bits"] / rows["lossless"],
    }
    text = []
    for name, gain in gains.items():
        table = rows.assign(gain=gain).pivot(index="model", columns="machine", values="gain")
        shown = table.loc[list(MODELS), list(MACHINES)].map(lambda value: "–" if pd.isna(value) else f"{value:.2f}")
        lines = [f"| {model} | " + " | ".join(values) + " |" for model, values in zip(shown.index, shown.values)]
        head = ["| " + " | ".join([name, *MACHINES]) + " |", "| --- |" + " ---: |" * len(MACHINES)]
        text.append("\n".join(head + lines))
    return "\n\n".join(text)


def main() -> None:
    pairs = [(model, machine) for machine in MACHINES for model in MODELS]
    with Pool() as pool:
        rows = pd.DataFrame(tqdm(pool.imap(row_of, pairs), total=len(pairs)))
    rows.to_csv(OUT, index=False, float_format="%.5g")
    print(tables(rows))


if __name__ == "__main__":
    main()
