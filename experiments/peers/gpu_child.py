"""The process in which one side of ``gpu_peers`` runs one batch; started by file name.

The request (``experiments.peers.child``):

    side           "ours", "accelerate", "offloaded_cache" or "flexgen"
    shape          an OPT's name, or the path of its config.json
    prompts        token ids, all prompts of one length
    gen_tokens     tokens to generate for each
    device         "cuda" or "cpu"
    dtype          "float16", "bfloat16" or "float32"
    device_memory  bytes that torch may allocate on the device; enforced on CUDA
    host_memory    bytes of ours for the host
    folder         of FlexGen, for what it would keep on a disk
    mini_batch     of ours and of FlexGen: requests that are computed together
    weight_percent of FlexGen: weights on the GPU
    cache_percent  of FlexGen: keys and values on the GPU

The answer: {"seconds", "device_peak_bytes", "host_peak_bytes"} (and ours: "policy", "num_waves"), or "missing" or
"error" alone. Weights are random (FlexGen's dummy weights are ones), since only sizes matter; loading is not timed, and
a short run precedes the timed one.
"""

# pyright: reportMissingImports=false
# Peers are installed in folders of their own, which the type checker does not see.

import resource
import time

from experiments.peers.child import Side, serve


def build_model(request: dict, device: str):
    """Return transformers' model of the shape on ``device``. Its values repeat one random block: drawing billions of
    random numbers would take longer than the run."""
    import torch
    from transformers import OPTForCausalLM

    from experiments.peers.random_opt import opt_config
    from flexhybrid.core.model.shape import shape_of

    config = opt_config(shape_of(request["shape"]), eos_token_id=None)
    with torch.device("meta"):
        model = OPTForCausalLM(config).to(getattr(torch, request["dtype"])).eval()
    model.to_empty(device=device)
    model.tie_weights()
    block = torch.randn(1 << 20, device=device).mul_(0.02).to(getattr(torch, request["dtype"]))
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            full = len(flat) // len(block) * len(block)
            flat[:full].view(-1, len(block)).copy_(block)
            flat[full:].copy_(block[: len(flat) - full])
    return model


def timed(run, request: dict) -> dict:
    """Time ``run(gen_tokens)`` after a warm-up run of two tokens."""
    import torch

    run(2)
    if request["device"] == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run(request["gen_tokens"])
    if request["device"] == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - began}


def generate_with(model, request: dict, **options) -> dict:
    """Time transformers' greedy generate over the batch."""
    import torch

    ids = torch.tensor(request["prompts"], device=request["device"])
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def run(tokens: int) -> None:
        out = model.generate(
            input_ids=ids, attention_mask=mask, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, **options
        )
        assert out.shape == (len(ids), ids.shape[1] + tokens)

    return timed(run, request)


def run_accelerate(request: dict) -> dict:
    """Time accelerate's cpu_offload: all weights on the host, keys and values on the device."""
    from accelerate import cpu_offload

    model = build_model(request, "cpu")
    return generate_with(cpu_offload(model, execution_device=request["device"]), request)


def run_offloaded_cache(request: dict) -> dict:
    """Time transformers' offloaded cache: weights on the device, keys and values on the host except two layers'."""
    return generate_with(build_model(request, request["device"]), request, cache_implementation="offloaded")


def run_flexgen(request: dict) -> dict:
    """Time FlexGen's engine over dummy weights: activations on the GPU, as in its published runs."""
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice
    from flexgen.utils import ExecutionEnv

    if request["device"] != "cuda":
        raise RuntimeError("flexgen runs on CUDA alone")
    gpu, cpu, disk = TorchDevice("cuda:0"), TorchDevice("cpu"), TorchDisk(request["folder"])
    env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
    on_gpu, cached, mini_batch = request["weight_percent"], request["cache_percent"], request["mini_batch"]
    packed = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
    policy = Policy(
        gpu_batch_size=mini_batch, num_gpu_batches=len(request["prompts"]) // mini_batch, w_gpu_percent=on_gpu,
        w_cpu_percent=100 - on_gpu, cache_gpu_percent=cached, cache_cpu_percent=100 - cached, act_gpu_percent=100,
        act_cpu_percent=0, overlap=True, sep_layer=True, pin_weight=True, cpu_cache_compute=False, attn_sparsity=1.0,
        compress_weight=False, comp_weight_config=packed, compress_cache=False, comp_cache_config=packed,
    )  # fmt: skip
    try:
        model = OptLM(f"facebook/{request['shape']}", env, "_DUMMY_", policy)
        return timed(lambda tokens: model.generate(request["prompts"], max_new_tokens=tokens), request)
    finally:
        env.close_copy_threads()  # they are no daemons: the process would not end


def run_ours(request: dict) -> dict:
    """Time our engine under the policy of "auto" for this batch, in as many waves as the budgets require."""
    import torch

    from flexhybrid.core.model.shape import shape_of
    from flexhybrid.core.problem import Budgets, Problem
    from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
    from flexhybrid.core.wave import admit
    from flexhybrid.core.waves import split_waves
    from flexhybrid.core.workload import Workload
    from flexhybrid.resolve import PacedDevice, best_policy, named_hardware
    from flexhybrid.runtime.engine import Engine, RunControl
    from flexhybrid.runtime.profiling.attention_paths import fastest_paths
    from flexhybrid.runtime.session import Session
    from flexhybrid.runtime.storage.loader import RandomWeights
    from flexhybrid.runtime.storage.weights import Weights

    shape, prompts = shape_of(request["shape"]), request["prompts"]
    device = torch.device(request["device"])
    problem = Problem(
        shape=shape,
        dtype=request["dtype"],
        hardware=named_hardware(None, PacedDevice(device)),
        budgets=Budgets(request["device_memory"], request["host_memory"]),
        device=device.type,
        attention=fastest_paths(device.type, request["dtype"], shape.queries_per_key, shape.head_dim),
    )
    workload = Workload.uniform(len(prompts), len(prompts[0]), request["gen_tokens"])
    policy = best_policy(problem, workload)
    waves = split_waves(problem, policy, workload)

    def wave_of(requests: int, tokens: int):
        lengths = Workload.uniform(requests, len(prompts[0]), tokens)
        return admit(problem, policy, lengths)

    sizes = buffer_sizes(wave_of(len(waves[0]), request["gen_tokens"]))  # the largest wave is the first
    weights = Weights(shape, RandomWeights(shape, device=device.type), request["dtype"], device, policy)
    engine = Engine(weights, policy, sizes)

    def run(tokens: int) -> None:
        for members in waves:
            ids = [prompts[i] for i in members]
            result = Session(engine, wave_of(len(ids), tokens), ids).generate(RunControl())
            assert all(len(answer) == tokens for answer in result.tokens)

    return timed(run, request) | {"policy": policy.to_dict(), "num_waves": len(waves)}


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
    sides = {"ours": run_ours, "accelerate": run_accelerate, "offloaded_cache": run_offloaded_cache}
    sides["flexgen"] = run_flexgen
    serve({name: within_budget(run) for name, run in sides.items()})
