"""Settings of the process that runs hold: the last user restores what was there before the first."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from tiny_models import greedy, save_tiny

from flexhybrid import LLM, SamplingParams
from flexhybrid.runtime.models.empty_model import _empty_model
from flexhybrid.runtime.process_settings import HeldSetting


def test_the_last_user_restores_the_setting():
    values = ["before"]
    setting = HeldSetting(lambda: values[-1], values.append, "held")
    first, second = setting.held(), setting.held()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert values == ["before", "held"]
    second.__exit__(None, None, None)
    assert values == ["before", "held", "before"]
    with pytest.raises(KeyError), setting.held():
        raise KeyError
    assert values[-1] == "before"


@contextmanager
def changed(dtype, *others):
    """Torch as other code of the process may have left it."""
    torch.set_default_dtype(dtype)
    try:
        with ExitStack() as held:
            for other in others:
                held.enter_context(other())
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def model(request, tmp_path_factory):
    """A folder, and transformers' own greedy tokens: of a file of our own, and of transformers' layers."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, greedy(save_tiny(folder, request.param), PROMPTS, 6)


PROMPTS = [[5, 9, 33, 2, 17, 60, 8, 44, 51, 3, 3, 30, 18, 25, 31, 12, 7], [4, 8, 15, 16, 23]]
SETTINGS = [
    (torch.float16,),
    (torch.float64, partial(torch.device, "meta"), torch.inference_mode),
    (torch.bfloat16, partial(torch.autocast, "cpu", dtype=torch.bfloat16), deterministic),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_do_not_depend_on_settings_of_the_process(model, settings):
    """Before a model is made, between two calls, and while it lives."""
    folder, expected = model
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def tokens(llm):
        return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params)]

    _empty_model.cache_clear()
    with changed(*settings):
        llm = LLM(folder, "hybrid(0.5)", device="cpu", dtype="float32")
        before = tokens(llm)
    between = tokens(llm)
    with changed(*settings):
        while_it_lives = tokens(llm)
    llm.close()
    assert [before, between, while_it_lives] == [expected] * 3
