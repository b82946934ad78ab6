"""Tiny random checkpoints of any decoder in transformers, and the tokens of transformers' own greedy generate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

#: Sizes of a tiny model, by the names that configurations have for them; a configuration takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_query_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None),
    "vocab_size": 97, "head_dim": 16, "global_head_dim": 16, "rotary_dim": 8, "word_embed_proj_dim": 64,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "sliding_window": 9, "attention_window_size": 9, "tie_word_embeddings": False, "embedding_size": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
}  # fmt: skip
#: Six layers, of which the last two attend to keys and values of the two before them.
LENDING: dict[str, Any] = {
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
MAMBA2: dict[str, Any] = {"head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}
#: Linear attention in two of three layers, and sizes of it by two families' names.
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
KIMI: dict[str, Any] = LINEAR | {"linear_head_dim": 16, "linear_num_heads": 4}
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
#: What cannot be derived from a name: sizes that must fit one another in ways of a model's own.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"), LATENT),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), LATENT | KIMI),
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    **dict.fromkeys(("cwm", "modernbert-decoder"), {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {**LENDING, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "laurel_rank": 8},
    "gemma4_text": LENDING | {"global_head_dim": 32, "pad_token_id": 0},
    **dict.fromkeys(
        ("nemotron", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 16, "num_key_value_heads": 2}
    ),
    "gemma2": {"attn_logit_softcapping": 2.0},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), DELTA_NET),
    "olmo_hybrid": {"num_hidden_layers": 4},
    **dict.fromkeys(("mamba", "falcon_mamba"), {"intermediate_size": 128}),
    "mamba2": MAMBA2 | {"num_heads": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 3},
    "granitemoehybrid": MAMBA | LINEAR | {"shared_intermediate_size": 64},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention", "conv"]}),
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "head_dim": 16},
    "zamba2": {"layer_types": ["linear_attention", "hybrid", "linear_attention"]},
    "dots1": {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **dict.fromkeys(("dots3_note", "dots3_note_text"), {"num_key_value_heads": 4}),
    "gemma4_unified_text": {"pad_token_id": 0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
}  # fmt: skip

#: Sizes of the part for pictures.
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
    "intermediate_size": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 64, "vision_output_dim": 64,
    "projector_input_dim": 32, "projector_output_dim": 64,
}  # fmt: skip


def tiny_config(model_type: str):
    """Return a configuration of this type at a tiny size; raise transformers' own error if there is none."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = vars(CONFIG_MAPPING[model_type]())
    for name in ("layer_types", "mlp_layer_types"):  # made for another number of layers
        if known.get(name):
            known[name] = None
    names = {*known, *getattr(CONFIG_MAPPING[model_type], "attribute_map", {})}
    sizes = {name: value for name, value in SIZES.items() if name in names and _takes(known.get(name, 0), value)}
    sizes |= {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if known.get("text_config") is not None:
        sizes["text_config"] = tiny_config(known["text_config"].model_type).to_dict()
    if known.get("vision_config") is not None:
        seeing = vars(known["vision_config"])
        sizes["vision_config"] = {name: value for name, value in VISION.items() if name in seeing}
        sizes |= {name: 96 for name in known if name.endswith(("token_id", "token_index")) and "image" in name}
    return AutoConfig.for_model(model_type, **{**sizes, **OWN.get(model_type, {})})


def _takes(default, value) -> bool:
    """Return True if a field with this default takes a size; fields that are off stay off."""
    return default is not None or value is None


def save_tiny(folder: Path, model_type: str, seed: int = 1, **sizes: Any):
    """Save a random checkpoint of this type, with these ``sizes``; return transformers' own model in float32.

    Weights are large, so that logits are spread out and greedy choices are clear.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    config.update(sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif "sink" in name:
                parameter.normal_(0.0, 1.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def save_with_pictures(folder: Path, model_type: str, text_type: str, tied: bool = False, **more: Any):
    """Save a random checkpoint that takes pictures, of this type around a tiny text part; return transformers' model.

    ``more``: fields of its configuration.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seeing = {"model_type": CONFIG_MAPPING[model_type]().vision_config.model_type, "image_size": 28, "patch_size": 14}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = CONFIG_MAPPING[model_type](
        text_config=tiny_config(text_type).to_dict(),
        vision_config=sizes | seeing,
        tie_word_embeddings=tied,
        **{"image_token_index" if model_type == "mistral3" else "image_token_id": 96},
        **more,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def greedy(model, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of transformers' own generate, each prompt alone; no token ends an answer."""
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
