"""Bench rows of recall: what H2O and InfiniGen answer about facts that are asked for after the eviction."""

from functools import partial

import numpy as np

from experiments.bench.harness import Table
from experiments.reproduce.infinigen.recall import bound, studies
from experiments.studies.recall_study import MODEL, SEED, SIZES, WHOLE_LAYERS, fetching, keeping, measure
from experiments.training import recall
from flexhybrid.runtime.threads import torch_threads

PLACES = 64  #: a fifth of the prompt


def bench_recall(table: Table, num_texts: int = 20) -> None:
    """Add the right answers of the full cache, of H2O over its bound, and of InfiniGen over the full cache."""
    texts = recall.draw_texts(SIZES, num_texts, np.random.default_rng(SEED))
    study = studies()[MODEL.name]
    with torch_threads(1):
        run = partial(measure, MODEL, texts=texts, sizes=SIZES, heads=study["heads"])
        full = run("resident", 0)["right"]
        evicting = run(keeping(PLACES, SIZES, WHOLE_LAYERS), WHOLE_LAYERS)["right"]
        guessing = run(fetching(PLACES, SIZES, WHOLE_LAYERS), WHOLE_LAYERS)["right"]
    conditions = {"texts": num_texts, "queries": SIZES.queries, "facts": SIZES.facts, "places": PLACES}
    table.at_least("recall: right answers of the full cache", full, 0.98, "", **conditions)
    name = f"recall: right answers of H2O with {PLACES} places"
    table.at_most(name, evicting, bound(study, PLACES), "", **conditions)
    name = f"recall: InfiniGen's right answers over the full cache's, {PLACES} tokens fetched"
    table.at_least(name, guessing / full, 0.95, "x", **conditions)
