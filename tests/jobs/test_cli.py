"""Test commands that run no model: their output for people and for programs, and their errors for wrong input."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from flexhybrid import cli, shipped
from flexhybrid.arguments import add_options, option, options_from
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Bits, Policy, Selection
from flexhybrid.jobs import search
from flexhybrid.jobs import simulate as jobs

LENGTHS = ("--input-len", "512", "--output-len", "8")
SIMULATE = ("simulate", "--model", "opt-6.7b", "--hardware", "t4", "--batch", "4", *LENGTHS)
SEARCH = ("search", "--model", "opt-6.7b", "--hardware", "t4", "--batch", "4", "--no-confirm", *LENGTHS)


def grid(folder, text: str = "") -> str:
    path = folder / "grid.toml"
    path.write_text(
        text
        or 'system = ["kv_only", "hybrid(0.5)"]\nmodel = "opt-125m"\nhardware = "t4"\nbatch = 2\n'
        "prompt_len = 64\ngen_len = 4\n"
    )
    return str(path)


def strict_json(text: str) -> dict:
    """Return the only JSON object of a text; NaN and Infinity are refused, as they are not JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def parsers(parser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from parsers(inner)


def test_no_option_silently_drops_a_value(capsys):
    """A file or a list given twice is refused unless the option collects values. Of numbers and names the last one
    counts."""
    for parser in parsers(cli.build_parser()):
        for name, action in parser._option_string_actions.items():
            if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
                continue
            value = str(next(iter(action.choices))) if action.choices else "1"
            for _ in range(2):
                with pytest.raises(SystemExit):
                    parser.parse_args([name, value, "-Z"])
                assert "given twice" not in capsys.readouterr().err
            with pytest.raises(SystemExit):
                parser.parse_args([name, value, name, value, "-Z"])
            refused = f"{name} is given twice, " in capsys.readouterr().err
            several = action.nargs or name in ("--vary", "--policy", "--system", "--selection")
            several = several or action.type is Path and name != "--model"
            assert refused == (bool(several) and name != "--keep"), name


@dataclass(frozen=True)
class Asked:
    """A record with one flag of each type."""

    place: Path = option("needed", names=("-p", "--place"))
    count: int | None = option("", None)
    share: float = option("", 0.5)
    names: tuple[str, ...] = option("", ("a",))
    keep: bool = option("", False)
    trials: bool = option("", True)
    both: bool = option("", True, action=argparse.BooleanOptionalAction)
    own: int = 7


def test_flags_fill_a_record(capsys):
    parser = cli.Parser()
    add_options(parser, Asked)
    for given, expected in (
        (["-p", "x"], Asked(Path("x"))),
        (["--place", "x", "--count", "3", "--names", "b", "c"], Asked(Path("x"), 3, names=["b", "c"])),
        (
            ["-p", "x", "--keep", "--no-trials", "--no-both", "--share", "1"],
            Asked(Path("x"), None, 1.0, ("a",), True, False, False),
        ),
    ):
        assert options_from(Asked, parser.parse_args(given)) == expected
    for wrong in ([], ["-p", "x", "--count", "y"], ["-p", "x", "--own", "8"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)


def test_former_names_of_flags_are_accepted(as_json):
    former = ("--prompt-len=512", "--gen-len", "8")
    assert as_json(*SIMULATE[: -len(LENGTHS)], *former, "--system", "kv_only") == as_json(
        *SIMULATE, "--system", "kv_only"
    )


@pytest.mark.parametrize(
    "arguments, key",
    [
        (SIMULATE, "tokens_per_s"),
        (("sweep", "GRID", "--workers", "1"), "num_points"),
        (("reproduce", "--list"), "experiments"),
        (("reproduce", "--only", "infinigen-fig2", "--out", "OUT"), "experiments"),  # none judged: median null
    ],
)
def test_json_is_one_object_on_stdout(arguments, key, tmp_path, capsys):
    there = {"GRID": grid(tmp_path), "OUT": str(tmp_path / "out")}
    assert cli.main([*(there.get(one, one) for one in arguments), "--json"]) == 0
    assert key in strict_json(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((*SIMULATE, "--system", "hybird"), "did you mean hybrid"),
        ((*SIMULATE, "--system", "hybrid"), "needs share"),
        ((*SIMULATE, "--input-len", "2041"), "positions for 2048"),
        ((*SIMULATE, "--model", "opt-31b"), "did you mean opt-30b"),
        ((*SIMULATE, "--hardware", "rtx4091"), "did you mean rtx4090"),
        ((*SIMULATE, "--batch", "x"), "invalid int value: 'x'"),
        ((*SIMULATE, "--policy", "EMPTY"), "the policy is empty"),
        ((*SIMULATE, "--system", "EMPTY"), "the policy is empty"),
        ((*SIMULATE, "--system", "/nowhere.json"), "cannot read policy file /nowhere.json"),
        ((*SIMULATE, "--device-memory", "-4GiB"), "expected one argument, which does not begin with -"),
        ((*SIMULATE, "--bach", "3"), "unknown option '--bach'; did you mean --batch"),
        ((*SIMULATE, "-b", "3"), "unrecognized arguments: -b 3 (see flexhybrid simulate --help)"),
        (("run", "-i", "a", "-o", "b", "--modle=c"), "unknown option '--modle'; did you mean --model? (see "),
        (("run", "-i", "a", "-o", "b", "-i", "c"), "-i is given twice, a and c: give it once (see"),
        ((*SIMULATE, "--vary", "batch=1,2", "--vary", "gen_len=8"), "--vary is given twice, batch=1,2 and gen_len=8"),
        (("run", "-i", "-", "-o", "-", "--model", str(shipped.CHECKPOINT)), "the output is -: give a file"),
        (
            ("run", "-i", "a", "-o", "b", "--model", str(shipped.CHECKPOINT), "--report", "-"),
            "--report is -: give a file",
        ),
        ((*SIMULATE, "--system", "kv_only", "--device-memory", "10B"), "there are 10 bytes (2."),
        (("cascade", "plan", "--bach"), "flexhybrid cascade plan --help"),
        ((*SIMULATE, "--device-memory", "1MiB", "--system", "kv_only"), "does not fit"),
        ((*SEARCH, "--input-len", "4096"), "positions for 2048"),
        ((*SEARCH, "--device-memory", "0"), "must be a positive"),
        ((*SEARCH, "--device-memory", "24"), "'24' is 24 bytes: add a unit, like 24GiB"),
        (("sweep", "NOWHERE"), "nowhere.toml"),
        (("reproduce", "--only", "capture-table4"), "did you mean capture-table3"),
        (("profile", "--device", "cpu", "--link-gb-per-s", "-1"), "must be a number of at least"),
        (("compare", "--model", "NOWHERE"), "no checkpoint at"),
        (("simulat",), "unknown command 'simulat'; did you mean simulate?"),
        (("run", "--format", "txt"), "unknown value of --format 'txt'; did you mean text? known: auto, jsonl, text"),
        (
            ("simulate", "--model", "opt-30b", "--hardware", "t4", "--output-len", "9"),
            "work: --batch, --input-len (or the",
        ),
    ],
)
def test_wrong_input_is_one_line_on_stderr(arguments, words, tmp_path, capsys):
    there = {"EMPTY": str(tmp_path / "empty.json"), "NOWHERE": str(tmp_path / "nowhere.toml")}
    (tmp_path / "empty.json").write_text("{}")
    json_too = ("--json",) if arguments[0] != "simulat" else ()
    try:
        status = cli.main([*(there.get(one, one) for one in arguments), *json_too])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2 and said.out == ""
    assert words in said.err and len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("run -i NONE -o OUT --model HERE", "cannot read NONE: No such file or directory"),
        ("run -i HERE/config.json -o OUT --model NONE", "no checkpoint at NONE: give a local folder"),
        ("run -i HERE/config.json -o NONE/out --model HERE", "cannot write NONE/out: there is no folder NONE"),
        ("run -i HERE/config.json -o OUT --model HERE --policy NONE.json", "cannot read policy file NONE.json"),
        ("run -i HERE/config.json -o OUT --model HERE --hardware NONE/t4", "cannot read hardware file NONE/t4"),
        ("skew --model NONE --text HERE/config.json --out OUT", "no checkpoint at NONE: give a local folder"),
        ("skew --model HERE --text NONE --out OUT", "cannot read text file NONE: No such file or directory"),
        ("compare --policy NONE", "cannot read policy file NONE"),
        ("profile --model NONE", "no model configuration at NONE"),
        ("accuracy --text NONE", "cannot read text file NONE: No such file or directory"),
        ("accuracy --model NONE", "no checkpoint at NONE: give a local folder"),
    ],
)
def test_a_missing_path_is_reported_before_heavy_imports(arguments, words, tmp_path, monkeypatch, capsys):
    """The message is the one of the code that would read the path later."""
    for job in ("accuracy.job", "compare.job", "profile.job", "run.job", "skew"):
        monkeypatch.setitem(sys.modules, f"flexhybrid.jobs.{job}", None)  # an import fails
    there = {"NONE": str(tmp_path / "none"), "OUT": str(tmp_path / "out"), "HERE": str(shipped.CHECKPOINT)}
    for name, path in there.items():
        arguments, words = arguments.replace(name, path), words.replace(name, path)
    assert cli.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert words in said.err and not said.out and not (tmp_path / "out").exists()


