"""Decode latency over InfiniGen's threshold (OSDI 2024, Fig. 17a), measured on a link that is paced to RATE.

The skewed model decodes behind prompts of the paper's length, of documents that it has not learned from, so that each
layer fetches as many tokens as its threshold lets through. The cache lies on the host; copies between it and the device
(both this machine's memory) take the time of a link of RATE GB/s. Weights are resident, as in the paper. One run of the
prompts fills the cache; the decode is repeated over it.

Writes experiments/results/accuracy/latency/MODEL.json, from which ``experiments.reproduce.infinigen.accuracy`` makes
Fig. 17a. Run it on an idle machine: it takes some two minutes.

Usage::

    python -m experiments.studies.latency_study [--model experiments/checkpoints/opt-stdlib-deep]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from experiments import CHECKPOINTS
from experiments.bench.harness import least_disturbed
from experiments.bench.overlap import LAST
from experiments.bench.selection import moved_share
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.studies.accuracy_study import TEXTS
from flexhybrid import shipped
from flexhybrid.core.files import write_by_rename
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.trace import Window
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.accuracy.job import read_texts
from flexhybrid.jobs.machine import device_name
from flexhybrid.jobs.skew import skew
from flexhybrid.llm import LLM
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads
from sim.presets import infinigen, offloaded, resident

RATE = 0.1  #: GB/s of the link: loading all of the cache takes several times as long as computing
BATCH, MAX_TOKENS, ROUNDS = 4, 8, 3


def policies() -> dict[str, Policy]:
    """Return name -> policy: all of the cache, and each threshold, without a cap."""
    thresholds = {f"alpha {alpha:g}": infinigen(alpha, cap=1.0) for alpha in studied.ALPHAS}
    return {"full cache": offloaded(overlap="full"), **thresholds}


def measure(policy: Policy, weights: Weights, prompts: list[list[int]]) -> dict:
    """Return seconds per decode iteration of each round, the share of the cache that moved, and how much of the
    processors others used; rounds are the least disturbed ones."""
    workload = Workload.uniform(len(prompts), len(prompts[0]), MAX_TOKENS)
    with Session.of(weights, policy, workload, prompts, make_engine=partial(Engine, link_gb_per_s=RATE)) as session:
        session.generate()
        done = least_disturbed(session.decode, ROUNDS)
        windows = [Window(each.result, LAST) for each in done]
        moved = moved_share(windows[0], session.wave)
    steps = [window.seconds / window.num_iterations for window in windows]
    others = [each.others for each in done]
    return {"step_s": statistics.median(steps), "rounds_s": steps, "moved": moved, "others_cpu_share": others}


def study(model: Path, folder: Path, length: int = 2048) -> dict:
    """Measure all policies. ``folder`` takes the skewed checkpoint."""
    skewed = folder / "skewed"
    skew(model, shipped.PROMPTS, skewed)
    with LLM(model, resident(), device="cpu", dtype="float32") as llm:
        texts = read_texts(llm, TEXTS, length, BATCH).ids
    prompts = [text[: int(studied.PROMPT_SHARE * length)] for text in texts]
    checkpoint, on_device = Checkpoint(skewed), Policy(weights=Placement(device=1.0))
    with closing(Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), on_device)) as weights:
        rows = {name: measure(policy, weights, prompts) for name, policy in policies().items()}
    return {
        "model": model.name,
        "batch": BATCH,
        "prompt_tokens": len(prompts[0]),
        "max_tokens": MAX_TOKENS,
        "link_gb_per_s": RATE,
        "machine": device_name(torch.device("cpu")),
        "policies": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=CHECKPOINTS / "opt-stdlib-deep")
    parser.add_argument("--out", type=Path, default=studied.LATENCY_RESULTS)
    args = parser.parse_args()
    with torch_threads(1), tempfile.TemporaryDirectory() as folder:
        figures = study(args.model, Path(folder))
    write_by_rename(args.out / f"{args.model.name}.json", json.dumps(figures, indent=1))
    for name, row in figures["policies"].items():
        print(f"{name}: {1e3 * row['step_s']:.1f} ms an iteration, {row['moved']:.1%} of the cache moved")


if __name__ == "__main__":
    main()
