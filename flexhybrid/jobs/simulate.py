"""``flexhybrid simulate``: predicts one run of one system."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

from flexhybrid.core.admission import batch_size, open_batch
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS
from flexhybrid.core.errors import InputError, check, flag, is_integer
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import kept_shares, memory_plan, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.units import counted, gib, parse_bytes
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.rates import RATES, company_note, pace_of_link, with_given_rates
from policy_search.papers.at_best import at_best, best_batch
from policy_search.systems import Setting, System, system
from sim import catalogue
from sim.queue_clock import QueueRun, price_queue, walk_queue
from sim.simulate import MOST_TASKS, TASKS_PER_POSITION, SimulatedRun, simulate

#: Difference between systems' shares of weights on the device above which UNLIKE is printed.
UNLIKE_WEIGHTS = 0.1
UNLIKE = (
    "  note: these systems keep different shares of the weights on the device, which may matter more than their "
    'caches; to compare at one share, write it as an option: `simulate --compare "kv_only(weights_device=0.5)"`'
)

#: Note on a system that keeps all weights on the device if they fit.
WEIGHTS_STREAMED = "not all weights fit the device with the cache, the rest is streamed"

Note = Callable[[str], object]  #: prints a line for the user

#: Keys of a point (one prediction's inputs), named like the flags: lengths, memories, model, machine and its rates.
LENGTHS = ("batch", "prompt_len", "gen_len")
MEMORIES = tuple(f"{tier}_memory" for tier in TIERS)
POINT = ("model", "hardware", "host", *LENGTHS, "dtype", *RATES, *MEMORIES)
#: Fields of a policy that a point may also have, in place of the system's own.
POLICY_FIELDS = (
    *("weights.device", "weights.disk", "bits.weights", "bits.kv", "bits.act"),
    *(f"cache.{kind}@{tier}" for kind in ("kv", "act") for tier in TIERS),
    f"cache.{ATTENDED_ENTRY}",
    *("schedule", "attention", "hidden", "overlap", "packing", "max_mini_batch_tokens", "max_batch"),
    "experts.batch",
)
AUTO = "auto"  #: value of "batch": the batch with the most tokens a second

MOST_AT_A_TIME = 1024  #: limit on a queue's running requests, as in a run
SHORT_S = 60.0  #: predicted seconds below which NO_START is printed
NO_START = "  not counted: the start of a run, some seconds for loading weights and compiling kernels"


def setting_of(point: Mapping, note: Note | None = None) -> Setting:
    """Return the model, machine and requests of a point, a mapping with the keys POINT.

    ``note`` gets a line if the machine's profile was disturbed, and one for each memory larger than the machine's own:
    such memories are allowed. Raise InputError that names the key for a value that cannot be used.
    """
    if missing := [flag(name) for name in LENGTHS if point[name] is None]:
        raise InputError(f"give the size of the work: {', '.join(missing)} (or the lengths of a queue, --lengths)")
    for name in LENGTHS:
        check(name, point[name], is_integer(point[name]) and point[name] >= 1, "a whole number >= 1")
    shape = shape_to_simulate(point["model"])
    if point.get("host") is None and point["hardware"].lower() == catalogue.LOCAL:
        from flexhybrid.jobs.profile.job import local_machine  # loads torch

        machine = local_machine(shape, point.get("dtype"))
    else:
        machine = catalogue.load(point["hardware"], point.get("host"))
    hardware = with_given_rates(machine, point)
    if note and (disturbed := company_note(hardware)):
        note(disturbed)
    sizes = {name: size for name in MEMORIES if (size := parse_bytes(point.get(name))) is not None}
    for name, size in sizes.items():
        memory = getattr(hardware, name)
        if note and memory is not None and size > memory:
            note(f"{flag(name)} {point[name]} is more than the {gib(memory)} that {hardware.name} has")
    hardware = hardware.with_memory({name.removesuffix("_memory"): size for name, size in sizes.items()})
    last = point["prompt_len"] + point["gen_len"]
    if last > shape.max_positions:
        raise InputError(
            f"{point['prompt_len']} tokens of input and {point['gen_len']} of output are {last}; {shape.name} has "
            f"positions for {shape.max_positions}. For longer requests give --model a config.json with larger "
            "max_position_embeddings"
        )
    # As in a run: a float32 checkpoint runs in float32, a 16-bit one on a CPU in the profile's faster dtype.
    usual = hardware.dtype if hardware.name == catalogue.LOCAL and shape.dtype != "float32" else shape.dtype
    problem = Problem(shape=shape, dtype=point.get("dtype") or usual, hardware=hardware)
    return Setting(problem, point["batch"], point["prompt_len"], point["gen_len"])


def asked_record(machine: Hardware, asked: Mapping) -> dict:
    """Return a prediction's inputs and the origin of its machine's rates, as plain JSON."""
    inputs = {name: value for name, value in asked.items() if value is not None}
    inputs |= {name: parse_bytes(inputs[name]) for name in MEMORIES if name in inputs}
    paced = {"paced": words} if (words := pace_of_link(machine)) else {}
    return {"inputs": inputs, "rates": {"hardware": machine.name, **machine.rates, **paced}}


def is_policy_file(text: str) -> bool:
    """Return whether ``text`` names a policy file: it ends in .json or has a slash."""
    return text.endswith(".json") or "/" in text.partition("(")[0]


def named_system(text: str, setting: Setting) -> System:
    """Return the system of a name with options, or of a policy file. Raise InputError if it is neither."""
    return System(text, Policy.load(text), setting.machine) if is_policy_file(text) else system(text, setting)


def simulate_system(setting: Setting, made: System, clock: str = "closed") -> SimulatedRun:
    """Return the predicted run of a system, on the machine with the rates of the system's code."""
    problem = replace(setting.problem, hardware=made.hardware)
    return simulate(problem, made.policy, setting.batch, setting.prompt_tokens, setting.max_tokens, clock=clock)


