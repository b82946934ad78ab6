"""Test the offline API: order, lengths, sampling, waves and error messages."""

import dataclasses
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from models import save_llama, save_opt

from flexhybrid import LLM, InputError, Policy, SamplingParams, cli, shipped
from flexhybrid.core.policy import Bits, Placement
from flexhybrid.core.problem import Problem
from flexhybrid.runtime.storage.loader import Checkpoint

ROOT = Path(__file__).parents[2]


def tokens(llm, prompts, **params):
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, SamplingParams(**params))]


def test_results_come_in_input_order_with_text(cpu_dtype):
    llm = LLM(shipped.CHECKPOINT, policy="hybrid(0.5)", device="cpu")
    prompts = ["def close(self):", "Return", "class Reader:\n    "]
    answers = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
    assert [answer.prompt for answer in answers] == prompts
    for answer in answers:
        out = answer.outputs[0]
        assert len(out.token_ids) <= 5 and out.finish_reason in ("stop", "length")
        assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert answer.prompt_token_ids == llm.tokenizer(answer.prompt)["input_ids"]


def test_without_a_seed_all_calls_and_prompts_draw_differently(tiny):
    llm = LLM(tiny, "kv_only", device="cpu")
    prompts = [[5, 6, 7]] * 4
    seen = tokens(llm, prompts, max_tokens=12, ignore_eos=True, temperature=3.0)
    answers = llm.generate(prompts, [SamplingParams(max_tokens=12, ignore_eos=True, temperature=3.0)] * 4)
    seen += [answer.outputs[0].token_ids for answer in answers]
    assert len({tuple(one) for one in seen}) == 8


def test_stop_token_ids_and_min_tokens(tiny):
    llm = LLM(tiny, "hybrid(0.5)", device="cpu")
    prompt = [5, 6, 7]
    free = tokens(llm, [prompt], max_tokens=12, temperature=0, ignore_eos=True)[0]
    place = next(i for i in range(3, 12) if free[i] not in free[:i])
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": [free[place]]}
    out = llm.generate([prompt], SamplingParams(**greedy))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[: place + 1], "stop", free[place])
    held = llm.generate([prompt], SamplingParams(**greedy, min_tokens=place + 1))[0].outputs[0]
    assert held.token_ids[:place] == free[:place] and free[place] != held.token_ids[place]
    assert free[place] not in held.token_ids[: place + 1]
    exactly = llm.generate([prompt], SamplingParams(**greedy, min_tokens=place))[0].outputs[0]
    assert exactly == out
    # The model's own end: no reason is given, unless it is asked for while ignored.
    shape = llm.shape
    llm.codec.shape = dataclasses.replace(shape, eos_token_ids=(free[place],))
    out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[: place + 1], "stop", None)
    out = llm.generate([prompt], SamplingParams(**greedy))[0].outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", free[place])
    out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=place + 1, ignore_eos=True))[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (free[: place + 1], "length", None)


def test_stop_texts_cut_the_text_and_end_the_request(cpu_dtype):
    llm = LLM(shipped.CHECKPOINT, policy="hybrid(0.5)", device="cpu")
    prompts = ["def close(self):", "class Reader:", "import os"]
    whole = [a.outputs[0] for a in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))]
    text = whole[0].text
    stop = text[12:17]
    at = text.index(stop)
    params = [
        SamplingParams(temperature=0, max_tokens=40, stop=["never in there", stop]),
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, stop="never in there"),
    ]
    answers = [answer.outputs[0] for answer in llm.generate(prompts, params)]
    assert (answers[0].text, answers[0].finish_reason, answers[0].stop_reason) == (text[:at], "stop", stop)
    used = len(answers[0].token_ids)
    assert answers[0].token_ids == whole[0].token_ids[:used] and used < 40
    assert stop in llm.tokenizer.decode(whole[0].token_ids[:used])
    assert stop not in llm.tokenizer.decode(whole[0].token_ids[: used - 1])
    assert answers[1:] == whole[1:]
    included = dataclasses.replace(params[0], include_stop_str_in_output=True)
    out = llm.generate(prompts[:1], included)[0].outputs[0]
    assert (out.text, out.token_ids) == (text[: at + len(stop)], answers[0].token_ids)
    # A stop token's text is left out, or kept, in the same way.
    token = whole[0].token_ids[10]
    first = whole[0].token_ids.index(token)
    for included in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=40, stop_token_ids=[token], include_stop_str_in_output=included
        )
        out = llm.generate(prompts[:1], params)[0].outputs[0]
        assert out.text == llm.tokenizer.decode(whole[0].token_ids[: first + included])
        assert out.token_ids == whole[0].token_ids[: first + 1] and out.stop_reason == token


