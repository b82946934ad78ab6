"""Tiny checkpoints for tests."""

from __future__ import annotations

import json

import torch

from flexhybrid.jobs.compare.exactness import Reference


def save_opt(folder, *, layers=2, heads=3, head_dim=16, ffn=40, vocab=61, positions=96, eos=2, seed=0, scale=0.25,
             post_norm=False, embed_dim=None, dtype=torch.float32):  # fmt: skip
    """Save a random OPT checkpoint in Hugging Face layout; return transformers' float32 model of it. Weights are large
    (scale 0.25), so that logits are spread out and greedy choices are clear."""
    from transformers import OPTConfig, OPTForCausalLM

    hidden = heads * head_dim
    config = OPTConfig(
        vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=ffn,
        max_position_embeddings=positions, word_embed_proj_dim=embed_dim or hidden, eos_token_id=eos, dropout=0.0,
        do_layer_norm_before=not post_norm,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" not in name:
                parameter.normal_(0.0, scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.tie_weights()
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model.float()


def save_llama(folder, *, kind="llama", layers=2, heads=4, kv_heads=2, head_dim=16, hidden=None, ffn=40, vocab=61,
               positions=96, eos=2, tied=False, rope=None, theta=10_000.0, seed=0, scale=0.25, dtype=torch.float32,
               max_shard_size="1GB", **more):  # fmt: skip
    """Make a random Hugging Face checkpoint; return transformers' float32 model. ``more``: its config."""
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}[kind]
    more = more if kind != "phi3" else {"pad_token_id": 0, **more}  # its own lies beyond a small vocabulary
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab, hidden_size=hidden or heads * head_dim, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=ffn, max_position_embeddings=positions,
        eos_token_id=eos, tie_word_embeddings=tied, rope_parameters=dict(rope or {}, rope_theta=theta), **more,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, scale)
    model.tie_weights()
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()


def save_drawn(folder, shape: dict):
    """Save the checkpoint of a shape that ``strategies`` has drawn; return transformers' model."""
    return (save_llama if "kind" in shape else save_opt)(folder, **shape)


class InMemory(Reference):
    """The reference tokens of a checkpoint that was just made; its files are not read."""

    def __init__(self, model):
        self.model = model.eval()

    def answers(self, prompts, max_tokens, stops) -> list[list[int]]:
        """Return each prompt's tokens generated alone, up to its limit or its stop."""
        return [
            self.generate([prompt], length, True)[0][:stop]
            for prompt, length, stop in zip(prompts, max_tokens, stops, strict=True)
        ]


def loaded(folder):
    """Return transformers' own model of a checkpoint's files, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()


def edit_config(folder, **fields) -> None:
    """Change fields of a checkpoint's config.json; a field with the value ``...`` is removed."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


LETTERS = {chr(ord("0") + i): 3 + i for i in range(61)}  #: of ``save_tokenizer``, with their ids


def save_tokenizer(folder, characters: dict[str, int] = LETTERS, begins: bool = False) -> None:
    """Save a tokenizer with one token per character. ``begins``: each text begins with a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({"<s>": 0, "<pad>": 1, "</s>": 2} | characters, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>").save_pretrained(folder)


def save_text_model(folder) -> None:
    """Save a tiny OPT, a tokenizer with one token per character, and a chat template with tools."""
    save_opt(folder, vocab=64)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
