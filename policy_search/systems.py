"""All systems by name: the papers' methods and baselines as policies for a model, a machine and a workload.

``system("h2o(0.1)", setting)`` returns a policy and the machine with the rates that the system's code reaches. Options
are written as in a call: ``infinigen(alpha=5, cap=0.1)``, ``flexgen(host_attention=true)``.

Some options apply to every system and describe its code (``sim.implementation``): cache_link, weights_link, conversion,
gemm, the seconds in ``ADDED``, and engine. Their defaults are what is known of the system's code (``MEASURED``):

- ``deepspeed(weights_link=1)``: DeepSpeed's policy with the full rate of the link;
- ``flexgen(engine=ours)``: FlexGen's policy on our engine;
- ``kvpr_column(engine=flexgen)``: KVPR's policy on FlexGen's engine, as its authors ran it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from flexhybrid.core.context.cache_entries import stored_copies
from flexhybrid.core.errors import InputError, check, file_errors, unknown
from flexhybrid.core.hardware import MEASURE, Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import BITS, Overlap, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.workload import Workload
from policy_search.search_problem import RESIDENT_MINI_BATCH_TOKENS
from sim import presets
from sim.array_clock import predict
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates, mean_lengths, num_mini_batches
from sim.cost import hardware_of
from sim.implementation import ADDED, Implementation, eager_bytes, known_code, on
from sim.simulate import SimulatedRun, simulate


@dataclass(frozen=True)
class Setting:
    """A model on a machine with requests of one length."""

    problem: Problem
    batch: int
    prompt_tokens: int
    max_tokens: int
    own_batch: bool = False  #: whether FlexGen's search may choose a batch of fewer requests

    @property
    def workload(self) -> Workload:
        return Workload.uniform(self.batch, self.prompt_tokens, self.max_tokens)

    @property
    def machine(self) -> Hardware:
        """Return the machine's hardware record. Raise InputError if the problem has none."""
        return hardware_of(self.problem)

    def on(self, hardware: Hardware) -> Setting:
        """Return the setting on another machine."""
        return replace(self, problem=replace(self.problem, hardware=hardware))

    def device_peak_bytes(self, policy: Policy, weights_device=None) -> np.ndarray:
        """Return the device's bytes under a policy, [shares]. ``weights_device``: shares of the weights on the device
        (None: the policy's share)."""
        weights_disk = None if weights_device is None else 0.0
        lengths = self.batch, self.prompt_tokens, self.max_tokens
        candidates = Candidates(policy, *lengths, weights_device=weights_device, weights_disk=weights_disk)
        problem = replace(self.problem, hardware=self.machine, device="")  # the machine's own device
        return peak_bytes(problem, candidates)["device"]


@dataclass(frozen=True)
class System:
    """A named policy, and the machine with the rates that the system's code reaches."""

    name: str
    policy: Policy
    hardware: Hardware


def _flexgen(setting: Setting, cache: str | None = None, **options) -> Policy:
    from policy_search.papers.flexgen import FlexGenOptions, flexgen_policy

    batch = None if setting.own_batch else setting.batch
    asked = FlexGenOptions(batch=batch, most_requests=setting.batch, cache_on_host=cache == "host", **options)
    return flexgen_policy(setting.problem, setting.workload, asked).policy


def _deepspeed(setting: Setting, bits: int | None = None, cache: str = "device") -> Policy:
    """Return DeepSpeed's policy with the largest batch that fits. It runs a batch as one mini-batch, so its temporary
    tensors count (``eager_bytes``)."""
    policy, budget = presets.deepspeed(bits, cache), setting.problem.effective_budgets.device
    if budget is None:
        return policy
    batches, lengths = np.arange(1, setting.batch + 1), (setting.prompt_tokens, setting.max_tokens)
    problem = replace(setting.problem, hardware=setting.machine, device="")
    planned = peak_bytes(problem, Candidates(policy, batches, *lengths))["device"]
    beside = eager_bytes(problem.shape, *lengths, problem.bytes_per_element)
    fitting = batches[planned + batches * beside <= budget]
    return replace(policy, max_batch=int(fitting[-1])) if len(fitting) else policy


def _capture(setting: Setting, **options) -> Policy:
    from policy_search.papers.capture import CaptureOptions, capture_policy

    return capture_policy(setting.problem, setting.workload, CaptureOptions(batch=setting.batch, **options))


