"""Test models with keys and values from a narrow latent: ACT blocks hold it, found by tracing dependencies."""

from dataclasses import replace

import pytest
import torch
from policies import wider_policies
from runs import run_wave
from tiny_models import greedy, save_tiny

from flexhybrid import LLM, SamplingParams
from flexhybrid.core import work
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.latent import kv_gen_of
from flexhybrid.runtime.models.transformer import _attend
from flexhybrid.runtime.storage.loader import Checkpoint
from sim import catalogue
from sim.presets import act_only, kv_only

pytest.importorskip("greenlet")

PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 71, 3, 3, 90, 18, 25, 31, 12, 7], [4, 8, 15, 16, 23], [42] * 11]
LATENT, LAYERS, HEADS, MAX_TOKENS = 24, 3, 4, 10  # of tiny_models: kv_lora_rank 16, and 8 elements to be rotated
WIDER = wider_policies(400, 24, 12)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Return a checkpoint of DeepSeek-V3's type, and transformers' own tokens."""
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, greedy(save_tiny(folder, "deepseek_v3"), PROMPTS, MAX_TOKENS)


def run(folder, policy):
    return run_wave(Checkpoint(folder), policy, PROMPTS, MAX_TOKENS, hardware=catalogue.load("t4"))


def stored_act_bytes(result) -> float:
    return sum(event.task.work.link_bytes for event in result.trace if event.task.verb == "store_act")


def test_an_act_block_holds_the_latent_alone(deepseek):
    folder, expected = deepseek
    result = run(folder, act_only())
    tokens = sum(len(prompt) + MAX_TOKENS - 1 for prompt in PROMPTS)  # the last one is not looked at
    assert result.tokens == expected
    assert stored_act_bytes(result) == LATENT * LAYERS * tokens * 4
    few = run(folder, Policy("few bits", cache={"act@host": 1.0}, bits=Bits(act=8)))
    assert stored_act_bytes(few) == (LATENT + 4) * LAYERS * tokens  # a scale and a zero point a row


def test_the_plan_knows_what_kv_gen_reads(deepseek):
    shape = Checkpoint(deepseek[0]).shape
    expanding = 16 * HEADS * (16 + 16)  # kv_b_proj: from the latent to each head's keys and values
    assert shape.act_width == LATENT
    assert work.kv_gen(shape, 4, 5).flops == 2 * expanding * 5
    layout = layer_layout(shape, 4)
    assert layout.kv_end - layout.vectors_end == 4 * expanding < layout.qkv_end - layout.vectors_end


def test_requests_that_join_and_share_their_beginnings_read_the_same_latents(deepseek):
    folder, _ = deepseek
    prompts = [PROMPTS[0] * 2 + [last] for last in range(3, 10)]
    asked = SamplingParams(max_tokens=6, temperature=0)

    def answers(policy, **more):
        with LLM(folder, policy, device="cpu", dtype="float32", **more) as llm:
            return [answer.outputs[0].token_ids for answer in llm.generate(prompts, asked)]

    assert answers(replace(act_only(), max_batch=3)) == answers(kv_only(), enable_prefix_caching=False)


class Attention(torch.nn.Module):
    """Attention with keys and values from a narrow row, and also from the hidden states if they ``leak``."""

    def __init__(self, leak: str):
        super().__init__()
        self.leak = leak
        self.query, self.down, self.up = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8), torch.nn.Linear(8, 64)

    def forward(self, hidden_states):
        keys = self.up(self.down(hidden_states))
        if self.leak == "sum":
            keys = keys + hidden_states
        if self.leak == "in place":
            keys[..., :1].copy_(self.query(hidden_states)[..., :1])
        heads = [rows.view(1, -1, 4, 16).transpose(1, 2) for rows in (self.query(hidden_states), keys, keys)]
        return _attend(self, *heads)


@pytest.mark.parametrize(
    "leak, source, unread", [("", "down", ("query",)), ("sum", None, ("query",)), ("in place", None, ())]
)
def test_a_row_is_no_latent_if_keys_or_values_need_more(leak, source, unread):
    with torch.device("meta"), torch.inference_mode():
        found = hosted(lambda: kv_gen_of(Attention(leak), torch.empty(1, 3, 64), (), {}, True))
    assert (found.source, found.width, found.unread) == (source, 8 if source else 64, unread)
