"""The process in which one peer of ``gpu_peers`` runs one batch; started by file name.

The request (``experiments.peers.children``):

    side           "flexgen" or "transformers"
    shape          a model's name, or the path of its config.json
    prompts        token ids, all prompts of one length
    gen_tokens     tokens to generate for each, more than 2
    device         "cuda" or "cpu"
    dtype          "float16", "bfloat16" or "float32"
    device_memory  bytes that torch may allocate on the device; enforced on CUDA
    cache          of transformers: "offloaded", "static" or "dynamic"
    folder         of FlexGen, for what it would keep on a disk
    mini_batch     of FlexGen: requests of a GPU batch
    weight_percent of FlexGen: weights on the GPU
    cache_percent  of FlexGen: keys and values on the GPU
    sep_layer      of FlexGen: attention and MLP are layers of their own, as it is shipped
    page_locked    of FlexGen: its host cache is page-locked, which is our patch

The answer: {"seconds", "seconds_of_2", "decode_s", "cupti", "device_peak_bytes", "host_peak_bytes"}, or "missing" or
"error" alone. Weights are random (FlexGen's dummy weights are ones), since only sizes matter, and loading them is not
timed. A run over a few tokens of each prompt loads kernels and allocates; then two tokens and all tokens are timed, and
their difference is the decode's time. CUPTI follows the kernels of the run of two tokens alone.
"""

# pyright: reportMissingImports=false
# Peers are installed in folders of their own, which the type checker does not see.

import resource
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from experiments.peers.children import Side, serve

WARM_TOKENS, WARM_ANSWER = 16, 4  #: of each prompt, and generated: a compiled forward takes three steps to settle

#: Generates a number of tokens for each prompt, with room for the whole answer.
Generate = Callable[[list[list[int]], int], object]


def timed(run: Generate, request: dict) -> dict:
    """Time ``run`` over two tokens and over all."""
    from experiments.bench.harness import seconds_of
    from experiments.gpu.watch import under_cupti

    on_cuda, prompts, tokens = request["device"] == "cuda", request["prompts"], request["gen_tokens"]

    def waited(few: list[list[int]], count: int) -> None:
        import torch

        run(few, count)
        if on_cuda:
            torch.cuda.synchronize()

    waited([prompt[:WARM_TOKENS] for prompt in prompts], min(WARM_ANSWER, tokens))
    cupti = under_cupti(lambda: waited(prompts, 2), on_cuda)
    two_s = cupti["wall_s"] if "wall_s" in cupti else seconds_of(lambda: waited(prompts, 2))
    seconds = seconds_of(lambda: waited(prompts, tokens))
    return {"seconds": seconds, "seconds_of_2": two_s, "decode_s": seconds - two_s, "cupti": cupti}


def run_transformers(request: dict) -> dict:
    """Time transformers' greedy generate with weights on the device. "offloaded": keys and values on the host except
    two layers'; "static": on the device, with the forward that generate compiles for it on CUDA."""
    import torch
    from transformers import AutoModelForCausalLM, StaticCache

    from experiments.peers.random_opt import config_of
    from flexhybrid.core.model.shape import shape_of

    length = len(request["prompts"][0]) + request["gen_tokens"]
    with torch.device(request["device"]):
        config = config_of(shape_of(request["shape"]), eos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request["dtype"])).eval()
    static = StaticCache(config=model.config, max_cache_len=length) if request["cache"] == "static" else None

    @torch.inference_mode()
    def run(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts, device=request["device"])
        options = {"cache_implementation": request["cache"]}
        if static is not None:  # one cache for all runs: another would be compiled for, and captured, again
            static.reset()
            options = {"past_key_values": static}
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **options)
        assert out.shape == (len(ids), ids.shape[1] + count)

    return timed(run, request)


def run_flexgen(request: dict) -> dict:
    """Time FlexGen's engine over dummy weights: activations on the GPU, as in its published runs."""
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
    from flexgen.utils import ExecutionEnv

    if request["device"] != "cuda":
        raise RuntimeError("flexgen runs on CUDA alone")
    if request["page_locked"]:
        lock_pages(TorchDevice)
    gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(request["folder"])
    env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
    on_gpu, cached, mini_batch = request["weight_percent"], request["cache_percent"], request["mini_batch"]
    packed = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    policy = Policy(
        gpu_batch_size=mini_batch, num_gpu_batches=len(request["prompts"]) // mini_batch, w_gpu_percent=on_gpu,
        w_cpu_percent=100 - on_gpu, cache_gpu_percent=cached, cache_cpu_percent=100 - cached, act_gpu_percent=100,
        act_cpu_percent=0, overlap=True, sep_layer=request["sep_layer"], pin_weight=True, cpu_cache_compute=False,
        attn_sparsity=1.0, compress_weight=False, comp_weight_config=packed, compress_cache=False,
        comp_cache_config=packed,
    )  # fmt: skip
    length = len(request["prompts"][0]) + request["gen_tokens"]
    try:
        model = OptLM(f"facebook/{request['shape']}", env, "_DUMMY_", policy)
        # All runs have room for the same number of tokens, so that their caches are allocated alike.
        return timed(
            lambda prompts, count: model.generate(prompts, max_new_tokens=length - len(prompts[0]), cut_gen_len=count),
            request,
        )
    finally:
        env.close_copy_threads()  # they are no daemons: the process would not end


def lock_pages(device_class: Any) -> None:
    """Patch FlexGen's TorchDevice: page-lock the host memory of its cache, which it asks for unlocked.

    FlexGen then copies without its relays and their threads. Torch's own page-locked memory would round up to powers of
    two. Memory is kept for the next run, so that, as with ours, locking is not timed.
    """
    from flexgen.pytorch_backend import DeviceType, TorchTensor, np_dtype_to_torch_dtype

    from flexhybrid.runtime.storage.host_memory import HostMemory

    memory, plain, kept = HostMemory(pinned=True), device_class.allocate, deque()

    def allocate(self, shape, dtype, pin_memory=None, name=None):
        if self.device_type != DeviceType.CPU or pin_memory is not False:
            return plain(self, shape, dtype, pin_memory, name)
        if kept and kept[0][1]() is None and kept[0][0].shape == tuple(shape):  # FlexGen has deleted its tensor
            data, _ = kept.popleft()
        else:
            data = memory.zeros(tuple(shape), np_dtype_to_torch_dtype[dtype])
        given = data[:]
        kept.append((data, weakref.ref(given)))
        return TorchTensor.create_from_torch(given, self, name=name)

    device_class.allocate = allocate


def within_budget(run: Side) -> Side:
    """Bound the device memory of ``run`` on CUDA, and add the peaks of device and host memory to its answer."""

    def side(request: dict) -> dict:
        import torch

        on_cuda = request["device"] == "cuda"
        if on_cuda:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request["device_memory"] / total))
        answer = run(request)
        peak = torch.cuda.max_memory_allocated() if on_cuda else None
        host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return answer | {"device_peak_bytes": peak, "host_peak_bytes": host_peak}

    return side


if __name__ == "__main__":
    sides = {"flexgen": run_flexgen, "transformers": run_transformers}
    serve({name: within_budget(run) for name, run in sides.items()})
