"""Test that the rest of a layer may compute long prompts some rows at a time."""

from __future__ import annotations

import numpy as np
import pytest
from models import save_llama, save_opt

from flexhybrid import LLM, SamplingParams
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.verbs import computing


@pytest.mark.parametrize("save", [save_opt, save_llama])
def test_prompts_computed_in_pieces_of_rows_give_transformers_tokens(tmp_path, monkeypatch, save):
    save(tmp_path)
    generator, rows = np.random.default_rng(0), []
    own = computing._finish_by_rows

    def noted(state, w, hidden, attended):
        rows.append(len(hidden))
        return own(state, w, hidden, attended)

    monkeypatch.setattr(computing, "_finish_by_rows", noted)
    monkeypatch.setattr(computing, "ROWS_AT_A_TIME", 7)
    prompts = [generator.integers(3, 50, length).tolist() for length in (1, 9, 20)]
    reference = Reference(tmp_path)
    with LLM(tmp_path, "hybrid(0.5)", device="cpu", dtype="float32") as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    expected = reference.generate(prompts, 5, ignore_eos=True)
    outcome = compare_tokens(reference, prompts, expected, [answer.outputs[0].token_ids for answer in answers])
    assert outcome.exact, outcome.first_wrong
    assert max(rows) > 7 >= min(rows)