def test_special_tokens_are_shown_on_request(cpu_dtype):
    llm = LLM(shipped.CHECKPOINT, policy="kv_only", device="cpu")
    eos = llm.shape.eos_token_ids[0]
    special = llm.tokenizer.decode([eos])
    llm.codec.shape = dataclasses.replace(llm.shape, eos_token_ids=())
    shown = {}
    for skip in (True, False):
        params = SamplingParams(
            temperature=0, max_tokens=3, stop_token_ids=[eos], skip_special_tokens=skip, include_stop_str_in_output=True
        )
        out = llm.generate(["class Reader:\n    "], params)[0].outputs[0]
        assert out.token_ids == [eos]
        shown[skip] = out.text
    assert special and shown == {True: "", False: special}


def test_a_wave_planned_for_other_weights_is_refused(tiny):
    """A run would read weights that were never loaded and give wrong tokens."""
    from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
    from flexhybrid.core.wave import admit
    from flexhybrid.core.workload import Workload
    from flexhybrid.runtime.engine import Engine
    from flexhybrid.runtime.kernels.sampling import greedy_plan
    from flexhybrid.runtime.storage.weights import Weights

    checkpoint = Checkpoint(tiny)
    policy = Policy(weights=Placement(device=0.5, host=0.5))
    wave = admit(Problem(shape=checkpoint.shape, dtype="float32"), policy, Workload.uniform(1, 4, 2))
    engine = Engine(
        Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), Policy()), policy, buffer_sizes(wave)
    )
    with pytest.raises(ValueError, match="does not place the weights as they were loaded"):
        engine.executor(wave, [[3, 4, 5, 6]], greedy_plan(1))


def test_auto_keeps_everything_resident_when_nothing_is_paced(tiny):
    llm = LLM(tiny, device="cpu")
    answer = tokens(llm, [[5, 6, 7]], max_tokens=4, temperature=0)
    assert llm.policy.cache == {"kv@device": 1.0} and llm.policy.weights.device == 1.0
    assert llm.generate([]) == []
    assert answer == tokens(LLM(tiny, "kv_only", device="cpu"), [[5, 6, 7]], max_tokens=4, temperature=0)


# ---- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, words",
    [
        ([[]], "prompt 0 is empty"),
        ([[3, 4], [5] * 96], "prompt 1 has 96 tokens"),
        ([[3, 61]], "token id 61"),
        ([[-1]], "token id -1"),
        (["text"], "no tokenizer files"),
        ("text", "no tokenizer files"),
        (None, "must be a list"),
        ({"prompt": []}, "prompt 0 is empty"),
        (b"ab", "must be a list"),
        ([None], "prompt 0 must be a text or a list of token ids"),
        ([3, 4], "prompt 0 must be"),
        ([[1.5, 2.0]], "prompt 0 must be"),
        ([[True]], "prompt 0 must be"),
        ([b"ab"], "prompt 0 must be"),
        ([[3], [[4]]], "prompt 1 must be"),
        ([{"prompt": "one"}], "prompt 0 is text, but .* has no tokenizer"),
        ([{"prompt": "one", "prompt_token_ids": [5]}], "prompt 0 must be a text or a list of token ids"),
    ],
)
def test_wrong_prompts(tiny, prompts, words):
    with pytest.raises(InputError, match=words):
        LLM(tiny, "kv_only", device="cpu").generate(prompts)