def _searched(setting: Setting, lossless: bool = True) -> Policy:
    from policy_search.search import FULL, LOSSLESS, SearchSettings, search

    settings = SearchSettings(batch=setting.batch, space=LOSSLESS if lossless else FULL)
    return search(setting.problem, setting.workload, settings).policy


def _resident(setting: Setting, max_mini_batch_tokens=None, weights_device: float | None = None) -> Policy:
    """Return ``resident`` with as many weights on the device as fit. If no size of mini-batches is given, it has the
    one that is predicted to be fastest."""
    if max_mini_batch_tokens is not None:
        return _placed(setting, presets.resident(max_mini_batch_tokens), weights_device)
    lengths, runs = (setting.batch, setting.prompt_tokens, setting.max_tokens), []
    for policy in map(presets.resident, RESIDENT_MINI_BATCH_TOKENS):
        with suppress(InputError):  # not even one request fits
            runs.append(simulate(setting.problem, _placed(setting, policy, weights_device), *lengths))
    fastest = max(runs, key=lambda run: run.tokens_per_s, default=None)
    return fastest.policy if fastest else _placed(setting, presets.resident(), weights_device)


def resident_by_speed(problem: Problem, workload: Workload) -> list[Policy]:
    """Return ``resident`` with each size of RESIDENT_MINI_BATCH_TOKENS, the fastest prediction first. The prediction
    runs all requests together, with the mean lengths. Without a machine to predict on, return only the preset."""
    if problem.hardware is None:
        return [presets.resident()]
    lengths = workload.num_requests, *mean_lengths(workload)
    sizes = np.array(RESIDENT_MINI_BATCH_TOKENS)
    try:
        seconds = predict(problem, Candidates(presets.resident(), *lengths, sizes)).total_s
    except InputError:  # a machine without a line for one of the verbs
        return [presets.resident()]
    return [presets.resident(int(tokens)) for tokens in sizes[np.argsort(seconds, kind="stable")]]


def _uvm(setting: Setting, fault_gb_per_s: float = 4.0) -> System:
    """Return a system with unified memory, in which pages migrate to the device when they are touched.

    If everything fits the device, it migrates once. Otherwise all of it migrates in every iteration: layers are touched
    in a cycle, which evicts the pages that are needed soonest. ``fault_gb_per_s``: rate of migration with evictions;
    the default follows from InfiniGen's Figs. 14 and 15.
    """
    check("uvm: fault_gb_per_s", fault_gb_per_s, 0 < fault_gb_per_s < float("inf"), "a number > 0")
    policy, hardware = presets.ideal(), replace(setting.machine, device_memory=None)
    budget = setting.problem.effective_budgets.device
    if budget is None or float(setting.device_peak_bytes(policy)[0]) <= budget:
        return System("uvm", replace(policy, name="uvm"), hardware)
    paged = replace(hardware.line("load_weights", "h2d"), s_per_byte=1e-9 / fault_gb_per_s, samples=(), r2=None)
    lines = {**hardware.lines, **{verb: paged for verb in ("load_weights", "load_kv", "store_kv")}}
    migrating = replace(presets.offloaded(), name="uvm", weights=Placement(host=1.0))
    return System("uvm", migrating, replace(hardware, lines=lines))


def _infinigen(setting: Setting, expected: float | str | None = None, **options) -> Policy | System:
    """Return InfiniGen's policy. ``expected``: share of loaded tokens, or an accuracy.json of ``flexhybrid accuracy``
    that has the share at ``alpha``."""
    if isinstance(expected, str):
        expected = _measured_share(Path(expected), float(options.get("alpha", 4.0)))
    return _PLAIN_INFINIGEN.make(setting, expected=expected, **options)


def _measured_share(path: Path, alpha: float) -> float:
    """Return the share of a context that selecting layers load at an alpha, interpolated in an accuracy.json. Raise
    InputError if the file has no such shares, or if alpha is outside their range."""
    with file_errors(f"read {path}"):
        text = path.read_text(encoding="utf-8")
    try:
        rows = [(row["alpha"], row["fetched"]) for row in json.loads(text)["policies"] if row.get("alpha") is not None]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no accuracy.json of `flexhybrid accuracy`") from None
    if not rows:
        raise InputError(f"{path} has no infinigen(…) with a finite alpha: measure some with `flexhybrid accuracy`")
    alphas, shares = zip(*sorted(rows), strict=True)
    if not alphas[0] <= alpha <= alphas[-1]:
        raise InputError(f"{path} was measured at alphas from {alphas[0]:g} to {alphas[-1]:g}, not at {alpha:g}")
    return float(np.interp(alpha, alphas, shares))


