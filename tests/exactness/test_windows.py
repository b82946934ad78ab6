"""Sliding windows: whatever a policy says, the tokens behind a window are transformers' own too."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from models import InMemory, save_llama
from strategies import lossless_policies
from test_exactness_policies import check


@st.composite
def windowed(draw) -> dict:
    """Arguments of ``models.save_llama``: one window for all layers, or layers with and without one."""
    layers, window = draw(st.integers(1, 4)), draw(st.sampled_from((2, 9, 16, 17, 40)))  # of 1 transformers sees all
    shape = dict(layers=layers, heads=4, kv_heads=2, head_dim=8, hidden=32, seed=draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(("mistral", "qwen2", "qwen3", "phi3")))
    if kind not in ("mistral", "phi3"):
        types = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        shape |= dict(use_sliding_window=True, max_window_layers=0)
        shape |= dict(layer_types=[("full", "sliding")[sliding] + "_attention" for sliding in types])
    return dict(shape, kind=kind, sliding_window=window)


@settings(max_examples=7)
@given(st.data(), windowed(), lossless_policies())
def test_every_lossless_policy_gives_the_references_tokens(tmp_path_factory, data, shape, policy):
    folder = tmp_path_factory.mktemp("model")
    model = save_llama(folder, **shape)
    max_tokens = data.draw(st.integers(1, 18))
    lengths = data.draw(st.lists(st.integers(1, 96 - max_tokens), min_size=1, max_size=5))
    generator = np.random.default_rng(shape["seed"])
    prompts = [generator.integers(3, 61, length).tolist() for length in lengths]
    check(folder, prompts, max_tokens, policy, InMemory(model))
