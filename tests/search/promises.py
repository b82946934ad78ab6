"""Whether systems keep what their papers say of them: never slower than a baseline, by prediction, in random settings.

KVPR says that "in the worst-case scenario, the method performs no worse than the baseline" (section 3.3). InfiniGen
"consistently provides performance improvements with larger models, longer sequence lengths, and larger batch sizes"
(section 1), and CAPTURE promises no such thing: where they lose is shown beside, as is
where KVPR's eq. 10 alone does. ``PYTHONPATH=. python tests/search/promises.py`` tries SETTINGS of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from tqdm import tqdm

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from policy_search.systems import Setting, system
from sim import catalogue, presets
from sim.simulate import simulate

MODELS = ("opt-1.3b", "opt-6.7b", "opt-13b", "opt-30b", "llama-2-7b", "llama-3-8b")
MACHINES = ("t4", "rtx4090", "a100-40g", "h100")
SETTINGS = 2000
TOLERANCE = 1e-9  #: relative, of sums in another order


@dataclass(frozen=True)
class Promise:
    """A system and a policy that it is never slower than. A system is given by name, or as a policy to be run as
    such."""

    name: str
    system: str | Policy
    baseline: str | Policy
    judged: bool = True
    decode: bool = False  #: of the decode alone: storing both copies of the prompts is not a split's


@dataclass
class Kept:
    """Results of a promise: seconds over the baseline's, less 1, and the settings in which it was slower."""

    excess: list[float] = field(default_factory=list)
    where: Counter = field(default_factory=Counter)

    @property
    def num_worse(self) -> int:
        return sum(self.where.values())

    @property
    def worst(self) -> float:
        return max(self.excess, default=0.0)


def promises() -> list[Promise]:
    kv, row = presets.kvpr_column(), presets.kvpr_row()
    column = replace(kv, name="FlexGen's stream", cache={"kv@host": 1.0})
    return [
        Promise("KVPR, column", "kvpr_column", column),
        Promise("KVPR, column, pipeline rule", "kvpr_column(split=pipeline)", column),
        Promise("KVPR, row", "kvpr_row(weights_device=1)", replace(row, name="Accelerate", cache={"kv@host": 1.0})),
        Promise(
            "InfiniGen against all of the cache",
            "infinigen(weights_device=1)",
            presets.offloaded(overlap="full"),
            judged=False,
        ),
        Promise("decode by eq. 10 alone", kv, column, judged=False, decode=True),
        Promise(
            "decode by the pipeline rule alone", presets.kvpr_column("pipeline"), column, judged=False, decode=True
        ),
        Promise("CAPTURE against KV alone", "capture", presets.kv_only(), judged=False),
        Promise("CAPTURE against ACT alone", "capture", presets.act_only(), judged=False),
    ]


def random_setting(rng: np.random.Generator) -> Setting:
    """Draw a model, a machine with its link 1/4 to 4 times as fast, and a batch; contexts are assembled."""
    hardware = catalogue.load(str(rng.choice(MACHINES)))
    rate = 1e-9 / hardware.line("load_kv", "h2d").s_per_byte * 4 ** rng.uniform(-1, 1)
    shape = shape_by_name(str(rng.choice(MODELS)))
    prompt, generated = round(2 ** rng.uniform(4, 10.5)), round(2 ** rng.uniform(1, 7))
    prompt = min(prompt, shape.max_positions - generated)
    hardware = hardware.with_link_rate(rate)
    hardware = replace(hardware, device_memory=None, host_memory=None, attends_in_place=False)
    return Setting(Problem(shape=shape, hardware=hardware), round(2 ** rng.uniform(0, 8)), prompt, generated)


def seconds_of(what: str | Policy, setting: Setting, decode: bool = False) -> float:
    """Return the predicted seconds of a run of a system or policy, or of its decode."""
    policy = what if isinstance(what, Policy) else system(what, setting).policy
    run = simulate(setting.problem, policy, setting.batch, setting.prompt_tokens, setting.max_tokens)
    return run.decode_s if decode else run.total_s


def kept(asked: list[Promise], count: int, seed: int = 23, progress: bool = False) -> dict[str, Kept]:
    """Return results by name over ``count`` settings; a setting that a system refuses is drawn again for all."""
    rng, found, done = np.random.default_rng(seed), {promise.name: Kept() for promise in asked}, 0
    with tqdm(total=count, unit="setting", leave=False, disable=not progress) as bar:
        while done < count:
            setting = random_setting(rng)
            try:
                pairs = [[seconds_of(what, setting, p.decode) for what in (p.system, p.baseline)] for p in asked]
            except InputError:
                continue
            done += 1
            bar.update()
            for promise, (ours, theirs) in zip(asked, pairs, strict=True):
                of = found[promise.name]
                of.excess.append(ours / theirs - 1)
                if of.excess[-1] > TOLERANCE:
                    of.where[_kind(setting)] += 1
    return found


def _kind(setting: Setting) -> str:
    """Describe a setting in words."""
    context = setting.prompt_tokens + setting.max_tokens
    length = next((f"context up to {end}" for end in (128, 512) if context <= end), "longer context")
    return f"{length}, {'up to 8 requests' if setting.batch <= 8 else 'more requests'}"


if __name__ == "__main__":
    for name, of in kept(promises(), SETTINGS, progress=True).items():
        print(f"{name}: slower in {of.num_worse} of {SETTINGS}, by {of.worst:.1%} at most; {dict(of.where)}")
