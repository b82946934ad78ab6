"""Train one of the small checkpoints that the experiments serve.

Each is an OPT or a Qwen3 of about four million parameters, or fewer (``--hidden``, ``--layers``). It learns
from the Python standard library of the interpreter that runs this script (`experiments.training.corpus`). Nothing is
downloaded. All share one tokenizer, so that their losses compare.

Usage::

    python -m experiments.training.train_checkpoint --out flexhybrid/shipped/opt-stdlib-4m \\
        --steps 5771 --positions 640 --seed 0

``make models`` trains the checkpoints that are missing. A training that is stopped begins again.
"""

import argparse
import copy
import functools
import math
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Idle OpenMP threads sleep rather than spin, which leaves the cores to other programs. It must be
# in the environment before torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from experiments.training.corpus import EOS_ID, PAD_ID, VOCAB_SIZE, Stream, read_corpus, save_tokenizer, train_tokenizer
from experiments.training.outliers import Outliers

# Each step trains either on short rows or on rows as long as the model's positions allow, which
# train the later positions. Both hold nearly the same number of tokens.
TOKENS_PER_STEP = 4096
SHORT_ROW = 256
SHORT_ROW_SHARE = 0.5  # Of the steps.
# With growing rows the first steps train on short rows alone, at any position, at a steady learning rate; the last ones
# on long rows while it falls. Short rows cost half as much a token here.
LONG_STEPS_SHARE = 0.35
RATE_WITH_OUTLIERS = 0.5  # Of the peak, where they are raised with the first long rows.
# Rows that begin at a document's start, as a prompt does. Whole documents are few and long: more rows at their starts
# would show the model little else.
DOCUMENT_START_SHARE = {"cut": 0.6, "whole": 0.15}
PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
RATE_WITH_MUON = 4.0  # Times the learning rate, of matrices and tables: their held-out loss falls faster so.
WARM_UP_STEPS = 150
WEIGHT_DECAY = 0.1  # For matrices only; biases, norms and embeddings have none.
ADAM_BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
EVALUATE_EVERY = 250
EVALUATION_TOKENS = 16_384  # Held-out tokens at each interval; the final figure uses all of them.
LAST_STEPS = 50  # Their mean loss is said.
CHUNK = 256  # Positions; the final held-out loss is also given for the first and the last so many of a row.


HIDDEN, LAYERS = 256, 4  # of the shipped shape
HEAD_SIZE = 32


