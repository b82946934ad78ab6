"""The choice among the ways to attend: by time, kept for the machine, taken over by what goes on."""

import functools
import inspect
from types import SimpleNamespace

import pytest

from flexhybrid.core.problem import AttentionPaths
from flexhybrid.runtime.profiling import attention_paths
from flexhybrid.runtime.profiling.attention_paths import PATHS, USUAL, candidates, paths_of

fastest_paths = inspect.unwrap(attention_paths.fastest_paths)  # not the one that is forced


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Seconds of each way, or a function of its operands, for the test to set: by a clock that only they move on; and a
    folder to keep the choice."""
    now, seconds = [0.0], dict.fromkeys(PATHS, 1.0)

    def attend(name, *operands):
        cost = seconds[name]
        now[0] += cost(*operands) if callable(cost) else cost

    monkeypatch.setattr(attention_paths, "PATHS", {name: functools.partial(attend, name) for name in PATHS})
    monkeypatch.setattr(attention_paths, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    attention_paths._kept.cache_clear()
    yield seconds
    attention_paths._kept.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PATHS)
def test_the_fastest_way_is_taken_in_its_dtype(timed, name, dtype):
    timed[name] = 0.5
    expected = (name,) * 3 if name in candidates(dtype) else USUAL
    assert fastest_paths("cpu", dtype, 1) == expected and fastest_paths("cuda", dtype, 1) == USUAL


def test_heads_that_share_a_key_head_have_a_choice_of_their_own(timed):
    timed["products"] = lambda query, keys, *_: 0.5 if query.shape[2] == 4 * keys.shape[1] else 2.0
    assert fastest_paths("cpu", "float32", 1) == AttentionPaths("fused", "fused", "fused")
    assert fastest_paths("cpu", "float32", 4) == AttentionPaths("products", "products", "products")


def test_the_usual_way_is_kept_where_another_is_hardly_faster(timed):
    timed["products in float32"] = 0.95
    assert fastest_paths("cpu", "bfloat16", 1) == USUAL


def test_the_choice_is_kept_by_dtype_and_measured_again_where_it_cannot_be_read(timed, tmp_path):
    timed["products"] = 0.5
    assert set(fastest_paths("cpu", "bfloat16", 1)) == {"products"}
    timed["products"], timed["fused"] = 0.5, 0.1
    attention_paths._kept.cache_clear()  # another process
    assert set(fastest_paths("cpu", "bfloat16", 1)) == {"products"} and set(fastest_paths("cpu", "float32", 1)) == {
        "fused"
    }
    file = tmp_path / "cache/attention-cpu.json"
    for content in (b"", b"[]", b"{}", file.read_bytes().replace(b"products", b"gone")):
        file.write_bytes(content)
        attention_paths._kept.cache_clear()
        assert set(fastest_paths("cpu", "bfloat16", 1)) == {"fused"}


def test_without_a_folder_to_keep_it_the_choice_holds_for_the_process(timed, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "file/cache"))
    timed["products"] = 0.5
    assert set(fastest_paths("cpu", "float32", 1)) == {"products"}
    timed["products"] = 2.0
    assert set(fastest_paths("cpu", "float32", 1)) == {"products"}


@pytest.mark.parametrize("record", [None, [], "fused", {}, {"prompt": "fused"}, {**USUAL._asdict(), "chunk": "other"}])
def test_what_is_no_choice_is_not_taken_over(record):
    assert paths_of(USUAL._asdict()) == USUAL and paths_of(record) is None