class SimulatedQueue(NamedTuple):
    """The predicted run of a queue of requests under a system."""

    system: System
    workload: Workload
    run: QueueRun
    peak_bytes: dict[str, int]
    clock: str
    kept_weights: dict[str, float]  #: tier -> share of the layers' bytes that it holds

    @property
    def tokens_per_s(self) -> float:
        return self.run.tokens_per_s

    def to_dict(self) -> dict:
        """Return plain JSON."""
        run = self.run
        return {
            "tokens_per_s": run.tokens_per_s,
            "total_s": run.total_s,
            "tokens": run.total_tokens,
            "requests": self.workload.num_requests,
            "at_a_time": run.at_a_time,
            "phases": {
                name: asdict(phase) | {"tokens_per_s": phase.tokens_per_s} for name, phase in run.phases.items()
            },
            "busy": run.busy,
            "binding": run.binding,
            "step_backs": run.preemptions,
            "recomputing": run.recomputing,
            "peak_bytes": self.peak_bytes,
            "kept_weights": self.kept_weights,
            "policy": self.system.policy.to_dict(),
            "lossless": self.system.policy.lossless,
            "clock": self.clock,
        }


def queue_setting(point: Mapping, workload: Workload, note: Note | None = None) -> Setting:
    """Return the setting of a queue, with the lengths of its longest request.
    Its batch is ``point["batch"]`` (None: MOST_AT_A_TIME), or the number of requests if that is smaller."""
    batch = min(point.get("batch") or MOST_AT_A_TIME, workload.num_requests)
    longest = {"prompt_len": int(workload.prompt_tokens.max()), "gen_len": int(workload.max_tokens.max())}
    return setting_of({**point, "batch": batch, **longest}, note)


