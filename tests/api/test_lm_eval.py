"""The adapter for lm-evaluation-harness, where that is installed: against transformers, and on a local file's task."""

import json
import math

import pytest

pytest.importorskip("lm_eval")  # not among the pinned packages: thirty others come with it

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from flexhybrid import shipped
from flexhybrid.core.errors import InputError
from flexhybrid.jobs.compare.exactness import Reference
from flexhybrid.lm_eval_adapter import FlexHybridLM
from flexhybrid.sampling_params import SamplingParams

CHECKPOINT = shipped.CHECKPOINT


@pytest.fixture(scope="module")
def model():
    return FlexHybridLM(str(CHECKPOINT), policy="hybrid(0.5)", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference():
    return Reference(CHECKPOINT).model


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@torch.inference_mode()
def logprobs(reference, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each token but the first, the most probable tokens there)."""
    logits = reference(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]], logits.argmax(-1)


def test_loglikelihood_is_transformers_own(model, reference):
    pairs = [("def close(self):", "\n    self.close()"), ("import ", "os"), ("", "for i in range(10):"), ("if a", " ")]
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        ids, start = model.tok_encode(context + continuation), len(model.tok_encode(context.rstrip()))
        values, best = logprobs(reference, ids)
        assert logprob == pytest.approx(float(values[start - 1 :].sum()), abs=2e-3)
        assert greedy == (best[start - 1 :].tolist() == ids[start:])


def test_a_greedy_continuation_is_said_to_be_one(model):
    context = model.tok_encode("def close(self")
    (answer,) = model.llm.generate([context], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    tokens = answer.outputs[0].token_ids
    other = [*tokens[:-1], 3 if tokens[-1] != 3 else 4]
    found = model._loglikelihood_tokens([(None, context, tokens), (None, context, other), (None, context, [])])
    assert [greedy for _, greedy in found] == [True, False, True] and found[2][0] == 0


def test_contexts_that_are_too_long_lose_their_beginning(model, reference):
    context = "a = 1\n" * 400
    ids = model.tok_encode(context + "b = 2")
    count = len(ids) - len(model.tok_encode(context.rstrip()))
    values, _ = logprobs(reference, ids[-640:])
    ((logprob, _),) = model.loglikelihood(instances("loglikelihood", [(context, "b = 2")]), disable_tqdm=True)
    assert len(ids) > 640 and logprob == pytest.approx(float(values[-count:].sum()), abs=2e-3)
    with pytest.raises(InputError, match="a continuation of"):
        model.loglikelihood(instances("loglikelihood", [("a", context)]), disable_tqdm=True)


def test_rolling_loglikelihood_covers_each_token_once(model, reference):
    texts = ["def close(self):\n    pass\n", "x = [1, 2]\n" * 150]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]))
    ids = model.tok_encode(texts[0])  # begins with </s>, the prefix
    assert found[0] == pytest.approx(float(logprobs(reference, ids)[0].sum()), abs=2e-3)
    ids = model.tok_encode(texts[1])
    first = logprobs(reference, ids[:640])[0].sum()
    rest = logprobs(reference, ids[-640:])[0][-(len(ids) - 640) :].sum()
    assert 640 < len(ids) < 1278 and found[1] == pytest.approx(float(first + rest), abs=2e-2)


def test_generation_stops_at_the_texts_of_the_task(model):
    prompts = [("def close(self):\n", {"until": ["\n\n", "def"], "max_gen_toks": 40}), ("import ", {"max_gen_toks": 5})]
    first, second = model.generate_until(instances("generate_until", prompts))
    assert first and "def" not in first and "\n\n" not in first
    assert second and len(model.tok_encode(second, add_special_tokens=False)) <= 6


def test_a_task_of_a_local_file_runs(tmp_path, monkeypatch):
    """A multiple-choice task whose likelier answers are known, by name from the harness's list of models."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"question": "def close(self):\n", "choices": ["    self", " banana banana"], "answer": 0},
        {"question": "for i in", "choices": [" apricot apricot", " range("], "answer": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "local_choice.yaml").write_text(
        f"""
        task: local_choice
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
        test_split: test
        output_type: multiple_choice
        doc_to_text: "{{{{question}}}}"
        doc_to_choice: "{{{{choices}}}}"
        doc_to_target: "{{{{answer}}}}"
        metric_list: [{{metric: acc}}]
        """
    )
    result = simple_evaluate(
        "flexhybrid", f"pretrained={CHECKPOINT},policy=int4", tasks=["local_choice"], device="cpu",
        task_manager=TaskManager(include_path=str(tmp_path)), bootstrap_iters=0,
    )  # fmt: skip
    assert math.isclose(result["results"]["local_choice"]["acc,none"], 1.0)
