"""The virtual clock against measured decodes of models whose layers are of different kinds, on the paced link.

Six models with random weights, each of whose sizes come from a configuration of transformers: grouped heads by a file
of our own, the others through transformers' layers. The machine is profiled at each model's layer sizes, by fewer runs
than ``flexhybrid profile`` makes: all weights are streamed here, and nothing is packed.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from experiments.bench.harness import Table, bench
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape, has_own_file, shape_from_config
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.predicted import virtual_decode
from flexhybrid.jobs.compare.speed import LAST, Bench, PolicyRun
from flexhybrid.jobs.profile.job import fastest_dtype
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.profiling.profile import MIXES, profile
from flexhybrid.runtime.session import random_prompts
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from policy_search.fit import fit_hardware
from sim.presets import act_only, hybrid, kv_only
from sim.virtual_clock import summarize

BATCH, CONTEXT, MAX_TOKENS, MINI_BATCH = 16, 496, 6, 8
BOUND = MINI_BATCH * (CONTEXT + 17)
WORKLOAD = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
LINK_GB_PER_S = 0.5
ROUNDS, KEPT = 8, 4  #: of each policy; those that other processes disturbed least
WINDOW = 128

#: Sizes of all models, by the names that configurations have for them.
SIZES: dict[str, Any] = dict(
    hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    intermediate_size=1536, vocab_size=2048, max_position_embeddings=2048, tie_word_embeddings=False,
    sliding_window=WINDOW, pad_token_id=None, bos_token_id=None, eos_token_id=None, dtype="bfloat16",
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=384, n_shared_experts=1, n_group=1, topk_group=1,
    first_k_dense_replace=2,
)  # fmt: skip
#: Kind -> (model type, its own sizes).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("granite", {}),
    "windows in all layers": ("mistral", {}),
    "windows in five of six layers": ("gemma3_text", {}),
    "experts behind dense layers": ("glm4_moe", _EXPERTS),
    "grouped heads, their norms": ("qwen3", {"num_key_value_heads": 2}),
    "latent attention, experts": (
        "deepseek_v3",
        _EXPERTS | dict(num_key_value_heads=8, head_dim=32, q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=32,
                        qk_rope_head_dim=32, v_head_dim=64),
    ),
}  # fmt: skip


class Measured(NamedTuple):
    """Tokens a second of a model's decode under a policy."""

    policy: str
    predicted: float
    measured: tuple[float, ...]  #: by round
    others: tuple[float, ...]  #: share of the cores that other processes used

    @property
    def error(self) -> float:
        return self.predicted / statistics.median(self.measured) - 1


def save_config(folder: Path, model_type: str, own: dict[str, Any]) -> None:
    """Write the config.json of a kind's model."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = vars(CONFIG_MAPPING[model_type]())
    sizes = {name: value for name, value in (SIZES | own).items() if name in known}
    cleared = {name: None for name in ("layer_types", "mlp_layer_types") if known.get(name)}
    config = AutoConfig.for_model(model_type, **cleared, **sizes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")


def shape_in(folder: Path) -> ModelShape:
    """Return the shape that a folder with nothing but a config.json has."""
    return shape_from_config(folder) if has_own_file(folder) else empty_model(folder).shape


def profiled(shape: ModelShape, dtype: str) -> Hardware:
    """Return this machine's lines for a model."""
    result = profile(shape, dtype, torch.device("cpu"), LINK_GB_PER_S, runs=MIXES)
    return fit_hardware(
        result.samples, name="bench", device="cpu", dtype=dtype, attends_in_place=result.attends_in_place
    ).with_link_rate(LINK_GB_PER_S)


def policies() -> list[Policy]:
    return [kv_only(BOUND), hybrid(0.5, BOUND), act_only(BOUND)]


def measure(shape: ModelShape, dtype: str) -> list[Measured]:
    """Measure a model's decode under each policy, interleaved, and predict it."""
    hardware, device = profiled(shape, dtype), torch.device("cpu")
    problem = Problem(shape=shape, dtype=dtype, device="cpu", hardware=hardware)
    prompts = random_prompts(WORKLOAD, shape.vocab)
    make_weights = partial(Weights, shape, RandomWeights(shape), dtype, device)
    with Bench(make_weights, problem, prompts, MAX_TOKENS, PacedDevice(device, LINK_GB_PER_S)) as bench:
        runs = [PolicyRun(bench, policy) for policy in policies()]
        rows = bench.measure(runs, ROUNDS, lambda policy: False, lambda step: None)
        found = []
        for row in rows:
            predicted = summarize(virtual_decode(problem, row.policy, WORKLOAD), LAST).decode_tokens_per_s
            rounds = sorted(zip((share or 0.0 for share in row.others_cpu_share), row.decode_tokens_per_s))[:KEPT]
            others, measured = zip(*rounds, strict=True)
            found.append(Measured(row.policy.name, predicted, measured, others))
    return found


@bench("layers")
def bench_layer_kinds(table: Table) -> None:
    """Add the virtual clock's error of every kind, their median and the worst."""
    errors, shares = [], []
    for kind, (model_type, own) in tqdm(KINDS.items(), unit="kind", leave=False):
        with TemporaryDirectory() as name:
            folder = Path(name)
            save_config(folder, model_type, own)
            shape = shape_in(folder)
            rows = measure(shape, fastest_dtype(shape, torch.device("cpu")))
        of_kind = [abs(row.error) for row in rows]
        tqdm.write(
            f"     {kind} ({model_type}): median error {100 * statistics.median(of_kind):.1f} %; tokens/s (error): "
            + ", ".join(f"{row.policy} {statistics.median(row.measured):.1f} ({row.error:+.1%})" for row in rows)
        )
        errors += [row.error for row in rows]
        shares += [share for row in rows for share in row.others]
    table.errors(f"virtual clock vs measured, {len(KINDS)} kinds of models", errors, 8, 20)
    table.disturbed("rounds of kinds of models", shares)
