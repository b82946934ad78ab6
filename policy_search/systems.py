"""Every system by name: the papers' baselines and methods as policies for a given model, machine and workload.

``system("h2o(0.1)", setting)`` gives a policy and the machine as that system's implementation sees it. Options are
written as in a call: ``infinigen(alpha=5, cap=0.1)``, ``flexgen(host_attention=true)``, ``kvpr_column(hiding=false)``.
Options that every system takes say how well its code uses the machine (``sim.implementation``): cache_link,
weights_link, step_s, conversion, gemm.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.workload import Workload
from sim import presets
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.implementation import Implementation, on
from sim.simulate import Outcome, budgets_of, simulate


@dataclass(frozen=True)
class Setting:
    """A model on a machine with requests of one length."""

    shape: ModelShape
    hardware: Hardware
    batch: int
    prompt_tokens: int
    max_tokens: int
    bytes_per_element: int = 2

    @property
    def workload(self) -> Workload:
        return Workload.uniform(self.batch, self.prompt_tokens, self.max_tokens)


@dataclass(frozen=True)
class System:
    """A policy, and the machine as the system's implementation sees it."""

    name: str
    policy: Policy
    hardware: Hardware


def _flexgen(setting: Setting, host_attention: bool = False, compress: bool = False) -> Policy:
    from policy_search.papers.flexgen import flexgen_policy

    return flexgen_policy(
        setting.shape, setting.hardware, setting.workload, setting.bytes_per_element, batch=setting.batch,
        host_attention=host_attention, compress=compress,
    ).policy  # fmt: skip


def _capture(
    setting: Setting, ratio: bool = True, packing: bool = True, device_act: bool = True, balance: str = "paper"
) -> Policy:
    from policy_search.papers.algorithm1 import capture_policy

    return capture_policy(
        setting.shape, setting.hardware, setting.workload, setting.bytes_per_element, batch=setting.batch,
        balance=balance, ratio=ratio, packing=packing, device_act=device_act,
    )  # fmt: skip


def _searched(setting: Setting, lossless: bool = False) -> Policy:
    from policy_search.search import search

    return search(
        setting.shape, setting.hardware, setting.bytes_per_element, setting.workload, batch=setting.batch,
        lossless=lossless,
    ).policy  # fmt: skip


def _uvm(setting: Setting, fault_gb_per_s: float = 4.0) -> System:
    """Unified memory: what is touched migrates page by page. What fits the device migrates once; what does not, is
    touched in a cycle over all layers, so that the oldest pages, those needed soonest, are the ones that make room: all
    of it migrates every iteration. 4 GB/s with evictions is what InfiniGen's Fig. 14 and 15 imply."""
    if not 0 < fault_gb_per_s < float("inf"):
        raise InputError(f"uvm: fault_gb_per_s is {fault_gb_per_s}; it must be a number > 0")
    policy = presets.ideal()
    peak = predict(
        setting.shape, setting.hardware, setting.bytes_per_element,
        Candidates(policy, setting.batch, setting.prompt_tokens, setting.max_tokens), walk=False,
    ).peak_bytes["device"]  # fmt: skip
    hardware = replace(setting.hardware, device_memory=None)
    if float(peak[0]) <= (setting.hardware.usable_memory("device") or float("inf")):
        return System("uvm", replace(policy, name="uvm"), hardware)
    line = hardware.line("load_weights", "h2d")
    paged = replace(line, s_per_byte=1e-9 / fault_gb_per_s, samples=(), r2=None)
    lines = {**hardware.lines, **{verb: paged for verb in ("load_weights", "load_kv", "store_kv")}}
    moved = replace(presets.offloaded(weights=Placement(host=1.0)), name="uvm")
    return System("uvm", moved, replace(hardware, lines=lines))


def _ideal(setting: Setting) -> System:
    return System("ideal", presets.ideal(), replace(setting.hardware, device_memory=None))


def _fastdecode(setting: Setting, gpus: int = 1, **options) -> System:
    """One of ``gpus`` GPUs that share a host's cores: attention on the host gets its part of them."""
    hardware = on(Implementation("fastdecode", sharers=gpus), setting.hardware)
    policy = _keep_what_fits(setting, presets.fastdecode(**options))
    return System("fastdecode", policy, hardware)