def simulate_queue(
    setting: Setting, made: System, workload: Workload, clock: str = "closed", run: QueueRun | None = None
) -> SimulatedQueue:
    """Return the predicted run of a queue under a system, on the machine with the rates of the system's code.
    ``run``: the closed form's run if known, else None. Raise InputError if the virtual clock would need too long."""
    problem = replace(setting.problem, hardware=made.hardware)
    problem = replace(problem, budgets=problem.effective_budgets)
    places = batch_size(problem, made.policy, workload, setting.batch)
    run = run or price_queue(problem, made.policy, workload, setting.batch, places)
    if clock == "virtual":
        tasks = TASKS_PER_POSITION * problem.shape.num_layers * run.times.sum()
        if tasks > MOST_TASKS:
            raise InputError(
                f"the virtual clock would walk more than {tasks / 1e6:.0f} million tasks (limit "
                f"{MOST_TASKS / 1e6:.0f}): use the closed form, or fewer requests"
            )
        run = walk_queue(problem, made.policy, workload, setting.batch)
    wave = open_batch(problem, made.policy, workload, places)
    memory = total_bytes(memory_plan(problem, made.policy, buffer_sizes(wave)))
    return SimulatedQueue(made, workload, run, memory, clock, kept_shares(problem, made.policy))


def run_point(
    point: Mapping, workload: Workload | None = None, note: Note | None = None
) -> tuple[Setting, System, SimulatedRun | SimulatedQueue]:
    """Return the setting, the system and the predicted run of a point, or of a queue ``workload`` with its settings.
    Keys of ``point``: POINT, "system" (a name or a policy file), "clock" and POLICY_FIELDS; "batch" may be AUTO. Raise
    InputError as ``setting_of`` does, and if nothing fits."""
    text, clock, auto = point["system"], point.get("clock") or "closed", point["batch"] == AUTO
    fields = fields_of(point)
    if workload is not None:
        setting = queue_setting({**point, "batch": None if auto else point["batch"]}, workload, note)
        made = named_system(text, setting)
        return setting, made, simulate_queue(setting, made, workload, clock)
    setting = setting_of({**point, "batch": MOST_AT_A_TIME if auto else point["batch"]}, note)
    if auto:
        if is_policy_file(text):
            made, run = best_batch(lambda there: named_system(text, there), setting)
        else:
            made, run = at_best(text, setting, True)
        setting = replace(setting, batch=run.batch)
        return setting, made, run if clock == "closed" else simulate_system(setting, made, clock)
    made = named_system(text, setting)
    for field, value in fields.items():
        made = replace(made, policy=made.policy.with_field(field, value))
    return setting, made, simulate_system(setting, made, clock)


def fields_of(point: Mapping) -> dict:
    """Return the fields of the policy that a point sets. Raise InputError if it has any with the batch AUTO."""
    fields = {field: point[field] for field in POLICY_FIELDS if field in point}
    if fields and point["batch"] == AUTO:
        raise InputError(f"batch auto chooses {next(iter(fields))} itself: give a number as batch")
    return fields


def describe_queue(outcome: SimulatedQueue) -> str:
    """Return a queue's predicted run as lines of text."""
    run, policy, workload = outcome.run, outcome.system.policy, outcome.workload
    memory = ", ".join(f"{tier} {gib(size)}" for tier, size in outcome.peak_bytes.items() if size)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in run.busy.items() if share >= 0.005)
    lengths = f"{workload.prompt_tokens.mean():.0f} + {workload.answers.mean():.0f} tokens on average"
    again = f"computing their contexts again takes {run.recomputing:.1%} of the time"
    known = "" if workload.answer_tokens is not None else " (every answer at its limit)"
    lines = [
        f"{policy.name}: {run.tokens_per_s:.4g} tokens/s; {counted(workload.num_requests, 'request')} of {lengths}"
        f"{known}",
        f"  {run.total_s:.4g} s, {counted(run.at_a_time, 'request')} at a time",
        f"  {'':7}{'iterations':>12}{'seconds':>12}{'tokens/s':>12}{'at a time':>12}",
    ]
    for name, phase in ((name, phase) for name, phase in run.phases.items() if phase.iterations):
        numbers = f"{phase.seconds:12.4g}{phase.tokens_per_s:12.4g}{phase.running:12.1f}"
        lines.append(f"  {name:7}{phase.iterations:12,.0f}{numbers}")
    return "\n".join(
        [
            *lines,
            f"  weights {kept_text(policy, outcome.kept_weights)}; cache {shares_text(policy.cache)}",
            f"  memory: {memory}",
            f"  busy: {busy or 'nothing'}; bound by {run.binding}",
            *[f"  preempted: {run.preemptions:,.0f} times; {again}"] * bool(run.preemptions),
            *no_start(run.total_s),
        ]
    )