@pytest.mark.parametrize(
    "params, words",
    [
        ({"temperature": 0.5}, "^sampling_params must be a SamplingParams"),
        ([SamplingParams()], "2 prompts and 1 sampling_params"),
        ([SamplingParams(), None], "sampling_params 1"),
        (SamplingParams(stop="a"), "prompt 0 has stop texts, but .* no tokenizer"),
        ([SamplingParams(), SamplingParams(stop_token_ids=[3, 61])], "prompt 1 holds token id 61"),
        (SamplingParams(stop_token_ids=list(range(61)), min_tokens=1), "leaves no token"),
    ],
)
def test_wrong_sampling_params_are_errors_before_loading(tiny, params, words):
    llm = LLM(tiny, "kv_only", device="cpu")
    with pytest.raises(InputError, match=words):
        llm.generate([[3, 4], [5]], params)
    assert llm.loaded.engine is None


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "tpu"}, "tpu"),
        ({"policy": "magic"}, "known: auto, kv_only"),
        ({"policy": "nowhere.json"}, "cannot read policy file"),
        ({"link_gb_per_s": 0}, "must be a number of at least"),
        ({"host_memory": "1KiB"}, "host memory: .*needs at least"),
        ({"device_memory": "4KiB"}, "device memory: .*needs at least"),
        ({"host_memory": "lots"}, "lots"),
        ({"host_memory": "-3GiB"}, "must be a positive"),
        ({"policy": Policy(embedding=Placement(host=1))}, "embedding"),
        ({"policy": Policy(bits=Bits(act=4))}, "bits.act 4 needs rows of a multiple of 64 elements"),
        ({"policy": Policy(cache={"tok": 1.0})}, "tok"),
    ],
)
def test_wrong_settings_are_errors_before_loading(tiny, settings, words):
    with pytest.raises(InputError, match=words):
        LLM(tiny, **{"policy": "kv_only", "device": "cpu", **settings})


def test_the_memory_named_by_a_budget_error_is_enough(tiny):
    """The error names a size; with that size it runs."""
    import re

    with pytest.raises(InputError) as caught:
        LLM(tiny, "kv_only", device="cpu", host_memory=1000)
    least = re.search(r"at least ([\d.]+ [KMG]iB)", str(caught.value))[1]
    roomy = str(float(least.split()[0]) + 0.1) + least.split()[1]
    llm = LLM(tiny, "kv_only", device="cpu", host_memory=roomy)
    assert len(tokens(llm, [[5, 6]], max_tokens=3, temperature=0, ignore_eos=True)[0]) == 3


def test_tensors_outside_the_layers_outlive_the_file(tiny, tmp_path):
    """Views of the mapped file would change with it, and end the process if the file is shortened."""
    folder = shutil.copytree(tiny, tmp_path / "copy")
    kept = dict(Checkpoint(folder).outer_tensors())
    before = {name: tensor.clone() for name, tensor in kept.items()}
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())


def test_a_missing_folder_is_an_error_at_once(tmp_path):
    with pytest.raises(InputError, match="nothing is ever downloaded"):
        LLM(tmp_path / "facebook" / "opt-125m")


