"""Train the small OPT checkpoint that the experiments serve.

The model is an ``OPTForCausalLM`` of about four million parameters. It learns from the
Python standard library of the interpreter that runs this script: the source of each
function and class, and the docstrings as prose. Nothing is downloaded.

Usage::

    python -m experiments.train_checkpoint --out experiments/checkpoints/opt-stdlib-4m \\
        --minutes 38 --positions 640 --seed 0

``--minutes`` measures the machine's speed first and derives a number of steps from it, which is
logged; ``--steps`` sets that number directly, which repeats an earlier run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import json
import math
import os
import platform
import random
import re
import sysconfig
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

# Idle OpenMP threads sleep rather than spin, which leaves the cores to other programs. It must be
# in the environment before torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM

# --- The tokenizer ------------------------------------------------------------------------------

VOCAB_SIZE = 2048
# The order gives the ids, and they are OPT's own: <s> 0, <pad> 1, </s> 2, <unk> 3.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
PAD_ID = 1
EOS_ID = 2  # OPT uses </s> both to begin a text and to end it.

# --- The corpus ---------------------------------------------------------------------------------

# Directories whose files are not the library's own prose and code: tests, installed packages, and
# the code-page tables of `encodings`.
SKIPPED_DIRECTORIES = {
    "__pycache__", "encodings", "idle_test", "site-packages", "test", "tests",
}  # fmt: skip
# Files that hold little but data.
SKIPPED_FILES = {"html/entities.py", "msilib/schema.py", "msilib/sequence.py", "this.py"}
TOPICS_FILE = "pydoc_data/topics.py"  # A dictionary of manual pages, read as prose.
HELD_OUT_SHARE = 0.04  # Of the files (and manual pages); the model never trains on these.
WHOLE_CLASS_CHARACTERS = 3000  # A longer class is cut into its head and its methods.
TABLE_CHARACTERS = 1500  # A longer statement that is no function or class is a data table.
SHORTEST_DOCUMENT = 40  # Characters; anything shorter teaches nothing.
WRAPPED_LINE_CHARACTERS = 45  # Every line but the last of a wrapped paragraph is at least so long.
LEGAL = re.compile(r"copyright|licen[sc]e|warrant|all rights reserved|permission to use", re.I)
TYPOGRAPHY = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})

# --- The training run ---------------------------------------------------------------------------

# Each step trains either on short rows or on rows as long as the model's positions allow, which
# train the later positions. Both hold nearly the same number of tokens.
TOKENS_PER_STEP = 4096
SHORT_ROW = 256
SHORT_ROW_SHARE = 0.5  # Of the steps.
DOCUMENT_START_SHARE = 0.6  # Rows that begin at a document's start, as a prompt does.
PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
WARM_UP_STEPS = 150
WEIGHT_DECAY = 0.1  # For matrices only; biases, norms and embeddings have none.
ADAM_BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
SPEED_STEPS = 24  # Steps, on a copy of the model, from which the speed is measured.
SPEED_MARGIN = 0.92  # Part of the budget that the steps may fill; the rest covers evaluation.
EVALUATE_EVERY = 250
EVALUATION_ROWS = 32  # Held-out rows at each interval; the final figure uses all of them.
LOG_EVERY = 50
SAVE_EVERY_SECONDS = 300


@dataclass(frozen=True)
class Corpus:
    """The documents to learn from and those held out."""

    training: list[str]
    held_out: list[str]


def library_files() -> list[Path]:
    """The standard library's Python files that hold code or prose, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES.intersection(relative.parts[:-1]):
            continue
        if relative.as_posix() in SKIPPED_FILES or path.name.startswith("_sysconfigdata"):
            continue
        kept.append(path)
    return kept


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
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=True)):
            found.append(unwrap(inspect.cleandoc(text)))
    return found


def without_legal_comments(source: str) -> str:
    """Drop the blocks of comment lines that state a licence."""
    blocks = re.split(r"\n\s*\n", source)
    kept = []
    for block in blocks:
        lines = [line.strip() for line in block.split("\n") if line.strip()]
        is_comment = all(line.startswith("#") for line in lines)
        if not (is_comment and LEGAL.search(block)):
            kept.append(block)
    return "\n\n".join(kept)


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
            first = next(
                (n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))),
                None,
            )
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


