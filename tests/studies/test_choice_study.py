"""What a share of the keys costs where their weights are known: the rules by hand, and that all keys cost nothing."""

import math

import pytest
import torch
from models import save_opt
from transformers import AutoModelForCausalLM

from experiments.studies import choice_study
from experiments.studies.choice_study import RULES, attention, heaviest_and_newest, largest, logprobs, thinned

LENGTH, PROMPT = 24, 16


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_opt(folder, layers=3)
    choice_study.AttentionInterface.register(choice_study.NAME, attention(None, (), PROMPT))
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=choice_study.NAME
    ).eval()


def causal_weights(heads: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(heads, LENGTH, LENGTH, generator=generator)
    return scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def test_the_largest_weights_are_kept():
    weights = causal_weights()
    chosen = thinned(weights, PROMPT, largest, 0.25)
    assert torch.equal(chosen[:, :PROMPT], weights[:, :PROMPT])
    for head in range(2):
        for query in range(PROMPT, LENGTH):
            count = math.ceil(0.25 * (query + 1))
            best = sorted(range(query + 1), key=lambda key: -weights[head, query, key])[:count]
            row = chosen[head, query]
            assert set(row.nonzero().flatten().tolist()) == set(best)
            assert torch.allclose(row[best], weights[head, query, best] / weights[head, query, best].sum())


def test_half_of_the_kept_keys_are_the_newest_and_half_those_with_the_most_weight_from_the_prompt():
    weights = causal_weights()
    chosen = thinned(weights, PROMPT, heaviest_and_newest, 0.25)
    for head in range(2):
        heavy = weights[head, :PROMPT].sum(0)
        for query in range(PROMPT, LENGTH):
            count = math.ceil(0.25 * (query + 1))
            newest = list(range(query + 1 - count // 2, query + 1))
            older = [key for key in range(query + 1) if key not in newest]
            heaviest = sorted(older, key=lambda key: -heavy[key])[: count - count // 2]
            assert set(chosen[head, query].nonzero().flatten().tolist()) == {*newest, *heaviest}


@pytest.mark.parametrize("rule", RULES.values(), ids=[*RULES])
def test_all_keys_cost_nothing_and_the_attention_is_transformers_own(network, rule):
    texts = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    choice_study.AttentionInterface.register(choice_study.NAME, attention(None, (), PROMPT))
    full = logprobs(network, texts, PROMPT)
    network.set_attn_implementation("eager")
    assert logprobs(network, texts, PROMPT) == pytest.approx(full, abs=1e-5)
    network.set_attn_implementation(choice_study.NAME)
    choice_study.AttentionInterface.register(choice_study.NAME, attention(rule, (1, 2), PROMPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinned, "__defaults__", (1.0,))
        assert logprobs(network, texts, PROMPT) == pytest.approx(full, abs=1e-5)
    few = logprobs(network, texts, PROMPT)
    assert few != pytest.approx(full, abs=1e-5)
