"""KVPR: in whatever order a layer's weights and its context cross the link, the tokens are transformers' own."""

from typing import Any

import numpy as np
import pytest
from models import save_llama, save_opt
from runs import run_wave
from toy_machine import machine

from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.trace import check_trace
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.storage.loader import Checkpoint

#: In one mini-batch a layer comes at once, in several slice by slice: the most tokens of one, and where weights lie.
WAYS = {
    "at once": (1 << 12, Placement(host=1.0)),
    "most of it at once": (1 << 12, Placement(device=0.1, host=0.9)),
    "in slices": (80, Placement(host=1.0)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder and reference tokens of a model of each family; of the second every other layer has a window."""
    found, rng = {}, np.random.default_rng(3)
    prompts = [rng.integers(3, 61, length).tolist() for length in (50, 37, 9)]
    for name in ("opt", "windows"):
        folder = tmp_path_factory.mktemp(name)
        if name == "opt":
            save_opt(folder, layers=3)
        else:
            types = [f"{kind}_attention" for kind in ("full", "sliding", "full")]
            windows: dict[str, Any] = dict(
                sliding_window=9, use_sliding_window=True, max_window_layers=0, layer_types=types
            )
            save_llama(folder, kind="qwen3", layers=3, heads=4, kv_heads=4, head_dim=8, hidden=32, **windows)
        reference = Reference(folder)
        found[name] = folder, prompts, reference, reference.generate(prompts, 6, True)
    return found


@pytest.mark.parametrize("order", ["kv_first", "kv_act_first", "natural"])
@pytest.mark.parametrize("schedule", ["column", "row"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["opt", "windows"])
def test_tokens_do_not_hang_on_the_order_of_loads(checkpoints, model, way, schedule, order):
    folder, prompts, reference, expected = checkpoints[model]
    bound, weights = WAYS[way]
    rule = {"kv_first": "paper_prompt", "kv_act_first": "pipeline", "natural": "paper"}[order]
    cache, way_to_run = {"both(kv@host,act@host)": 1.0}, {"schedule": schedule, "split": rule, "weight_order": order}
    policy = Policy(cache=cache, weights=weights, max_mini_batch_tokens=bound, **way_to_run)
    result = run_wave(Checkpoint(folder), policy, prompts, 6, hardware=machine(link=1e-4))
    assert check_trace(result.trace) == []
    outcome = compare_tokens(reference, prompts, expected, result.tokens)
    assert outcome.exact, outcome.first_wrong
    loads = [task for task, _, _ in result.trace if (task.verb, task.iteration) == ("load_weights", 2)]
    whole = way != "in slices" or schedule == "row"
    pieces = {(task.payload.start, task.payload.end) for task in loads}
    assert len(pieces) == ((2 if order == "kv_act_first" else 1) if whole else 3)
    assert any(task.verb == "kv_gen" for task, _, _ in result.trace)