@pytest.mark.parametrize(
    "variable, inner", [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_a_name_is_found_in_the_hugging_face_cache(tiny, tmp_path, monkeypatch, variable, inner):
    """The layout of the cache is checked against huggingface_hub."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(InputError, match="To get it: hf download some/tiny-model --local-dir tiny-model"):
        LLM("some/tiny-model", "kv_only", device="cpu")
    repository = tmp_path / inner / "models--some--tiny-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0123abc")
    shutil.copytree(tiny, repository / "snapshots/0123abc")
    found = try_to_load_from_cache("some/tiny-model", "config.json", cache_dir=tmp_path / inner)
    with LLM("some/tiny-model", "kv_only", device="cpu", dtype="float32") as llm:
        assert str(llm.checkpoint.path / "config.json") == found and llm.shape.name == "tiny-model"
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0))[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "/nowhere"], "no checkpoint at"),
        (["--host-memory", "3KiB"], "needs at least"),
        (["--policy", "/nowhere.json"], "cannot read policy file"),
        (["--device", "cuda"], "no CUDA device"),
        (["--link-gb-per-s", "-1"], "must be a number of at least"),
        (["--out", "README.md"], "cannot write results to README.md"),
    ],
)
def test_the_command_answers_in_one_line_with_status_2(arguments, words, cpu_dtype, tmp_path, monkeypatch, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    out = tmp_path / "out"
    arguments = ["compare", *(["--out", str(out)] if "--out" not in arguments else []), *arguments]
    if words == "needs at least" and cpu_dtype == "bfloat16":  # one of them as a user would, in a process of its own
        as_main = "import runpy; runpy.run_module('flexhybrid', run_name='__main__', alter_sys=True)"
        run = warm_python.run([sys.executable, "-c", as_main, *arguments], cwd=ROOT, timeout=120)
        status, stdout, stderr = run.returncode, run.stdout, run.stderr
    else:
        monkeypatch.chdir(ROOT)
        status = cli.main(arguments)
        stdout, stderr = capsys.readouterr()
    assert status == 2, stderr
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and words in lines[0] and "Traceback" not in stderr
    assert stdout == "" and not out.exists()


def test_hardware_by_name_and_folders_that_are_not_there(tiny):
    llm = LLM(tiny, Policy(cache={"both(kv@host,act@host)": 1.0}), device="cpu", dtype="float32", hardware="rtx4090")
    assert tokens(llm, [[5, 6, 7]], max_tokens=4, temperature=0) == tokens(
        LLM(tiny, "kv_only", device="cpu", dtype="float32"), [[5, 6, 7]], max_tokens=4, temperature=0
    )
    with pytest.raises(InputError, match="rtx4090"):
        LLM(tiny, "kv_only", device="cpu", hardware="rtx4091")
    with pytest.raises(InputError, match="there is no folder /nowhere"):
        LLM(tiny, Policy(weights=Placement(disk=1)), device="cpu", disk_dir="/nowhere/at all").generate([[5]])
    with pytest.raises(InputError, match=r"write weights=Placement\("):
        Policy(weights={"host": 1.0})


def test_an_unknown_argument_is_named_with_the_nearest(tmp_path):
    with pytest.raises(
        InputError, match=r"unknown argument of LLM 'dvice'; did you mean device\b.* known: model, policy"
    ):
        LLM(tmp_path, dvice="cpu")


def test_a_callback_may_not_start_another_run(tiny):
    with LLM(tiny, "kv_only", device="cpu", dtype="float32") as llm:
        with pytest.raises(InputError, match="this LLM is running"):
            llm.generate([[5, 6]], on_answer=lambda i, answer: llm.generate([[7, 8]]))
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_a_prompts_last_tokens_may_pass_the_decode(tiny, cpu_dtype):
    """Tokens are those of a prefill, also for texts that stop early; a wrong number is refused."""
    prompts = [[5, 6, 7, 8, 9], [11, 12], [13] * 20]
    params = [SamplingParams(max_tokens=n, temperature=0.0, min_tokens=m) for n, m in ((6, 0), (9, 3), (4, 1))]
    with LLM(tiny, "hybrid(0.5)", device="cpu", dtype="float32") as llm:
        expected = [answer.outputs for answer in llm.generate(prompts, params)]
        counts: list[int] = []
        answers = llm.generate(prompts, params, on_tokens=counts.append, num_decoded=[4, 0, 13])
        assert [answer.outputs for answer in answers] == expected
        assert [answer.prompt_token_ids for answer in answers] == prompts
        assert sum(counts) == sum(len(outputs[0].token_ids) for outputs in expected)
        with pytest.raises(InputError, match="num_decoded of prompt 1 is 2"):
            llm.generate(prompts, params, num_decoded=[0, 2, 0])


def test_two_models_at_once_give_the_tokens_of_each_alone(tmp_path):
    """Two engines with different policies, one of them with a disk, each run in a thread and close their own
    resources."""
    folders = (tmp_path / "opt", tmp_path / "llama")
    save_opt(folders[0], seed=1)
    save_llama(folders[1], seed=2)
    disk = Policy("disk", Placement(host=0.5, disk=0.5), cache={"kv@disk": 0.5, "act@host": 0.5})
    settings = [(folders[0], disk), (folders[1], "hybrid(0.5)"), (folders[1], Policy(attention="host"))]
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 61, n).tolist() for n in (7, 20, 1, 33)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)

    def answers(number: int, calls: int, together=None) -> list[list[list[int]]]:
        folder, policy = settings[number]
        with LLM(folder, policy, device="cpu", dtype="float32", disk_dir=tmp_path) as llm:
            if together:
                together.wait(60)
            return [[a.outputs[0].token_ids for a in llm.generate(prompts, params)] for _ in range(calls)]

    alone = [answers(number, 1) for number in range(len(settings))]
    for pair in ((0, 1), (1, 2), (2, 2)):
        together = threading.Barrier(2)
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda number, together=together: answers(number, 3, together), pair))
        assert both == [3 * alone[number] for number in pair], pair


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_an_llm_refuses_to_run_in_a_forked_process(tiny_llm):
    """It would wait for threads that do not exist there. The process that made the LLM can go on using it."""
    params = SamplingParams(max_tokens=3, temperature=0)
    before, (reading, writing) = tiny_llm.generate([[5, 6]], params), os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        try:
            tiny_llm.generate([[5, 6]], params)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 1000).startswith(b"InputError: this LLM and its threads belong to the parent process")
    assert tiny_llm.generate([[5, 6]], params) == before
