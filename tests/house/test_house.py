"""Limits that keep the project readable: no import circles, small folders, named arguments, formatting."""

from __future__ import annotations

import ast
import csv
from collections import Counter
from pathlib import Path

import pytest
from test_floors import ROOT, imported_names, is_within, parsed, source_files

BUDGETS = Path(__file__).with_name("budgets.csv")  #: lines of Python by folder: limits, which only fall, and goals
LIMITS = Path(__file__).with_name("limits.csv")  #: the same for what ``counts`` counts


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


def test_no_modules_import_each_other():
    assert circles(import_graph(product_sources())) == []


@pytest.mark.parametrize("late", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_the_check_sees_a_circle(late):
    sources = {
        "pack": "",
        "pack.a": "import pack.b",
        "pack.b": late.format("from pack import a"),
        "pack.c": "import pack.a",
    }
    graph = import_graph({module: (text, module == "pack") for module, text in sources.items()})
    assert circles(graph) == [{"pack.a", "pack.b"}]


def counts(sources: dict[str, str]) -> Counter[str]:
    """Return how often the sources contain what a limit names."""
    found = Counter[str]()
    for text in sources.values():
        found["files under 45 lines"] += text.count("\n") < 45
        late = set()
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                found["classes of 200 lines or more"] += node.end_lineno - node.lineno >= 199
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                late |= {part for part in ast.walk(node) if isinstance(part, (ast.Import, ast.ImportFrom))}
                names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
                found["functions with more than 8 parameters"] += len(names) - (names[:1] in (["self"], ["cls"])) > 8
            elif isinstance(node, ast.Call) and not any(isinstance(argument, ast.Starred) for argument in node.args):
                found["calls with 7 or more positional arguments"] += len(node.args) >= 7
        found["imports inside functions"] += len(late)
    return found


def test_no_count_is_over_its_limit():
    files = [*source_files().values(), *(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))]
    found = counts({module: text for module, (text, _) in product_sources().items()})
    found["places without the formatter"] = sum(path.read_text("utf-8").count("# fmt: skip") for path in files)
    found["files in a folder"] = max(Counter(path.parent for path in files).values())
    with open(LIMITS, encoding="utf-8") as file:
        limits = {row["what"]: int(row["limit"]) for row in csv.DictReader(file)}
    assert found.keys() == limits.keys()
    assert {what: count for what, count in found.items() if count > limits[what]} == {}
    wide = "def f(self, a, b, c, d, e, f, g, h, *, i):\n import j\n f(1, 2, 3, 4, 5, 6, 7)\n f(1, 2, 3, 4, 5, 6, g=7)"
    assert [counts({"a": wide})[what] for what in limits] == [0, 1, 1, 1, 1, 0, 0]


def test_no_two_classes_share_a_name():
    trees = [parsed(text) for text, _ in product_sources().values()]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


#: Modules that may multiply by the slopes of a line, or take its value, and why they price no task.
PRICES = {
    "flexhybrid.core.hardware": "the line, and the one function that prices a task",
    "flexhybrid.cascade.": "traffic between GPUs",
    "policy_search.fit": "residuals: samples are counts",
    "policy_search.papers.flexgen": "FlexGen's own cost model",
    "sim.correction": "residuals: samples are counts",
    "experiments.reproduce.": "fits of papers' machines",
}


def priced(text: str) -> list[int]:
    """Return lines that compute a price by hand: slope times amount (except in lines and units), or a line's value."""
    nodes, found = list(ast.walk(parsed(text))), []
    lines = [node for node in nodes if isinstance(node, (ast.keyword, ast.Dict))]
    lines += [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Line"]
    in_lines = {part for line in lines for part in ast.walk(line)}
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and node not in in_lines:
            sides = [ast.unparse(side) for side in (node.left, node.right) if not isinstance(side, ast.Constant)]
            found += [node.lineno] * (len(sides) == 2 and any(".s_per_" in side for side in sides))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "at":
            found += [node.lineno] * (len(node.args) == 2)
    return found


def test_one_function_prices_a_task():
    by_hand = {module for module, (text, _) in product_sources().items() if priced(text)}
    assert {module for module in by_hand if not module.startswith(tuple(PRICES))} == set()
    assert all(any(module.startswith(name) for module in by_hand) for name in PRICES)
    assert priced("a = n * line.s_per_byte\nb = 1e9 * line.s_per_flop\nc = line.at(f, n)") == [1, 3]
    assert not priced("replace(line, s_per_byte=2 * n * line.s_per_byte)\nLine(s_per_flop=n * line.s_per_flop)")


#: Modules and folders of core, from the ground up: each imports from its own row and from those above it.
CORE_LAYERS = """
errors files units
context.cache_entries policy task verbs hardware
model
context.blocks context.selection context.prefixes workload
problem
work context.split
context.packing wave
schedule.buffer_sizes memory
schedule.scheduler admission
schedule plan trace
""".strip().splitlines()


def test_core_imports_from_its_own_layer_and_those_below():
    def layer(module: str) -> int:
        name = module.removeprefix("flexhybrid.core.")
        return next(at for at, row in enumerate(CORE_LAYERS) if any(is_within(name, entry) for entry in row.split()))

    core = {m: s for m, s in product_sources().items() if m.startswith("flexhybrid.core.") and not s[1]}
    upward = [(m, other) for m, of in import_graph(core).items() for other in of if layer(other) > layer(m)]
    assert upward == []
    # Of any type are a count (a number or an array) and a payload (the executor's).
    of_any_type = {m for m, (text, _) in core.items() for n in ast.walk(parsed(text)) if getattr(n, "id", "") == "Any"}
    assert of_any_type == {"flexhybrid.core.task"}


def test_no_folder_is_over_its_budget():
    with open(BUDGETS, encoding="utf-8") as file:
        budgets = {row["folder"]: int(row["lines"]) for row in csv.DictReader(file)}
    files, lines = [*source_files().values(), *(ROOT / "tests").rglob("*.py")], Counter[str]()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        folder = max((folder for folder in budgets if name.startswith(folder)), key=len)
        lines[folder] += path.read_text(encoding="utf-8").count("\n")
    assert {folder: count for folder, count in lines.items() if count > budgets[folder]} == {}


#: Functions of torch that make a tensor: without a dtype it is of the process's default dtype, which anyone may change.
MAKERS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal"}
MAKERS |= {"ones", "rand", "randint", "randn", "scalar_tensor", "tensor", "zeros"}


def made_without_dtype(text: str) -> list[int]:
    """Return the lines where torch makes a tensor without a named dtype."""
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
