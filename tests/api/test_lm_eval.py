"""Test the adapter for lm-evaluation-harness against transformers, and against the harness's own ``hf`` model."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from lazily import Lazily

from flexhybrid import shipped
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import Reference
from flexhybrid.requests import load_tokenizer
from flexhybrid.runner import LoadedModel
from flexhybrid.sampling_params import SamplingParams

POSITIONS = 96
adapter, harness = Lazily("flexhybrid.lm_eval_adapter"), Lazily("lm_eval")
instance, tasks = Lazily("lm_eval.api.instance"), Lazily("lm_eval.tasks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Return the shipped checkpoint with only its first 96 positions, so that short texts are too long."""
    folder = tmp_path_factory.mktemp("short")
    model = Reference(shipped.CHECKPOINT).model
    model.config.max_position_embeddings = POSITIONS
    positions = model.model.decoder.embed_positions
    positions.weight = torch.nn.Parameter(positions.weight[: POSITIONS + 2].clone())
    model.save_pretrained(folder)
    load_tokenizer(shipped.CHECKPOINT).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(checkpoint):
    return adapter.FlexHybridLM(checkpoint, policy="hybrid(0.5)", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint).model


def instances(kind: str, arguments: list[tuple]):
    return [instance.Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@torch.inference_mode()
def logprobs(reference, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probability of each token but the first, and the most probable tokens there."""
    logits = reference(torch.tensor([ids[:-1]])).logits[0]
    return torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]], logits.argmax(-1)


def test_loglikelihood_is_transformers_own(model, reference):
    pairs = [("def close(self):", "\n    self.close()"), ("import ", "os"), ("", "for i in range(10):"), ("if a", " ")]
    found = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        ids, start = model.tok_encode(context + continuation), len(model.tok_encode(context.rstrip()))
        values, best = logprobs(reference, ids)
        assert logprob == pytest.approx(float(values[start - 1 :].sum()), abs=2e-3)
        assert greedy == (best[start - 1 :].tolist() == ids[start:])


def test_greedy_continuations_are_marked(model):
    context = model.tok_encode("def close(self")
    (answer,) = model.llm.generate([context], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    tokens = answer.outputs[0].token_ids
    other = [*tokens[:-1], 3 if tokens[-1] != 3 else 4]
    found = model._loglikelihood_tokens([(None, context, tokens), (None, context, other), (None, context, [])])
    assert [greedy for _, greedy in found] == [True, False, True] and found[2][0] == 0


def test_contexts_that_are_too_long_lose_their_beginning(model, reference):
    context = "a = 1\n" * 40
    ids = model.tok_encode(context + "b = 2")
    count = len(ids) - len(model.tok_encode(context.rstrip()))
    values, _ = logprobs(reference, ids[-97:])
    ((logprob, _),) = model.loglikelihood(instances("loglikelihood", [(context, "b = 2")]), disable_tqdm=True)
    assert len(ids) > 96 and logprob == pytest.approx(float(values[-count:].sum()), abs=2e-3)
    with pytest.raises(InputError, match="a continuation of"):
        model.loglikelihood(instances("loglikelihood", [("a", context)]), disable_tqdm=True)


def test_rolling_loglikelihood_covers_each_token_once(model, reference):
    """The prefix is scored too if the tokenizer adds one, as in the harness's own models."""
    texts = ["def close(self):\n    pass\n", "x = [1, 2]\n" * 17]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]))
    ids = [model.prefix_token_id, *model.tok_encode(texts[0])]
    assert found[0] == pytest.approx(float(logprobs(reference, ids)[0].sum()), abs=2e-3)
    ids = [model.prefix_token_id, *model.tok_encode(texts[1])]
    first = logprobs(reference, ids[:97])[0].sum()
    rest = logprobs(reference, ids[-97:])[0][-(len(ids) - 97) :].sum()
    assert 97 < len(ids) < 193 and found[1] == pytest.approx(float(first + rest), abs=2e-2)