def describe(outcome: SimulatedRun) -> str:
    """Return a predicted run as lines of text."""
    o = outcome
    memory = ", ".join(f"{tier} {gib(size)}" for tier, size in o.peak_bytes.items() if size)
    busy = ", ".join(f"{name} {share:.0%}" for name, share in o.busy.items() if share >= 0.005)
    streamed = o.policy.name == "resident" and o.policy.weights.device < 1
    decodes = bool(o.decode_s > 0)  # False for answers of one token, which the prefill gives
    rate = f"decode {o.decode_tokens_per_s:.4g} tokens/s" if decodes else "no decode, each answer is one token"
    lines = [
        f"{o.policy.name}{' as far as it fits' * streamed}: {o.tokens_per_s:.4g} tokens/s; {rate}",
        f"  prefill {o.prefill_s:.4g} s, decode {o.decode_s:.4g} s; {counted(o.batch, 'request')} in {_waves(o)}, "
        f"{o.num_mini_batches} mini-batch{'es' * (o.num_mini_batches > 1)} {'a wave' if o.num_waves > 1 else 'in all'}",
        f"  first tokens{' of the first wave' * (o.num_waves > 1)} after {o.ttft_s:.4g} s (TTFT)"
        + f", then {o.tpot_s:.4g} s a token (TPOT)" * decodes,
        f"  weights {kept_text(o.policy, o.kept_weights)}; cache {shares_text(o.policy.cache)}",
        f"  memory: {memory}",
        f"  busy {'while decoding' if decodes else 'in the prefill'}: {busy or 'nothing'}; bound by {o.binding}",
    ]
    if o.limited_by:
        lines.insert(2, f"  at most {counted(o.wave, 'request')} at a time by {o.limited_by}")
    if o.num_mini_batches == o.wave > 1:
        lines.insert(2, f"  one request a mini-batch by max_mini_batch_tokens {o.policy.max_mini_batch_tokens:,}")
    if streamed:
        lines.insert(3, f"  {WEIGHTS_STREAMED}")
    for entry, (first, last) in o.recomputed_tokens.items():
        beyond = f"; KVPR's eq. 11 allows {o.prompt_tokens:,} (split=paper_prompt)" * (last > o.prompt_tokens)
        lines.append(
            f"  {entry}: recomputes {first:,} tokens of a request in the first step, {last:,} in the last{beyond}"
        )
    for link, kinds in o.traffic_bytes.items():
        if total := sum(kinds.values()):
            parts = ", ".join(f"{kind} {gib(size)}" for kind, size in kinds.items() if size)
            lines.append(f"  {link}: {gib(total)} ({parts})")
    return "\n".join([*lines, *no_start(o.total_s)])


def unlike_weights(on_device: Iterable[float]) -> list[str]:
    """Return the note UNLIKE if the systems' shares of weights on the device differ, else no note."""
    shares = list(on_device)
    return [UNLIKE] if max(shares) - min(shares) > UNLIKE_WEIGHTS else []


def no_start(total_s: float) -> list[str]:
    """Return the note NO_START for a run shorter than SHORT_S, else no note."""
    return [NO_START] if total_s < SHORT_S else []


def _waves(o: SimulatedRun) -> str:
    """Return "1 wave", "3 waves of 40", or "2 waves of 50 and one of 28"."""
    remainder = o.batch % o.wave
    if o.num_waves == 1:
        return "1 wave"
    full = o.num_waves - (remainder > 0)
    return f"{f'{full} waves' if full > 1 else 'one wave'} of {o.wave}{f' and one of {remainder}' if remainder else ''}"


def kept_text(policy: Policy, kept: Mapping[str, float]) -> str:
    """Return ``shares_text`` of ``kept`` (tier -> share of the weights), and the policy's share if it differs."""
    asked = policy.weights.device
    note = f" ({asked:.1%} on the device asked; tensors are not split)" if abs(kept["device"] - asked) > 1e-3 else ""
    return shares_text(kept) + note


def shares_text(shares: Mapping[str, float]) -> str:
    """Return shares as text like "device 58.3%, host 41.7%"."""
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)
