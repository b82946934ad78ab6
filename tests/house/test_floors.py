"""The floors of the house: imports run downwards only.

Two proofs. Statically, every import statement of every module is on its floor's list. Dynamically, a fresh
interpreter imports all modules of a floor and the libraries that the floor must not load are not there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import warm_python

ROOT = Path(__file__).resolve().parents[2]


class Floor(NamedTuple):
    """``at_import``: what a module may name at its top. ``lazily``: what else inside functions. An entry excludes the
    floors inside it ("flexhybrid" is not "flexhybrid.core"). The standard library is allowed everywhere."""

    at_import: frozenset[str]
    lazily: frozenset[str] = frozenset()
    must_not_load: tuple[str, ...] = ()


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLOORS = {
    "flexhybrid.core": Floor(
        names("flexhybrid.core numpy"),
        must_not_load=("torch", "transformers", "scipy", "flexhybrid.runtime", "sim", "policy_search"),
    ),
    "flexhybrid.runtime": Floor(
        names("flexhybrid.core flexhybrid.runtime numpy torch triton numba llvmlite safetensors"),
        lazily=names("transformers greenlet"),  # where models run through transformers' own layers
        must_not_load=("sim", "policy_search", "experiments", "figures"),
    ),
    "sim": Floor(
        names("sim flexhybrid.core numpy"),
        lazily=names("scipy"),  # where the pace of a queue is fitted
        must_not_load=("torch", "transformers", "scipy", "flexhybrid.runtime", "policy_search"),
    ),
    "policy_search": Floor(
        names("policy_search sim flexhybrid.core numpy scipy"),
        lazily=names("pulp"),
        must_not_load=("torch", "transformers", "flexhybrid.runtime", "pulp"),
    ),
    # Options of all commands: read before anything is loaded.
    "flexhybrid.arguments": Floor(
        names("flexhybrid.core"), must_not_load=("torch", "transformers", "scipy", "sim", "flexhybrid.runtime")
    ),
    # Reads models' outputs: torch only inside the functions that run a model.
    "flexhybrid.cascade": Floor(
        names("flexhybrid.cascade flexhybrid.core flexhybrid.arguments sim policy_search numpy scipy tqdm"),
        lazily=names("flexhybrid flexhybrid.runtime torch transformers pandas pyarrow pulp pynvml ray starlette"),
        must_not_load=("torch", "transformers", "pandas", "pulp", "ray", "flexhybrid.runtime"),
    ),
    # The doors (DOORS below) load nothing heavy; what they open lazily may.
    "flexhybrid": Floor(
        names(
            "flexhybrid flexhybrid.arguments flexhybrid.cascade flexhybrid.core flexhybrid.runtime sim policy_search "
            "numpy pandas torch transformers tokenizers safetensors tqdm pyarrow ray lm_eval starlette uvicorn "
            "prometheus_client"
        ),
        lazily=names("experiments figures jinja2 scipy"),  # experiments: flexhybrid.cli alone (the reproduce command)
        must_not_load=("torch", "transformers", "scipy", "pandas", "matplotlib", "ray"),
    ),
    "experiments": Floor(
        names(
            "experiments figures flexhybrid flexhybrid.arguments flexhybrid.cascade flexhybrid.core flexhybrid.runtime "
            "sim policy_search numpy scipy pandas torch transformers tokenizers safetensors tqdm pytest jinja2"
        ),
        # peers, where they are installed; the handwritten digits; the cascade's hop on Ray Serve; tasks of the harness;
        # a GPU's clocks and partitions
        lazily=names("accelerate flexgen sklearn ray lm_eval pynvml cuda"),
    ),
    "figures": Floor(
        names("figures numpy pandas matplotlib"),
        must_not_load=("torch", "transformers", "flexhybrid", "sim", "policy_search", "experiments"),
    ),
}

#: Modules that a user imports, or starts, before anything is known of the job.
DOORS = ("flexhybrid", "flexhybrid.cli")

cold_run = functools.partial(subprocess.run, capture_output=True, text=True)


def floor_of(module: str) -> str | None:
    """Return the floor of a module: the longest that is a prefix of its name; None for a library."""
    return max((floor for floor in FLOORS if is_within(module, floor)), key=len, default=None)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def source_files() -> dict[str, Path]:
    """Return module name -> file over all floors, without peers installed by ``make gpu-peers``."""
    files, installed = {}, ROOT / "experiments" / "peers" / "installed"
    for top in sorted({floor.split(".")[0] for floor in FLOORS}):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.is_relative_to(installed):
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source text; several tests read it."""
    return ast.parse(source)


