"""Train the small OPT that recalls facts (`experiments.training.recall`); nothing is downloaded.

It begins with few facts, twice as many once it answers nearly all, up to the last size. Its table of positions begins
as sinusoids, in which "the token before" is one rotation wherever it is asked. In half of the steps the first two
layers see only the last LOCAL tokens, so that the facts are looked up in later layers, which policies thin out.

Usage::

    python -m experiments.training.train_recall --out experiments/checkpoints/opt-recall --seed 0
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
from transformers import OPTConfig, OPTForCausalLM

from experiments.training import recall
from experiments.training.corpus import EOS_ID, PAD_ID, save_tokenizer
from experiments.training.train_checkpoint import save_model

FACTS = (8, 16, 32, 64, 128)
FILLER, QUERIES, POSITIONS = 63, 64, 512
TOKENS_PER_STEP = 2048
LOCAL, LOCAL_LAYERS, LOCAL_SHARE = 8, 2, 0.5
LEARNING_RATE = 1e-3
EMBEDDING_STD = 0.1
GROWS_AT = 0.95


def build(hidden, layers, head_size) -> OPTForCausalLM:
    config = OPTConfig(
        vocab_size=recall.VOCAB_SIZE, hidden_size=hidden, num_hidden_layers=layers, ffn_dim=4 * hidden,
        num_attention_heads=hidden // head_size, max_position_embeddings=POSITIONS, word_embed_proj_dim=hidden,
        do_layer_norm_before=True, activation_function="relu", dropout=0.0, attention_dropout=0.0, layerdrop=0.0,
        tie_word_embeddings=True, pad_token_id=PAD_ID, bos_token_id=EOS_ID, eos_token_id=EOS_ID,
    )
    model = OPTForCausalLM(config)
    decoder = model.model.decoder
    with torch.no_grad():
        decoder.embed_tokens.weight.normal_(0, EMBEDDING_STD)
        table = decoder.embed_positions.weight
        angles = torch.arange(len(table))[:, None] * 10000 ** (-torch.arange(hidden // 2) / (hidden // 2))
        table.copy_(torch.cat([angles.sin(), angles.cos()], dim=1) * EMBEDDING_STD * 2**0.5)
    return model


TOKEN, PREVIOUS, PLACE = slice(0, 48), slice(48, 96), slice(96, 128)

@torch.no_grad()
def wire(model, s=0.1, lookup=True):
    """Set an induction circuit: layer 0 copies the token before, layer 2 looks up."""
    decoder = model.model.decoder
    layers = decoder.layers
    d = model.config.hidden_size
    for layer in layers:
        layer.fc2.weight.mul_(0.3)
        layer.self_attn.out_proj.weight.mul_(0.3)
    decoder.embed_tokens.weight.zero_()
    decoder.embed_tokens.weight[:, TOKEN].normal_(0, s)
    n = (PLACE.stop - PLACE.start) // 2
    w = 2.5 * ((torch.arange(n) + 0.5) / n) ** 2
    table = decoder.embed_positions.weight
    table.zero_()
    angles = torch.arange(len(table))[:, None] * w
    table[:, PLACE] = torch.cat([angles.sin(), angles.cos()], 1) * s * 2**0.5
    a = layers[0].self_attn
    hd = model.config.hidden_size // model.config.num_attention_heads
    beta = 6.0
    q, k = torch.zeros(2 * n, 2 * n), torch.eye(2 * n)
    c, si = w.cos().diag(), w.sin().diag()
    # sin(x - w) = sin x cos w - cos x sin w ; cos(x - w) = cos x cos w + sin x sin w
    q[:n, :n], q[:n, n:], q[n:, :n], q[n:, n:] = c, -si, si, c
    a.q_proj.weight[:hd] = 0; a.k_proj.weight[:hd] = 0; a.v_proj.weight[:hd] = 0; a.out_proj.weight[:, :hd] = 0
    a.q_proj.weight[: 2 * n, PLACE] = q * beta**0.5
    a.k_proj.weight[: 2 * n, PLACE] = k * beta**0.5
    a.v_proj.weight[:48, TOKEN] = torch.eye(48)
    a.out_proj.weight[PREVIOUS, :48] = torch.eye(48) * s
    if not lookup:
        return
    a = layers[2].self_attn
    beta = 4.0
    a.q_proj.weight[:hd] = 0; a.k_proj.weight[:hd] = 0; a.v_proj.weight[:hd] = 0; a.out_proj.weight[:, :hd] = 0
    a.q_proj.weight[:48, TOKEN] = torch.eye(48) * beta**0.5
    a.k_proj.weight[:48, PREVIOUS] = torch.eye(48) * beta**0.5
    a.v_proj.weight[:48, TOKEN] = torch.eye(48)
    a.out_proj.weight[TOKEN, :48] = torch.eye(48) * 3 * s


def local_first(model, mask_of):
    for layer in model.model.decoder.layers[:LOCAL_LAYERS]:
        def hook(module, args, kwargs):
            if mask_of["mask"] is not None:
                kwargs["attention_mask"] = mask_of["mask"]
            return args, kwargs
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=6000)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--head-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=LEARNING_RATE)
    p.add_argument("--local-share", type=float, default=LOCAL_SHARE)
    p.add_argument("--alike", type=float, default=0.0)
    p.add_argument("--half", action="store_true")
    p.add_argument("--wired", action="store_true")
    p.add_argument("--threads", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    rng = np.random.default_rng(a.seed)
    model = build(a.hidden, a.layers, a.head_size).train()
    if a.alike:
        with torch.no_grad():
            for layer in model.model.decoder.layers:
                attn = layer.self_attn
                attn.q_proj.weight.normal_(0, a.alike * a.hidden**-0.5)
                attn.k_proj.weight.copy_(attn.q_proj.weight)
    if a.wired:
        wire(model, lookup=not a.half)
    mask_of = {"mask": None}
    local_first(model, mask_of)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.01)
    a.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(recall.build_tokenizer(), POSITIONS, a.out)
    stage, recent, began = 0, [], time.perf_counter()
    loc = []
    for step in range(a.steps):
        for g in opt.param_groups:
            g["lr"] = a.lr * min(1, (step + 1) / 100)
        facts = FACTS[stage]
        sizes = recall.Sizes(facts, int(rng.integers(0, min(FILLER, facts) + 1)), min(QUERIES, facts))
        rows = torch.tensor(recall.draw_texts(sizes, max(4, TOKENS_PER_STEP // sizes.tokens), rng))
        n = rows.shape[1] - 1
        local = rng.random() < a.local_share
        if local:
            d = torch.arange(n)[:, None] - torch.arange(n)
            mask_of["mask"] = ((d >= 0) & (d < LOCAL))[None, None]
        else:
            mask_of["mask"] = None
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        at = hidden[:, sizes.prompt_tokens :: 2]
        targets = rows[:, sizes.prompt_tokens + 1 :: 2]
        logits = model.lm_head(at)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        recent.append(float((logits.argmax(-1) == targets).float().mean()))
        loc.append(local)
        last = recent[-20:]
        if step % 20 == 19:
            la = [r for r, l in zip(last, loc[-20:]) if l] or [0]
            print(f"step {step + 1} facts {facts} loss {float(loss.detach()):.3f} right {np.mean(last):.3f} local {np.mean(la):.3f} {time.perf_counter() - began:.0f} s", flush=True)
        if step % 200 == 199:
            save_model(model, a.out)
        if len(last) == 20 and np.mean(last) >= GROWS_AT:
            if stage + 1 < len(FACTS):
                stage, recent, loc = stage + 1, [], []
    save_model(model, a.out)


if __name__ == "__main__":
    main()
