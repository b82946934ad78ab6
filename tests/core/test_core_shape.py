"""Test bytes and FLOPs worked out by hand, and shapes read from config.json against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexhybrid.core import work
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import KNOWN_SHAPES, shape_by_name, shape_from_config, shape_of


def test_opt_30b_cache_of_one_token():
    shape = shape_by_name("OPT-30B")
    # 2 (K and V) · 7,168 · 2 bytes = 28,672 a layer, 48 layers
    assert shape.kv_token_bytes(2) == 28_672
    assert shape.num_layers * shape.kv_token_bytes(2) == 1_376_256
    assert shape.num_layers * shape.act_token_bytes(2) == 688_128  # half: plain multi-head attention
    grouped = shape_by_name("llama-3-8b")  # 2 · 8 heads · 128 · 2 bytes; hidden states of 4,096
    assert (grouped.kv_token_bytes(2), grouped.act_token_bytes(2)) == (4096, 8192)


#: Parameters of the published checkpoints (OPT's head is its embedding; Qwen2.5's query, key and value biases are not
#: in the shape).
PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "llama-2-7b": 6_738_415_616,
    "llama-2-7b-32k": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_shapes_have_exactly_the_published_parameters(name):
    shape = KNOWN_SHAPES[name]
    assert shape.num_layers * shape.layer_bytes(2) + shape.embedding_bytes(2) == 2 * PARAMETERS[name]


def test_the_two_largest_opts_have_the_parameters_of_their_names():
    for name, billions in (("opt-66b", 65.7), ("opt-175b", 174.6)):
        shape = KNOWN_SHAPES[name]
        parameters = shape.num_layers * shape.layer_bytes(1) + shape.embedding_bytes(1)
        assert parameters / 1e9 == pytest.approx(billions, rel=0.002)
    assert KNOWN_SHAPES.keys() == PARAMETERS.keys() | {"opt-66b", "opt-175b"}


def test_flops_of_the_verbs_worked_by_hand():
    shape = shape_by_name("opt-6.7b")
    h = 4096
    assert work.kv_gen(shape, 2, 1).flops == 4 * h * h  # 4·h·G·d a token
    assert work.project(shape, 2, 1).flops == 6 * h * h
    assert work.finish(shape, 2, 1).flops == 2 * h * h + 16 * h * h
    # A new token: 2·weights + 4·H·d·context
    one_token = [work.project(shape, 2, 1), work.attend_decode(shape, 2, 1, 100), work.finish(shape, 2, 1)]
    assert sum(w.flops for w in one_token) == 2 * shape.layer_matrix_elements + 4 * h * 100
    assert work.attend_decode(shape, 2, 1, 100).memory_bytes == 100 * shape.kv_token_bytes(2)
    # Causal attention: query t looks at t keys, so 4·h·(1 + 2 + … + n)
    assert work.attend_prefill(shape, 2, 3, 10).flops == 3 * 4 * h * sum(range(1, 11))
    assert work.load_blocks(shape, 2, "kv", 3, 1).link_bytes == 3 * 16 * 4 * h
    assert work.load_blocks(shape, 2, "act", 3, 1).link_bytes == 3 * 16 * 2 * h
    assert work.head(shape, 2, 4).flops == 2 * 50_272 * h * 4


# --- config.json ------------------------------------------------------------------------------------------------------


def write_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


OPT_FIELDS = dict(
    model_type="opt", hidden_size=48, num_attention_heads=3, num_hidden_layers=2, ffn_dim=100, vocab_size=77,
    max_position_embeddings=64, word_embed_proj_dim=48, dtype="bfloat16",
)  # fmt: skip
LLAMA_FIELDS = dict(
    model_type="llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2,
    intermediate_size=100, vocab_size=77, max_position_embeddings=64, dtype="float32",
)  # fmt: skip

CONFIGS = [
    ("OPTConfig", dict(OPT_FIELDS)),
    ("OPTConfig", dict(OPT_FIELDS, word_embed_proj_dim=24, do_layer_norm_before=False, dtype="float16")),
    ("OPTConfig", dict(OPT_FIELDS, tie_word_embeddings=False, eos_token_id=5)),
    ("LlamaConfig", dict(LLAMA_FIELDS)),
    ("LlamaConfig", dict(LLAMA_FIELDS, head_dim=16, tie_word_embeddings=True, eos_token_id=[3, 4])),
    ("LlamaConfig", dict(LLAMA_FIELDS, rms_norm_eps=1e-5, rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32))),
    ("MistralConfig", dict(LLAMA_FIELDS, model_type="mistral", head_dim=8)),
    ("MistralConfig", dict(LLAMA_FIELDS, model_type="mistral", sliding_window=None)),
    ("Qwen2Config", dict(LLAMA_FIELDS, model_type="qwen2", dtype="bfloat16", tie_word_embeddings=True)),
    ("Qwen3Config", dict(LLAMA_FIELDS, model_type="qwen3")),
    ("Phi3Config", dict(LLAMA_FIELDS, model_type="phi3", pad_token_id=0, sliding_window=20)),
    ("Qwen3Config", dict(LLAMA_FIELDS, model_type="qwen3", head_dim=16, eos_token_id=[3, 4])),
]  # fmt: skip


#: max_position_embeddings and scaling of published configurations -> the positions that vLLM derives for them.
POSITIONS = {
    "Qwen2.5-7B with YaRN": (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    "Qwen3 with YaRN": (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    "Yarn-Llama-2-64k": (65536, {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}, 65536),
    "vicuna-7b-v1.5-16k": (4096, {"type": "linear", "factor": 4.0}, 16384),
    "Llama-3.1-8B": (
        131072,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        131072,
    ),
    "YaRN without a factor": (256, {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 256),
    "its angles change behind": (4096, {"type": "dynamic", "factor": 2.0}, 4096),
    "mscale of 0 is none": (64, {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0}, 256),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_scaled_rotations_have_the_positions_of_the_extended_context(tmp_path, name):
    trained, scaling, positions = POSITIONS[name]
    fields = LLAMA_FIELDS | {"max_position_embeddings": trained, "rope_scaling": scaling}
    assert shape_from_config(write_config(tmp_path, **fields)).max_positions == positions


@pytest.mark.parametrize("config_class, fields", CONFIGS)
def test_shape_agrees_with_autoconfig(tmp_path, config_class, fields):
    import transformers

    fields = {key: value for key, value in fields.items() if key != "model_type"}
    getattr(transformers, config_class)(**fields).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    shape = shape_from_config(tmp_path)
    opt = config.model_type == "opt"
    heads = config.num_attention_heads
    assert shape.num_layers == config.num_hidden_layers
    assert shape.hidden == config.hidden_size
    assert shape.num_heads == heads
    assert shape.num_kv_heads == (heads if opt else config.num_key_value_heads)
    assert shape.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // heads)
    assert shape.ffn == (config.ffn_dim if opt else config.intermediate_size)
    assert shape.vocab == config.vocab_size
    assert shape.max_positions == config.max_position_embeddings
    assert shape.tied_head == config.tie_word_embeddings
    assert shape.dtype == str(config.dtype).removeprefix("torch.")
    eos = config.eos_token_id
    assert shape.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    if opt:
        assert shape.pre_norm == config.do_layer_norm_before
        assert (shape.embed_dim or shape.hidden) == config.word_embed_proj_dim
    assert (shape.gated_mlp, shape.rotary, shape.bias) == (not opt, not opt, opt)
    assert shape.qkv_bias == (config.model_type == "qwen2")
    assert shape.qk_norm == (config.model_type == "qwen3")
    if not opt:
        assert shape.norm_eps == config.rms_norm_eps
        assert shape.rope.theta == config.rope_parameters["rope_theta"]
        assert shape.rope.type == config.rope_parameters["rope_type"]
        assert shape.attention[0].window == getattr(config, "sliding_window", None)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_its_old_and_its_new_name(tmp_path, key):
    fields = {name: value for name, value in OPT_FIELDS.items() if name != "dtype"}
    assert shape_from_config(write_config(tmp_path, **fields, **{key: "bfloat16"})).dtype == "bfloat16"
    assert shape_from_config(write_config(tmp_path, **fields)).dtype == "float32"


def rope(**scaling) -> dict:
    return dict(rope_scaling=scaling)


ERRORS = [
    (OPT_FIELDS, dict(model_type="gpt2"), ["gpt2", "opt"]),
    (OPT_FIELDS, dict(model_type=None), ["model_type is None; it must be the name of an architecture"]),
    (OPT_FIELDS, dict(model_type=["opt"]), ["architecture"]),
    (OPT_FIELDS, dict(hidden_size=None), ["hidden_size"]),
    (OPT_FIELDS, dict(hidden_size=50), ["50", "num_attention_heads 3"]),
    (OPT_FIELDS, dict(num_attention_heads=0), ["num_attention_heads"]),
    (OPT_FIELDS, dict(num_hidden_layers=None), ["num_hidden_layers"]),
    (OPT_FIELDS, dict(num_hidden_layers=-1), ["num_layers", "-1"]),
    (OPT_FIELDS, dict(vocab_size="many"), ["vocab", "many"]),
    (OPT_FIELDS, dict(ffn_dim=None), ["ffn_dim"]),
    (OPT_FIELDS, dict(dtype="int8"), ["int8", "dtype"]),
    (OPT_FIELDS, dict(activation_function="gelu"), ["activation_function", "gelu"]),
    (OPT_FIELDS, dict(enable_bias=False), ["enable_bias", "False"]),
    (OPT_FIELDS, dict(eos_token_id="</s>"), ["eos_token_ids", "</s>"]),
    (OPT_FIELDS, dict(eos_token_id=[1, None]), ["eos_token_ids", "None"]),
    (OPT_FIELDS, dict(tie_word_embeddings="yes"), ["tied_head", "yes"]),
    (OPT_FIELDS, dict(word_embed_proj_dim="wide"), ["embed_dim", "wide"]),
    (OPT_FIELDS, dict(do_layer_norm_before=1), ["pre_norm", "1"]),
    (OPT_FIELDS, dict(model_type="opts"), ["unknown architecture 'opts'", "did you mean opt"]),
    (OPT_FIELDS, dict(layer_types=["full_attention"] * 3), ["layer_types = ['full_attention', "]),
    (OPT_FIELDS, dict(activation_function="é" * 900), ["activation_function 'ééé", "éé… is not supported"]),
    (LLAMA_FIELDS, dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
    (LLAMA_FIELDS, dict(attention_bias=True), ["attention_bias"]),
    (LLAMA_FIELDS, dict(mlp_bias=True), ["mlp_bias"]),
    (LLAMA_FIELDS, dict(rms_norm_eps="small"), ["norm_eps", "small"]),
    (LLAMA_FIELDS, dict(rms_norm_eps=0), ["norm_eps", "0"]),
    (LLAMA_FIELDS, dict(model_type="mistral", sliding_window=0), ["sliding_window", "0"]),
    (LLAMA_FIELDS, dict(model_type="mistral", sliding_window=True), ["sliding_window", "True"]),
    (LLAMA_FIELDS, dict(num_key_value_heads=4), ["6 heads", "4 key/value heads"]),
    (LLAMA_FIELDS, rope(rope_type="longrope", factor=2.0), ["longrope", "llama3"]),
    (LLAMA_FIELDS, rope(type="su"), ["rope_type 'su'"]),
    (LLAMA_FIELDS, rope(type=["linear"]), ["rope_type ['linear']"]),
    (LLAMA_FIELDS, dict(rope_scaling="linear"), ["rope_scaling", "'linear'"]),
    (LLAMA_FIELDS, rope(type="linear"), ["rope_type linear needs factor"]),
    (LLAMA_FIELDS, rope(type="linear", factor=0), ["factor", "0"]),
    (LLAMA_FIELDS, rope(type="linear", factor="two"), ["factor", "two"]),
    (LLAMA_FIELDS, rope(rope_type="llama3", factor=8.0, high_freq_factor=4.0), ["low_freq_factor"]),
    (LLAMA_FIELDS, rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4), ["above"]),
    (LLAMA_FIELDS, rope(rope_type="yarn", factor=8, truncate=1), ["truncate", "1"]),
    (LLAMA_FIELDS, dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), ["full_attention"]),
    (LLAMA_FIELDS, dict(rope_parameters=dict(rope_theta=-1)), ["rope_theta", "-1"]),
    (LLAMA_FIELDS, dict(rope_theta=1), ["rope_theta", "above 1"]),
    (LLAMA_FIELDS, dict(partial_rotary_factor=0.5), ["partial_rotary_factor 0.5"]),
    (LLAMA_FIELDS, dict(rope_parameters=dict(partial_rotary_factor=0.25)), ["partial_rotary_factor 0.25"]),
    (LLAMA_FIELDS, dict(head_dim=7), ["head_dim 7", "even"]),
]


@pytest.mark.parametrize("fields, changes, words", ERRORS)
def test_errors_name_the_file_and_the_value(tmp_path, fields, changes, words):
    with pytest.raises(InputError) as error:
        shape_from_config(write_config(tmp_path, **fields | changes))
    for word in [tmp_path.name, *words]:
        assert word in str(error.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(InputError, match="config.json"):
        shape_from_config(tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match="config.json"):
            shape_from_config(tmp_path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_path_that_no_system_has_is_an_input_error(path):
    with pytest.raises(InputError):
        shape_from_config(path)
    with pytest.raises(InputError, match="unknown model"):
        shape_of(path)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, name",
    [
        ("OPT-30B", "opt-30b"),
        ("facebook/opt-30b", "opt-30b"),
        (" opt-125m ", "opt-125m"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
    ],
)
def test_names_as_they_are_written(given, name):
    assert shape_by_name(given) is shape_of(given) is KNOWN_SHAPES[name]


@pytest.mark.parametrize(
    "given, nearest",
    [
        ("opt-31b", "opt-30b"),
        ("opt-7b", "opt-6.7b"),
        ("facebook/opt-31b", "opt-30b"),
        ("Llama-2-8b-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),  # a larger vocabulary: another model
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),  # other positions: another model
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(given, nearest):
    for ask in (shape_by_name, shape_of):
        with pytest.raises(InputError) as error:
            ask(given)
        guess, known = str(error.value).split("? known: ")
        assert guess.startswith(f"unknown model {given!r}; did you mean ") and nearest in guess
        assert known.startswith(", ".join(KNOWN_SHAPES))


def test_a_name_of_another_type_is_an_unknown_model():
    for ask in (shape_by_name, shape_of):
        with pytest.raises(InputError, match="unknown model .*known: opt-125m, .*qwen3-32b"):
            ask(None)


def test_a_model_is_given_by_name_or_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("facebook/opt-30b", "opt-30b", "mine"):
        Path(folder).mkdir(parents=True)
        write_config(Path(folder), **OPT_FIELDS)
    known = KNOWN_SHAPES["opt-30b"]
    assert shape_of("opt-30b") is known  # a bare name is the known model, whatever lies about
    for path in (
        "./opt-30b",
        "facebook/opt-30b",
        "opt-30b/",
        "mine",
        "mine/config.json",
        Path("opt-30b"),
        tmp_path / "mine",
    ):
        assert shape_of(path).hidden == 48, path
    Path("tiny.json").write_text(Path("mine/config.json").read_text())
    assert shape_of("tiny.json").hidden == 48
    for path in ("none.json", Path("none"), "mine/none.json"):
        with pytest.raises(InputError, match="no model configuration at .*none"):
            shape_of(path)
    with pytest.raises(InputError, match="no model configuration at .*config.json"):
        shape_of(tmp_path)
    with pytest.raises(InputError, match="or the path of a config.json or of the folder that holds one"):
        shape_of("their/opt-31b")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("count", [10**9, 10**30, 1e30])
def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_made(tmp_path, kind, count):
    name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    with pytest.raises(InputError, match=f"{name} is .*at most 1000"):
        shape_from_config(write_config(tmp_path, **LLAMA_FIELDS | {"model_type": kind, name: count}))