@functools.cache
def imported_names(module: str, is_package: bool, source: str) -> list[tuple[str, bool]]:
    """(what is imported, whether at import time) for every import statement, relative ones resolved.

    "Inside a function" and "under TYPE_CHECKING" count as lazy. An import is a statement, so expressions are passed by.
    """
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *([base] if base else [])])
            # `from flexhybrid import core` names flexhybrid.core; a class name behind the dot does no harm.
            found.extend((f"{base}.{alias.name}", at_import) for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            at_import = False
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_import)
            return
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                visit(child, at_import)

    visit(parsed(source), True)
    return found


def forbidden_imports(module: str, is_package: bool, source: str) -> list[str]:
    floor = FLOORS[floor_of(module)]
    allowed_lazily = floor.at_import | floor.lazily
    wrong = []
    for name, at_import in imported_names(module, is_package, source):
        if name.split(".")[0] in {*sys.stdlib_module_names, "_typeshed"}:  # the stubs of type checkers
            continue
        allowed = floor.at_import if at_import else allowed_lazily
        if not any(is_within(name, entry) and floor_of(name) in (None, entry) for entry in allowed):
            wrong.append(f"{module} imports {name}{' at its top' if at_import else ''}")
    return wrong


def test_every_import_stays_on_its_floor_or_goes_down():
    files = source_files()
    assert "flexhybrid.core.wave" in files
    wrong = [
        line
        for module, path in files.items()
        for line in forbidden_imports(module, path.name == "__init__.py", path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_reproduce_command_imports_experiments():
    importers = {
        module
        for module, path in source_files().items()
        for name, _ in imported_names(module, path.name == "__init__.py", path.read_text(encoding="utf-8"))
        if is_within(name, "experiments") and not is_within(module, "experiments")
    }
    assert importers == {"flexhybrid.cli"}


def test_the_check_tells_forbidden_imports_from_allowed_ones():
    lazily, typing = "def f():\n    {}", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}"
    for module, forbidden, allowed in (
        ("flexhybrid.core.wave", "import torch", "import json\nimport numpy as np\nfrom .task import Task"),
        ("flexhybrid.core.wave", lazily.format("import transformers"), "from flexhybrid.core import work"),
        ("flexhybrid.core.wave", "from .. import runtime", "from . import work"),
        ("flexhybrid.runtime.clock", "from flexhybrid import LLM", "import torch"),
        ("flexhybrid.runtime.clock", "import policy_search.search as s", "import flexhybrid.core.wave as w"),
        ("flexhybrid.llm", "from experiments import bench", "import torch\nfrom flexhybrid.runtime import loader"),
        ("policy_search.lp", "import pulp", lazily.format("import pulp")),
        ("flexhybrid.cascade.models", "import torch", typing.format("import torch")),
        ("figures.timeline", "from flexhybrid.core.trace import TraceEvent", "import matplotlib"),
    ):
        assert forbidden_imports(module, False, forbidden) and not forbidden_imports(module, False, allowed), module


@pytest.mark.parametrize("floor", [name for name, floor in FLOORS.items() if floor.must_not_load])
def test_importing_a_floor_leaves_the_heavy_libraries_out(floor):
    modules = [module for module in source_files() if floor_of(module) == floor and not module.endswith("__main__")]
    if floor == "flexhybrid":
        modules = [module for module in modules if module in DOORS]
    if importlib.util.find_spec("triton") is None:  # not for every system
        modules = [module for module in modules if not module.endswith("_triton")]
    if importlib.util.find_spec("numba") is None:
        of_numba = ("kernels.in_place", "kernels.rows_numba", "kernels.compiled.attention", "kernels.compiled.rows")
        modules = [module for module in modules if not module.endswith(of_numba)]
    if not modules:
        pytest.skip(f"{floor} has no module yet")
    tops = {top for top in names(" ".join(FLOORS)) if "." not in top}
    program = (
        "import importlib, sys\n"
        f"for name in [name for name in sys.modules if name.split('.')[0] in {tops!r}]: del sys.modules[name]\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(*(name for name in {FLOORS[floor].must_not_load!r} if name in sys.modules))"
    )
    # What has torch and libraries loaded serves where none of them is looked for.
    run = warm_python.run if tops.issuperset(FLOORS[floor].must_not_load) else cold_run
    result = run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
