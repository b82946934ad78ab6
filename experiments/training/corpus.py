"""The text that the shipped checkpoints learn from: the Python standard library of the interpreter that runs this.

Two cuts of it. *Cut*: each function, class and docstring is a document, a few hundred tokens long. *Whole*: each
file's code is one document, and each manual page; most of that text lies in documents of more than 2,048 tokens, in
which names defined early come back late. Both hold out the same files, so a model that learned from one can go on with
the other.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import random
import re
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
# The order gives the ids, and they are OPT's own: <s> 0, <pad> 1, </s> 2, <unk> 3.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
PAD_ID = 1
EOS_ID = 2  # OPT uses </s> both to begin a text and to end it.

# Directories whose files are not the library's own prose and code: tests, installed packages, and
# the code-page tables of `encodings`.
SKIPPED_DIRECTORIES = {"__pycache__", "encodings", "idle_test", "site-packages", "test", "tests"}
# Files that hold little but data.
SKIPPED_FILES = {"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "this.py"}
TOPICS_FILE = "pydoc_data/topics.py"  # A dictionary of manual pages, read as prose.
HELD_OUT_SHARE = 0.04  # Of the files (and manual pages); the model never trains on these.
WHOLE_CLASS_CHARACTERS = 3000  # A longer class is cut into its head and its methods.
TABLE_CHARACTERS = 1500  # A longer statement that is no function or class is a data table.
SHORTEST_DOCUMENT = 40  # Characters; anything shorter teaches nothing.
HELD_OUT_CHARACTERS = 8_000  # Of each document in the shipped text: 2,048 tokens and a few more.
WRAPPED_LINE_CHARACTERS = 45  # Every line but the last of a wrapped paragraph is at least so long.
LEGAL = re.compile(r"copyright|licen[sc]e|warrant|all rights reserved|permission to use", re.I)
TYPOGRAPHY = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})


@dataclass(frozen=True)
class Corpus:
    """The documents to learn from and those held out."""

    training: list[str]
    held_out: list[str]


def library_files() -> list[Path]:
    """The standard library's Python files that hold code or prose, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])

    def is_kept(path: Path) -> bool:
        skipped = SKIPPED_DIRECTORIES.intersection(path.parts[:-1]) or path.as_posix() in SKIPPED_FILES
        return not skipped and not path.name.startswith("_sysconfigdata")

    return [path for path in sorted(root.rglob("*.py")) if is_kept(path.relative_to(root))]


def unwrap(text: str) -> str:
    """Join the lines of wrapped paragraphs, and leave code, lists and tables as they are."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.translate(TYPOGRAPHY).strip("\n")):
        if LEGAL.search(paragraph):
            continue
        lines = paragraph.split("\n")
        indents = {len(line) - len(line.lstrip()) for line in lines}
        wrapped = (
            len(lines) > 1
            and len(indents) == 1
            and all(len(line) >= WRAPPED_LINE_CHARACTERS for line in lines[:-1])
            and not any(line.lstrip().startswith((">>>", "...", "|", "+", "-")) for line in lines)
            and "::=" not in paragraph
        )
        paragraphs.append(" ".join(line.strip() for line in lines) if wrapped else paragraph)
    return "\n\n".join(paragraphs)


def docstrings(tree: ast.Module) -> list[str]:
    """Every docstring in a module, as prose."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node, clean=True) for node in ast.walk(tree) if isinstance(node, kinds))
    return [unwrap(inspect.cleandoc(text)) for text in texts if text]


def without_legal_comments(source: str) -> str:
    """Drop the blocks of comment lines that state a licence."""

    def states_licence(block: str) -> bool:
        lines = (line.strip() for line in block.split("\n"))
        return all(line.startswith("#") for line in lines if line) and bool(LEGAL.search(block))

    return "\n\n".join(block for block in re.split(r"\n\s*\n", source) if not states_licence(block))


def code_pieces(lines: list[str], body: list[ast.stmt], start: int) -> list[str]:
    """Cut a body into one piece for each function or class, with the comments above it.

    Imports, docstrings and data tables are left out; other statements between two definitions
    make one piece together. `start` is the number of lines before the body.
    """
    pieces: list[str] = []
    loose: list[str] = []

    def close_loose() -> None:
        if loose:
            pieces.append("\n".join(loose))
            loose.clear()

    end = start
    for node in body:
        segment = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            close_loose()
            pieces.append(segment)
        elif isinstance(node, ast.ClassDef):
            close_loose()
            if len(segment) <= WHOLE_CLASS_CHARACTERS:
                pieces.append(segment)
                continue
            first = next((n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))), None)
            if first is None:
                continue
            head_end = min([first.lineno, *(d.lineno for d in first.decorator_list)]) - 1
            pieces.append("\n".join(lines[node.lineno - 1 : head_end]))
            methods = [n for n in node.body if n.lineno > head_end]
            pieces.extend(code_pieces(lines, methods, head_end))
        else:
            is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_import and not is_docstring and len(segment) <= TABLE_CHARACTERS:
                loose.append(segment)
    close_loose()
    return pieces