def test_generation_stops_at_the_texts_of_the_task(model):
    prompts = [("def close(self):\n", {"until": ["\n\n", "def"], "max_gen_toks": 40}), ("import ", {"max_gen_toks": 5})]
    first, second = model.generate_until(instances("generate_until", prompts))
    assert first and "def" not in first and "\n\n" not in first
    assert second and len(model.tok_encode(second, add_special_tokens=False)) <= 6


def test_generation_is_greedy_unless_a_task_asks_for_sampling(model):
    """A task without do_sample and temperature gets the most probable tokens every time."""
    greedy, sampled = {"max_gen_toks": 20}, {"max_gen_toks": 20, "do_sample": True, "temperature": 3.0}
    texts = model.generate_until(instances("generate_until", [("import ", greedy)] * 2 + [("import ", sampled)] * 2))
    (answer,) = model.llm.generate(["import "], SamplingParams(max_tokens=20, temperature=0.0))
    assert texts[0] == texts[1] == answer.outputs[0].text
    assert len({texts[0], *texts[2:]}) == 3


def test_a_lossy_policy_affects_even_a_one_token_answer(model, checkpoint):
    text = "def close(self):\n    self.file.close()\n" * 5
    request = [(None, model.tok_encode(text), [3])]
    ((exact, _),) = model._loglikelihood_tokens(request, disable_tqdm=True)

    def with_policy(policy: str, decode_context: float | None = None):
        return adapter.FlexHybridLM(checkpoint, policy, device="cpu", dtype="float32", decode_context=decode_context)

    lossy, blind, every = with_policy("h2o(0.1)"), with_policy("h2o(0.1)", 0), with_policy("hybrid(0.5)", 1.0)
    assert (model.decode_context, lossy.decode_context) == (0.0, 0.8)
    for lm in (blind, every):
        assert lm._loglikelihood_tokens(request, disable_tqdm=True)[0][0] == pytest.approx(exact, abs=1e-3)
    assert abs(lossy._loglikelihood_tokens(request, disable_tqdm=True)[0][0] - exact) > 1e-2
    prompt = instances("generate_until", [(text, {"max_gen_toks": 12, "until": ["\n\n\n"]})])
    assert every.generate_until(prompt) == model.generate_until(prompt)
    with pytest.raises(InputError, match="decode_context is 2"):
        with_policy("h2o(0.1)", 2)


def test_choices_that_differ_in_their_last_token_are_computed_as_one_text(model, monkeypatch):
    texts = []
    scored = adapter.score
    monkeypatch.setattr(
        "flexhybrid.lm_eval_adapter.score",
        lambda llm, given, *args, **more: texts.extend(given) or scored(llm, given, *args, **more),
    )
    pairs = [("a = ", choice) for choice in ("1", "2", "3")] + [("b = ", "1")]
    together = model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert len(texts) == 2
    alone = [model.loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)[0] for pair in pairs]
    for (logprob, greedy), (logprob_alone, greedy_alone) in zip(together, alone, strict=True):
        assert logprob == pytest.approx(logprob_alone, abs=1e-4) and greedy == greedy_alone


def test_answers_are_cached_as_they_come(model, checkpoint, monkeypatch):
    """A run that ends early keeps its finished answers; waves here have one request each."""
    kept = []
    monkeypatch.setattr(model.cache_hook, "add_partial", lambda kind, request, answer: kept.append((kind, answer)))
    policy = replace(model.llm.settled_policy, max_batch=1)
    small = adapter.FlexHybridLM(checkpoint, policy=policy, device="cpu", dtype="float32")
    small.cache_hook = model.cache_hook
    pairs = [("def f(", "self"), ("import os", "\n"), ("return ", "None")]

    def fail_at_the_third(self, *arguments):
        if len(kept) == 2:
            raise OSError("no more")
        return run_wave(self, *arguments)

    run_wave = LoadedModel.make_engine
    monkeypatch.setattr(LoadedModel, "make_engine", fail_at_the_third)
    with pytest.raises(OSError, match="no more"):
        small.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [kind for kind, _ in kept] == ["loglikelihood"] * 2


