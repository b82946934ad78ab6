"""Test that an error in one line is that line's error, and that the other lines are answered as without it."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import answered, lines_of

from flexhybrid import SamplingParams
from flexhybrid.jobs.run.lines import JobLines
from flexhybrid.requests import RequestCodec

HUGE, DIGITS = 10**400, "1" * 5000


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))


def line(name: str, prompt=(5, 6), **body) -> str:
    return lines_of({name: {"prompt": prompt, "max_tokens": 3, **body}})[0]


def run(folder, model, lines: list[str], *more: str) -> dict[str, dict]:
    """Answer the lines; return custom_id -> body."""
    return {name: {**body, "created": 0} for name, body in answered(folder, model, lines, *more).items()}


def tokens(body: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in body["choices"]]


def nested(levels: int):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


#: Line -> what its error says; None: it is answered.
ODD = {
    line("all", top_k=1e30, temperature=1.5, seed=3): None,
    line("all, as an integer", top_k=HUGE, temperature=1.5, seed=3): None,
    line("held", min_tokens=10**30, max_tokens=10**31, stop_token_ids=[7]): None,
    line("long", max_tokens=HUGE, temperature=0): None,
    line("steep", repetition_penalty=1e300, temperature=0): None,
    line("flat", repetition_penalty=1e-310, temperature=0): None,
    line("deep, and ignored", metadata=nested(200)): None,
    line("hot", temperature=HUGE): "temperature is",
    line("penalty", repetition_penalty=HUGE): "repetition_penalty is",
    line("bias", logit_bias={"7": HUGE}): "logit_bias is",
    line("key", logit_bias={DIGITS: 1}): "logit_bias is",
    line("n", n=HUGE): "n is",
    line("seed", seed=1.5e300): None,
    line("ids", prompt=[5, HUGE]): "the prompt holds token id 1000",
    line("below", prompt=[-1]): "the prompt holds token id -1; the vocabulary is 0 … 60",
    line("beyond", prompt=[61]): "the prompt holds token id 61",
    line("half", prompt=[5.5]): "prompt must be a text or a list of token ids",
    line("flag", prompt=[True]): "prompt must be a text or a list of token ids",
    line("stop", stop=nested(200)): "stop is",
    line("name", **{"x" * 5000: 1}): "unknown sampling parameter 'xxx",
    line("stop_token_ids", stop_token_ids=[HUGE]): "stop_token_ids of the prompt holds token id 1000",
}
#: What cannot be read far enough for its custom_id.
UNREAD = [
    *(line("deep", **{name: "@"}).replace('"@"', "[" * 1000 + "]" * 1000) for name in ("stop", "metadata")),
    line("digits", seed="@").replace('"@"', DIGITS),
    line("nan", top_p=float("nan")),
]


def test_extreme_values_are_answered_or_refused_by_name(tiny, tmp_path, capsys):
    plain = [line("free", temperature=1.5, seed=3), line("seed 2", seed=int(1.5e300) % 2**64)]
    found = run(tmp_path, tiny, [*plain, *ODD, *UNREAD])
    wanted = {json.loads(raw)["custom_id"]: message for raw, message in ODD.items()}
    told = {name: body["error"]["message"] for name, body in found.items() if name and "error" in body}
    assert set(told) == {name for name, message in wanted.items() if message}
    assert [(name, text) for name, text in told.items() if wanted[name] not in text or len(text) > 900] == []
    choices = {name: body["choices"] for name, body in found.items() if name in ("free", "all", "all, as an integer")}
    assert choices["all"] == choices["all, as an integer"] == choices["free"]
    assert found["seed"]["choices"] == found["seed 2"]["choices"]
    out = capsys.readouterr().out
    assert f"{len(plain) + sum(not text for text in ODD.values())} answered, " in out and " 0 left of " in out
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len([*plain, *ODD, *UNREAD])


class PanicException(BaseException):
    """An exception as libraries in Rust raise it."""


FAULTS = {
    "counted": RecursionError("deep"),
    "read": PanicException("panicked"),
    "opened": OverflowError("x" * 10**6),
    "completed": KeyError("k"),
    "written": PanicException("panicked"),
}


@pytest.mark.parametrize("stage", FAULTS)
def test_a_failure_of_one_line_is_its_error(tiny, tmp_path, monkeypatch, stage):
    """This holds at any stage and with several answers; the other lines are answered as in a run without failures."""
    lines = [line(f"r{i}", [5 + i, 7], n=1 + i % 3, seed=i, logprobs=1) for i in range(8)]
    bad = ([7, 7], [8, 7])
    whole = run(tmp_path, tiny, lines)
    check, open_, completion, written = RequestCodec.check, RequestCodec.open, RequestCodec.completion, JobLines.line
    checked: list = []

    def fails(prompt, index=0):
        if list(prompt) in bad and index in (0, 1):
            raise FAULTS[stage]

    def checks(codec, prompt, *more):
        checked.append(prompt)
        if stage == "counted" or checked.count(prompt) > 1:
            fails(prompt)
        return check(codec, prompt, *more)

    def opens(codec, prompt, params, index):
        fails(prompt, index)
        return open_(codec, prompt, params, index)

    def completes(codec, generated):
        fails(generated.prompt_ids, generated.index)
        return completion(codec, generated)

    def writes(job, number, request, output):
        fails(output.prompt_token_ids)
        return written(job, number, request, output)

    replaced = {
        "counted": (RequestCodec, "check", checks),
        "read": (RequestCodec, "check", checks),
        "opened": (RequestCodec, "open", opens),
        "completed": (RequestCodec, "completion", completes),
        "written": (JobLines, "line", writes),
    }
    monkeypatch.setattr(*replaced[stage])
    found = run(tmp_path, tiny, lines, "--overwrite", "--max-num-seqs", "3")
    assert [name for name, body in found.items() if "error" in body] in (["r2", "r3"], ["r3", "r2"])
    error = found["r3"]["error"]
    assert type(FAULTS[stage]).__name__ in error["message"] and len(error["message"]) < 1200
    assert {name: tokens(body) for name, body in found.items() if "error" not in body} == {
        name: tokens(body) for name, body in whole.items() if name not in ("r2", "r3")
    }


def test_a_failure_of_all_lines_ends_the_run(tiny, tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(RequestCodec, "open", fails)
    with pytest.raises(MemoryError):
        run(tmp_path, tiny, [line("a")])


def test_a_seed_has_the_same_effect_for_every_prompt(tiny, tiny_llm, tmp_path):
    """The seed is in a file, in one SamplingParams for all prompts, or in a list. Answers to one prompt differ."""
    asked = {"seed": 7, "temperature": 3.0, "n": 2, "max_tokens": 8}
    params = SamplingParams(**asked, ignore_eos=True)
    lists = [tiny_llm.generate([[5, 6]] * 2, given) for given in (params, [params] * 2)]
    found = run(tmp_path, tiny, [line(name, **asked, ignore_eos=True, return_token_ids=True) for name in "ab"])
    lists.append([SimpleNamespace(outputs=[SimpleNamespace(**one) for one in found[name]["choices"]]) for name in "ab"])
    tokens = {str([output.token_ids for output in answer.outputs]) for answers in lists for answer in answers}
    assert len(tokens) == 1
    first, second = json.loads(tokens.pop())
    assert first != second


def body(number: int, **asked) -> str:
    return json.dumps({"prompt": [5 + number, 7], "max_tokens": 4, "temperature": 2.0, **asked})


#: Change of an input of 8 lines -> the lines of the new one (numbers of the old, or new lines).
CHANGES = {
    "line taken out": [0, 1, 2, 4, 5, 6, 7],
    "first line taken out": [1, 2, 3, 4, 5, 6, 7],
    "line changed": [0, 1, 2, body(3, max_tokens=2), 4, 5, 6, 7],
    "lines added": [body(20), 0, 1, 2, 3, body(21), 4, 5, 6, 7, body(22)],
    "order": [7, 6, 5, 4, 3, 2, 1, 0],
    "line made bad": [0, 1, 2, "{broken", 4, 5, 6, 7],
    "twice": [0, 0, 1, 2, 3, 4, 5, 6, 7, 7],
    "blank lines": [0, "", 1, 2, 3, "  ", 4, 5, 6, 7],
}


@pytest.mark.parametrize(
    "change, named", [*((change, bool(turn % 2)) for turn, change in enumerate(CHANGES)), ("twice", True)]
)
def test_a_changed_input_keeps_the_answers_to_remaining_lines(tiny, tmp_path, capsys, change, named):
    """Kept answers have the seeds of their former line numbers. A run killed at any write of the change repeats it."""
    lines = [line(f"r{i}", [5 + i, 7], temperature=2.0) if named else body(i) for i in range(8)] + ["{bad"]
    first = run(tmp_path, tiny, lines, "--errors", str(tmp_path / "errors.jsonl"))
    assert len(first) == 8
    new = [lines[one] if isinstance(one, int) else one for one in CHANGES[change]]
    out, saved = tmp_path / "out.jsonl", {path.name: path.read_bytes() for path in tmp_path.glob("*.jsonl*")}
    for killed_at in (None, 1, 2, 3) if change == "first line taken out" else (None,):
        for name, data in saved.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "out.jsonl.removed").unlink(missing_ok=True)
        calls = []

        def dies(partial, path, calls=calls, killed_at=killed_at, replace=Path.replace):
            calls.append(path)
            if len(calls) == killed_at:
                raise SystemExit("killed")
            return replace(partial, path)

        more = ("--errors", str(tmp_path / "errors.jsonl"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", dies)
            with contextlib.suppress(SystemExit):
                run(tmp_path, tiny, new, *more)
        assert len(calls) == killed_at or not killed_at and len(calls) >= 3
        found = run(tmp_path, tiny, new, *more)
        rows = sorted((json.loads(raw) for raw in out.read_text().splitlines()), key=lambda row: row["id"])
        errors = [json.loads(raw)["id"] for raw in (tmp_path / "errors.jsonl").read_text().splitlines()]
        numbers = [int(row["id"].removeprefix("batch_req_")) for row in rows]
        answered = [number for number, raw in enumerate(new, 1) if raw.strip() and raw != "{broken"]
        if named and change == "twice":
            assert errors == ["batch_req_00000002", "batch_req_00000010"]
            answered = [number for number in answered if number not in (2, 10)]
        else:
            assert errors == ["batch_req_00000004"] * (change == "line made bad")
        assert numbers == answered and len(found) == len(answered)
        for row, number in zip(rows, numbers, strict=True):
            raw = new[number - 1]
            assert row["custom_id"] == (json.loads(raw)["custom_id"] if '"custom_id"' in raw else f"line-{number}")
            assert row["response"]["body"]["id"] == f"cmpl-{number:08d}"
            if raw in lines and new.count(raw) == 1:
                before = f"r{lines.index(raw)}" if named else f"line-{lines.index(raw) + 1}"
                assert tokens(row["response"]["body"]) == tokens(first[before])
        gone = [raw for raw in lines[:8] if raw not in new]
        beside = tmp_path / "out.jsonl.removed"
        assert {json.loads(raw)["custom_id"] for raw in (beside.read_text().splitlines() if gone else [])} == {
            "r3" if named else "line-4" for _ in gone if change != "first line taken out"
        } | {"r0" if named else "line-1" for _ in gone if change == "first line taken out"}
        assert run(tmp_path, tiny, new, *more).keys() == found.keys()
    told = capsys.readouterr().out
    assert f"changed    the input was changed: {8 - len(gone)} answers kept" in told
    assert ("2 of them blank" in told) == (change == "blank lines")


def test_another_input_is_refused(tiny, tmp_path, capsys):
    run(tmp_path, tiny, [body(1), body(2)])
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(AssertionError):
        run(tmp_path, tiny, [body(3), body(4)])
    assert "(the file was changed)" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before and not (tmp_path / "out.jsonl.removed").exists()


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_named(tiny, tmp_path, capsys, indent):
    with pytest.raises(AssertionError):
        run(tmp_path, tiny, [json.dumps([json.loads(body(1))] * 2, indent=indent)])
    assert "in.jsonl holds one JSON array; write one request a line" in capsys.readouterr().err
    assert run(tmp_path, tiny, ["[1", body(1), "2]"])["line-2"]["choices"]  # bad lines make no array