def documents_of(path: Path, full_files: bool = False) -> list[list[str]]:
    """The documents in one file, grouped so that one group is wholly held out or not at all.

    Cut or whole, a file has the same groups in the same order; ``full_files`` makes each group one document.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []  # Deliberately broken or otherwise encoded files.
    if path.as_posix().endswith(TOPICS_FILE):
        strings = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        if full_files:
            return [[unwrap(text)] for text in strings if len(text) > 200]
        # Each section of a manual page is a document; the sections of one page make one group.
        return [re.split(r"\n\n(?=[^\n]+\n[*=\-]{4,}\n)", unwrap(text)) for text in strings if len(text) > 200]
    lines = [line.rstrip() for line in source.expandtabs(4).split("\n")]
    header = (tree.body[0].end_lineno or 1) - 1 if tree.body else 0
    if tree.body and isinstance(tree.body[0], (ast.FunctionDef, ast.ClassDef)):
        header = tree.body[0].lineno - 1
    pieces = [without_legal_comments(piece).strip("\n") for piece in code_pieces(lines, tree.body, header)]
    if full_files:
        return [["\n\n".join(pieces)]]
    return [[textwrap.dedent(piece).strip("\n") for piece in pieces] + docstrings(tree)]


def read_corpus(seed: int, full_files: bool = False) -> Corpus:
    """Read the library, shuffle it, and hold out a part: the files are those of the seed, cut or ``full_files``."""
    groups = [group for path in library_files() for group in documents_of(path, full_files)]
    shuffler = random.Random(seed)
    shuffler.shuffle(groups)
    split = int(len(groups) * HELD_OUT_SHARE)

    def flatten(part: list[list[str]]) -> list[str]:
        documents = [d for group in part for d in group if len(d) >= SHORTEST_DOCUMENT]
        documents = list(dict.fromkeys(documents))
        shuffler.shuffle(documents)
        return documents

    held_out = flatten(groups[:split])
    seen = set(held_out)
    training = [document for document in flatten(groups[split:]) if document not in seen]
    return Corpus(training, held_out)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE that, like OPT's, puts ``</s>`` before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", EOS_ID)]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, positions: int, out: Path) -> None:
    """Write the two tokenizer files that `AutoTokenizer` reads."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "</s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
        "padding_side": "left",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class Stream:
    """Documents as one run of tokens, each beginning with ``</s>``, and where they begin.

    The ``</s>`` that begins one document also ends the one before, so the model learns both to
    start from it and to stop with it.
    """

    tokens: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def encode(cls, tokenizer: Tokenizer, documents: list[str]) -> Stream:
        """Encode the documents one after another."""
        ids: list[int] = []
        starts: list[int] = []
        for encoding in tokenizer.encode_batch(documents):
            starts.append(len(ids))
            ids.extend(encoding.ids)
        ids.append(EOS_ID)
        return cls(torch.tensor(ids), torch.tensor(starts))

    def batch(self, rows: int, length: int, start_share: float, generator: torch.Generator) -> torch.Tensor:
        """Random rows of `length` tokens and one more, the last target; `start_share` of them begin a document."""
        last = len(self.tokens) - length - 1
        anywhere = torch.randint(last + 1, (rows,), generator=generator)
        chosen = torch.randint(len(self.starts), (rows,), generator=generator)
        at_start = torch.rand(rows, generator=generator) < start_share
        begin = torch.where(at_start, self.starts[chosen], anywhere).clamp(max=last)
        return self.tokens[begin[:, None] + torch.arange(length + 1)]

    def all_rows(self, length: int) -> torch.Tensor:
        """The stream cut into consecutive rows."""
        return self.tokens.unfold(0, length + 1, length)


def long_tests(seed: int, count: int) -> list[str]:
    """The code of ``count`` long files of the library's own tests, drawn by the seed; no model learns from any."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / "test").rglob("test_*.py"))
    random.Random(seed).shuffle(files)
    documents = (document for path in files for group in documents_of(path, full_files=True) for document in group)
    return list(itertools.islice((each for each in documents if len(each) >= HELD_OUT_CHARACTERS), count))


def write_held_out(path: Path, seed: int, num_tests: int) -> None:
    """Write the beginnings of the long held-out documents and of long tests, separated by form feeds."""
    held_out = read_corpus(seed, full_files=True).held_out
    long = [document for document in held_out if len(document) >= HELD_OUT_CHARACTERS] + long_tests(seed, num_tests)
    path.write_text("\f".join(document[:HELD_OUT_CHARACTERS].rstrip() + "\n" for document in long), encoding="utf-8")


if __name__ == "__main__":
    write_held_out(Path(sys.argv[1]), seed=0, num_tests=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