def test_commas_of_a_policy_and_a_beginning_of_sequence(model, checkpoint):
    arguments = f"pretrained={checkpoint},policy=infinigen(alpha=4,cap=0.2),dtype=float32"
    lm = adapter.FlexHybridLM.create_from_arg_string(arguments, {"device": "cpu"})
    selection = lm.llm.settle(Workload.uniform(1, 16, 16)).selection
    assert (selection.alpha, selection.max_fraction) == (4, 0.2)
    assert lm.llm.problem.dtype == "float32" and lm.decode_context == 0.8
    prefix = model.tokenizer.decode([model.prefix_token_id])
    once = model.tok_encode(f"{prefix}import os")
    assert once == model.tok_encode("import os") and once.count(model.prefix_token_id) == 1


def test_a_message_to_be_continued_stays_open(model, monkeypatch):
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<a>{% endif %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    history = [{"role": "u", "content": "hi"}, {"role": "a", "content": "so"}]
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<u>hi</s><a>so"
    assert model.apply_chat_template(history[:1]) == "<u>hi</s><a>"


# ---- whole tasks, beside the harness's own model

TASKS = {
    "local_choice": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{answer}}"
        metric_list: [{metric: acc}]
    """,
    "local_answer": r"""
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[answer]}}"
        generation_kwargs: {until: ["\n\n"], max_gen_toks: 12}
        metric_list: [{metric: exact_match}]
    """,
    "local_rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
    """,
}
ROWS = [
    {
        "question": "def close(self):\n",
        "choices": ["    self", " banana banana"],
        "answer": 0,
        "text": "x = [1, 2]\n" * 17,
    },
    {"question": "for i in", "choices": [" apricot apricot", " range("], "answer": 1, "text": "import os\n"},
    {"question": "a = 1\n" * 40 + "a =", "choices": [" 1", " 2"], "answer": 0, "text": "a = 1\n" * 40},
]


@pytest.fixture(scope="module")
def local_tasks(tmp_path_factory):
    """Return tasks over a file of rows: choices, answers and rolling texts, some longer than the model's context."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name, lines in TASKS.items():
        files = f"{{data_files: {{test: {folder / 'rows.jsonl'}}}}}"
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + textwrap.dedent(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        # The harness's own account of the machine starts pip and git each time.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        patch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: "")
        yield tasks.TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def hf_results(local_tasks, checkpoint):
    """Return the samples of the harness's own model: task -> responses."""
    arguments = {"pretrained": checkpoint, "dtype": "float32"}
    return evaluate("hf", arguments, local_tasks)


def evaluate(model: str, arguments: dict, manager) -> dict[str, list]:
    result = harness.simple_evaluate(
        model, arguments, tasks=list(TASKS), device="cpu", task_manager=manager, bootstrap_iters=0, batch_size=1
    )
    return {task: [sample["filtered_resps"] for sample in samples] for task, samples in result["samples"].items()}


@pytest.mark.parametrize("policy, decode_context", [("hybrid(0.5)", None), ("kv_only", 0.1)])
def test_an_exact_policy_has_the_scores_of_the_harness_s_own_model(
    local_tasks, checkpoint, hf_results, policy, decode_context
):
    arguments = {"pretrained": checkpoint, "policy": policy, "dtype": "float32", "decode_context": decode_context}
    found = evaluate("flexhybrid", arguments, local_tasks)
    assert found["local_answer"] == hf_results["local_answer"]
    for task in ("local_choice", "local_rolling"):
        for ours, theirs in zip(found[task], hf_results[task], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                one, other = (pair if isinstance(pair, tuple) else (pair,) for pair in (one, other))
                assert one[0] == pytest.approx(other[0], rel=1e-4, abs=2e-3) and one[1:] == other[1:]