def documents_of(path: Path) -> list[list[str]]:
    """The documents in one file, grouped so that one group is wholly held out or not at all."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []  # Deliberately broken or otherwise encoded files.
    if path.as_posix().endswith(TOPICS_FILE):
        strings = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        # Each section of a manual page is a document; the sections of one page make one group.
        return [re.split(r"\n\n(?=[^\n]+\n[*=\-]{4,}\n)", unwrap(text)) for text in strings if len(text) > 200]
    lines = [line.rstrip() for line in source.expandtabs(4).split("\n")]
    header = tree.body[0].end_lineno - 1 if tree.body else 0
    if tree.body and isinstance(tree.body[0], (ast.FunctionDef, ast.ClassDef)):
        header = tree.body[0].lineno - 1
    code = [
        textwrap.dedent(without_legal_comments(piece)).strip("\n") for piece in code_pieces(lines, tree.body, header)
    ]
    return [code + docstrings(tree)]


def read_corpus(seed: int) -> Corpus:
    """Read the library, shuffle it, and hold a part of it out."""
    groups = [group for path in library_files() for group in documents_of(path)]
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

    def batch(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Random rows of `length` tokens and one more, the last target."""
        last = len(self.tokens) - length - 1
        anywhere = torch.randint(last + 1, (rows,), generator=generator)
        chosen = torch.randint(len(self.starts), (rows,), generator=generator)
        at_start = torch.rand(rows, generator=generator) < DOCUMENT_START_SHARE
        begin = torch.where(at_start, self.starts[chosen], anywhere).clamp(max=last)
        return self.tokens[begin[:, None] + torch.arange(length + 1)]

    def all_rows(self, length: int) -> torch.Tensor:
        """The stream cut into consecutive rows."""
        return self.tokens.unfold(0, length + 1, length)


def build_model(positions: int) -> OPTForCausalLM:
    """A fresh model of the shipped shape."""
    config = OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        word_embed_proj_dim=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        ffn_dim=1024,
        max_position_embeddings=positions,
        do_layer_norm_before=True,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
    )
    return OPTForCausalLM(config)


def build_optimizer(model: OPTForCausalLM) -> torch.optim.AdamW:
    """AdamW with weight decay on the layers' matrices alone."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "embed" not in name else plain).append(parameter)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=PEAK_LEARNING_RATE,
        betas=ADAM_BETAS,
    )


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to the final rate."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return FINAL_LEARNING_RATE + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * cosine


def loss_of(model: OPTForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy, in nats for each token, of rows that carry their last target."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: OPTForCausalLM, rows: torch.Tensor) -> float:
    """The mean held-out loss."""
    model.eval()
    total = sum(float(loss_of(model, part)) * len(part) for part in rows.split(8))
    model.train()
    return total / len(rows)


def train_step(
    model: OPTForCausalLM,
    optimizer: torch.optim.Optimizer,
    stream: Stream,
    positions: int,
    generator: torch.Generator,
) -> tuple[float, int]:
    """One optimizer step; returns its loss and the number of tokens."""
    short = float(torch.rand((), generator=generator)) < SHORT_ROW_SHARE
    length = min(SHORT_ROW, positions) if short else positions
    rows = stream.batch(max(1, TOKENS_PER_STEP // length), length, generator)
    loss = loss_of(model, rows)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return float(loss.detach()), rows[:, 1:].numel()


def measure_seconds_per_step(model: OPTForCausalLM, stream: Stream, positions: int) -> float:
    """The mean time of a step, from a few steps on a copy that is thrown away."""
    trial = copy.deepcopy(model)
    optimizer = build_optimizer(trial)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):  # The first steps also set up memory and kernels.
        train_step(trial, optimizer, stream, positions, generator)
    began = time.perf_counter()
    for _ in range(SPEED_STEPS):
        train_step(trial, optimizer, stream, positions, generator)
    return (time.perf_counter() - began) / SPEED_STEPS


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


def save_model(model: OPTForCausalLM, out: Path) -> None:
    """Write a bfloat16 copy of the model and its configuration."""
    saved = copy.deepcopy(model).to(torch.bfloat16).eval()
    saved.config.architectures = ["OPTForCausalLM"]
    saved.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # It is written readable by its owner alone.


README = """\
# opt-stdlib-4m

