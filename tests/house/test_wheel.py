"""Test a built wheel, installed away from the repository: it holds all files, and its commands work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from functools import partial
from pathlib import Path

import pytest
import warm_python
from forced_machine import ATTENTION, FASTER_DTYPE
from toy_machine import machine

import flexhybrid
from experiments.reproduce.paper import listing
from flexhybrid import shipped

ROOT = Path(__file__).parents[2]
FLOORS = ("flexhybrid", "sim", "policy_search", "experiments", "figures")
#: What users do not need: records that no code opens, developers' parts of experiments, the second checkpoint.
LEFT_OUT = re.compile(
    r"experiments/(results/(amd-|intel-|nvidia-|reproduce/|NOTES)|(bench|checkpoints|gpu|peers|studies|training)/)"
    r"|flexhybrid/shipped/qwen3"
)
MOST_BYTES = 8_000_000


def done(command: list, folder: Path, warm: bool = False) -> str:
    """Run a command in a folder from which the repository is not importable; return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "forced"), FASTER_DTYPE: "float32"}
    environment["FLEXHYBRID_CACHE"] = str(folder / "cache")
    environment[ATTENTION] = "fused"  # no kernel is compiled for the place where the wheel lies
    run = warm_python.run if warm else partial(subprocess.run, capture_output=True, text=True)
    ended = run(list(map(str, command)), cwd=folder, env=environment, timeout=240)
    assert ended.returncode == 0, f"{command}: {ended.stderr[-2000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = done(["git", "-C", ROOT, "ls-files", *FLOORS, "setup.py", "LICENSE", "README.md"], ROOT.parent)
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked, tmp_path_factory) -> Path:
    """Build the wheel from a copy, since a build leaves files that the next one takes, and without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    # What pip calls, in one process instead of pip's four. Compressing the files would take 3 s.
    build = f"build_meta.build_wheel({str(out)!r}, {{'--build-option': '--compression=stored'}})"
    done([sys.executable, "-c", f"from setuptools import build_meta; {build}"], source)
    return next(out.glob("flexhybrid-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return the folder of a new environment with the wheel; other packages come from this process."""
    folder = tmp_path_factory.mktemp("installed")
    done([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    python = folder / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    done([sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel], folder)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_holds_every_file_that_is_opened(wheel, tracked):
    """All lies within flexhybrid, and a compressed wheel is small. Modules keep their lines; only imports differ."""
    with zipfile.ZipFile(wheel) as content:
        held = {name for name in content.namelist() if ".dist-info/" not in name}
        packed = sum(len(zlib.compress(content.read(name), 6)) for name in held)
        told = content.read(next(name for name in content.namelist() if name.endswith("METADATA"))).decode()
        assert all(content.read(name).count(b"\n") == (ROOT / home(name)).read_bytes().count(b"\n") for name in held)
    assert {home(name) for name in held} == {name for name in tracked if "/" in name and not LEFT_OUT.match(name)}
    assert packed < MOST_BYTES
    assert f"Version: {flexhybrid.__version__}" in told and "Provides-Extra: serve" in told
    assert f"\nversion: {flexhybrid.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {flexhybrid.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def home(name: str) -> str:
    """Return the place in the repository of a file of the wheel."""
    inner = name.removeprefix("flexhybrid/")
    return inner if inner.startswith(tuple(f"{floor}/" for floor in FLOORS[1:])) else name


def test_a_users_own_folders_keep_their_names(installed, tmp_path):
    """Next to folders of the same names, and to a clone, a script imports the installed package and its own folders."""
    for name in FLOORS[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n")
    (tmp_path / "flexhybrid" / "docs").mkdir(parents=True)  # a clone, without __init__.py at its top
    script = "; ".join(f"import {name}; assert {name}.OWN" for name in FLOORS[1:])
    used = "from flexhybrid import LLM, shipped; LLM(shipped.CHECKPOINT, 'flexgen', hardware='rtx4090', device='cpu')"
    (tmp_path / "script.py").write_text(f"{script}\n{used}\nprint(shipped.FOLDER)\n")
    printed = done([installed / "bin" / "python", tmp_path / "script.py"], tmp_path)
    assert printed.startswith(str(installed))
    assert done([installed / "bin" / "flexhybrid", "--version"], tmp_path) == f"flexhybrid {flexhybrid.__version__}\n"


#: Prints where the packages' modules lie, and what commands print, one after the other in this process: a fork of one
#: that has loaded torch, and the packages from the repository, which it forgets.
FILES_AND_COMMANDS = """
import contextlib, io, json, sys
packages, floors, commands = json.loads(sys.argv[1])
for name in [name for name in sys.modules if name.partition(".")[0] in floors]:
    del sys.modules[name]
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
sys.path[:] = [packages, *(folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix)))]
from flexhybrid import cli
printed = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(words) == 0, words
    printed.append(out.getvalue())
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in floors}
print(json.dumps({"files": files, "printed": printed}))
"""


def test_commands_work_without_the_repository(installed, tmp_path):
    only = ["infinigen-accuracy-table2", "cascade-table1"]
    setting = ["--model", "opt-30b", "--hardware", "t4", "--input-len", "512", "--output-len", "32", "--batch", "16"]
    (ships,) = (installed / "lib").glob("python*/site-packages/flexhybrid/shipped")
    machine().save(tmp_path / "machine.json")
    files = ["-i", ships / shipped.PROMPTS.name, "--model", ships / shipped.CHECKPOINT.name, "-o", "answers.jsonl"]
    commands = (
        ["reproduce", "--only", *only, "--workers", "1", "--out", "reproduced", "--json"],
        ["simulate", *setting, "--json"],
        ["run", *map(str, files), "--hardware", "machine.json", "--max-tokens", "2", "--quiet"],
        ["reproduce", "--list"],
    )
    packages = ships.parents[1]
    asked = json.dumps([str(packages), FLOORS, commands])
    told = json.loads(done([sys.executable, "-c", FILES_AND_COMMANDS, asked], tmp_path, warm=True))
    assert {name.partition(".")[0] for name in told["files"]} == {"flexhybrid"}
    assert all(packages in Path(file).parents for file in told["files"].values())
    assert {f"{name}.csv" for name in only} <= {path.name for path in (tmp_path / "reproduced").iterdir()}
    assert json.loads(told["printed"][1])["tokens_per_s"] > 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(shipped.prompts()) and all(answer["error"] is None for answer in answers)
    assert set(listing()) <= set(re.findall(r"^[\w.-]+", told["printed"][-1], re.MULTILINE))
    assert "reproduce" in done([installed / "bin" / "flexhybrid", "--help"], tmp_path)
    assert "infinigen-accuracy-fig12" in listing()
