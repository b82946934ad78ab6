"""Test which attention path is chosen: the fastest one; the choice is kept for the machine and for resumed jobs."""

import functools
import inspect
from types import SimpleNamespace

import pytest

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import AttentionPaths
from flexhybrid.resolve import pick_device, resolve_problem
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.profiling import attention_paths
from flexhybrid.runtime.profiling.attention_paths import ON_GPU, PATHS, USUAL, candidates, paths_of


def fastest_paths(device: str, dtype: str, group: int) -> AttentionPaths:
    """Return the product's choice without the tests' forced path, and without attention in place."""
    return inspect.unwrap(attention_paths.fastest_paths)(device, dtype, group)._replace(in_place=False, on_host=False)


def names(paths: AttentionPaths) -> set[str]:
    return set(paths[:3])


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Return the seconds of each path, or a function of its operands, by a clock that only they advance."""
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
def test_the_fastest_path_of_a_dtype_is_chosen(timed, name, dtype):
    timed[name] = 0.5
    expected = AttentionPaths(*(name,) * 3) if name in candidates(dtype) else USUAL
    assert fastest_paths("cpu", dtype, 1) == expected and fastest_paths("cuda", dtype, 1) == ON_GPU


def test_grouped_heads_have_their_own_choice(timed):
    timed["products"] = lambda query, context, *_: 0.5 if query.shape[2] == 4 * context.keys.shape[1] else 2.0
    assert fastest_paths("cpu", "float32", 1) == AttentionPaths("fused", "fused", "fused")
    assert fastest_paths("cpu", "float32", 4) == AttentionPaths("products", "products", "products")


def test_a_slightly_faster_path_does_not_replace_the_usual_one(timed):
    timed["products in float32"] = 0.95
    assert fastest_paths("cpu", "bfloat16", 1) == USUAL


def test_the_choice_is_kept_by_dtype_and_measured_again_if_unreadable(timed, tmp_path):
    timed["products"] = 0.5
    assert names(fastest_paths("cpu", "bfloat16", 1)) == {"products"}
    timed["products"], timed["fused"] = 0.5, 0.1
    attention_paths._kept.cache_clear()  # another process
    assert names(fastest_paths("cpu", "bfloat16", 1)) == {"products"} and names(fastest_paths("cpu", "float32", 1)) == {
        "fused"
    }
    file = tmp_path / "cache/attention-cpu.json"
    for content in (b"", b"[]", b"{}", file.read_bytes().replace(b"products", b"gone")):
        file.write_bytes(content)
        attention_paths._kept.cache_clear()
        assert names(fastest_paths("cpu", "bfloat16", 1)) == {"fused"}


def test_without_a_cache_folder_the_choice_holds_for_the_process(timed, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "file/cache"))
    timed["products"] = 0.5
    assert names(fastest_paths("cpu", "float32", 1)) == {"products"}
    timed["products"] = 2.0
    assert names(fastest_paths("cpu", "float32", 1)) == {"products"}


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        "fused",
        {},
        {"prompt": "fused"},
        {**USUAL._asdict(), "chunk": "other"},
        {**USUAL._asdict(), "in_place": "fused"},
        {**USUAL._asdict(), "on_host": 1},
    ],
)
def test_a_malformed_record_is_not_used(record):
    assert paths_of(USUAL._asdict()) == USUAL and paths_of(record) is None


@pytest.mark.parametrize("in_place", [False, True])
def test_an_early_choice_has_one_flag_for_device_and_host(in_place):
    record = USUAL._replace(in_place=in_place)._asdict()
    del record["on_host"]
    assert paths_of(record) == USUAL._replace(in_place=in_place, on_host=in_place)


@pytest.mark.parametrize("dtype, here", [("float32", True), ("bfloat16", True), ("float16", False)])
def test_with_numba_a_cpu_attends_in_place_in_the_kernels_dtypes(timed, monkeypatch, dtype, here):
    paths = inspect.unwrap(attention_paths.fastest_paths)
    assert paths("cpu", "float32", 1).in_place
    assert attention_paths.can_attend_in_place(dtype) == here
    assert paths("cpu", dtype, 1).on_host and paths("cuda", dtype, 1).on_host
    monkeypatch.setattr(compiled, "converts_float16", lambda: False)
    assert paths("cuda", dtype, 1).on_host == here
    monkeypatch.setattr(compiled, "has_numba", lambda: False)
    assert not any((*paths("cpu", dtype, 1)[3:], *paths("cuda", dtype, 1)[3:]))


def test_a_job_that_began_with_numba_is_refused_without_it(monkeypatch):
    monkeypatch.setattr(compiled, "has_numba", lambda: False)
    arguments = LLMArguments("none", device="cpu", dtype="float32", attention=USUAL._replace(in_place=True))
    with pytest.raises(InputError, match="pip install numba"):
        resolve_problem(arguments, shape_by_name("opt-125m"), pick_device("cpu"))
