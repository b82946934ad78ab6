"""Check that names in backticks and paths in docstrings, comments and pages exist."""

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from test_floors import ROOT, parsed

#: Names of other code, of files that users make, and words in examples.
ELSEWHERE = set(Path(__file__).with_name("elsewhere.txt").read_text("utf-8").split())
OTHER_PATHS = ("vllm/", "benchmark/", "experimental/", "accuracy/src/", "speedup/")


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]\w{2,}", text))


def strange(text: str, known: set[str], members: dict[str, set], files: list[str]) -> set[str]:
    """Return what a text mentions that does not exist: words in backticks, members of folders and classes, paths."""
    paths = {path for path in re.findall(r"(?<![\w./-])(?:[\w-]+/)+[\w.-]+\.py\b", text)}
    found = {path for path in paths if not any(file.endswith(path) for file in files)}
    found = {path for path in found if not path.startswith(OTHER_PATHS)}
    for name in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        found |= words(name) - known
        for dotted in re.findall(r"[A-Za-z]\w*(?:\.[A-Za-z]\w*)+", name):
            parts = dotted.split(".")
            pairs = zip(parts, parts[1:], strict=False)
            found |= {dotted for owner, part in pairs if part not in members.get(owner, [part]) and len(part) > 4}
    return found - ELSEWHERE


def test_names_and_paths_that_texts_mention_exist():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split() if (ROOT / name).exists()]
    known, members, texts = words(" ".join(files)), defaultdict[str, set](set), {}
    for name in files:
        for folder, inner in zip(Path(name).parts, Path(name).parts[1:], strict=False):
            members[folder].add(inner.removesuffix(".py"))
    for name in (name for name in files if name.endswith(".py")):
        text = (ROOT / name).read_text("utf-8")
        if name.startswith("tests/"):
            known |= words(text)
            continue
        nodes, spoken = list(ast.walk(parsed(text))), re.findall(r"#:? (.*)", text)
        for node in nodes:
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
                spoken.append(ast.get_docstring(node, clean=False) or "")
            if isinstance(node, ast.ClassDef):
                inner = list(ast.walk(node))
                members[node.name] |= {getattr(part, field, "") for part in inner for field in ("id", "attr", "name")}
        names = {getattr(node, field, "") for node in nodes for field in ("id", "attr", "arg", "name")}
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        strings = {string for string in strings.difference(spoken) if not re.search(r"\s\S+\s", string)}
        known |= words(" ".join([*map(str, names), *strings]))
        members[Path(name).parent.name] |= names if name.endswith("__init__.py") else set()
        texts[name] = "\n".join(spoken).replace("``", "`")
    pages = [name for name in files if name.endswith(".md") and not name.startswith("experiments/re")]
    texts |= {name: (ROOT / name).read_text("utf-8") for name in [*pages, "experiments/results/NOTES.md"]}
    assert {name: found for name, text in texts.items() if (found := strange(text, known, members, files))} == {}
    name = "_".join(["no", "such", "name"])
    assert strange(f"`{name}` in no/such/{'file.py'}", known, members, files) == {name, "no/such/file.py"}