def test_a_prompt_may_use_all_positions_but_those_of_its_answer():
    point = {"model": "opt-6.7b", "hardware": "t4", "batch": 1, "gen_len": 8}
    assert jobs.setting_of({**point, "prompt_len": 2040}).prompt_tokens == 2040
    with pytest.raises(InputError, match="2041 .* are 2049"):
        jobs.setting_of({**point, "prompt_len": 2041})


@pytest.mark.parametrize(
    "batch, room_for_four, words",
    [(4, False, "4 requests in 1 wave, "), (8, True, "8 requests in 2 waves of 4, "),
     (7, True, "7 requests in one wave of 4 and one of 3, "),
     (10, True, "10 requests in 2 waves of 4 and one of 2, ")],
)  # fmt: skip
def test_the_report_lists_waves_in_order(batch, room_for_four, words):
    point = {"system": "kv_only", "model": "opt-125m", "hardware": "t4", "batch": batch, "prompt_len": 64, "gen_len": 4}
    whole = jobs.run_point({**point, "batch": 4})[-1]
    limit = {"host_memory": str(whole.peak_bytes["host"])} if room_for_four else {}
    run = jobs.run_point(point | limit)[-1]
    assert words in jobs.describe(run)
    limited = "at most 4 requests at a time by host memory: 5 would take" in jobs.describe(run)
    assert limited == room_for_four == bool(run.limited_by)
    one = {**point, "batch": 3, "prompt_len": 700}
    wide = jobs.describe(jobs.run_point({**one, "system": "kv_only(max_mini_batch_tokens=1024)"})[-1])
    assert "one request a mini-batch by max_mini_batch_tokens 1,024" in wide


