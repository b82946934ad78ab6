"""``flexhybrid simulate``: one run of one system, predicted."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape, shape_of
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.units import gib, parse_bytes
from policy_search.systems import Setting, System, system
from sim import catalogue
from sim.simulate import SimulatedRun, simulate

Budgets = dict[str, str | None]  #: tier -> memory as text, in place of the machine's own; None: the machine's
Note = Callable[[str], object]  #: takes a line for the user

#: Said of a system that would keep all weights on the device where they do not fit.
WEIGHTS_STREAMED = "not all weights fit the device beside the cache, the rest is streamed"


def setting_of(point: dict, budgets: Budgets | None = None, note: Note | None = None) -> Setting:
    """Return the setting of a point: model, hardware, batch, prompt_len, gen_len and dtype by name.

    ``note`` takes a line about a profile that was taken in company, and one for each budget above the machine's memory;
    such budgets ask what more memory would bring. Raise InputError, naming the key.
    """
    for name in ("batch", "prompt_len", "gen_len"):
        check(name, point[name], is_integer(point[name]) and point[name] >= 1, "a whole number >= 1")
    shape = shape_of(point["model"])
    hardware = machine_of(point["hardware"], shape)
    if note and hardware.company:
        from flexhybrid.jobs.profile.job import company_note  # loads torch

        note(company_note(hardware) or "")
    for tier, text in (budgets or {}).items():
        if (budget := parse_bytes(text)) is not None:
            memory = getattr(hardware, f"{tier}_memory")
            if note and memory is not None and budget > memory:
                note(f"--{tier}-memory {text} is more than the {gib(memory)} that {hardware.name} has")
            no_reserve = {"device_reserve": 0} if tier == "device" else {}  # a budget may be filled
            hardware = replace(hardware, **{f"{tier}_memory": budget}, **no_reserve)
    last = point["prompt_len"] + point["gen_len"]
    if last > shape.max_positions:
        raise InputError(
            f"prompt_len {point['prompt_len']} + gen_len {point['gen_len']} are {last} tokens; {shape.name} has "
            f"positions for {shape.max_positions}. For longer ones give a config.json with larger "
            "max_position_embeddings as model"
        )
    usual = hardware.dtype if hardware.name == catalogue.LOCAL else "float16"  # a measured machine's own
    problem = Problem(shape=shape, dtype=point.get("dtype") or usual, hardware=hardware)
    return Setting(problem, point["batch"], point["prompt_len"], point["gen_len"])


def machine_of(hardware: str, shape: ModelShape) -> Hardware:
    """Return a machine by name or from a file; "local" is this one, as a run of the model would take it."""
    if hardware.lower() != catalogue.LOCAL:
        return catalogue.load(hardware)
    from flexhybrid.jobs.profile.job import local_machine  # loads torch

    return local_machine(shape)


def run_simulate(
    point: dict, policy: Path | None = None, budgets: Budgets | None = None, note: Note | None = None
) -> SimulatedRun:
    """Return one predicted run. ``policy``: a policy file in place of the point's system, which may also be one.
    ``budgets`` and ``note`` as in ``setting_of``."""
    setting = setting_of(point, budgets, note)
    if policy is None and point["system"].endswith(".json"):
        policy = Path(point["system"])
    made = system(point["system"], setting) if policy is None else System("", Policy.load(policy), setting.machine)
    return simulate_system(setting, made, point.get("clock", "closed"))


def simulate_system(setting: Setting, made: System, clock: str = "closed") -> SimulatedRun:
    """Return the predicted run of a system in a setting, on the machine as the system sees it."""
    problem = replace(setting.problem, hardware=made.hardware)
    return simulate(problem, made.policy, setting.batch, setting.prompt_tokens, setting.max_tokens, clock=clock)


def describe(outcome: SimulatedRun) -> str:
    """Return a few lines of text."""
    o = outcome
    memory = ", ".join(f"{tier} {gib(size)}" for tier, size in o.peak_bytes.items() if size)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in o.busy.items() if share >= 0.005)
    lines = [
        f"{o.policy.name}: {o.tokens_per_s:.4g} tokens/s; decode {o.decode_tokens_per_s:.4g} tokens/s",
        f"  prefill {o.prefill_s:.4g} s, decode {o.decode_s:.4g} s; {o.batch} requests in {_waves(o)}, "
        f"{o.num_mini_batches} mini-batch{'es' * (o.num_mini_batches > 1)} {'a wave' if o.num_waves > 1 else 'in all'}",
        f"  weights {_shares(asdict(o.policy.weights))}; cache {_shares(o.policy.cache)}",
        f"  memory: {memory}",
        f"  busy while decoding: {busy or 'nothing'}; bound by {o.binding}",
    ]
    if o.policy.name == "resident" and o.policy.weights.device < 1:
        lines.insert(3, f"  not resident: {WEIGHTS_STREAMED}")
    for link, kinds in o.traffic_bytes.items():
        if total := sum(kinds.values()):
            parts = ", ".join(f"{kind} {gib(size)}" for kind, size in kinds.items() if size)
            lines.append(f"  {link}: {gib(total)} ({parts})")
    return "\n".join(lines)


def _waves(o: SimulatedRun) -> str:
    """Return "1 wave", "3 waves of 40", or "2 waves of 50 and one of 28"."""
    remainder = o.batch % o.wave
    if o.num_waves == 1:
        return "1 wave"
    full = o.num_waves - (remainder > 0)
    return f"{f'{full} waves' if full > 1 else 'one wave'} of {o.wave}{f' and one of {remainder}' if remainder else ''}"


def _shares(shares: Mapping[str, float]) -> str:
    """Return "device 58.3%, host 41.7%"."""
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)
