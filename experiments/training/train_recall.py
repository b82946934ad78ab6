"""Build and train the small OPT that recalls facts (`experiments.training.recall`). Nothing is downloaded.

An induction circuit (Olsson et al. 2022) is set by hand and then trained, all weights free. Random weights had not
learned to recall 8 facts after 380 steps. The token table leaves the columns PREVIOUS and PLACE empty, and the table of
positions has sinusoids in PLACE. A head of layer 0 attends to the token before and writes it into PREVIOUS; a head of
layer LOOKUP attends to where its own token is the previous one, and writes the token there over its own. In half of the
steps layers before LOOKUP see the last LOCAL tokens alone, so that facts stay looked up in LOOKUP or later, in layers
that policies thin out.

Usage::

    python -m experiments.training.train_recall --out experiments/checkpoints/opt-recall --seed 0 --steps 200
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from experiments.training import recall
from experiments.training.corpus import EOS_ID, PAD_ID, save_tokenizer
from experiments.training.recall import Sizes
from experiments.training.train_checkpoint import GRADIENT_NORM, build_optimizers, save_model, say

HIDDEN, HEADS, LAYERS, POSITIONS = 128, 2, 4, 512
LOOKUP = 2  #: the layer that looks facts up
TOKEN, PREVIOUS, PLACE = slice(0, 48), slice(48, 96), slice(96, 128)  #: columns of the residual stream
EMBEDDING_STD = 0.1
FASTEST = 2.5  #: radians a position: of the fastest sinusoid
BEFORE, SAME = 6.0, 4.0  #: how sharply the heads of layer 0 and LOOKUP attend when they are set
ANSWER = 3.0  #: how much of the looked-up token is written over the own one
QUIET = 0.3  #: factor of what all other heads and feed-forwards write at first

SIZES = tuple(Sizes(facts, min(63, facts), min(64, facts)) for facts in (16, 32, 64, 128))  #: of steps, at random
TOKENS_PER_STEP = 2048
PEAK_RATE, WARM_UP = 1e-3, 20
LOCAL, LOCAL_SHARE = 8, 0.5
LOG_EVERY = 20
JUDGED = 32  #: texts of the last size on which a training's answers are judged


def build(vocab_size: int = recall.VOCAB_SIZE, positions: int = POSITIONS) -> OPTForCausalLM:
    """Return the OPT with its circuit set and random weights elsewhere."""
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=vocab_size,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            ffn_dim=4 * HIDDEN,
            num_attention_heads=HEADS,
            max_position_embeddings=positions,
            word_embed_proj_dim=HIDDEN,
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
    )
    _set_circuit(model)
    return model


@torch.no_grad()
def _set_circuit(model: OPTForCausalLM) -> None:
    decoder = model.model.decoder
    layers: list[Any] = list(decoder.layers)
    for layer in layers:
        layer.fc2.weight.mul_(QUIET)
        layer.self_attn.out_proj.weight.mul_(QUIET)
    tokens, positions = decoder.embed_tokens.weight, decoder.embed_positions.weight
    tokens.zero_()[:, TOKEN].normal_(0, EMBEDDING_STD)
    frequencies = FASTEST * ((torch.arange(PLACE.stop - PLACE.start) // 2 + 0.5) / 16) ** 2
    positions.zero_()[:, PLACE] = _sinusoids(torch.arange(len(positions)), frequencies) * EMBEDDING_STD * 2**0.5
    words = torch.eye(TOKEN.stop - TOKEN.start)
    _set_head(layers[0].self_attn, BEFORE, (_turn_back(frequencies), PLACE, PLACE), words * EMBEDDING_STD, PREVIOUS)
    _set_head(layers[LOOKUP].self_attn, SAME, (words, TOKEN, PREVIOUS), words * EMBEDDING_STD * ANSWER, TOKEN)


def _sinusoids(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return sines and cosines in turn, [positions, frequencies], of pairs of equal frequencies."""
    angles = positions[:, None] * frequencies
    return torch.where(torch.arange(len(frequencies)) % 2 == 0, angles.sin(), angles.cos())