def sizes(positions: int, hidden: int, layers: int) -> dict[str, Any]:
    """Return the config fields that both architectures share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_SIZE,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
    }


def build_opt(positions: int, hidden: int = HIDDEN, layers: int = LAYERS) -> OPTForCausalLM:
    """Return an untrained OPT."""
    config = OPTConfig(do_layer_norm_before=True, activation_function="relu", dropout=0.0, attention_dropout=0.0)
    config.update(sizes(positions, hidden, layers))
    config.update({"word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden, "layerdrop": 0.0})
    return OPTForCausalLM(config)


def build_qwen3(positions: int, hidden: int = HIDDEN, layers: int = LAYERS) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of about the same size, in which four query heads share a key and value head."""
    # All sizes at once: Qwen3Config makes a list of its layers' kinds with one for each layer.
    config = Qwen3Config(
        intermediate_size=hidden * 11 // 4,
        num_key_value_heads=max(1, hidden // HEAD_SIZE // 4),
        head_dim=HEAD_SIZE,
        **sizes(positions, hidden, layers),
    )
    return Qwen3ForCausalLM(config)


ARCHITECTURES = {"opt": build_opt, "qwen3": build_qwen3}


def longer(model: OPTForCausalLM, positions: int) -> OPTForCausalLM:
    """The same OPT with more positions: its later half is repeated, so that neighbours still look like neighbours.

    Positions drawn at random instead would have to learn from nothing what "the token before" means.
    """
    old = model.model.decoder.embed_positions.weight.detach()
    offset = old.shape[0] - model.config.max_position_embeddings  # OPT's table has two rows that no position uses
    half = model.config.max_position_embeddings // 2
    new = build_opt(positions)
    state = {name: value for name, value in model.state_dict().items() if "embed_positions" not in name}
    new.load_state_dict(state, strict=False)
    rows = torch.arange(positions)
    rows = torch.where(rows < 2 * half, rows, half + rows % half)
    with torch.no_grad():
        table = new.model.decoder.embed_positions.weight
        table[:offset] = old[:offset]
        table[offset:] = old[offset + rows]
    return new


def build_optimizers(model: PreTrainedModel, with_muon: bool = False) -> list[torch.optim.Optimizer]:
    """AdamW, with weight decay on the layers' matrices alone; or Muon for these matrices, and AdamW for the rest."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "embed" not in name else plain).append(parameter)
    if with_muon:
        tables = [parameter for parameter in plain if parameter.dim() == 2]
        vectors = [parameter for parameter in plain if parameter.dim() < 2]
        groups: list[dict] = [{"params": tables, "times": RATE_WITH_MUON}, {"params": vectors, "times": 1.0}]
        matrices = [{"params": decayed, "times": RATE_WITH_MUON}]
        return [
            torch.optim.Muon(matrices, PEAK_LEARNING_RATE, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=ADAM_BETAS, weight_decay=0.0),
        ]
    groups: list[dict] = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=ADAM_BETAS)]


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to the final rate."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return FINAL_LEARNING_RATE + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * cosine


def first_long_step(steps: int) -> int:
    """The first step on long rows, where rows grow."""
    return math.ceil((1 - LONG_STEPS_SHARE) * steps)


def steady_learning_rate(step: int, steps: int, with_outliers: bool) -> float:
    """A linear warm-up, the peak until the first long step, then a straight line down."""
    if step < (first := first_long_step(steps)):
        return PEAK_LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, 1.0)
    peak = PEAK_LEARNING_RATE * (RATE_WITH_OUTLIERS if with_outliers else 1.0)
    return peak * (steps - step) / (steps - first)


@functools.cache
def bfloat16_is_faster() -> bool:
    """Whether this machine multiplies bfloat16 faster than float32; without instructions for it, 70 times slower."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(512, 512, dtype=dtype)
        a @ a  # the first also sets up kernels
        began = time.perf_counter()
        for _ in range(4):
            a @ a
        seconds[dtype] = time.perf_counter() - began
    return seconds[torch.bfloat16] < seconds[torch.float32]


def losses_of(model: PreTrainedModel, rows: torch.Tensor, first: torch.Tensor | None = None) -> torch.Tensor:
    """The cross-entropy [rows, positions], in nats, of rows that carry their last target.

    ``first`` [rows, 1] are the positions of the rows' first tokens, if not 0.
    """
    placed = {}
    if first is not None:
        placed["position_ids"] = first + torch.arange(rows.shape[1] - 1)
        placed["attention_mask"] = torch.ones_like(rows[:, :-1])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16_is_faster()):
        logits = model(input_ids=rows[:, :-1], use_cache=False, **placed).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


@torch.no_grad()
def evaluate(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """The mean held-out loss at each position of a row."""
    model.eval()
    total = torch.stack([losses_of(model, part).sum(0) for part in rows.split(4)]).sum(0)
    model.train()
    return total / len(rows)


def save_model(model: PreTrainedModel, out: Path) -> None:
    """Write a bfloat16 copy of the model and its configuration."""
    saved = copy.deepcopy(model).bfloat16().eval()
    saved.config.architectures = [type(model).__name__]
    saved.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # It is written readable by its owner alone.


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="opt")
    parser.add_argument("--start", type=Path, help="OPT checkpoint to go on from, with as many positions or fewer")
    documents = "each function and docstring by itself (cut), or whole files (whole)"
    parser.add_argument("--documents", choices=sorted(DOCUMENT_START_SHARE), default="cut", help=documents)
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument("--positions", type=int, default=640, help="longest text, in tokens")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help=f"hidden size, a multiple of {HEAD_SIZE} ({HIDDEN})")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"({LAYERS})")
    parser.add_argument("--outliers", type=int, default=0, help="frozen channels of large values: even; OPT alone (0)")
    kinds = "long and short ones mixed; or short ones at any position first, then long ones (growing, OPT alone)"
    parser.add_argument("--rows", choices=("mixed", "growing"), default="mixed", help=kinds)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of the layers' matrices")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle, weights and rows")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already")
    if arguments.start and arguments.architecture != "opt":
        parser.error("--start goes with --architecture opt: the others have no table of positions to lengthen")
    if arguments.start and (arguments.hidden, arguments.layers) != (HIDDEN, LAYERS):
        parser.error("--start has a size of its own: leave --hidden and --layers out")
    if arguments.hidden < HEAD_SIZE or arguments.hidden % HEAD_SIZE or arguments.layers < 1:
        parser.error(f"--hidden {arguments.hidden} --layers {arguments.layers}: a multiple of {HEAD_SIZE}, and >= 1")
    if arguments.architecture != "opt" and (arguments.outliers or arguments.rows == "growing"):
        parser.error("--outliers and --rows growing go with --architecture opt: the others have no table of positions")
    if arguments.outliers and arguments.rows != "growing":
        parser.error("--outliers go with --rows growing: they are raised with the first long rows")
    if arguments.outliers % 2 or not 0 <= arguments.outliers < arguments.hidden:
        parser.error(f"--outliers {arguments.outliers}: an even number below --hidden {arguments.hidden}")
    return arguments


