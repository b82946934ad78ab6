"""Train one of the two small checkpoints that ship: an OPT or a Qwen3 of three to four million parameters.

It learns from the Python standard library of the interpreter that runs this script (`experiments.training.corpus`).
Nothing is downloaded.

Usage::

    python -m experiments.training.train_checkpoint --out OUT --architecture qwen3 --positions 640 --seed 0 --steps 2500
"""

import argparse
import copy
import functools
import math
import os
import time
from pathlib import Path
from typing import Any

# Idle OpenMP threads sleep rather than spin, which leaves the cores to other programs. It must be
# in the environment before torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from experiments.training.corpus import EOS_ID, PAD_ID, VOCAB_SIZE, Stream, read_corpus, save_tokenizer, train_tokenizer

# Each step trains either on short rows or on rows as long as the model's positions allow, which
# train the later positions. Both hold nearly the same number of tokens.
TOKENS_PER_STEP = 4096
SHORT_ROW = 256
SHORT_ROW_SHARE = 0.5  # Of the steps.
DOCUMENT_START_SHARE = 0.6  # Of the rows: those begin at a document's start, as a prompt does.
PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
WARM_UP_STEPS = 150
WEIGHT_DECAY = 0.1  # For matrices only; biases, norms and embeddings have none.
ADAM_BETAS = (0.9, 0.95)
GRADIENT_NORM = 1.0
HELD_OUT_ROW = 512  # Positions, at most.
SAID_EVERY = 50  # Steps.

HIDDEN, LAYERS = 256, 4
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


def build_optimizer(model: PreTrainedModel) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay on the layers' matrices alone."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "embed" not in name else plain).append(parameter)
    groups: list[dict] = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=ADAM_BETAS)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to the final rate."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return FINAL_LEARNING_RATE + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * cosine


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


def losses_of(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """The cross-entropy [rows, positions], in nats, of rows that carry their last target."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16_is_faster()):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


@torch.no_grad()
def evaluate(model: PreTrainedModel, rows: torch.Tensor) -> float:
    """The mean loss of rows."""
    model.eval()
    total = sum(float(losses_of(model, part).sum()) for part in rows.split(4))
    model.train()
    return total / rows[:, 1:].numel()


def train(model: PreTrainedModel, stream: Stream, positions: int, steps: int, seed: int) -> None:
    """Train for a number of steps, with a line now and then."""
    generator, optimizer, began = torch.Generator().manual_seed(seed), build_optimizer(model), time.perf_counter()
    recent = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        is_short = float(torch.rand((), generator=generator)) < SHORT_ROW_SHARE
        length = min(SHORT_ROW, positions) if is_short else positions
        rows = stream.batch(max(1, TOKENS_PER_STEP // length), length, DOCUMENT_START_SHARE, generator)
        loss = losses_of(model, rows).mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        recent = [*recent[-SAID_EVERY + 1 :], float(loss.detach())]
        if (step + 1) % SAID_EVERY == 0:
            minutes = (time.perf_counter() - began) / 60
            print(f"step {step + 1}/{steps} loss {sum(recent) / len(recent):.3f}, {minutes:.1f} min", flush=True)


def save_model(model: PreTrainedModel, out: Path) -> None:
    """Write a bfloat16 copy of the model and its configuration."""
    saved = copy.deepcopy(model).bfloat16().eval()
    saved.config.architectures = [type(model).__name__]
    saved.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # It is written readable by its owner alone.


def main() -> None:
    """Build the corpus and the tokenizer, train, and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="new folder for the checkpoint")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="opt")
    parser.add_argument("--steps", type=int, required=True, help="number of optimizer steps")
    parser.add_argument("--positions", type=int, default=640, help="longest text, in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle, weights and rows")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already")
    arguments.out.mkdir(parents=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus = read_corpus(arguments.seed)
    tokenizer = train_tokenizer(corpus.training)
    save_tokenizer(tokenizer, arguments.positions, arguments.out)
    model = ARCHITECTURES[arguments.architecture](arguments.positions)
    model.train()
    train(model, Stream.encode(tokenizer, corpus.training), arguments.positions, arguments.steps, arguments.seed)
    save_model(model, arguments.out)
    held_out = Stream.encode(tokenizer, corpus.held_out).all_rows(min(HELD_OUT_ROW, arguments.positions))
    print(f"held-out loss {evaluate(model, held_out):.3f} nats a token, on {held_out[:, 1:].numel():,} tokens")


if __name__ == "__main__":
    main()