A small `OPTForCausalLM` of {parameters:,} parameters for tests and experiments: 4 layers, hidden
size 256, 8 heads, feed-forward size 1,024, {positions} positions, a byte-level BPE of
{vocabulary:,} tokens, weights in bfloat16. Its completions look like Python source and
documentation; they are not correct code.

It learned from the Python {python} standard library alone (sources and docstrings, without tests,
data tables, import lines and licence headers), which is under the PSF licence. No other text and
no other model went into it.

| | |
| --- | --- |
| Command | `{command}` |
| Seed | {seed} |
| Steps | {step:,} of {steps:,} |
| Tokens seen | {tokens:,} (the training text is {corpus:,} tokens) |
| Training loss | {training_loss:.3f} nats for each token, mean of the last {log_every} steps |
| Held-out loss | {loss:.3f} nats for each token, on {held_out:,} tokens of held-out files |
| Time | {minutes:.0f} minutes |
| Machine | two CPU cores |
"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=38, help="time to train for, about")
    parser.add_argument("--steps", type=int, help="number of steps, in place of --minutes")
    parser.add_argument("--positions", type=int, default=640, help="longest text, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle, weights and rows")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Build the corpus and the tokenizer, train, and save."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus(arguments.seed)
    tokenizer = train_tokenizer(corpus.training)
    save_tokenizer(tokenizer, arguments.positions, out)
    stream = Stream.encode(tokenizer, corpus.training)
    held_out = Stream.encode(tokenizer, corpus.held_out).all_rows(min(512, arguments.positions))
    picked = torch.linspace(0, len(held_out) - 1, min(EVALUATION_ROWS, len(held_out))).long()
    print(
        f"{len(corpus.training):,} documents, {sum(map(len, corpus.training)):,} characters, "
        f"{len(stream.tokens):,} tokens; held out {held_out.numel():,} tokens",
        flush=True,
    )

    model = build_model(arguments.positions).train()
    optimizer = build_optimizer(model)
    steps = arguments.steps
    if steps is None:
        seconds = measure_seconds_per_step(model, stream, arguments.positions)
        steps = max(1, int(arguments.minutes * 60 * SPEED_MARGIN / seconds))
        print(f"{seconds:.3f} s for each step", flush=True)
    print(f"--steps {steps}", flush=True)

    began = saved_at = time.perf_counter()
    tokens = 0
    recent: list[float] = []

    def save(step: int, rows: torch.Tensor) -> float:
        """Save the model with its loss on the held-out `rows`, and return that loss."""
        loss = evaluate(model, rows)
        save_model(model, out)
        facts = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "positions": arguments.positions,
            "vocabulary": VOCAB_SIZE,
            "python": ".".join(platform.python_version_tuple()[:2]),
            "command": f"python -m experiments.train_checkpoint --out {out.as_posix()} "
            f"--positions {arguments.positions} --seed {arguments.seed} --steps {steps}",
            "seed": arguments.seed,
            "step": step,
            "steps": steps,
            "tokens": tokens,
            "corpus": len(stream.tokens),
            "training_loss": sum(recent) / len(recent),
            "log_every": LOG_EVERY,
            "loss": loss,
            "held_out": rows[:, 1:].numel(),
            "minutes": (time.perf_counter() - began) / 60,
        }
        (out / "README.md").write_text(README.format(**facts))
        return loss

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss, count = train_step(model, optimizer, stream, arguments.positions, generator)
        tokens += count
        recent = [*recent[-LOG_EVERY + 1 :], loss]
        done = step + 1
        if done % LOG_EVERY == 0:
            elapsed = time.perf_counter() - began
            print(
                f"step {done}/{steps} loss {sum(recent) / len(recent):.3f} "
                f"{tokens / elapsed:.0f} tokens/s {elapsed / 60:.1f} min",
                flush=True,
            )
        if done % EVALUATE_EVERY == 0:
            print(f"step {done} held-out loss {evaluate(model, held_out[picked]):.3f}", flush=True)
        if time.perf_counter() - saved_at > SAVE_EVERY_SECONDS:
            save(done, held_out[picked])
            saved_at = time.perf_counter()

    final = save(steps, held_out)
    elapsed = time.perf_counter() - began
    print(
        f"final held-out loss {final:.3f}, {tokens:,} tokens, {tokens / elapsed:.0f} tokens/s, {elapsed / 60:.1f} min",
        flush=True,
    )


if __name__ == "__main__":
    main()