def _fastdecode(setting: Setting, gpus: int = 1) -> System:
    """Return FastDecode's system for one of ``gpus`` GPUs that share the host's cores and memory equally."""
    hardware = on(Implementation("fastdecode", sharers=gpus), setting.machine)
    return System("fastdecode", _keep_what_fits(setting, presets.fastdecode()), hardware)


def _placed(setting: Setting, policy: Policy, weights_device: float | None) -> Policy:
    """Return the policy with a share of its weights on the device. None: the share that fits, if the policy keeps all
    weights there."""
    if weights_device is not None:
        return replace(policy, weights=Placement(device=weights_device, host=1.0 - weights_device))
    return _keep_what_fits(setting, policy) if policy.weights.device == 1.0 else policy


def _keep_what_fits(setting: Setting, policy: Policy) -> Policy:
    """Return the policy with as many twelfths of each layer's weights on the device as fit."""
    budget = setting.problem.effective_budgets.device
    if budget is None:
        return policy
    shares = np.arange(12, -1, -1) / 12
    fitting = np.flatnonzero(setting.device_peak_bytes(policy, shares) <= budget)
    share = float(shares[fitting[0]]) if len(fitting) else 0.0
    return replace(policy, weights=Placement(device=share, host=1.0 - share))


def _kvpr(setting: Setting, policy: Policy, weights_device: float | None) -> Policy:
    """Return KVPR's policy, or the same policy with only keys and values if that is predicted to be faster.

    KVPR's rules look at one layer and ignore the time and memory of storing layer inputs. The choice here keeps KVPR's
    claim that it is never slower than loading all keys and values (section 3.3).
    """
    policy, plain = (_placed(setting, choice, weights_device) for choice in (policy, without_recomputing(policy)))
    lengths, runs = (setting.batch, setting.prompt_tokens, setting.max_tokens), []
    for choice in (plain, policy):
        with suppress(InputError):  # not even one request fits
            run = simulate(setting.problem, choice, *lengths)
            # KVPR counts only if its last decode step recomputes tokens: otherwise the layer inputs are never read.
            if choice is plain or any(last for _, last in run.recomputed_tokens.values()):
                runs.append(run)
    return min(runs, key=lambda run: run.total_s).policy if runs else policy


def without_recomputing(policy: Policy) -> Policy:
    """Return a policy of both(…) entries with only their keys and values."""
    copies = (copy for entry in policy.cache for copy in stored_copies(entry))
    return replace(policy, cache={f"kv@{copy.tier}": 1.0 for copy in copies if copy.representation == "kv"})


