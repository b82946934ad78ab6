"""The process in which one side of ``accelerate_disk`` runs: a batch, weights on disk, memory bounded by the system.

Started by file name. The request (``experiments.peers.children``):

    side          "prepare" (write accelerate's offload folder), "accelerate" or "ours"
    checkpoint    folder in Hugging Face layout
    folder        accelerate's offload folder, or where our scratch file may lie
    prompts       token ids, all prompts of one length
    gen_tokens    tokens to generate for each, at least 3
    memory_bytes  what the process may take beyond what it holds once its libraries are loaded
    dtype         "float32" or "bfloat16"
    threads       of torch
    policy        of ours, as a dictionary
    embeddings    of accelerate: "disk", as disk_offload keeps them, or "memory"

The answer: "error" alone where the run was not possible, else seconds, bytes and tokens; of ours also the seconds of
the disk alone and of the computation alone.

RLIMIT_DATA bounds both sides: an allocation beyond it fails. It counts private memory without the page cache, so
neither side may use the cache: ours reads with O_DIRECT (the run is refused where that does not work), and accelerate's
files are dropped from the cache before every forward pass. ``read_bytes``, the kernel's count of bytes that the process
read from the disk, is the evidence.
"""

# pyright: reportMissingImports=false
# Peers are installed in folders of their own, which the type checker does not see.

import os
import resource
import threading
import time
from pathlib import Path

from experiments.peers.children import Side, serve

#: Decode iterations over which the computation alone is timed; the others take as long.
IDEAL_ITERATIONS = 3

#: Of a thread. The system's default counts eight times this against the bound and is never used.
STACK_BYTES = 1 << 20


def proc_bytes(file: str, field: str) -> int:
    """Return a field of /proc/self/status (in kB there) or /proc/self/io, in bytes."""
    for line in Path(f"/proc/self/{file}").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * (1024 if value.endswith("kB") else 1)
    raise KeyError(field)


class Bound:
    """Private memory of this process beyond what it holds now: its limit and its resident peak."""

    def __init__(self):
        self._held = proc_bytes("status", "VmData")
        self._resident = proc_bytes("status", "RssAnon")
        self.peak_bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def limit(self, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._held + num_bytes, resource.RLIM_INFINITY))

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, proc_bytes("status", "RssAnon") - self._resident)
            time.sleep(0.02)


def start_threads(threads: int) -> None:
    """Start torch's threads, so that their stacks count with the libraries."""
    import torch

    torch.set_num_threads(threads)
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))


# ---- accelerate


def prepare(request: dict) -> dict:
    """Write accelerate's offload folder of the checkpoint, in which the tied head is a separate file."""
    from accelerate.utils import offload_state_dict
    from safetensors.torch import load_file

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
    import torch
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
    import torch
    import transformers.models.opt.modeling_opt  # noqa: F401

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


# ---- ours


def run_ours(request: dict) -> dict:
    """Run one wave with all layers' weights on the disk, keys and values in memory."""
    import numpy as np
    import torch

    start_threads(request["threads"])
    from flexhybrid.core.memory import check_budget, memory_plan
    from flexhybrid.core.policy import Policy
    from flexhybrid.core.problem import Budgets, Problem
    from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
    from flexhybrid.core.trace import TraceWindow, busy_seconds, check_trace, iteration_ends
    from flexhybrid.core.wave import admit
    from flexhybrid.core.workload import Workload
    from flexhybrid.runtime.engine import Engine
    from flexhybrid.runtime.session import Session
    from flexhybrid.runtime.storage.loader import Checkpoint
    from flexhybrid.runtime.storage.weights import DiskPlace, Weights

    bound = Bound()
    policy, prompts = Policy.from_dict(request["policy"]), request["prompts"]
    checkpoint = Checkpoint(request["checkpoint"])
    shape = checkpoint.shape
    problem = Problem(shape=shape, dtype=request["dtype"], device="cpu")
    workload = Workload.uniform(len(prompts), len(prompts[0]), request["gen_tokens"])
    wave = admit(problem, policy, workload)
    sizes = buffer_sizes(wave)
    plan = memory_plan(problem, policy, sizes)
    in_memory = {part: size for tier in ("device", "host") for part, size in plan[tier].items()}
    check_budget({"host": in_memory}, Budgets(host=request["memory_bytes"]), f"batch {len(prompts)}")
    place = DiskPlace(request["folder"])
    weights = Weights(shape, checkpoint, request["dtype"], torch.device("cpu"), policy, place)
    del checkpoint  # unmaps its files
    bound.peak_bytes = 0
    bound.limit(request["memory_bytes"])
    disk = weights.disk
    if disk is None or not disk.direct:
        return {"error": f"reads of {disk.describe() if disk else 'no disk'}: no fair comparison"}
    engine = Engine(weights, policy, sizes)
    session = Session(engine, wave, prompts)
    read_before = proc_bytes("io", "read_bytes")
    result = session.generate()
    read_bytes, peak = proc_bytes("io", "read_bytes") - read_before, bound.peak_bytes

    answer = {
        "iteration_end_s": [float(end) for end in iteration_ends(result.trace)],
        "read_bytes": read_bytes,
        "peak_bytes": peak,
        "planned_bytes": sum(in_memory.values()),
        "violations": len(check_trace(result.trace)),
        "busy_s": busy_seconds(result.trace),
        "tokens": np.array(result.tokens).tolist(),
    }
    decode = request["gen_tokens"] - 1
    began = time.perf_counter()  # all layers are read one after another while nothing else runs
    for layer in range(shape.num_layers):
        disk.read([(weights.disk_starts[layer], engine.slots.staging[layer % 2])])
    answer["ideal_disk_s"] = decode * (time.perf_counter() - began)
    disk.enabled = session.engine.copies.enabled = False
    window = TraceWindow(session.decode(IDEAL_ITERATIONS + 1))
    answer["ideal_compute_s"] = window.seconds * decode / window.num_iterations
    engine.close()
    weights.close()
    return answer


def bounded(run: Side) -> Side:
    """Lift the memory bound after ``run``: the answer, and the end of the process, need memory as well."""

    def side(request: dict) -> dict:
        try:
            return run(request)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return side


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    serve({"prepare": prepare, "accelerate": bounded(run_accelerate), "ours": bounded(run_ours)})
