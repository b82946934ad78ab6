"""Arguments of vLLM's ``LLM``: values without effect are accepted; for others, the error says what to write here."""

from collections.abc import Callable, Iterable
from inspect import signature

from flexhybrid.core.errors import InputError, shown, unknown
from flexhybrid.sampling_params import same

_NO_DOWNLOAD = "nothing is downloaded: give a local folder (hf download NAME --local-dir FOLDER)"
_ONE_DEVICE = "a model runs on one device; `flexhybrid run --engine ray` starts an executor on each"
_PLACES = 'the policy places weights and cache; budgets are device_memory="20GiB" and host_memory="100GiB"'

#: Names; values without effect, besides None (None: all values); and what to write in place of other values. From
#: vllm/entrypoints/llm.py and vllm/engine/arg_utils.py, versions 0.4 to 0.20.
_ROWS: tuple[tuple[str, tuple | None, str], ...] = (
    ("async_scheduling compilation_config disable_async_output_proc disable_custom_all_reduce disable_log_requests "
     "disable_log_stats distributed_executor_backend enable_chunked_prefill enforce_eager max_logprobs "
     "max_seq_len_to_capture served_model_name swap_space trust_remote_code use_v2_block_manager", None, ""),
    ("code_revision download_dir revision tokenizer_revision hf_token", (), _NO_DOWNLOAD),
    ("data_parallel_size pipeline_parallel_size tensor_parallel_size", (1,), _ONE_DEVICE),
    ("disable_sliding_window enable_expert_parallel", (False,), "leave it out"),
    ("override_neuron_config speculative_config", ({},), "leave it out"),
    ("allowed_local_media_path limit_mm_per_prompt mm_processor_kwargs", ("", {}), "only text models are supported"),
    ("block_size", (16,), "blocks have 16 tokens"),
    ("config_format", ("auto", "hf"), "checkpoints are in Hugging Face layout"),
    ("convert", ("auto", "none"), "models only generate"),
    ("runner task", ("auto", "generate"), "models only generate"),
    ("cpu_offload_gb", (0,), _PLACES),
    ("gpu_memory_utilization", (0.9,), _PLACES),
    ("num_gpu_blocks_override", (), _PLACES),
    ("enable_lora", (False,), "merge the adapter into the weights"),
    ("hf_overrides", ({},), "change config.json"),
    ("kv_cache_dtype", ("auto",), "give a policy with bits=Bits(kv=8)"),
    ("quantization_param_path", (), "give a policy with bits=Bits(kv=8)"),
    ("quantization", (), "give a policy with bits=Bits(weights=4): it packs plain weights while loading"),
    ("load_format", ("auto", "hf", "pt", "safetensors"), "safetensors and .bin files are read"),
    ("max_num_batched_tokens", (), "give a policy with max_mini_batch_tokens"),
    ("max_num_seqs", (256,), "give a policy with max_batch: Policy(max_batch=…)"),
    ("max_seq_len", (), "give max_model_len, which limits prompt and answer together"),
    ("override_generation_config", ({},), "give SamplingParams"),
    ("seed", (0,), "give SamplingParams(seed=…)"),
    ("skip_tokenizer_init", (False,), "leave it out: prompts may be token ids in any case"),
    ("tokenizer_mode", ("auto", "hf"), "leave it out: the tokenizer is transformers' own"),
)  # fmt: skip
ARGUMENTS = {name: (neutral, advice) for names, neutral, advice in _ROWS for name in names.split()}
_POOLING = "models only generate text here; embeddings, scores and classes need another program"
_SERVER = "there is no server behind this LLM"
#: Methods and attributes of vLLM's ``LLM`` -> advice. From vllm/entrypoints/llm.py, versions 0.4 to 0.20.
METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), _POOLING),
    **dict.fromkeys(("apply_model", "collective_rpc", "get_metrics", "llm_engine", "preprocess_chat"), _SERVER),
    "beam_search": "use SamplingParams(n=…, logprobs=…) and choose the best answer",
    "set_tokenizer": "put the tokenizer's files into the model's folder",
    "sleep": "release() frees the memory until the next generate",
    "wake_up": "the next generate loads the weights again",
    **dict.fromkeys(("start_profile", "stop_profile"), "generate(…, on_trace=…) returns a trace"),
    **dict.fromkeys(("reset_prefix_cache", "reset_mm_cache"), "no prompt is cached from one call to the next"),
}
#: Arguments of vLLM's ``generate`` and ``chat`` without a counterpart here.
UNSUPPORTED = (
    *("guided_options_request", "lora_request", "mm_processor_kwargs", "priority", "prompt_adapter_request"),
    "tokenization_kwargs",
)
#: Names of dtypes in vLLM -> names here, if different.
DTYPES = {"half": "float16", "float": "float32"}


def check_vllm_arguments(others: dict, model: object, known: Iterable[str]) -> None:
    """Raise InputError for the first of ``others`` that would have an effect, or is not one of vLLM's arguments."""
    for name, value in others.items():
        if name == "tokenizer" and (value is None or str(value) == str(model)):
            continue
        if name == "tokenizer":
            raise InputError(f"tokenizer is {shown(value)}; put its files into the model's folder, {model}")
        if name not in ARGUMENTS:
            raise unknown("argument of LLM", name, known)
        neutral, advice = ARGUMENTS[name]
        if neutral is not None and value is not None and not any(same(value, one) for one in neutral):
            raise InputError(f"{name} is {shown(value)}, which is not supported: {advice}")


def absent_method(name: str) -> str:
    """Return the message of an AttributeError, with advice for a method of vLLM's ``LLM``."""
    advice = f": {METHODS[name]}" if name in METHODS else ""
    return f"LLM has no attribute {name!r}{advice}"


def plain_dtype(dtype: object) -> str:
    """Return the name of a dtype, given as torch's dtype or by name, also vLLM's short one."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def nothing_asked(call: Callable, asked: dict[str, object]) -> None:
    """Raise InputError for arguments of vLLM's ``generate`` and ``chat`` that would have an effect, and for names that
    neither vLLM nor ``call`` knows."""
    for name, value in asked.items():
        if name not in UNSUPPORTED:
            raise unknown("argument", name, (known for known in signature(call).parameters if known != "others"))
        if value:
            raise InputError(f"{name} is {shown(value)}; it is not supported: leave it out")