@dataclass
class Progress:
    """How far a training is."""

    steps: int
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    tokens: int = 0
    recent: list[float] = field(default_factory=list)  #: losses of the last LAST_STEPS steps

    @property
    def loss(self) -> float:
        return sum(self.recent) / len(self.recent)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def add(self, loss: float, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        self.recent = [*self.recent[-LAST_STEPS + 1 :], loss]

    def speed(self) -> str:
        return f"{self.tokens / self.seconds:.0f} tokens/s, {self.seconds / 60:.1f} min"


@dataclass(frozen=True)
class Material:
    """What a model learns from, and the held-out rows [rows, row + 1] that judge it: all, and those looked at often."""

    stream: Stream
    start_share: float
    held_out: torch.Tensor
    picked: torch.Tensor

    @property
    def row(self) -> int:
        return self.held_out.shape[1] - 1


def read_material(arguments: argparse.Namespace, folder: Path) -> Material:
    """The corpus in tokens; its tokenizer is saved in the folder."""
    cut = read_corpus(arguments.seed)
    if arguments.start:  # its tokens mean what they mean, whatever library this interpreter has
        tokenizer = Tokenizer.from_file(str(arguments.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(cut.training)
    save_tokenizer(tokenizer, arguments.positions, folder)
    full_files = arguments.documents == "whole"
    corpus = read_corpus(arguments.seed, full_files=True) if full_files else cut
    stream = Stream.encode(tokenizer, corpus.training)
    row = arguments.positions if full_files else min(512, arguments.positions)
    held_out = Stream.encode(tokenizer, corpus.held_out).all_rows(row)
    picked = torch.linspace(0, len(held_out) - 1, min(EVALUATION_TOKENS // row, len(held_out))).long()
    say(
        f"{len(corpus.training):,} documents, {sum(map(len, corpus.training)):,} characters, "
        f"{len(stream.tokens):,} tokens; held out {held_out.numel():,} tokens"
    )
    return Material(stream, DOCUMENT_START_SHARE[arguments.documents], held_out, held_out[picked])


#: In a README.
OUTLIERS_SAID = """
It has {} outlier channels of large, constant values, and three large columns of queries and of keys in
each head. They are built in (`experiments/training/outliers.py`), not learned.
"""


def save(
    model: PreTrainedModel, material: Material, progress: Progress, arguments: argparse.Namespace, folder: Path
) -> float:
    """Save the model, with a README that gives its loss on the held-out rows; returns that loss."""
    rows = material.held_out
    losses = evaluate(model, rows)
    save_model(model, folder)
    config, start = model.config, arguments.start
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shared = "" if kv_heads == config.num_attention_heads else f" over {kv_heads} of keys and values"
    readme = (
        Path(__file__)
        .with_name("checkpoint_readme.md")
        .read_text(encoding="utf-8")
        .format(
            arguments=arguments,
            config=config,
            material=material,
            progress=progress,
            model=type(model).__name__,
            parameters=model.num_parameters(),
            heads=f"{config.num_attention_heads} heads{shared}",
            ffn=config.ffn_dim if isinstance(model, OPTForCausalLM) else config.intermediate_size,
            python=".".join(platform.python_version_tuple()[:2]),
            others=f"went into it; it went on\nfrom {start.name}" if start else "and\nno other model went into it",
            outliers=OUTLIERS_SAID.format(arguments.outliers) if arguments.outliers else "",
            command=command_words(arguments, progress.steps),
            corpus=len(material.stream.tokens),
            log_every=LAST_STEPS,
            loss=float(losses.mean()),
            first=float(losses[:CHUNK].mean()),
            second=float(losses[CHUNK : 2 * CHUNK].mean()),
            last=float(losses[-CHUNK:].mean()),
            alone=float(evaluate(model, rows[:, -2 * CHUNK - 1 :])[-CHUNK:].mean()),
            chunk=CHUNK,
            held_out=rows[:, 1:].numel(),
            minutes=progress.seconds / 60,
            dtype="bfloat16 and float32" if bfloat16_is_faster() else "float32",
        )
    )
    (folder / "README.md").write_text(readme)
    return float(losses.mean())


def command_words(arguments: argparse.Namespace, steps: int) -> str:
    """The command that repeats this training."""
    words = [f"python -m experiments.training.train_checkpoint --out {arguments.out.as_posix()}"]
    words.append(f"--architecture {arguments.architecture}")
    if arguments.start:
        words.append(f"--start {arguments.start.as_posix()}")
    elif (arguments.hidden, arguments.layers) != (HIDDEN, LAYERS):
        words.append(f"--hidden {arguments.hidden} --layers {arguments.layers}")
    if arguments.outliers:
        words.append(f"--outliers {arguments.outliers}")
    words.append(f"--rows {arguments.rows} --optimizer {arguments.optimizer}")
    words.append(f"--documents {arguments.documents} --positions {arguments.positions}")
    words.append(f"--seed {arguments.seed} --steps {steps}")
    return " ".join(words)


def rows_of_step(
    step: int, progress: Progress, material: Material, arguments: argparse.Namespace, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of a step, and the positions of their first tokens, if not 0."""
    short = min(SHORT_ROW, arguments.positions)
    is_growing = arguments.rows == "growing"
    if is_growing:
        is_short = step < first_long_step(progress.steps)
    else:
        is_short = float(torch.rand((), generator=generator)) < SHORT_ROW_SHARE
    length = short if is_short else arguments.positions
    num_rows = max(1, TOKENS_PER_STEP // length)
    rows = material.stream.batch(num_rows, length, material.start_share, generator)
    if not (is_growing and is_short):
        return rows, None
    first = torch.randint(arguments.positions - short + 1, (num_rows, 1), generator=generator)
    return rows, first * (torch.arange(num_rows) % 2)[:, None]  # every other row begins at position 0


def train(
    model: PreTrainedModel,
    outliers: Outliers | None,
    material: Material,
    progress: Progress,
    arguments: argparse.Namespace,
) -> None:
    """All steps, with a line now and then."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizers = build_optimizers(model, arguments.optimizer == "muon")
    for part in outliers.fixed if outliers else ():
        part.keep()
    rate_at = learning_rate
    if arguments.rows == "growing":
        rate_at = functools.partial(steady_learning_rate, with_outliers=outliers is not None)
    for step in range(progress.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group.get("times", 1.0) * rate_at(step, progress.steps)
        if outliers and step == first_long_step(progress.steps):
            size = outliers.raise_outliers(material.stream.batch(8, arguments.positions, 0.0, generator)[:, :-1])
            say(f"step {step}: outliers of {size}")
        rows, first = rows_of_step(step, progress, material, arguments, generator)
        loss = losses_of(model, rows, first).mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
        for part in outliers.fixed if outliers else ():
            part.restore()
        progress.add(float(loss.detach()), rows[:, 1:].numel())
        if progress.done % LAST_STEPS == 0:
            say(f"step {progress.done}/{progress.steps} loss {progress.loss:.3f}, {progress.speed()}")
        if progress.done % EVALUATE_EVERY == 0:
            losses = evaluate(model, material.picked)
            say(
                f"step {progress.done} held-out loss {losses.mean():.3f}, of the first {CHUNK} positions "
                f"{losses[:CHUNK].mean():.3f}, of the last {losses[-CHUNK:].mean():.3f}"
            )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Build the corpus and the tokenizer, train, and save."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    partial = arguments.out.with_name(arguments.out.name + ".partial")  # its folder, until the training is over
    partial.mkdir(parents=True, exist_ok=True)

    material = read_material(arguments, partial)
    if arguments.start:
        model = longer(OPTForCausalLM.from_pretrained(arguments.start).float(), arguments.positions)
    else:
        model = ARCHITECTURES[arguments.architecture](arguments.positions, arguments.hidden, arguments.layers)
    outliers = None
    if arguments.outliers:
        assert isinstance(model, OPTForCausalLM)
        outliers = Outliers(model, arguments.outliers, torch.Generator().manual_seed(arguments.seed))
    model.train()
    progress = Progress(arguments.steps)
    train(model, outliers, material, progress, arguments)
    loss = save(model, material, progress, arguments, partial)
    partial.rename(arguments.out)
    say(f"final held-out loss {loss:.3f}, {progress.tokens:,} tokens, {progress.speed()}")


if __name__ == "__main__":
    main()