def _plain(function: Callable[..., Policy]) -> Callable[..., Policy]:
    """A preset with its options; ``weights_device`` is the resident share of the weights.

    A system that keeps its weights on the device keeps, where they do not all fit, as many twelfths of each layer as
    do: a matrix of attention is a twelfth of an OPT layer, and FlexGen places whole matrices.
    """
    takes_weights = "weights" in inspect.signature(function).parameters

    def make(setting: Setting, weights_device: float | None = None, **options) -> Policy:
        arguments = (setting.shape,) if function is presets.hybrid_static else ()
        if weights_device is not None:
            options["weights"] = Placement(device=weights_device, host=1.0 - weights_device)
        policy = function(*arguments, **options)
        if weights_device is None and takes_weights and policy.weights.device == 1.0:
            return _keep_what_fits(setting, policy)
        return policy

    own = [p for p in inspect.signature(function).parameters.values() if p.name not in ("shape", "weights")]
    first = [inspect.Parameter("setting", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    resident = inspect.Parameter("weights_device", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="float")
    last = [resident] if takes_weights else []
    make.__signature__ = inspect.Signature(first + own + last)
    return make


def _keep_what_fits(setting: Setting, policy: Policy) -> Policy:
    budget = setting.hardware.usable_memory("device")
    if budget is None:
        return policy
    shares = np.arange(12, -1, -1) / 12
    candidates = Candidates(
        policy, setting.batch, setting.prompt_tokens, setting.max_tokens, weights_device=shares, weights_disk=0.0
    )
    peak = predict(setting.shape, setting.hardware, setting.bytes_per_element, candidates, walk=False).peak_bytes
    fitting = np.flatnonzero(peak["device"] <= budget)
    share = float(shares[fitting[0]]) if len(fitting) else 0.0
    return replace(policy, weights=Placement(device=share, host=1.0 - share))


#: name -> function(setting, **options) -> Policy or System
SYSTEMS: dict[str, Callable] = {
    **{name: _plain(function) for name, function in presets.PRESETS.items()},
    "hybrid": _plain(presets.hybrid),
    "flexgen": _flexgen,
    "capture": _capture,
    "uvm": _uvm,
    "ideal": _ideal,
    "fastdecode": _fastdecode,
    "searched": _searched,
}

_IMPLEMENTATION = {f.name for f in fields(Implementation)} - {"name", "source", "sharers"}
_CALL = re.compile(r"\s*([a-z0-9_]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def names() -> list[str]:
    """All systems, in the order of their definition."""
    return list(SYSTEMS)


def check(text: str) -> str:
    """The text itself if it names a system with options it takes. Raises InputError otherwise."""
    parse(text)
    return text


def parse(text: str) -> tuple[str, dict]:
    """(name, options) of a system written as a call. Raises InputError: unknown name, bad or missing value."""
    match = _CALL.fullmatch(text) if isinstance(text, str) else None
    name = match[1] if match else text
    if name not in SYSTEMS:
        raise unknown("system", name, names())
    takes = {
        key: p for key, p in inspect.signature(SYSTEMS[name]).parameters.items() if key not in ("setting", "options")
    }
    accepted = list(takes)
    options: dict = {}
    for place, argument in enumerate(filter(None, (a.strip() for a in (match[2] or "").split(",")))):
        key, equals, value = (part.strip() for part in argument.partition("="))
        if not equals:
            if place >= len(accepted):
                raise InputError(f"system {text!r}: {name} takes {len(accepted)} options ({', '.join(accepted)})")
            key, value = accepted[place], key
        if key not in accepted and key not in _IMPLEMENTATION:
            raise unknown(f"option of {name}", key, [*accepted, *sorted(_IMPLEMENTATION)])
        if key in options:
            raise InputError(f"system {text!r}: option {key} is given twice")
        options[key] = _value(value)
        if key in takes and (wanted := _misfit(takes[key], options[key])):
            raise InputError(f"system {text!r}: {key} is {value!r}; it must be {wanted}")
    if missing := [key for key, p in takes.items() if p.default is p.empty and key not in options]:
        raise InputError(f"system {text!r}: {name} needs {missing[0]}; write {name}(0.4), for example")
    return name, options


#: What an option of each type takes, in words.
_WANTED = {"bool": "true or false", "int": "a whole number >= 1", "float": "a number", "str": "a word"}


def _misfit(parameter: inspect.Parameter, value) -> str | None:
    """What an option's value must be, where it is not; None where it serves."""
    kind = parameter.annotation if isinstance(parameter.annotation, str) else type(parameter.default).__name__
    kind = kind.removesuffix(" | None")
    flag = isinstance(value, bool)
    serves = {
        "bool": flag,
        "int": isinstance(value, int) and not flag and value >= 1,
        "float": isinstance(value, (int, float)) and not flag,
        "str": isinstance(value, str),
    }
    return None if serves[kind] else _WANTED[kind]


def _value(text: str):
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def system(text: str, setting: Setting) -> System:
    """A system for a setting. Raises InputError for a name, option or value that is not known, and where the system's
    own placement finds nothing that fits."""
    name, options = parse(text)
    quality = {key: options.pop(key) for key in list(options) if key in _IMPLEMENTATION}
    for key, value in quality.items():
        if isinstance(value, (bool, str)):
            raise InputError(f"system {text!r}: {key} is {value!r}; it must be a number")
    if quality:
        setting = replace(setting, hardware=on(Implementation(name, **quality), setting.hardware))
    made = SYSTEMS[name](setting, **options)
    return made if isinstance(made, System) else System(text, made, setting.hardware)


def run_system(text: str, setting: Setting, clock: str = "closed") -> Outcome:
    """Simulate a system by name."""
    made = system(text, setting)
    return simulate(
        setting.shape, made.hardware, made.policy, setting.batch, setting.prompt_tokens, setting.max_tokens,
        setting.bytes_per_element, clock, budgets_of(made.hardware),
    )  # fmt: skip


# ---- what the executor runs of them

#: Systems that no policy stands for on a real machine, and why. What of a policy is refused, the executor itself says.
SIMULATED_ONLY = {"uvm": "its pages move when the hardware faults, not when a plan says so"}

#: Systems whose own placement is found on the lines of a machine.
_PLACED = ("flexgen", "capture", "searched")

#: Where only bytes are asked for: any seconds do.
_NOWHERE = Hardware("nowhere", "cpu", {resource: Line(overhead_s=1.0) for resource in RESOURCES})


def check_run(text: str) -> None:
    """Raise InputError, by name and with the reason, for a system or an option that the executor cannot run."""
    name, options = parse(text)
    if name in SIMULATED_ONLY:
        raise InputError(f"system {text!r} cannot be run: {SIMULATED_ONLY[name]}; `flexhybrid simulate` can")
    if name == "fastdecode" and options.get("gpus", 1) != 1:
        raise InputError(f"system {text!r} cannot be run: there is one device here; `flexhybrid simulate` takes more")
    if foreign := sorted(_IMPLEMENTATION & options.keys()):
        raise InputError(
            f"system {text!r} cannot be run: {foreign[0]} says how well other code uses a machine, and here it is ours "
            "that runs; `flexhybrid simulate` takes it"
        )


def needs_lines(text: str) -> bool:
    """Whether a system's placement is found on the lines of a machine."""
    return parse(text)[0] in _PLACED


def policy_anywhere(text: str, shape: ModelShape) -> Policy | None:
    """The policy of a system that is the same on every machine and for all requests; None for one that is not.

    Raises InputError as ``check_run`` does.
    """
    check_run(text)
    name, options = parse(text)
    if needs_lines(text):
        return None
    policy = _policy(text, Setting(shape, _NOWHERE, 1, 1, 1))
    stays = policy.weights.device < 1 or "weights_device" in options or name in ("resident", "ideal")
    return policy if stays else None


def policy_here(
    text: str, shape: ModelShape, hardware: Hardware | None, bytes_per_element: int, workload: Workload,
    budgets: dict[str, int | None],
) -> Policy:  # fmt: skip
    """The policy of a system for this machine and the longest of these requests.

    ``budgets``: bytes per tier; None takes what the machine has. Raises InputError as ``check_run`` does, where nothing
    fits, and where no machine is known to a system that takes one.
    """
    if (policy := policy_anywhere(text, shape)) is not None:
        return policy
    if hardware is None and needs_lines(text):
        raise InputError(f"system {text!r} needs to know this machine: run `flexhybrid profile` once")
    hardware = hardware or _NOWHERE
    sizes = {f"{tier}_memory": size for tier, size in budgets.items() if size is not None}
    if "device_memory" in sizes:
        sizes["device_reserve"] = 0  # a budget is what may be used
    prompt, generated = int(workload.prompt_tokens.max()), int(workload.max_tokens.max())
    setting = Setting(
        shape, replace(hardware, **sizes), workload.num_requests, prompt, generated, bytes_per_element
    )  # fmt: skip
    return _policy(text, setting)


def _policy(text: str, setting: Setting) -> Policy:
    """Under the name that it was asked for."""
    return replace(system(text, setting).policy, name=text.strip())
