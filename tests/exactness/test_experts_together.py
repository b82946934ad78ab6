"""Test experts that several mini-batches share: transformers' own tokens, whatever is multiplied together."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from runs import run_wave, some_requests
from test_refill import answers
from test_states import most_allocated
from tiny_models import greedy, save_tiny
from toy_machine import machine

from flexhybrid import cli
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Experts, Policy, Selection
from flexhybrid.core.trace import check_trace
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from sim import catalogue
from sim.presets import act_only, hybrid, kv_only, moe_gen

pytest.importorskip("greenlet")

PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 71, 3, 3, 90, 18, 25, 31, 12, 7] * 2, [4, 8, 15, 16, 23], [42] * 11, [7] * 3]
MAX_TOKENS = 5
#: Three or four mini-batches; prompts of the last one are computed in chunks.
POLICIES = {
    "kv_only": kv_only(50),
    "hybrid": hybrid(0.5, 50),
    "act_only": act_only(50),
    "host attention": replace(moe_gen(1.0), max_mini_batch_tokens=50),
    "tok": Policy(cache={"tok": 0.4, "act@device": 0.3, "kv@host": 0.3}, max_mini_batch_tokens=50),
    "chunks": Policy(cache={"act@host": 0.5, "kv@device": 0.5}, max_mini_batch_tokens=16),
}
#: Type -> what is special about it.
TYPES = {
    "mixtral": "experts in all layers",
    "qwen3_moe": "normed weights of the chosen ones",
    "gpt_oss": "biases, transposed matrices, windows",
    "deepseek_v2": "a shared expert, and a dense first layer",
    "deepseek_v3": "groups of experts, and biases that choose",
    "glm4_moe": "both",
    "qwen3_next": "recurrent layers with experts",
    "granitemoehybrid": "the same, with multipliers",
    "nemotron_h": "layers of experts alone",
}


def tokens(checkpoint, policy, batch: int, max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    """Return a wave's tokens; its trace must be in order, and have as many products as there are parts."""
    policy = replace(policy, experts=Experts(batch))
    result = run_wave(checkpoint, policy, PROMPTS, max_tokens, hardware=catalogue.load("t4"))
    assert check_trace(result.trace) == []
    last = [event.task for event in result.trace if event.task.iteration == max_tokens - 1]
    multiplied = [task for task in last if task.verb == "experts"]
    routed = [task for task in last if task.verb == "route"]
    num_mini_batches = len({task.mini_batch for task in last if task.verb == "finish"})
    parts = min(batch, num_mini_batches)
    assert num_mini_batches > 1 and len(multiplied) == parts * sum(checkpoint.shape.routed)
    assert len(routed) == (num_mini_batches if batch else 0) * sum(checkpoint.shape.routed)
    return result.tokens


@pytest.mark.parametrize("model_type", TYPES)
def test_mini_batches_that_share_experts_give_the_references_tokens(tmp_path, model_type):
    expected = greedy(save_tiny(tmp_path, model_type), PROMPTS, MAX_TOKENS)
    checkpoint = Checkpoint(tmp_path, modules=True)
    whole = checkpoint.shape.whole_prompts
    for number, (name, policy) in enumerate(POLICIES.items()):
        if name in ("chunks", "tok") and whole:
            continue
        batch = 1 + (number + len(model_type)) % 2
        assert tokens(checkpoint, policy, batch) == expected, (name, batch)


@pytest.mark.parametrize("sizes", [{"num_local_experts": 1, "num_experts_per_tok": 1}, {"num_experts_per_tok": 4}])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_one_expert_and_all_experts(tmp_path, sizes, batch):
    expected = greedy(save_tiny(tmp_path, "mixtral", **sizes), PROMPTS, MAX_TOKENS)
    assert tokens(Checkpoint(tmp_path, modules=True), hybrid(0.5, 50), batch) == expected


def test_experts_without_rows(tmp_path):
    """A decode step has four rows, and each chooses two of 32 experts."""
    expected = greedy(save_tiny(tmp_path, "mixtral", num_local_experts=32), PROMPTS, MAX_TOKENS)
    assert tokens(Checkpoint(tmp_path, modules=True), kv_only(50), 1) == expected


