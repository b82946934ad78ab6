"""Test speed comparisons with peers: a child process for each side, its results, and missing peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from experiments.bench.harness import Table
from experiments.peers import accelerate_disk, children
from experiments.peers.accelerate_disk import OURS, best, rates, same_tokens
from experiments.peers.random_opt import make_checkpoint
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_from_config
from tests.models import save_opt

OUR_CHILD, THEIR_CHILD = accelerate_disk.OUR_CHILD, accelerate_disk.THEIR_CHILD
CHILD_LIMIT_S = 120
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """(folder, transformers' model of it)"""
    folder = tmp_path_factory.mktemp("peers") / "tiny"
    return folder, save_opt(folder)


def request(folder: Path, scratch: Path, **changes) -> dict:
    return {
        "side": "ours", "checkpoint": str(folder), "folder": str(scratch), "prompts": PROMPTS, "gen_tokens": 4,
        "memory_bytes": 512 << 20, "dtype": "float32", "threads": 1, "policy": OURS.to_dict(),
    } | changes  # fmt: skip


# ---- a child's answer ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the bound and its witness are Linux's")
def test_our_side_from_the_disk_gives_transformers_tokens(tiny, tmp_path, warm_processes):
    folder, model = tiny
    answer = children.ask(OUR_CHILD, request(folder, tmp_path), CHILD_LIMIT_S)
    if "no fair comparison" in answer.get("error", ""):
        pytest.skip(answer["error"])
    ids = torch.tensor(PROMPTS)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    assert answer["tokens"] == expected[:, 4:].tolist()
    assert answer["violations"] == 0 and len(answer["iteration_end_s"]) == 4
    assert answer["iteration_end_s"] == sorted(answer["iteration_end_s"])
    assert answer["ideal_disk_s"] > 0 and answer["ideal_compute_s"] > 0
    assert "disk_read" in answer["busy_s"]


def test_a_batch_beyond_the_memory_is_an_error_that_names_both(tiny, tmp_path, warm_processes):
    answer = children.ask(OUR_CHILD, request(tiny[0], tmp_path, memory_bytes=1 << 16), CHILD_LIMIT_S)
    assert list(answer) == ["error"] and "batch 3" in answer["error"] and "64.0 KiB" in answer["error"]


def test_a_peer_that_cannot_be_imported_is_missing_by_name(tiny, tmp_path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("import psutil_that_is_not_there\n", encoding="utf-8")
    answer = children.ask(THEIR_CHILD, request(tiny[0], tmp_path, side="accelerate"), CHILD_LIMIT_S, [tmp_path])
    assert list(answer) == ["missing"] and "psutil_that_is_not_there" in answer["missing"]


@pytest.mark.parametrize(
    "code, words",
    [
        ("import sys; sys.exit('the end')", "status 1: the end"),
        ("import os; os.kill(os.getpid(), 9)", "status -9: no message"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
)
def test_a_child_that_dies_or_hangs_is_an_outcome(tmp_path, code, words):
    (tmp_path / "child.py").write_text(code, encoding="utf-8")
    assert words in children.ask(tmp_path / "child.py", {}, 1)["error"]


def test_a_child_sees_its_folders_and_variables(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = 1", encoding="utf-8")
    child = tmp_path / "child" / "child.py"
    child.parent.mkdir()
    child.write_text("import beside, json, os; print(json.dumps({'seen': os.environ['SEEN']}))", encoding="utf-8")
    assert children.ask(child, {}, 60, [tmp_path], {"SEEN": "yes"}) == {"seen": "yes"}


# ---- what is made of it ----------------------------------------------------------------------------------------------


def test_rates_count_all_tokens_and_the_decodes_apart():
    row = rates({"iteration_end_s": [2.0, 3.0, 4.0], "read_bytes": 30, "tokens": []}, batch=8)
    assert row["tokens_per_s"] == 8 * 3 / 4 and row["decode_tokens_per_s"] == 8 * 2 / 2
    assert row["read_bytes_per_iteration"] == 10
    assert rates({"error": "out of memory"}, batch=8) == {"error": "out of memory"}


def test_the_fastest_batch_counts_up_to_the_first_that_fails():
    speeds, calls = {4: 1.0, 8: 3.0, 16: 2.0}, []

    def run(batch: int) -> dict:
        calls.append(batch)
        return {"tokens_per_s": speeds[batch], "peak_bytes": 1} if batch in speeds else {"error": "out of memory"}

    row, tried = best(run, [16, 64, 8, 32, 4])
    assert row["batch"] == 8 and calls == [4, 8, 16, 32]
    assert [each["batch"] for each in tried] == calls and tried[-1]["error"] == "out of memory"
    with pytest.raises(InputError, match="out of memory"):
        best(run, [32, 64])


def test_tokens_count_up_to_a_requests_first_difference():
    """Sides with different batches share their first requests; tokens after a difference belong to another text."""
    assert same_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6], [7, 8, 9]]) == {"equal": 4, "of": 6}


def test_the_made_checkpoint_has_the_shape_and_is_made_once(tiny, tmp_path):
    shape = shape_from_config(tiny[0])
    made = make_checkpoint(tmp_path / "made", shape, "bfloat16")
    found = shape_from_config(made)
    for field in ("num_layers", "hidden", "num_heads", "ffn", "vocab", "max_positions"):
        assert getattr(found, field) == getattr(shape, field)
    assert found.dtype == "bfloat16"
    before = (made / "model.safetensors").stat().st_mtime_ns
    make_checkpoint(made, shape, "bfloat16")
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_without_accelerate_the_command_ends_with_status_2_and_says_how_to_get_it(tmp_path, capsys):
    assert accelerate_disk.main(["--peer", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "nowhere" in said and "accelerate==" in said


def test_each_side_has_its_best_batch_and_ours_is_compared_with_each():
    """Our iterations take 0.5 s, accelerate's 1 or 2 s, and accelerate fails at a batch of 4; one of its tokens
    differs."""

    class Runs:
        def ours(self, batch: int) -> dict:
            return self.answer(batch, 0.5) | {"ideal_disk_s": 0.25, "ideal_compute_s": 0.75}

        def accelerate(self, batch: int, embeddings: str) -> dict:
            if batch == 4:
                return {"error": "out of memory"}
            answer = self.answer(batch, {"disk": 2.0, "memory": 1.0}[embeddings])
            return answer | {"tokens": [[9, 9, 8], *answer["tokens"][1:]]}

        def answer(self, batch: int, step_s: float) -> dict:
            ends = [step_s * i for i in (1, 2, 3)]
            return rates(
                {"iteration_end_s": ends, "read_bytes": 6, "peak_bytes": 1, "tokens": [[9, 9, 9]] * batch}, batch
            )

    accelerate_disk.compare(table := Table(), Runs(), [4, 2])  # pyright: ignore[reportArgumentType]
    rows = {name: row["value"] for name, row in table.rows.items()}
    assert rows["ours: measured"] == 8.0 and rows["ours: overlap"] == 0.75
    assert (rows["ours over accelerate, embeddings on disk"], rows["ours over accelerate, embeddings in memory"]) == (
        8,
        4,
    )
    assert table.rows["ours over accelerate, embeddings on disk"]["same_tokens"] == {"equal": 5, "of": 6}
    assert len(table.rows["accelerate, embeddings on disk: measured"]["tried"]) == 2