def test_answers_of_one_token_have_no_decode():
    point = {"system": "kv_only", "model": "opt-125m", "hardware": "t4", "batch": 4, "prompt_len": 64, "gen_len": 1}
    said = jobs.describe(jobs.run_point(point)[-1])
    assert "no decode, each answer is one token" in said and "busy in the prefill: " in said
    assert "busy while decoding: " in jobs.describe(jobs.run_point({**point, "gen_len": 2})[-1])


def test_a_resident_system_that_streams_says_so(capsys):
    small = ("simulate", "--system", "resident", "--model", "opt-125m", "--hardware", "t4", "--batch", "1", *LENGTHS)
    assert cli.main(list(small)) == 0
    said = capsys.readouterr().out
    assert "weights device 100.0%" in said and "fits" not in said
    assert cli.main([*SIMULATE, "--system", "resident", "--model", "opt-30b"]) == 0
    said = capsys.readouterr().out
    assert "resident as far as it fits: " in said and "  not all weights fit" in said


def test_rivals_are_reported_with_whole_errors_and_shares(capsys, monkeypatch):
    """Text and JSON are made of one search."""
    found, run_search = [], search.run_search

    def once(*options):
        found[:] = found or [run_search(*options)]
        return found[0]

    monkeypatch.setattr(search, "run_search", once)
    monkeypatch.setattr(search, "IN_ANY_BITS", ("kv_only", "fastdecode"))
    asked = [*SEARCH, "--lossy", "--device-memory", "8GiB", "--host-memory", "8GiB", "--max-num-seqs", "4"]
    assert cli.main(asked) == 0
    said = capsys.readouterr().out
    assert cli.main([*asked, "--json"]) == 0
    rivals = strict_json(capsys.readouterr().out)["rivals"]
    assert "bind the search alone" not in said
    failed = [row["error"] for row in rivals if row["error"]]
    assert failed
    for error in failed:
        assert any(error.endswith(line.split("does not run: ")[1]) for line in said.splitlines() if "not run" in line)
    assert all(0 <= row["kept_weights"]["device"] <= 1 for row in rivals if not row["error"])
    kept = asdict(Bits()), Selection().method
    told = {row["system"]: row["policy"] for row in rivals if not row["error"]}
    changing = {name for name, policy in told.items() if (policy["bits"], policy["selection"]["method"]) != kept}
    assert {"deepspeed(bits=4)", "kv_only, same bits", "h2o", "infinigen"} <= changing and "kv_only" not in changing
    assert "  the selection " in said  # by default infinigen's
    marked = (line for line in said.splitlines() if line.endswith("changes the tokens)"))
    assert {line.strip().partition("  ")[0] for line in marked} == changing
    same = [line for line in said.splitlines() if "same bits" in line]
    assert same and not any("(bits" in line for line in same)