def _turn_back(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the matrix that makes the sinusoids of position p - 1 from those of p."""
    pairs = [torch.tensor([[f.cos(), -f.sin()], [f.sin(), f.cos()]]) for f in frequencies[::2]]
    return torch.block_diag(*pairs)


def _set_head(attention: Any, sharpness: float, looks: tuple, writes: torch.Tensor, into: slice) -> None:
    """Set head 0: its queries are ``looks[0]`` times the columns ``looks[1]``, its keys the columns ``looks[2]``; what
    it writes ``into`` is ``writes`` times the columns TOKEN."""
    turn, asks, answers = looks
    head = slice(0, attention.head_dim)
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        weight[head] = 0
    attention.out_proj.weight[:, head] = 0
    attention.q_proj.weight[: len(turn), asks] = turn * sharpness**0.5
    attention.k_proj.weight[: len(turn), answers] = torch.eye(len(turn)) * sharpness**0.5
    attention.v_proj.weight[: len(writes), TOKEN] = torch.eye(len(writes))
    attention.out_proj.weight[into, : len(writes)] = writes


class LocalFirst:
    """While ``on``, layers before LOOKUP see the last LOCAL tokens alone."""

    def __init__(self, model: OPTForCausalLM):
        self.on = False
        layers: list[Any] = list(model.model.decoder.layers[:LOOKUP])
        for layer in layers:
            layer.self_attn.register_forward_pre_hook(self._narrow, with_kwargs=True)

    def _narrow(self, _module, arguments, words):
        if not self.on:
            return None
        length = words["hidden_states"].shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return arguments, words | {"attention_mask": ((distance >= 0) & (distance < LOCAL))[None, None]}


def answers(model: OPTForCausalLM, texts: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [N, Q, vocab] where texts [N, tokens] must give a number, and the numbers [N, Q]."""
    hidden = model.model(input_ids=texts[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, sizes.prompt_tokens :: 2]), texts[:, sizes.prompt_tokens + 1 :: 2]


@torch.inference_mode()
def share_right(model: OPTForCausalLM, seed: int) -> float:
    """Return the share of right answers to JUDGED texts of the last size."""
    texts = torch.tensor(recall.draw_texts(SIZES[-1], JUDGED, np.random.default_rng(seed)))
    answered = [answers(model, part, SIZES[-1]) for part in texts.split(4)]
    right = [(logits.argmax(-1) == numbers).float().mean() for logits, numbers in answered]
    return float(torch.stack(right).mean())


def train(model: OPTForCausalLM, steps: int, seed: int) -> None:
    """Train on texts drawn by the seed; the loss is that of the answers alone."""
    rng, local, began = np.random.default_rng(seed), LocalFirst(model), time.perf_counter()
    (optimizer,) = build_optimizers(model)
    right = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        sizes = SIZES[rng.integers(len(SIZES))]
        sizes = Sizes(sizes.facts, int(rng.integers(sizes.filler + 1)), sizes.queries)
        local.on = rng.random() < LOCAL_SHARE
        texts = torch.tensor(recall.draw_texts(sizes, TOKENS_PER_STEP // sizes.tokens, rng))
        logits, numbers = answers(model, texts, sizes)
        loss = F.cross_entropy(logits.flatten(0, 1), numbers.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        right.append(float((logits.argmax(-1) == numbers).float().mean()))
        if (step + 1) % LOG_EVERY == 0:
            share, seconds = np.mean(right[-LOG_EVERY:]), time.perf_counter() - began
            say(f"step {step + 1}/{steps} loss {loss.detach():.3f}, {share:.1%} right, {seconds:.0f} s")
    local.on = False


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} is there already")
    return arguments


def main() -> None:
    """Set the circuit, train, and save."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model = build()
    before = share_right(model, arguments.seed + 1)
    say(f"as set: {before:.1%} right")
    train(model, arguments.steps, arguments.seed)
    partial = arguments.out.with_name(arguments.out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_tokenizer(recall.build_tokenizer(), POSITIONS, partial)
    save_model(model, partial)
    saved = OPTForCausalLM.from_pretrained(partial, dtype=torch.float32)
    after = share_right(saved, arguments.seed + 1)
    readme = Path(__file__).with_name("recall_readme.md").read_text(encoding="utf-8")
    (partial / "README.md").write_text(
        readme.format(
            name=arguments.out.name,
            out=arguments.out.as_posix(),
            arguments=arguments,
            config=model.config,
            parameters=model.num_parameters(),
            largest=SIZES[-1],
            before=before,
            after=after,
            judged=JUDGED,
            recall=recall,
        )
    )
    partial.rename(arguments.out)
    say(f"saved: {after:.1%} right")


if __name__ == "__main__":
    main()
