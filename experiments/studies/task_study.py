"""Tasks of lm-evaluation-harness on small models: what a lossy cache costs in right answers (InfiniGen, Fig. 11).

The paper's tasks are downloads and beyond models of this size. These two are made here (``experiments.studies.tasks``)
of files that the models have not learned from, and run by the harness through ``flexhybrid.lm_eval_adapter``. Under a
lossy policy the second half of each context passes the decode, since a prefill attends to everything. H2O's budget is a
share of the first half, its prompt, and stays what it is: at ``h2o(2f)`` it keeps the share f of the whole context.

Writes experiments/results/accuracy/tasks/MODEL.json: of each task and policy the share of right answers by document,
from which ``experiments.reproduce.infinigen.accuracy`` makes rows. Needs lm_eval (requirements-test.txt). On one core a
quarter of an hour for a model of twelve layers.

Usage::

    python -m experiments.studies.task_study [--models experiments/checkpoints/opt-stdlib-deep …]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments import CHECKPOINTS
from experiments.reproduce.infinigen.accuracy_policies import TASK_RESULTS, TASKS_OF_HARNESS, task_policies
from flexhybrid import shipped
from flexhybrid.core.files import write_by_rename
from flexhybrid.jobs.skew import skew
from flexhybrid.runtime.threads import torch_threads

MODELS = (shipped.CHECKPOINT, CHECKPOINTS / "opt-stdlib-deep")
FOLDER = Path(__file__).with_name("tasks")
DECODE_CONTEXT = 0.5  #: of a context, token by token, under lossy policies


def answers(model: Path, policy: str, manager, tasks: tuple[str, ...] = TASKS_OF_HARNESS) -> dict[str, list[dict]]:
    """Return task -> the harness's samples under a policy. The full cache answers after a prefill alone."""
    from lm_eval import evaluator

    from flexhybrid import lm_eval_adapter

    make: Any = lm_eval_adapter.FlexHybridLM  # the harness hides its arguments behind a decorator
    options: dict[str, Any] = {"dtype": "float32", "hardware": "rtx4090", "enable_prefix_caching": False}
    lm = make(str(model), policy=policy, device="cpu", **options)
    if lm.decode_context:
        lm.decode_context = DECODE_CONTEXT
    asked = {"tasks": list(tasks), "task_manager": manager, "bootstrap_iters": 0, "log_samples": True}
    result: Any = evaluator.simple_evaluate(lm, **asked)
    lm.llm.close()
    return {task: sorted(result["samples"][task], key=lambda each: each["doc_id"]) for task in tasks}


def by_document(samples: list[dict]) -> dict[str, list]:
    """Return the documents' numbers, their questions, and the share of these that is answered rightly."""
    right: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        right[sample["doc"]["document"]].append(float(sample["acc"]))
    documents = sorted(right)
    return {
        "documents": documents,
        "questions": [len(right[document]) for document in documents],
        "right": [sum(right[document]) / len(right[document]) for document in documents],
    }


def study(model: Path, folder: Path) -> dict:
    """Answer all questions under all policies. ``folder`` takes the skewed checkpoint."""
    from lm_eval.tasks import TaskManager

    os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    skewed = folder / "skewed"
    skew(model, shipped.PROMPTS, skewed)
    tasks: dict[str, dict[str, dict]] = {task: {} for task in TASKS_OF_HARNESS}
    for name, (is_skewed, policy) in task_policies().items():
        for task, samples in answers(skewed if is_skewed else model, policy, manager).items():
            tasks[task][name] = {"policy": policy, **by_document(samples)}
    return {"model": model.name, "decode_context": DECODE_CONTEXT, "tasks": tasks}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", help="folders (default: the small checkpoints that exist)")
    parser.add_argument("--out", type=Path, default=TASK_RESULTS)
    args = parser.parse_args()
    for model in args.models or [path for path in MODELS if (path / "config.json").is_file()]:
        with torch_threads(1), tempfile.TemporaryDirectory() as folder:
            figures = study(model, Path(folder))
        write_by_rename(args.out / f"{model.name}.json", json.dumps(figures, indent=1))
        print(f"{args.out / model.name}.json")


if __name__ == "__main__":
    main()
