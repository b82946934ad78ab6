"""The hardware record: a machine's fitted lines and memory sizes as plain data, one JSON file for each machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path

from flexhybrid.core.errors import InputError, check
from flexhybrid.core.files import load_json, write_by_rename
from flexhybrid.core.policy import Policy
from flexhybrid.core.task import RESOURCES, Work
from flexhybrid.core.verbs import RESOURCE_OF, VERBS

#: Resources whose tasks cross a link; the others compute.
LINKS = ("h2d", "d2h", "disk_read", "disk_write")

CALL_S = 4e-6  #: seconds in which Python issues a small operation: numpy 2 to 4 us, a CUDA kernel 4 to 5 us

#: Suffix of ``finish``'s line in layers with experts, whose matrix products are grouped.
EXPERTS_SUFFIX = "_experts"

#: Key of the line for launching a task: one Python thread plans tasks and hands them to the lanes.
LAUNCHER = "launcher"

#: Suffix of a verb's line that holds while nothing crosses the link.
ALONE_SUFFIX = "_alone"

FORMAT = "flexhybrid-hardware-1"

#: Keys of a record's notes. COMPANY: what disturbed the measurement, in words (absent: nothing). DISAGREED: sizes whose
#: measurement differed between two passes.
COMPANY, DISAGREED = "in company", "sizes that two passes disagreed on"

#: Keys of a record's notes. CONTENTION: computing resource ("compute_alone": with an idle link) -> {"wait_s",
#: "factor"}, the mean delay of its tasks by copies, threads and locks; lines hold for undisturbed tasks. AFTER_PAUSE:
#: line -> factor on a task after a pause. It prices nothing, because a resource that pauses does not limit a run.
CONTENTION, AFTER_PAUSE = "contention", "times as long after a pause"

#: Advice in errors about a machine that is not known.
MEASURE = 'run `flexhybrid profile` once, or name a machine (--hardware NAME, in Python hardware="NAME")'

#: Keys of a record's notes, in GB/s. PACE: rate at which a CPU imitates a link (absent or None: no link is imitated).
#: LIFTED_PACE: the rate that was imitated during the measurement, if ``Hardware.with_link_rate`` removed it.
PACE, LIFTED_PACE = "link_gb_per_s", "link's pace while measured, GB/s"

#: Keys of a record's notes. FAR_MEMORY: {"near_bytes", "share"} of a host with two nodes; memory beyond near_bytes is
#: on the far node and crosses the link at this share of its rate. CACHED_DISK: GB/s of disk reads that the page cache
#: serves. PAGE_CACHE: the same, if the code reads through the page cache (``sim.implementation``).
FAR_MEMORY, CACHED_DISK, PAGE_CACHE = "far host memory", "page cache, GB/s", "page cache in use, GB/s"

#: Key of a record's notes: tier -> usable bytes of the machine, if a user's budget replaced them.
OWN_MEMORY = "usable memory of its own"

#: Bytes of a GPU's memory that no program gets. The driver withholds 0.25 to 0.6 GiB of the datasheet's size (RTX 4090:
#: 0.24, A100 40 GB: 0.51, H200: 0.60; sources are in the catalogue's notes). The CUDA context with kernels and cuBLAS
#: workspaces is assumed to take up to 0.5 GiB more. GDDR6 with error correction loses another sixteenth; such a machine
#: has a ``device_reserve`` of its own. Cards under 16 GiB are assumed to lose a sixteenth in all.
CUDA_RESERVE_BYTES = 2**30


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Line:
    """A task's seconds = overhead_s + flops·s_per_flop + bytes·s_per_byte.

    Bytes are link bytes on a link, else memory bytes. A roofline would take the larger of the last two terms. Their sum
    is linear, so one form serves regression, array clock and linear programs, and it is more accurate: of 60 lines in
    five CPU records the two differ on 31. On these, held-out samples differ by 34.8 % from the sum and by 38.0 % from
    the larger term, and the sum is better on 22.
    """

    overhead_s: float = 0.0
    s_per_flop: float = 0.0
    s_per_byte: float = 0.0
    r2: float | None = None  #: R² of the fit; None for a datasheet's line
    samples: tuple[tuple[float, float, float], ...] = ()  #: (flops, bytes, seconds) to which the line was fitted

    def __post_init__(self):
        for name in ("overhead_s", "s_per_flop", "s_per_byte"):
            value = getattr(self, name)
            check(f"hardware line: {name}", value, _is_number(value) and value >= 0, "a number >= 0")

    def scaled(self, times: float) -> Line:
        """Return the line with all coefficients multiplied by ``times``."""
        terms = {name: times * getattr(self, name) for name in ("overhead_s", "s_per_flop", "s_per_byte")}
        return replace(self, **terms)

    def at(self, flops, num_bytes):
        """Return the seconds of a task; numbers or arrays."""
        return self.overhead_s + flops * self.s_per_flop + num_bytes * self.s_per_byte


def task_seconds(line: Line, resource: str, work: Work):
    """Return the seconds of a task on a line; the counts of its work may be numbers or arrays.

    This is the only price of a task. Not modelled: a link that is slower because of the other direction (h2d_both and
    d2h_both are measured, but stores are few) or because of a busy memory (profile under load), caches that stay warm
    between tasks, and the time to enqueue a task.
    """
    return line.at(work.flops, work.link_bytes if resource in LINKS else work.memory_bytes) + CALL_S * work.calls


@dataclass(frozen=True)
class Hardware:
    """A machine: its lines, memory sizes and notes."""

    name: str
    device: str  #: "cpu" or "cuda"
    lines: dict[str, Line]  #: verb ("kv_gen") or resource ("h2d") -> line; a verb without a line has its resource's
    device_memory: int | None = None  #: bytes of the device; None: no limit besides the host's
    host_memory: int | None = None  #: bytes; None: not known
    disk_memory: int | None = None  #: bytes; None: no disk is known
    source: str = ""  #: origin of the numbers: a datasheet's link, or date, command and device of a measurement
    dtype: str = "float16"  #: compute dtype of the lines
    faster_dtype: str | None = None  #: the dtype that a CPU computes faster, float32 or bfloat16; None: not measured
    notes: dict = field(default_factory=dict)
    device_reserve: int | None = None  #: bytes of device_memory that no program gets; None: see CUDA_RESERVE_BYTES
    attends_in_place: bool = False  #: the line of attend holds for attention in place (``AttentionPaths.in_place``)

    def __post_init__(self):
        for name in ("name", "device", "source", "dtype"):
            check(f"hardware: {name}", getattr(self, name), isinstance(getattr(self, name), str), "text")
        where, reserve = f"hardware {self.name}: ", self.device_reserve
        check(f"{where}device", self.device, self.device in ("cpu", "cuda"), "one of cpu, cuda")
        dtypes = (None, "float32", "bfloat16")
        check(f"{where}faster_dtype", self.faster_dtype, self.faster_dtype in dtypes, "float32, bfloat16 or null")
        in_place = self.attends_in_place
        check(f"{where}attends_in_place", in_place, isinstance(in_place, bool), "true or false")
        for name in ("device_memory", "host_memory", "disk_memory"):
            value = getattr(self, name)
            check(where + name, value, value is None or _is_number(value) and value > 0, "a number of bytes > 0")
        sized = reserve is None or _is_number(reserve) and reserve >= 0
        check(f"{where}device_reserve", reserve, sized, "a number of bytes >= 0")
        if self.device_memory is not None and reserve is not None:
            less = f"less than device_memory, {self.device_memory}"
            check(f"{where}device_reserve", reserve, reserve < self.device_memory, less)
        if not self.lines:
            raise InputError(f"{where}it has no lines")
        check(f"{where}notes", self.notes, isinstance(self.notes, dict), "an object")
        contention = self.notes.get(CONTENTION, {})
        of_resource = {"wait_s", "factor"}.issubset
        known = isinstance(contention, dict) and all(
            isinstance(delay, dict) and of_resource(delay) and all(_is_number(x) and x >= 0 for x in delay.values())
            for delay in contention.values()
        )
        check(f"{where}{CONTENTION}", contention, known, "wait_s and factor, numbers >= 0, by resource")

    def usable_memory(self, tier: str) -> float | None:
        """Return the bytes of a tier that a run may fill: the tier's memory, without the device's reserve."""
        size = getattr(self, f"{tier}_memory")
        if tier != "device" or size is None:
            return size
        reserve = self.device_reserve
        if reserve is None:
            reserve = min(CUDA_RESERVE_BYTES, size // 16) if self.device == "cuda" else 0
        return size - reserve

    def with_memory(self, sizes: Mapping[str, int]) -> Hardware:
        """Return the machine with these usable bytes of tiers. For a CUDA device, plans then count the CUDA context and
        the allocator."""
        own = {tier: self.own_memory(tier) for tier in sizes}
        changed: dict = {f"{tier}_memory": size for tier, size in sizes.items()}
        no_reserve = {"device_reserve": 0} if "device" in sizes else {}
        notes = {**self.notes, OWN_MEMORY: {**self.notes.get(OWN_MEMORY, {}), **own}}
        return replace(self, **changed, **no_reserve, notes=notes)

    def own_memory(self, tier: str) -> float | None:
        """Return the ``usable_memory`` of the machine before ``with_memory``."""
        return self.notes.get(OWN_MEMORY, {}).get(tier, self.usable_memory(tier))

    @property
    def launch_s(self) -> float:
        """Return the seconds that Python takes to launch a task; 0 if not measured."""
        return self.lines[LAUNCHER].overhead_s if LAUNCHER in self.lines else 0.0

    @property
    def has_disk(self) -> bool:
        """Return whether the disk's rates are known."""
        return "disk_read" in self.lines and "disk_write" in self.lines

    @property
    def company(self) -> str | None:
        """Return in words what disturbed the measurement of this record; None if nothing is known. Older records only
        have the sizes whose two passes differ."""
        sizes = self.notes.get(DISAGREED)
        return self.notes.get(COMPANY, f"two passes disagreed on {len(sizes)} sizes" if sizes else None)

    @property
    def rates(self) -> dict:
        """Return the origin of the rates. Keys: ``kind``: measured (by ``flexhybrid profile``), fitted (to published
        runs), assumed or stated; ``on``: source; ``held_out``: error on held-out rows; ``given``: flag -> the user's
        rate."""
        if "rates" in self.notes:
            return self.notes["rates"]
        measured = any(line.samples or line.r2 is not None for line in self.lines.values())
        return {"kind": "measured" if measured else "stated", "on": self.source}

    def line(self, verb: str, resource: str, suffix: str = "") -> Line:
        """Return the line that prices a verb's tasks on a resource, with contention. ``suffix``: ``Work.line``. Raise
        InputError if there is no line."""
        return self._contended(self.own_line(verb, resource, suffix), resource)

    def _contended(self, line: Line, resource: str) -> Line:
        """Return a line with the contention of a resource."""
        if contention := self.notes.get(CONTENTION, {}).get(resource):
            line = line.scaled(contention["factor"])
            return replace(line, overhead_s=line.overhead_s + contention["wait_s"])
        return line

    def own_line(self, verb: str, resource: str, suffix: str = "") -> Line:
        """Return ``line`` without contention."""
        key: str | None = verb
        while key is not None:
            if line := self.lines.get(key + suffix) or self.lines.get(key):
                return line
            key = VERBS[key].otherwise if key in VERBS else None
        if line := self.lines.get(resource):
            return line
        raise InputError(f"hardware {self.name!r} has no line for {verb!r} nor for {resource!r}")

    def at_work(self, policy: Policy) -> Hardware:
        """Return the machine under a policy: ``undisturbed`` if no context crosses the link."""
        return self.undisturbed if policy.stays_on_device else self

    @property
    def undisturbed(self) -> Hardware:
        """Return the machine with an idle link. Kernels that share memory with the link are then faster; their lines
        are "project_alone", …, if measured."""
        contention = self.notes.get(CONTENTION, {})
        notes = {**self.notes, CONTENTION: {**contention, **_of_alone(contention)}} if contention else self.notes
        return replace(self, lines={**self.lines, **_of_alone(self.lines)}, notes=notes)

    @property
    def contended(self) -> Hardware:
        """Return the machine with its contention as a part of its lines."""

        def resource(key: str) -> str:
            return f"{resource_of_line(key)}{ALONE_SUFFIX * key.endswith(ALONE_SUFFIX)}"

        lines = {key: self._contended(line, resource(key)) for key, line in self.lines.items()}
        return replace(self, lines=lines, notes={key: note for key, note in self.notes.items() if key != CONTENTION})

    def scaled(self, times: Mapping[str, float]) -> Hardware:
        """Return the machine with its tasks' seconds multiplied by ``times``, by line or resource, such as {"h2d":
        1.1}."""

        def factor(key: str) -> float:
            return times.get(key, times.get(resource_of_line(key) or "", 1.0))

        waits = self.notes.get(CONTENTION)
        scaled = {
            resource: {**delay, "wait_s": delay["wait_s"] * times.get(resource.removesuffix(ALONE_SUFFIX), 1.0)}
            for resource, delay in (waits or {}).items()
        }
        notes = {**self.notes, CONTENTION: scaled} if waits else self.notes
        return replace(self, lines={key: line.scaled(factor(key)) for key, line in self.lines.items()}, notes=notes)

    def with_link_rate(self, gb_per_s: float | None) -> Hardware:
        """Return a CPU's machine that imitates a link of another rate in both directions.

        None: no link is imitated, and the lines "h2d_unpaced" and "d2h_unpaced" apply, if measured. The notes keep the
        old rate as LIFTED_PACE, because the processor's lines were measured with it.
        """
        if gb_per_s is None and "h2d_unpaced" not in self.lines:
            return self
        check("the link's rate", gb_per_s, gb_per_s is None or _is_number(gb_per_s) and gb_per_s > 0, "a number > 0")

        def at_rate(key: str, line: Line) -> Line:
            if key.endswith("_unpaced") or not crosses_link(key):
                return line
            if gb_per_s is None:
                return self.lines["d2h_unpaced" if resource_of_line(key) == "d2h" else "h2d_unpaced"]
            return replace(line, s_per_byte=1e-9 / gb_per_s, samples=())

        lines = {key: at_rate(key, line) for key, line in self.lines.items()}
        lifted = {LIFTED_PACE: self.notes[PACE]} if gb_per_s is None and self.notes.get(PACE) else {}
        return replace(self, lines=lines, notes={**self.notes, PACE: gb_per_s, **lifted})

    def with_disk_rate(self, gb_per_s: float | None) -> Hardware:
        """Return the machine that imitates a disk of another rate in both directions, at most its measured rate. None:
        the lines "disk_read_unpaced" and "disk_write_unpaced" apply, if measured."""
        check("the disk's rate", gb_per_s, gb_per_s is None or _is_number(gb_per_s) and gb_per_s > 0, "a number > 0")
        lines = dict(self.lines)
        for key in self.lines:
            if not is_of_disk(key) or key.endswith("_unpaced"):
                continue
            own = self.lines.get(f"{resource_of_line(key)}_unpaced", self.lines[key])
            byte_s = 0.0 if gb_per_s is None else 1e-9 / gb_per_s
            lines[key] = replace(own, s_per_byte=byte_s, samples=()) if byte_s > own.s_per_byte else own
        return replace(self, lines=lines, notes={**self.notes, "disk_gb_per_s": gb_per_s})

    def with_gemm_rate(self, tflops: float) -> Hardware:
        """Return the machine with another rate of matrix products, in 10^12 operations/s."""
        check("the rate of matrix products", tflops, _is_number(tflops) and tflops > 0, "a number > 0")
        lines = dict(self.lines)
        for verb in VERBS.values():
            for key in (verb.name, verb.name + EXPERTS_SUFFIX) if verb.group == "gemm" else ():
                if key in self.lines or key == verb.name:
                    own = self.lines.get(key) or self.own_line(verb.name, verb.resource)
                    lines[key] = replace(own, s_per_flop=1e-12 / tflops, samples=())
        return replace(self, lines=lines)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the record by rename, so that a reader never sees half a file."""
        write_by_rename(Path(path), self.to_json())


def _of_alone(by_key: dict) -> dict:
    """Return only the items whose keys end in ALONE_SUFFIX, and drop the suffix."""
    return {key.removesuffix(ALONE_SUFFIX): value for key, value in by_key.items() if key.endswith(ALONE_SUFFIX)}


def resource_of_line(key: str) -> str | None:
    """Return the resource of the tasks that a line prices; None if the key is neither a resource nor a verb."""
    for suffix in (ALONE_SUFFIX, "_unpaced", "_both"):
        key = key.removesuffix(suffix)
    key = key.removesuffix(EXPERTS_SUFFIX)
    return key if key in RESOURCES else RESOURCE_OF.get(key)


def crosses_link(key: str) -> bool:
    """Return whether a line prices tasks of the host link."""
    return resource_of_line(key) in ("h2d", "d2h")


def is_of_disk(key: str) -> bool:
    """Return whether a line prices tasks of the disk."""
    return resource_of_line(key) in ("disk_read", "disk_write")


def load_hardware(path: str | Path) -> Hardware:
    """Read a record. Raise InputError, with the file, for broken JSON, another format or a wrong field."""
    data = load_json(path, "hardware file ")
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise InputError(f'{path} is not a hardware file: it lacks "format": "{FORMAT}"')
    try:
        _check_fields(Hardware, data, "")
        lines = data.pop("lines")
        if not isinstance(lines, dict):
            raise InputError(f"lines must be an object with one line a verb or resource, not {lines!r}")
        return Hardware(lines={key: _line_from_json(key, line) for key, line in lines.items()}, **data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_fields(record: type, data: dict, where: str) -> None:
    """Raise InputError for a field that the dataclass ``record`` does not have, or for a missing field."""
    known = fields(record)
    names = sorted(one.name for one in known)
    if strange := sorted(set(data) - set(names)):
        raise InputError(f"{where}unknown field {strange[0]!r}; known: {', '.join(names)}")
    needed = (one.name for one in known if one.default is MISSING and one.default_factory is MISSING)
    if missing := [name for name in needed if name not in data]:
        raise InputError(f"{where}the field {missing[0]!r} is missing")


def _line_from_json(key: str, data: object) -> Line:
    where = f"line {key!r}: "
    if not isinstance(data, dict):
        raise InputError(f"{where}it must be an object, not {data!r}")
    _check_fields(Line, data, where)
    samples = data.get("samples", [])
    if not isinstance(samples, list):
        raise InputError(f"{where}samples must be a list of [flops, bytes, seconds], not {samples!r}")
    for sample in samples:
        if not isinstance(sample, list) or len(sample) != 3 or not all(map(_is_number, sample)):
            raise InputError(f"{where}a sample must be three numbers, [flops, bytes, seconds], not {sample!r}")
    if data.get("r2") is not None and not _is_number(data["r2"]):
        raise InputError(f"{where}r2 must be a number or null, not {data['r2']!r}")
    try:
        return Line(**{**data, "samples": tuple(map(tuple, samples))})
    except InputError as error:
        raise InputError(f"{where}{error}") from None