#: Policies of a queue, the share of answers' limits that pools are made for, and whether prompts begin alike.
QUEUES = [
    ("mixtral", hybrid(0.5), 0.01, False),
    ("mixtral", kv_only(), 1.0, True),
    ("mixtral", moe_gen(1.0), 1.0, False),
    ("qwen3_next", kv_only(), 0.01, False),
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("model_type, policy, share, sharing", QUEUES)
def test_requests_that_join_and_stop(tiny_of, tmp_path, model_type, policy, share, sharing, batch):
    checkpoint, model = tiny_of(model_type)
    prompts, max_tokens, stops = some_requests(4, 9, 30)
    prompts = [list(range(5, 40)) * sharing + prompt for prompt in prompts]
    expected = [
        greedy(model, [prompt], min(length, stop))[0]
        for prompt, length, stop in zip(prompts, max_tokens, stops, strict=True)
    ]
    policy = replace(policy, max_mini_batch_tokens=120, experts=Experts(batch))
    assert answers(checkpoint, policy, prompts, max_tokens, stops, 4, tmp_path, share, sharing) == expected


def test_which_models_can_share_experts(tmp_path):
    for model_type, routed in (("qwen3", 0), ("llama4_text", 0), ("deepseek_v3", 2), ("nemotron_h", 1)):
        save_tiny(tmp_path / model_type, model_type)
        assert sum(empty_model(tmp_path / model_type).shape.routed) == routed, model_type


def test_what_is_refused(tmp_path, tiny, capsys):
    for fields, words in (
        ({"schedule": "row"}, "experts.batch is 1, with schedule row"),
        ({"hidden": "host"}, "hidden host"),
    ):
        with pytest.raises(InputError, match=words):
            Policy(experts=Experts(1), **fields)
    for value in (-1, 1.0, True, "all"):
        with pytest.raises(InputError, match="experts.batch"):
            Policy(experts=Experts(value))
    save_tiny(tmp_path / "llama4", "llama4_text")
    save_tiny(tmp_path / "mixtral", "mixtral")
    heavy = Selection("heavy_hitter", budget=0.5)
    for folder, policy, words in (
        ("llama4", moe_gen(), "computes them by its own code"),
        ("mixtral", replace(moe_gen(), selection=heavy), "selection heavy_hitter"),
    ):
        with pytest.raises(InputError, match=words):
            run_wave(Checkpoint(tmp_path / folder, modules=True), policy, PROMPTS, 3, hardware=machine())
    (tmp_path / "in.txt").write_text("a prompt\n")
    words = ["run", "-i", tmp_path / "in.txt", "-o", tmp_path / "out.jsonl", "--model", tiny, "--policy", "moe_gen"]
    assert cli.main([*map(str, words), "--device", "cpu", "--max-tokens", "2"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "experts.batch is 1, which is for models with experts" in said[-1] and "Traceback" not in "".join(said)


def test_rows_wait_within_the_planned_memory(tmp_path):
    """Layers of a decode step are replayed: rows of all mini-batches wait for their experts."""
    save_tiny(tmp_path, "deepseek_v3", hidden_size=128, n_routed_experts=16)
    checkpoint, policy = Checkpoint(tmp_path, modules=True), replace(moe_gen(), max_mini_batch_tokens=140)
    workload = Workload.uniform(96, 2, 3)
    weights, peaks = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), policy), []
    with closing(weights), Session.of(weights, policy, workload, hardware=machine()) as session:
        sizes = session.engine.buffers.sizes
        plan = memory_plan(session.wave.problem, policy, sizes)["device"]
        tasks = list(stream(session.wave))
        at = [n for n, task in enumerate(tasks) if (task.iteration, task.layer, task.resource) == (1, 1, "compute")]

        def perform(some) -> None:
            for task in some:
                session.executor.perform(task)

        def run_layers() -> None:
            perform(tasks[: at[0]])
            peaks.append(most_allocated(lambda: perform(tasks[at[0] : at[-1] + 1])))

        hosted(run_layers)
    room = plan["workspace"] + plan["rows at experts"] + plan["hidden states"]
    print(f"{peaks[0] / room:.2f} of the planned bytes")
    assert sizes.step_rows < sizes.places == 96 and 0.3 < peaks[0] / room <= 1