class Kind(NamedTuple):
    """A kind of option values."""

    wanted: str  #: description for the error message
    accepts: Callable[[object], bool]  #: whether a parsed value is of this kind


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number >= 1", lambda value: type(value) is int and value >= 1)
PACKED = Kind(f"one of {', '.join(map(str, BITS[1:]))}", lambda value: type(value) is int and value in BITS)
LAYERS = Kind("a whole number >= 0", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
SHARE = Kind("a number, or accuracy.json", lambda value: type(value) in (int, float, str))
ENGINE = Kind("ours or flexgen", lambda value: value in ("ours", "flexgen"))
HOST = Kind("host", lambda value: value == "host")
LIMIT = Kind("a share from 0 to 1, or bytes like 20GiB", lambda value: type(value) in (int, float, str))
WORD = Kind("a word", lambda value: isinstance(value, str))
PACKING = Kind("true, false or balance", lambda value: isinstance(value, bool) or value == "balance")
TIER = Kind("device or host", lambda value: value in ("device", "host"))
OVERLAP = Kind(f"one of {', '.join(get_args(Overlap))}", lambda value: value in get_args(Overlap))


@dataclass(frozen=True)
class Entry:
    """How a system is made from its name and options."""

    make: Callable[..., Policy | System]  #: called as make(setting, **options)
    options: dict[str, Kind] = field(default_factory=dict)  #: in the order of positional arguments of a call
    required: str | None = None  #: the option that has no default
    reads_lines: bool = False  #: whether the system's placement depends on the lines of a machine
    #: how ``papers.at_best`` finds the best batch: "together" if one policy serves all batches, "one by one" if each
    #: batch has a policy of its own, "itself" if the system chooses
    batches: Literal["together", "one by one", "itself"] = "together"
    only_simulated: str | None = None  #: why the executor cannot run it; None: it can


def _preset(
    function: Callable[..., Policy], options: dict[str, Kind], required: str | None = None, place=None
) -> Entry:
    """Return the entry of a preset.

    Besides ``options``, it takes ``weights_device`` (resident share of the weights) and ``overlap`` (which copies run
    during computation). A preset with resident weights keeps as many twelfths of each layer as fit: an attention matrix
    is a twelfth of an OPT layer, and FlexGen places whole matrices. ``place``: function that places the weights
    (default: ``_placed``).
    """

    def make(setting: Setting, weights_device: float | None = None, overlap: Overlap | None = None, **given) -> Policy:
        if function is presets.hybrid_static:
            given["shape"] = setting.problem.shape
        policy = function(**given)
        policy = policy if overlap is None else replace(policy, overlap=overlap)
        return (place or _placed)(setting, policy, weights_device)

    return Entry(make, {**options, "overlap": OVERLAP}, required, reads_lines=place is not None)


_WEIGHTS = {"weights_device": NUMBER, "weights_disk": NUMBER}
_SIZES = {"max_mini_batch_tokens": COUNT, **_WEIGHTS}
_SERIAL = {"max_mini_batch_tokens": COUNT, "overlap": OVERLAP, **_WEIGHTS}  # in this order
_INFINIGEN = dict.fromkeys(("alpha", "partial_ratio", "cap"), NUMBER) | {"pool": LIMIT, "victim": WORD}
_INFINIGEN |= {"whole_layers": COUNT, "expected": SHARE, "columns": WORD, **_SIZES}
_CAPTURE = {"ratio": FLAG, "packing": PACKING, "device_act": FLAG, "balance": WORD, **_WEIGHTS}
_PLAIN_INFINIGEN = _preset(presets.infinigen, _INFINIGEN)
_PAGES_FAULT = "its pages move when the hardware faults, not when a plan says so"

#: A new system needs a function that returns a policy (``sim.presets``) and a line here.
SYSTEMS: dict[str, Entry] = {
    "kv_only": _preset(presets.kv_only, _SIZES),
    "act_only": _preset(presets.act_only, _SIZES),
    "hybrid_static": _preset(presets.hybrid_static, _SIZES),
    "resident": Entry(_resident, _SIZES),
    "ideal": Entry(lambda setting: System("ideal", presets.ideal(), replace(setting.machine, device_memory=None))),
    "deepspeed": Entry(_deepspeed, {"bits": PACKED, "cache": TIER, "weights_disk": NUMBER}, batches="one by one"),
    "accelerate": _preset(presets.accelerate, {"cache": TIER, **_WEIGHTS}),
    "token_recompute": _preset(presets.token_recompute, {"ratio": NUMBER, **_SIZES}, required="ratio"),
    "kvpr_row": _preset(presets.kvpr_row, {"split": WORD, "act": WORD, **_WEIGHTS}, place=_kvpr),
    "kvpr_column": _preset(presets.kvpr_column, {"split": WORD, "hiding": FLAG, **_SIZES}, place=_kvpr),
    "offloaded": _preset(presets.offloaded, _SERIAL),
    "int4": _preset(presets.int4, _SERIAL),
    "quantized": _preset(presets.quantized, {"kv": PACKED, **_SERIAL}),
    "h2o": _preset(
        presets.h2o,
        {"budget": NUMBER, "whole_layers": LAYERS, "cache": TIER, "attention": TIER, "hidden": TIER, **_SIZES},
    ),
    "infinigen": Entry(_infinigen, _PLAIN_INFINIGEN.options),
    "fastdecode": Entry(_fastdecode, {"gpus": COUNT}),
    "neo": _preset(presets.neo, {"host": NUMBER, **_SIZES}),
    "headinfer": _preset(presets.headinfer, _SIZES),
    "apt_serve": _preset(presets.apt_serve, {"hidden": NUMBER, **_SIZES}),
    "xquant": _preset(presets.xquant, {"bits": PACKED, **_SIZES}),
    "moe_gen": _preset(presets.moe_gen, {"host": NUMBER, **_SIZES}),
    "hybrid": _preset(presets.hybrid, {"share": NUMBER, **_SIZES}, required="share"),
    "flexgen": Entry(
        _flexgen, {"host_attention": FLAG, "compress": FLAG, "cache": HOST}, reads_lines=True, batches="itself"
    ),
    "capture": Entry(_capture, _CAPTURE, reads_lines=True, batches="one by one"),
    "uvm": Entry(_uvm, {"fault_gb_per_s": NUMBER}, only_simulated=_PAGES_FAULT),
    "searched": Entry(_searched, {"lossless": FLAG}, reads_lines=True, batches="one by one"),
}

#: Options of every system, which describe its code (``sim.implementation``).
_QUALITIES = dict.fromkeys(("cache_link", "conversion", "gemm", "weights_link", *ADDED), NUMBER) | {"engine": ENGINE}
_CALL = re.compile(r"\s*([a-z0-9_]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def parse(text: str, known: Iterable[str] | None = None, other: str = "") -> tuple[str, dict]:
    """Return (name, options) of a system written as a call. Raise InputError for an unknown name or option, a value of
    the wrong kind, or a missing required option. The error of an unknown name lists ``known`` (default: all systems)
    and ``other``, a text for what else is accepted."""
    match = _CALL.fullmatch(text) if isinstance(text, str) else None
    name = match[1] if match else text
    if match is None and isinstance(text, str) and text.partition("(")[0].strip() in SYSTEMS:
        begun, _, rest = (part.strip() for part in text.partition("("))
        closed = f"{begun}({rest.strip('() ')})" if rest.strip("() ") else begun
        raise InputError(f"system {text!r}: its brackets do not match; write {closed}")
    if match is None or name not in SYSTEMS:
        raise unknown("system", name, SYSTEMS if known is None else known, other=other)
    entry, accepted = SYSTEMS[name], list(SYSTEMS[name].options)
    options: dict = {}
    for position, argument in enumerate(filter(None, (a.strip() for a in (match[2] or "").split(",")))):
        key, equals, value = (part.strip() for part in argument.partition("="))
        if not equals:
            if position >= len(accepted):
                raise InputError(f"system {text!r}: {name} takes {len(accepted)} options ({', '.join(accepted)})")
            key, value = accepted[position], key
        kind = entry.options.get(key) or _QUALITIES.get(key)
        if kind is None:
            raise unknown(f"option of {name}", key, [*accepted, *_QUALITIES])
        if key in options:
            raise InputError(f"system {text!r}: option {key} is given twice")
        options[key] = _value(value)
        if not kind.accepts(options[key]):
            raise InputError(f"system {text!r}: {key} is {value!r}; it must be {kind.wanted}")
    if entry.required and entry.required not in options:
        raise InputError(f"system {text!r}: {name} needs {entry.required}; write {name}(0.4), for example")
    return name, options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def system(text: str, setting: Setting, on_ours: bool = False) -> System:
    """Return a system for a setting. ``on_ours``: place for our engine, not for the system's own code. Raise InputError
    for an unknown name, option or value, or if the system's own placement finds nothing that fits."""
    name, options = parse(text)
    quality = {key: options.pop(key) for key in _QUALITIES if key in options}
    plain, neutral = setting.machine, Implementation(name)
    engine = quality.pop("engine", name)
    if engine == "ours" and (other := plain.notes.get("rates", {}).get("engine")):
        raise InputError(
            f"system {text!r}: {plain.name} has the rates of {other}'s code; for ours name another, like t4"
        )
    if "gemm" in quality:
        quality["gemm_of_peak"] = 1.0  # the option replaces the known limit
    code = neutral if on_ours else replace(known_code(engine, plain), **quality)
    if code != neutral:
        setting = setting.on(on(code, plain))
    on_disk = options.pop("weights_disk", 0.0)
    made = SYSTEMS[name].make(setting, **options)
    if isinstance(made, System):
        return made
    if on_disk:
        on_device = float(options.get("weights_device", min(made.weights.device, 1.0 - on_disk)))
        if not (0 <= on_disk <= 1 and on_device + on_disk <= 1):
            raise InputError(f"system {text!r}: weights_disk is a share from 0 to 1, with weights_device at most 1")
        made = replace(made, weights=Placement(on_device, max(0.0, 1.0 - on_device - on_disk), float(on_disk)))
    if code.undoes_bits_again and made.bits.weights != "native" or code.evict_head_s:
        batch = min(setting.batch, made.max_batch or setting.batch)
        lengths = setting.prompt_tokens, setting.max_tokens
        count, _ = num_mini_batches(batch, *lengths, made.max_mini_batch_tokens, made.packing)
        heads = batch / int(count) * setting.problem.shape.num_heads
        return System(text, made, on(code, plain, int(count), heads))
    return System(text, made, setting.machine)


def run_system(text: str, setting: Setting, clock: str = "closed") -> SimulatedRun:
    """Simulate a system by its name, written as a call."""
    made = system(text, setting)
    problem = replace(setting.problem, hardware=made.hardware)
    return simulate(problem, made.policy, setting.batch, setting.prompt_tokens, setting.max_tokens, clock=clock)


# ---- systems on the executor

#: A machine for policies that depend only on bytes; its seconds mean nothing.
_NOWHERE = Hardware("nowhere", "cpu", {resource: Line(overhead_s=1.0) for resource in RESOURCES})


def check_run(text: str, also: Iterable[str] = ()) -> None:
    """Raise InputError for a system or option that the executor cannot run, or for an unknown name. ``also``: further
    names that the error lists."""
    runs = (name for name, entry in SYSTEMS.items() if not entry.only_simulated)
    name, options = parse(text, [*also, *runs], other="a policy file (.json)")
    if reason := SYSTEMS[name].only_simulated:
        raise InputError(f"system {text!r} cannot be run: {reason}; `flexhybrid simulate` can")
    if name == "fastdecode" and options.get("gpus", 1) != 1:
        raise InputError(f"system {text!r} cannot be run: there is one device here; `flexhybrid simulate` takes more")
    if foreign := sorted(_QUALITIES.keys() & options.keys()):
        raise InputError(
            f"system {text!r} cannot be run: {foreign[0]} says how well other code uses a machine, and here it is ours "
            "that runs; `flexhybrid simulate` takes it"
        )


def needs_lines(text: str) -> bool:
    """Return whether a system's placement depends on the lines of a machine."""
    return SYSTEMS[parse(text)[0]].reads_lines


def dropped(text: str, attention: str) -> str:
    """Return a message if a system's call allows attention on the host but its search chose ``attention`` on the
    device; otherwise an empty text."""
    with suppress(InputError):  # the text may name a policy file
        if attention == "device" and parse(text)[1].get("host_attention"):
            return "host_attention is not used: by FlexGen's cost model attention on the device is faster"
    return ""


def policy_anywhere(text: str, shape: ModelShape) -> Policy | None:
    """Return a system's policy if it is the same for all machines and requests, else None. Raise InputError as
    ``check_run`` does."""
    check_run(text)
    name, options = parse(text)
    if needs_lines(text):
        return None
    if name == "resident" and not options:
        return presets.resident()  # only the best size of its mini-batches depends on the machine
    policy = _named_policy(text, Setting(Problem(shape=shape, hardware=_NOWHERE), 1, 1, 1))
    fixed = policy.weights.device < 1 or "weights_device" in options or name in ("resident", "ideal")
    return policy if fixed else None


def policy_here(text: str, problem: Problem, workload: Workload) -> Policy:
    """Return a system's policy for a problem's effective budgets and the longest of these requests. Raise InputError as
    ``check_run`` does, if nothing fits, or if the placement needs a machine and the problem has none."""
    if (policy := policy_anywhere(text, problem.shape)) is not None:
        return policy
    if problem.hardware is None:
        if needs_lines(text):
            raise InputError(f"system {text!r} needs to know this machine: {MEASURE}")
        problem = replace(problem, hardware=_NOWHERE)
    prompt_tokens, max_tokens = int(workload.prompt_tokens.max()), int(workload.max_tokens.max())
    return _named_policy(text, Setting(problem, workload.num_requests, prompt_tokens, max_tokens))


def _named_policy(text: str, setting: Setting) -> Policy:
    """Return the policy of a system, with ``text`` as its name."""
    return replace(system(text, setting, on_ours=True).policy, name=text.strip())
