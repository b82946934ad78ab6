"""Bench rows of decode speeds on the paced link over what its bytes and its products allow: of the path by a file of
ours, so that a later tree can be compared with this one by a ratio of one run, and of other models of the same sizes
through transformers' layers, which of them would gain by a file of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.bench.harness import Table, seconds_in_turn, seconds_of
from experiments.bench.models.layer_kinds import save_config, shape_in
from experiments.bench.models.module_path import LINK_GB_PER_S, WIDE, policies_of_width, streamed
from flexhybrid.core.plan import stream
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.threads import torch_threads

FAST, TURNS, PRODUCT_REPEATS = "llama", 5, 7
#: Sizes of all models. No text outgrows the window, so all load the same bytes.
SIZES: dict[str, Any] = WIDE | dict(num_hidden_layers=3, head_dim=64, sliding_window=2048, dtype="float32")
MODULES = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3")
PRODUCTS = ("project", "kv_gen", "finish")
#: Of its bound, what a decode by a file of ours reaches at least. Trees are held against each other by the rows.
FAST_BARS = {"kv_only": 0.95, "hybrid(0.5)": 0.8}
MODULE_BAR = 0.9  #: of the other path's: below, a file of its own pays, as Qwen3 and Phi-3 have it


def bench_path_speeds(table: Table) -> None:
    with torch_threads(1), TemporaryDirectory() as folder:
        shapes = {FAST: shape_in(_saved(Path(folder), FAST))}
        shapes |= {f"{name} (module)": empty_model(_saved(Path(folder), name)).shape for name in MODULES}
        for policy in policies_of_width():
            with ExitStack() as stack:
                sessions = {name: stack.enter_context(streamed(shape, policy)) for name, shape in shapes.items()}
                bounds = {name: bound_s(session) for name, session in sessions.items()}
                calls = {name: lambda _, session=session: session.decode_result() for name, session in sessions.items()}
                seconds = seconds_in_turn(calls, TURNS, warm_up=1)
            _add(table, policy.name, bounds, seconds)


def _saved(folder: Path, model_type: str) -> Path:
    own = folder / model_type
    own.mkdir(exist_ok=True)
    save_config(own, model_type, SIZES)
    return own


def _add(table: Table, policy: str, bounds: dict[str, dict[str, float]], seconds: dict[str, list[float]]) -> None:
    # Models of one size need the same products. Their own may be more: KV-Gen of Phi-3, whose queries, keys and values
    # are one matrix, computes queries too.
    bounds = {name: of | {"products_s": bounds[FAST]["products_s"]} for name, of in bounds.items()}
    reached = {name: [max(bounds[name].values()) / s for s in of_name] for name, of_name in seconds.items()}
    name = f"fast path: decode speed over its bound, {policy}"
    table.at_least(
        name, statistics.median(reached[FAST]), FAST_BARS[policy], "x", samples=reached[FAST], **bounds[FAST]
    )
    for other in reached:
        if other != FAST:
            ratios = [ours / fast for ours, fast in zip(reached[other], reached[FAST], strict=True)]
            name = f"{other}: decode speed over its bound, to the fast path's, {policy}"
            table.at_least(name, statistics.median(ratios), MODULE_BAR, "x", samples=ratios, **bounds[other])


def bound_s(session: Session) -> dict[str, float]:
    """Return the seconds that a decode takes at least: of the link for its bytes at its rate, and of plain products of
    torch with as many rows and operations as the compute lane's, each timed by itself."""
    link_bytes, products, shape = 0.0, Counter[tuple[int, int]](), session.wave.shape
    for task in stream(session.wave, first_iteration=1):
        if task.resource == "h2d":
            link_bytes += task.work.link_bytes
        elif task.verb in PRODUCTS and task.work.tokens:
            columns = task.work.flops / (2 * task.work.tokens * shape.hidden)
            products[int(task.work.tokens), round(columns)] += 1
    computed = sum(count * _product_s(*size, shape.hidden) for size, count in products.items())
    return {"link_s": link_bytes / (1e9 * LINK_GB_PER_S), "products_s": computed}


@cache
def _product_s(rows: int, columns: int, hidden: int) -> float:
    """Return the least seconds of a product [rows, hidden] x [hidden, columns], the same for all who have it."""
    left, right = torch.randn(rows, hidden), torch.randn(columns, hidden)
    return min(seconds_of(lambda: torch.mm(left, right.t())) for _ in range(PRODUCT_REPEATS))
