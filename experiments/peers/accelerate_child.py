"""The process in which accelerate runs one batch for ``accelerate_disk``; started by file name.

``memory_bound`` says what the request and the answer are, and how memory is bounded.
"""

# pyright: reportMissingImports=false
# Peers are installed in folders of their own, which the type checker does not see.

import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from experiments.peers.children import serve
from experiments.peers.memory_bound import Bound, bounded, proc_bytes, start_threads


def prepare(request: dict) -> dict:
    """Write accelerate's offload folder of the checkpoint, in which the tied head is a separate file."""
    from accelerate.utils import offload_state_dict

    names = set()
    for shard in sorted(Path(request["checkpoint"]).glob("*.safetensors")):
        tensors = load_file(shard)
        if "lm_head.weight" not in tensors and "model.decoder.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]
        offload_state_dict(request["folder"], tensors)
        names.update(tensors)
    os.sync()  # a dirty page cannot be dropped
    return {"tensors": len(names)}


def drop_page_cache(folder: str) -> None:
    for file in Path(folder).glob("*.dat"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def accelerate_model(request: dict):
    """Return the model with every weight offloaded to the disk by disk_offload; with embeddings in "memory" by its
    hooks over a map that holds these two tables."""
    from accelerate import disk_offload, init_empty_weights
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_align_device_hook
    from accelerate.utils import OffloadedWeightsLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(request["checkpoint"], local_files_only=True)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request["dtype"])).eval()
    device = torch.device("cpu")
    if request["embeddings"] == "disk":
        return disk_offload(model, request["folder"], execution_device=device)
    on_disk = OffloadedWeightsLoader(save_folder=request["folder"])
    table = on_disk["model.decoder.embed_tokens.weight"]
    kept = {"model.decoder.embed_tokens.weight": table, "lm_head.weight": table}
    weights_map = OffloadedWeightsLoader(state_dict=kept, save_folder=request["folder"])
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(model, execution_device=device, offload=True, weights_map=weights_map)
    return model


def run_accelerate(request: dict) -> dict:
    import accelerate  # noqa: F401  its libraries count as loaded
    import transformers.models.opt.modeling_opt  # noqa: F401  which looks for accelerate

    start_threads(request["threads"])
    bound = Bound()
    bound.limit(request["memory_bytes"])
    model = accelerate_model(request)
    ids = torch.tensor(request["prompts"])
    tokens, moments, cache = [], [], None
    read_before, began = proc_bytes("io", "read_bytes"), time.perf_counter()
    with torch.inference_mode():
        for _ in range(request["gen_tokens"]):
            drop_page_cache(request["folder"])
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(ids)
            moments.append(time.perf_counter() - began)
    return {
        "iteration_end_s": moments,
        "read_bytes": proc_bytes("io", "read_bytes") - read_before,
        "peak_bytes": bound.peak_bytes,
        "tokens": torch.cat(tokens, dim=1).tolist(),
    }


if __name__ == "__main__":
    serve({"prepare": prepare, "accelerate": bounded(run_accelerate)})
