"""Limits that keep the house easy to take in: no import circles, small folders, named arguments, obeyed formatting."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path

import pytest
from test_floors import ROOT, imported_names, parsed, source_files

MAX_FILES = 16  #: Python files of one folder
BUDGETS = Path(__file__).with_name("budgets.csv")  #: folder, lines of Python (they only fall), and its goal
MAX_FORMAT_SKIPS = 250  #: places where the formatter is switched off, tests included
MAX_LONG_CALLS = 20  #: calls with LONG_CALL or more positional arguments
LONG_CALL = 7


def import_graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Map each module to the modules it imports, at its top, inside functions and under TYPE_CHECKING.

    ``sources``: module name -> (source text, whether it is a package).
    """
    graph = {}
    for module, (text, is_package) in sources.items():
        graph[module] = set()
        for name, _ in imported_names(module, is_package, text):
            imported = name if name in sources else name.rpartition(".")[0]
            if imported in sources and imported != module:
                graph[module].add(imported)
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or by way of others."""

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reaches = {module: reachable(module) for module in graph}
    groups = {
        frozenset(m for m in reaches[module] if module in reaches[m]) for module in graph if module in reaches[module]
    }
    return [set(group) for group in groups]


def product_sources() -> dict[str, tuple[str, bool]]:
    return {
        module: (path.read_text(encoding="utf-8"), path.name == "__init__.py")
        for module, path in source_files().items()
    }


def long_calls(text: str) -> list[int]:
    """Return the lines of calls with LONG_CALL or more positional arguments."""
    return [
        node.lineno
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Call)
        and len(node.args) >= LONG_CALL
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]


def test_no_modules_import_each_other():
    assert circles(import_graph(product_sources())) == []


@pytest.mark.parametrize(
    "late", ["from pack import a", "def f():\n    from pack import a", "if TYPE_CHECKING:\n    from pack.a import A"]
)
def test_the_check_sees_a_circle(late):
    sources = {
        "pack": ("", True),
        "pack.a": ("import pack.b", False),
        "pack.b": (late, False),
        "pack.c": ("import pack.a", False),
    }
    assert circles(import_graph(sources)) == [{"pack.a", "pack.b"}]


def test_no_folder_holds_more_files_than_a_reader_takes_in():
    files = [*source_files().values(), *(ROOT / "tests").rglob("*.py")]
    crowded = {
        str(folder): count for folder, count in Counter(path.parent for path in files).items() if count > MAX_FILES
    }
    assert crowded == {}


def test_no_folder_is_over_its_budget():
    with open(BUDGETS, encoding="utf-8") as file:
        budgets = {row["folder"]: int(row["lines"]) for row in csv.DictReader(file)}
    files, lines = [*source_files().values(), *(ROOT / "tests").rglob("*.py")], Counter[str]()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        folder = max((folder for folder in budgets if name.startswith(folder)), key=len)
        lines[folder] += path.read_text(encoding="utf-8").count("\n")
    assert {folder: count for folder, count in lines.items() if count > budgets[folder]} == {}


def test_the_formatter_is_obeyed():
    files = [*source_files().values(), *(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))]
    skips = {path: path.read_text(encoding="utf-8").count("# fmt: skip") for path in files}
    assert sum(skips.values()) <= MAX_FORMAT_SKIPS, sorted(skips.items(), key=lambda item: -item[1])[:10]


def test_calls_name_their_arguments():
    calls = [(module, line) for module, (text, _) in product_sources().items() for line in long_calls(text)]
    assert len(calls) <= MAX_LONG_CALLS, calls
    assert long_calls("f(1, 2, 3, 4, 5, 6, 7)") == [1] and not long_calls("f(1, 2, 3, 4, 5, 6, g=7)")


#: Functions of torch that make a tensor: without a dtype it is of the process's default dtype, which anyone may change.
MAKERS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal"}
MAKERS |= {"ones", "rand", "randint", "randn", "scalar_tensor", "tensor", "zeros"}


def made_without_dtype(text: str) -> list[int]:
    """Return the lines where torch makes a tensor of no dtype that is named."""
    calls = [node for node in ast.walk(parsed(text)) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in MAKERS]
    made = [call for call in made if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"]
    return [call.lineno for call in made if not {"dtype", None} & {keyword.arg for keyword in call.keywords}]


def test_tensors_are_made_of_a_dtype_that_is_named():
    of_engine = {
        module: lines
        for module, (text, _) in product_sources().items()
        if module.startswith("flexhybrid.") and not module.startswith("flexhybrid.cascade")
        if (lines := made_without_dtype(text))
    }
    assert of_engine == {}
    assert made_without_dtype("torch.ones(2)\ntorch.ones(2, dtype=d)\nx.ones(2)\ntorch.tensor([1.0])") == [1, 4]
