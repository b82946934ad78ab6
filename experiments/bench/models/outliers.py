"""Bench rows of the model with outlier channels: its block inputs, and what InfiniGen costs where little moves."""

import tempfile
from pathlib import Path

from experiments import CHECKPOINTS
from experiments.bench.harness import Table
from experiments.reproduce.infinigen.accuracy_policies import PROMPT_SHARE, infinigen
from experiments.studies.accuracy_study import TEXTS
from experiments.studies.attention_study import block_inputs
from flexhybrid import shipped
from flexhybrid.jobs.accuracy.job import AccuracyOptions, accuracy, read_texts
from flexhybrid.jobs.skew import skew
from flexhybrid.llm import LLM
from flexhybrid.runtime.threads import torch_threads
from sim.presets import resident

MODEL, LENGTH = CHECKPOINTS / "opt-stdlib-deep", 2048
POLICY = infinigen(cap=0.05, whole_layers=1)  #: of the study's policies the one that moves least


def bench_outliers(table: Table, num_texts: int = 4) -> None:
    """Add the least similar block inputs of a layer (Table 1), and bytes and perplexity of POLICY."""
    with torch_threads(1), tempfile.TemporaryDirectory() as folder:
        with LLM(MODEL, resident(), device="cpu", dtype="float32") as llm:
            texts = read_texts(llm, TEXTS, LENGTH, num_texts).ids
        inputs = block_inputs(MODEL, texts)["block input"]
        skewed = Path(folder) / "skewed"
        skew(MODEL, shipped.PROMPTS, skewed)
        options = AccuracyOptions(
            skewed,
            TEXTS,
            policies=(POLICY,),
            length=LENGTH,
            prompt_tokens=int(PROMPT_SHARE * LENGTH),
            num_texts=num_texts,
            device="cpu",
            hardware="rtx4090",
            out=Path(folder) / "run",
        )
        row = accuracy(options, quiet=True)["policies"][1]
    conditions = {"model": MODEL.name, "texts": num_texts}
    least = min(sum(of_texts) / len(of_texts) for of_texts in inputs)
    table.at_least("outliers: cosine of a block's input with the one before, least layer", least, 0.9, "", **conditions)
    conditions |= {"policy": POLICY, "low": row["over_full_low"], "high": row["over_full_high"]}
    table.at_most("outliers: share of the cache that InfiniGen moves at 5 %", row["moved"], 0.2, "", **conditions)
    name = "outliers: InfiniGen's perplexity over the full cache's at 5 %"
    table.at_most(name, row["over_full"], 1.05, "x", **conditions)
