"""Test layers of experts: which tensors are experts, which stay unpacked, and the memory that a layer needs."""

import weakref
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from runs import run_wave
from tiny_models import save_tiny, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from toy_machine import machine

from flexhybrid.core.memory import memory_plan
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import kv_only

pytest.importorskip("greenlet")


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that exist."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not func.is_view and "set_" not in func.__name__:
                storage = tensor.untyped_storage()
                given = {
                    t.untyped_storage()._cdata
                    for t in torch.utils._pytree.tree_leaves((args, kwargs))
                    if isinstance(t, torch.Tensor)
                }
                if storage._cdata not in self.sizes and storage._cdata not in given:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.gone, storage._cdata)
        return result

    def gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


TYPES = ["qwen3_moe", "gpt_oss", "deepseek_v2", "glm4_moe", "phimoe", "gemma2", "llama"]


@pytest.mark.parametrize("model_type", TYPES)
def test_the_plan_holds_the_memory_that_a_layer_needs(tmp_path, model_type):
    save_tiny(tmp_path, model_type, hidden_size=128)
    checkpoint, cpu = Checkpoint(tmp_path, modules=True), torch.device("cpu")
    for dtype, batch in (("float32", 1), ("bfloat16", 16)):
        workload = Workload.uniform(batch, 64, 2)
        weights = Weights(checkpoint.shape, checkpoint, dtype, cpu, kv_only())
        peaks = []
        with closing(weights), Session.of(weights, kv_only(), workload, hardware=machine()) as session:
            plan = memory_plan(session.wave.problem, kv_only(), session.engine.buffers.sizes)["device"]

            def run_tasks(session=session, peaks=peaks) -> None:
                counted = Live()
                for task in stream(session.wave):
                    if task.iteration == 0 and task.verb in ("project", "attend_prefill", "finish"):
                        if task.verb == "project":
                            counted = Live()
                        with counted:
                            session.executor.perform(task)
                        peaks.append(counted.peak)
                    else:
                        session.executor.perform(task)

            hosted(run_tasks)
        scores = plan.get("attention scores", 0)  # how many are made at a time, the way to attend decides
        assert max(peaks) <= plan["workspace"] + scores and plan["workspace"] <= 1.35 * max(peaks)


#: Type -> whether some layer has experts, and the share of them that a token is multiplied with.
EXPERTS = {
    "lfm2": (False, 1.0),  # its three-dimensional tensors are kernels of convolutions
    "hunyuan_v1_moe": (True, 0.5),  # its configuration has a list
    "llama4_text": (True, 1.0),  # all experts are computed
    "nemotron_h": (True, 0.5),  # layers of experts alone
    "gpt_oss": (True, 0.5),
    "gemma2": (False, 1.0),
}


@pytest.mark.parametrize("model_type", EXPERTS)
def test_what_counts_as_experts(tmp_path, model_type):
    config = tiny_config(model_type)
    if model_type == "hunyuan_v1_moe":
        config.moe_topk = [2] * config.num_hidden_layers
    config.save_pretrained(tmp_path)
    modules = empty_model(tmp_path).shape.modules
    assert (modules.has_experts, modules.experts_share) == (
        EXPERTS[model_type][0],
        pytest.approx(EXPERTS[model_type][1]),
    )
    named = {t.name for kind in modules.kinds for t in kind if t.experts}
    assert all(".experts." in name for name in named)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "glm4_moe"])
def test_routers_and_biases_keep_all_bits(tmp_path, model_type):
    widths = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    reference = save_tiny(tmp_path, model_type, **dict.fromkeys(widths, 64))
    checkpoint, cpu = Checkpoint(tmp_path), torch.device("cpu")
    policy = replace(kv_only(), weights=Placement(0.5, 0.5), bits=Bits(weights=4))
    weights = Weights(checkpoint.shape, checkpoint, "float32", cpu, policy)
    own, kept, packed = dict(reference.model.layers[-1].named_parameters()), set(), set()
    with closing(weights):
        last = checkpoint.shape.num_layers - 1
        slot = weights.on_host[last]
        spots = {spot.name: spot for spot in weights.placed_of(last).layout.spots}
        for name, parts in weights.views(last, slot).items():
            whole = torch.cat([part.flatten() for part in parts])
            stored = spots[name].end - spots[name].start
            if whole.dtype == torch.float32:
                assert torch.equal(whole, own[name].flatten()) and stored == 4 * own[name].numel()
                kept.add(name)
            else:
                packed.add(name)
    routers = {name for name in own if ".gate." in name or ".router." in name or "expert_gate" in name}
    assert routers and routers | {name for name in own if "bias" in name} <= kept
    assert all(own[name].dim() == 1 for name in kept - routers if "bias" not in name)
    assert any("experts." in name for name in packed) and any("q_" in name for name in packed)
    assert run_wave(checkpoint, policy, [[5, 9, 33], [2]], 4).tokens