@pytest.mark.parametrize("option", ["--save-policy", "--lp"])
@pytest.mark.parametrize("place", ["missing/policy.json", "."])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(option, place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flexhybrid.jobs.search.run_search", lambda options: pytest.fail("searched first"))
    assert cli.main([*SEARCH, option, str(tmp_path / place)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


def test_the_saved_policy_is_the_one_found(tmp_path, capsys):
    """Both commands also warn of a budget that is larger than the machine's memory."""
    path, beyond = tmp_path / "policy.json", ("--device-memory", "100GiB")

    def told(*words: str) -> dict:
        assert cli.main([*words, *beyond, "--json"]) == 0
        said = capsys.readouterr()
        assert "--device-memory 100GiB is more than the 16.00 GiB that t4 has" in said.err
        return strict_json(said.out)

    found = told(*SEARCH, "--lossless", "--save-policy", str(path))
    assert Policy.load(path).to_dict() == found["policy"]
    by_policy, by_system = (told(*SIMULATE, named, str(path)) for named in ("--policy", "--system"))
    assert by_policy == by_system and by_policy["policy"] == found["policy"]
    assert cli.main([*SIMULATE, "--device-memory", "15GiB"]) == 0 and not capsys.readouterr().err


def test_a_prediction_is_the_same_text_in_every_process():
    """No sum and no name depends on the order of a set, which differs from process to process."""
    code = (
        "from flexhybrid.cli import main; main(['simulate', '--system', 'capture', '--model', 'opt-6.7b', "
        "'--hardware', 't4', '--batch', '32', '--input-len', '300', '--output-len', '40', '--json'])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "123"
    }
    assert len(texts) == 1 and texts.pop()


def test_a_batch_that_is_too_large_is_refused(capsys):
    """Its arrays of lengths alone would fill the memory."""
    args = ["--model", "opt-6.7b", "--hardware", "t4", "--batch", str(1 << 31), "--input-len", "9", "--output-len", "9"]
    assert cli.main(["simulate", "--system", "capture", *args]) == 2
    assert "2,147,483,648 requests is more than" in capsys.readouterr().err


def test_the_command_alone_names_its_commands(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and all(f"    {command} " in said.err for command in ("run", "simulate", "search", "doctor"))


def test_an_interrupt_during_imports_gives_no_traceback():
    script = (
        "import sys\n"
        "class Stopped:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'flexhybrid.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stopped())\n"
        "from flexhybrid.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flexhybrid: stopped\n")
