"""Run every command that the pages for users show."""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forced_machine import DTYPES, FASTER_DTYPE
from packaging.requirements import Requirement

from flexhybrid import cli
from flexhybrid.batch.openai import IGNORED
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.units import gib
from flexhybrid.jobs import doctor, machine
from flexhybrid.jobs.profile.job import model_profile_path
from flexhybrid.jobs.run import opening
from flexhybrid.resolve import PacedDevice

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "experiments/results/NOTES.md"
PAGE = (ROOT / "docs/running-a-job.md").read_text(encoding="utf-8")
OTHER_PAGES = (
    "choosing-a-policy",
    "reading-a-trace",
    "reproducing-a-paper",
    "adding-a-model",
    "python",
    "simulating",
    "a-token",
)
#: What a page tells to do, in its order: a named file to write, commands, Python.
STEP = re.compile(r"(?:^`([\w.-]+)`:\n\n)?^```(json|sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:    )?\.venv/bin/flexhybrid (.*)$", re.MULTILINE)
#: A machine that a profile might have found; "auto" keeps everything resident on it.
MACHINE = Hardware(
    "local", "cpu", {key: Line(1e-5, 1e-11, 1e-10) for key in ("compute", "h2d", "d2h", "host_compute")},
    source="made for tests", dtype="float32", faster_dtype="float32",
)  # fmt: skip


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Return a folder like a clone of the project, with the page's example files and a quick profile."""
    for folder in ("experiments", "flexhybrid"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "requests.jsonl").write_text(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    (tmp_path / "chat.jinja").write_text(re.search(r"```jinja\n(.*?)```", PAGE, re.DOTALL)[1])
    (tmp_path / "table.csv").write_text('question\nimport os\n"def f():\n    "\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(FASTER_DTYPE, "float32")
    monkeypatch.setattr(opening, "measure_for_model", lambda *setting: MACHINE)
    return tmp_path


def check_git_ignores(clone: Path) -> None:
    """Check that following a page leaves no file in a clone that git would add."""
    shutil.copy(ROOT / ".gitignore", clone)
    subprocess.run(["git", "init", "-q"], cwd=clone, check=True)
    untracked = ["git", "ls-files", "--others", "--exclude-standard", "--directory"]
    names = subprocess.run(untracked, cwd=clone, capture_output=True, text=True, check=True).stdout.split()
    assert set(names) - {"cache/"} == {".gitignore", "experiments", "flexhybrid"}


def test_the_page_about_jobs_works_as_written(clone, capsys):
    commands = COMMAND.findall(PAGE)
    assert len(commands) == len(re.findall(r"```sh", PAGE)) == 7
    told = []
    for command in commands:
        assert cli.main(shlex.split(command)) == 0, command
        told.append(capsys.readouterr().out)
        assert told[-1], command
    assert "predicted" in told[0] and "48 answered, 0 refused, 0 left" in told[0]
    first = [json.loads(raw) for raw in (clone / "first.jsonl").read_bytes().splitlines()]
    assert len(first) == len((ROOT / "flexhybrid/shipped/prompts.txt").read_text().splitlines())
    assert all(row["response"]["status_code"] == 200 for row in first)
    answers = [json.loads(raw) for raw in (clone / "answers.jsonl").read_bytes().splitlines()]
    assert sorted(row["custom_id"] for row in answers) == ["a", "b"]
    assert (clone / "split-errors.jsonl").read_bytes() == b""
    chats = [json.loads(raw)["response"] for raw in (clone / "chat.jsonl").read_bytes().splitlines()]
    assert [chat["status_code"] for chat in chats] == [200, 200]
    check_git_ignores(clone)


@pytest.mark.parametrize("name", OTHER_PAGES)
def test_every_block_of_a_page_works_as_written(name, clone, capsys, monkeypatch):
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    MACHINE.save(clone / "cache/hardware-cpu.json")
    steps = STEP.findall(page)
    assert len(steps) == page.count("```") // 2 >= 1
    for file, language, text in steps:
        if language == "json":
            (clone / file).write_text(text)
        elif language == "python":
            for dtype in DTYPES if "LLM(" in text else DTYPES[:1]:
                monkeypatch.setenv(FASTER_DTYPE, dtype)
                names = {"__name__": "page"}
                exec(compile(text, f"docs/{name}.md", "exec"), names)
                assert all(0 <= share <= 1 for share in names.get("busy", {}).values())
        else:
            commands = COMMAND.findall(text)
            assert len(commands) == len(text.splitlines())
            for command in commands:
                assert cli.main(shlex.split(command)) == 0, command
                out = capsys.readouterr().out
                assert out and ("--only" not in command or "held-out rows: |error|" in out), command
    check_git_ignores(clone)


def test_unread_fields_are_those_of_the_page():
    (sentence,) = re.findall(r"These fields are accepted and not read: (.*?)\.", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == IGNORED - {"model"}


def test_links_lead_to_files():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), NOTES]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_parser_accepts_the_commands_of_the_readme():
    """Commands that take at most a few seconds are also run, as other pages show them."""
    run = COMMAND.findall((ROOT / "docs/simulating.md").read_text(encoding="utf-8")) + COMMAND.findall(PAGE)
    assert "simulating" in OTHER_PAGES
    pages = [ROOT / "README.md", ROOT / "docs/accuracy.md"]
    commands = [command for page in pages for command in COMMAND.findall(page.read_text(encoding="utf-8"))]
    assert len(commands) == 6
    for command in commands:
        words = shlex.split(command)
        assert cli.build_parser().parse_args(words).command == words[0]
        assert words[0] not in ("run", "simulate", "search") or command in run


def test_the_readme_leads_to_answers_from_python(clone, capsys):
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "qwen3" in text
    exec(compile(text, "README.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


@pytest.fixture
def host_bytes(monkeypatch):
    """Set the memory of this machine, half of it free, without a disk. Float32 multiplies faster."""

    def has(size: int) -> None:
        monkeypatch.setattr(doctor, "fastest_dtype", lambda *_: "float32")
        monkeypatch.setattr(doctor, "_free_disk", lambda: 0)
        for module in (machine, doctor):
            monkeypatch.setattr(module, "host_memory_bytes", lambda: size)
            monkeypatch.setattr(module, "free_host_bytes", lambda: size // 2)

    return has


@pytest.mark.parametrize(
    ("size", "small", "large"),
    [
        (512 << 20, "does not fit", "does not fit"),
        (640 << 20, "fits memory", "does not fit"),
        (4 << 40, "fits memory", "fits memory"),
    ],
)
def test_what_fits_depends_on_the_installed_memory(host_bytes, size, small, large, num_cores, clone, capsys):
    """90 % of the machine's memory may be used; the memory free at the moment changes no verdict."""
    host_bytes(size)
    assert cli.main(["doctor", "--device", "cpu", "--models", "opt-125m", "opt-175b"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"opt-125m .* {small}", out) and re.search(rf"opt-175b .* {large}", out)
    assert f"host    {gib(size)}, {gib(size // 2)} free, {num_cores} cores" in out
    assert f"{gib(size // 2)} of memory is free now: run takes a part" in out


def test_the_doctor_says_what_fits_and_what_to_change(host_bytes, clone, capsys, monkeypatch):
    """The same model with the same rates is searched once."""
    host_bytes(32 << 30)
    policies = {}

    def best_policy(problem, lengths, search=doctor.best_policy, **more):
        key = repr((problem, lengths))
        policies[key] = policies.get(key) or search(problem, lengths, **more)
        return policies[key]

    monkeypatch.setattr(doctor, "best_policy", best_policy)
    assert cli.main(["doctor", "--device", "cpu", "--models", "opt-125m"]) == 0
    out = capsys.readouterr().out
    assert "not measured, so no speed is predicted: run flexhybrid profile" in out
    assert re.search(r"opt-125m +477.75 MiB float32 +-  fits memory", out)
    for disk_bytes, words in (
        (70 << 30, "does not fit"),
        (1 << 40, r"needs a disk \(flexhybrid profile --disk DIR .*\)"),
    ):
        monkeypatch.setattr(doctor, "_free_disk", lambda free=disk_bytes: free)
        assert cli.main(["doctor", "--device", "cpu", "--models", "opt-175b"]) == 0
        told = capsys.readouterr().out
        assert re.search(rf"opt-175b .* float32 .* {words}: one request at a time needs 65\d\.\d\d GiB", told)
    assert cli.main(["doctor", "--device", "cpu", "--models", "gpt-5"]) == 2 and "gpt-5" in capsys.readouterr().err
    assert cli.main(["doctor", "--device", "cpu", "--model", "gpt-5", "opt-125m"]) == 0
    assert re.search(
        r"(?s)gpt-5 +- - +-  refused, see below\nopt-125m +477.75 MiB.*\n- gpt-5 is refused: ", capsys.readouterr().out
    )
    MACHINE.save(clone / "cache/hardware-cpu.json")
    assert cli.main(["doctor", "--device", "cpu", "--json", "--models", "opt-125m", "opt-175b"]) == 0
    found = json.loads(capsys.readouterr().out)
    small, large = found["models"]
    assert small["model"] == "opt-125m" and small["tokens_per_s"] > 0 and "weights" in small["how"]
    assert large["tokens_per_s"] is None and "budget" in large["how"] and small["dtype"] == large["dtype"] == "float32"
    assert "computed in 32 bits" in large["how"] and "Raise" not in large["how"]  # no such machine
    assert large["how"].endswith("more than the machine has. What may help: a smaller model, fewer bits, a disk")
    assert found["gb_per_s"] == {"h2d": 10.0, "d2h": 10.0} and found["profile"]["measured"]
    # What a run has measured at a model's own layer sizes goes before: here every path and product is ten times slower.
    slower = dict.fromkeys(MACHINE.lines, Line(1e-4, 1e-10, 1e-9))
    kept = model_profile_path(shape_by_name("opt-125m"), "auto", PacedDevice(torch.device("cpu")))
    replace(MACHINE, lines=slower).save(kept)
    assert cli.main(["doctor", "--device", "cpu", "--json", "--models", "opt-125m"]) == 0
    (own,) = json.loads(capsys.readouterr().out)["models"]
    (clone / "cache/hardware-cpu.json").unlink()
    assert cli.main(["doctor", "--device", "cpu", "--models", "opt-125m"]) == 0
    assert "(measured for" in (told := capsys.readouterr().out) and "not measured" not in told
    assert cli.main(["doctor", "--device", "cpu", "--models", "opt-125m", "opt-350m"]) == 0
    assert "kept 1 profiles of single models" in (told := capsys.readouterr().out) and "not measured" in told
    assert own["own_profile"] and not small["own_profile"] and own["tokens_per_s"] < small["tokens_per_s"]
    assert cli.main(["doctor", "--models", "gpt-5"]) == 2


def test_no_step_of_setup_is_silent():
    """pip prints nothing for minutes; a line before each of its runs says what it fetches."""
    said = subprocess.run(["make", "-nB", ".venv/.testing"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    steps = [number for number, line in enumerate(lines) if "pip install" in line and "||" not in line]
    assert len(steps) == 4 and all(lines[number - 1].startswith('echo "setup') for number in steps)


def test_the_page_is_right_about_installing_ray():
    page = (ROOT / "docs/on-a-cluster.md").read_text(encoding="utf-8")
    (versions,) = re.findall(r'"ray": \["([^"]+)"\]', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert f"pip install '{versions}'" in page
    assert f"pip install '{versions}'" in (ROOT / "flexhybrid/jobs/ray_cluster.py").read_text(encoding="utf-8")
    assert "`make test` installs it too; `make setup` does not." in page
    for target, count in (("test", 1), ("setup", 0)):
        said = subprocess.run(["make", "-nB", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = {ROOT / name for name in re.findall(r"-r (\S+)", said)}
        pinned = [pin for file in files for pin in re.findall(r"^ray==(\S+)", file.read_text(), re.MULTILINE)]
        assert files and len(pinned) == count and all(pin in Requirement(versions).specifier for pin in pinned)


def test_the_page_about_cascades_works_as_written(clone, capsys):
    pytest.importorskip("sklearn")
    from experiments.training.digits import write

    page = (ROOT / "docs/cascade.md").read_text(encoding="utf-8")
    assert ".venv/bin/python -m experiments.training.digits --out digits" in page
    write(clone / "digits", seed=0, epochs=1)  # what that command does, in less time
    commands = COMMAND.findall(page)
    assert len(commands) == sum(part.count(".venv/bin/flexhybrid") for part in re.findall(r"```sh(.*?)```", page, re.S))
    for command in commands:
        assert cli.main(shlex.split(command)) == 0, command
        assert capsys.readouterr().out, command
    answers = [json.loads(line) for line in (clone / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 1797 - 800 - 500 and not any(answer["failed"] for answer in answers)
    check_git_ignores(clone)
