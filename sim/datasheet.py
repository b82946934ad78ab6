"""Datasheets: files of a machine's peaks, sizes and shares in customary units, and the records made from them.

Every line of the record is a peak times a share, or a rate under ``lines``, which scales with its peak and share.
``docs/simulating.md`` describes the format.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import isclose
from pathlib import Path

from flexhybrid.core.errors import InputError, check, is_number, unknown
from flexhybrid.core.files import load_json, write_by_rename
from flexhybrid.core.hardware import CACHED_DISK, FAR_MEMORY, Hardware, Line, load_hardware, resource_of_line
from flexhybrid.core.hardware import FORMAT as RECORD
from flexhybrid.core.units import parse_bytes

FORMAT = "flexhybrid-datasheet-1"

#: Assumed shares of the peaks (default). gemm: large matrix products; memory, attention_memory: device memory in
#: streaming reads and in decode attention; link: long copies; host_memory, host_flops: attention on the host
#: (``Datasheet.host_share`` limits the former).
SHARES = {"gemm": 0.6, "memory": 0.8, "attention_memory": 0.6, "link": 0.8, "host_memory": 0.35, "host_flops": 0.3}
OVERHEAD_US = {"compute": 10.0, "link": 10.0, "host": 20.0, "disk": 100.0}  #: microseconds of a task, assumed too
#: Share of the host memory's peak that the link and attention on the host reach together (as "memory" above), and the
#: least share that attention keeps beside a busy link. Both are assumed.
HOST_MEMORY_SHARED, HOST_MEMORY_LEAST = 0.8, 0.1
SCATTER_GB_PER_S = 20.0  #: copy rate of one host core; in a public STREAM run on a DGX A100 one thread has 28 GB/s
HOST = {"host_memory_gb_per_s": 51.2, "host_tflops": 1.0}  #: two channels of DDR4-3200; sixteen AVX2 cores at 2 GHz
KINDS = ("measured", "fitted", "assumed", "stated")


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """A machine in customary units: 10^12 operations/s, 10^9 bytes/s, memory sizes as text such as "24GiB"."""

    name: str
    tflops: float  #: peak of the tensor cores in FP16 with FP32 sums, dense
    memory_gb_per_s: float
    link_gb_per_s: float  #: rate of the link's standard in one direction
    device_memory: str
    host_memory: str | None = None
    host_memory_gb_per_s: float = HOST["host_memory_gb_per_s"]
    host_tflops: float = HOST["host_tflops"]
    disk_memory: str | None = None
    disk_read_gb_per_s: float | None = None
    disk_write_gb_per_s: float | None = None
    #: rate at which the page cache serves disk reads, for code that reads through it (ours does not)
    disk_cached_gb_per_s: float | None = None
    host_near_memory: str | None = None  #: memory of the NUMA node with the link; None: all host memory
    host_far_share: float | None = None  #: share of the link's rate that copies from the other node's memory reach
    device_reserve: str | None = None  #: device memory that runs must leave free
    price_per_hour: float | None = None  #: price of the machine in US dollars
    watts: float | None = None  #: power under load
    gpu: str = ""
    testbed: str = ""  #: owner of the machine, such as a paper
    shares: dict = field(default_factory=dict)  #: shares of the peaks that replace those of SHARES
    overhead_us: dict = field(default_factory=dict)  #: overheads that replace those of OVERHEAD_US
    scatter_gb_per_s: float = SCATTER_GB_PER_S
    #: verb or resource -> tflops, gb_per_s, overhead_us that are reached; no share applies to them
    lines: dict = field(default_factory=dict)
    #: values that peaks and shares gave for ``lines`` when these were fitted (default: today's). A line scales by the
    #: ratio of today's value to this one
    in_place_of: dict = field(default_factory=dict)
    #: decode steps read keys and values in place, as in our engine; False: ``lines`` are of code that copies them first
    attends_in_place: bool = True
    rates: dict = field(default_factory=dict)  #: ``kind``, one of KINDS; ``on`` and ``held_out``: measurements in words
    source: str = ""
    sources: dict = field(default_factory=dict)  #: field -> source of its number
    published_fit: dict = field(default_factory=dict)  #: values that others fitted to this machine

    def __post_init__(self):
        where = f"machine {self.name}: "
        for name in ("name", "gpu", "testbed", "source"):
            check(f"{where}{name}", getattr(self, name), isinstance(getattr(self, name), str), "text")
        for known in fields(self):
            if known.type in (float, float | None):
                value = getattr(self, known.name)
                unset = value is None and known.type is not float
                check(where + known.name, value, unset or _positive(value), "a number above 0")
        check(where + "attends_in_place", self.attends_in_place, type(self.attends_in_place) is bool, "true or false")
        for name, known in (("shares", SHARES), ("overhead_us", OVERHEAD_US)):
            _check_table(where + name, getattr(self, name), known)
        for name, value in self.shares.items():
            check(f"{where}the share {name}", value, value <= 1, "a share of the peak, at most 1")
        for name in ("rates", "sources", "published_fit"):
            check(where + name, getattr(self, name), isinstance(getattr(self, name), dict), "an object")
        for name, table in (("lines", self.lines), ("in_place_of", self.in_place_of)):
            check(where + name, table, isinstance(table, dict), "an object, one a verb or resource")
            for key, line in table.items():
                if resource_of_line(key) is None:
                    raise InputError(f"{where}{name}: {key!r} is neither a resource nor a verb")
                _check_table(f"{where}{name}: {key}", line, ("tflops", "gb_per_s", "overhead_us"))
        kind = self.rates.get("kind", "assumed")
        if kind not in KINDS:
            raise unknown(f"{where}rates: kind", kind, KINDS)
        disk = [self.disk_memory, self.disk_read_gb_per_s, self.disk_write_gb_per_s]
        if any(disk) and not all(disk):
            raise InputError(f"{where}a disk has disk_memory, disk_read_gb_per_s and disk_write_gb_per_s, or none")
        if bool(self.host_near_memory) != bool(self.host_far_share) or (self.host_far_share or 0) > 1:
            raise InputError(f"{where}two nodes have host_near_memory and host_far_share, a share of at most 1")
        object.__setattr__(self, "in_place_of", self.in_place_of or self.replaced())

    @property
    def host_share(self) -> float:
        """Return the share of the host memory's peak that attention on the host reaches, at most ``left_by_link``."""
        shares = SHARES | self.shares
        link = 1e9 * self.link_gb_per_s * shares["link"]
        return min(shares["host_memory"], left_by_link(link, 1e9 * self.host_memory_gb_per_s))

    def by_shares(self) -> dict[str, Line]:
        """Return the lines that follow from peaks and shares, without ``lines``."""
        shares, overhead = SHARES | self.shares, {k: 1e-6 * v for k, v in (OVERHEAD_US | self.overhead_us).items()}

        def line(where: str, tflops: float = 0.0, gb_per_s: float = 0.0) -> Line:
            return Line(overhead[where], 1e-12 / tflops if tflops else 0.0, 1e-9 / gb_per_s if gb_per_s else 0.0)

        gemm, copies = self.tflops * shares["gemm"], line("link", gb_per_s=self.link_gb_per_s * shares["link"])
        host = self.host_memory_gb_per_s * self.host_share
        lines = {
            "compute": line("compute", gemm, self.memory_gb_per_s * shares["memory"]),
            "attend": line("compute", gemm, self.memory_gb_per_s * shares["attention_memory"]),
            "attend_prefill": line("compute", gemm, self.memory_gb_per_s * shares["memory"]),
            "h2d": copies,
            "d2h": copies,
            "host_compute": line("host", gb_per_s=host),
            "attend_host": line("host", self.host_tflops * shares["host_flops"], host),
            "scatter": line("host", gb_per_s=self.scatter_gb_per_s),
        }
        if self.disk_read_gb_per_s and self.disk_write_gb_per_s:
            lines["disk_read"] = line("disk", gb_per_s=self.disk_read_gb_per_s)
            lines["disk_write"] = line("disk", gb_per_s=self.disk_write_gb_per_s)
        return lines

    def replaced(self) -> dict[str, dict[str, float]]:
        """Return the values that peaks and shares give for the numbers of ``lines``, in the same form."""
        plain, found = self.by_shares(), {}
        for key, own in self.lines.items():
            rates = in_rates(plain.get(key) or plain.get(resource_of_line(key) or "") or Line())
            found[key] = {name: rates[name] for name in own if own[name] and name in rates}
        return found

    def hardware(self) -> Hardware:
        """Return the record of the machine, with lines in seconds per FLOP and byte."""
        lines, replaced = self.by_shares(), self.replaced()
        for key, own in self.lines.items():
            before = lines.get(key) or lines.get(resource_of_line(key) or "") or Line()
            then = replaced[key] | self.in_place_of.get(key, {})
            now = {name: rate * replaced[key].get(name, 1) / (then.get(name) or 1) for name, rate in own.items()}
            seconds = 1e-6 * now["overhead_us"] if "overhead_us" in now else before.overhead_s
            flops, moved = now.get("tflops"), now.get("gb_per_s")
            lines[key] = Line(seconds, 1e-12 / flops if flops else 0.0, 1e-9 / moved if moved else 0.0)
        notes = {
            "gpu": self.gpu,
            "testbed": self.testbed,
            "peak_flops": 1e12 * self.tflops,
            "memory_bytes_per_s": 1e9 * self.memory_gb_per_s,
            "link_bytes_per_s": 1e9 * self.link_gb_per_s,
            "host_memory_bytes_per_s": 1e9 * self.host_memory_gb_per_s,
            "host_peak_flops": 1e12 * self.host_tflops,
            "efficiency": SHARES | self.shares | {"host_memory": self.host_share},
            "rates": {"kind": "assumed", "on": self._shares_in_words(), **self.rates},
            "sources": self.sources,
            "published_fit": self.published_fit,
        }
        near = parse_bytes(self.host_near_memory)
        far = {"near_bytes": near, "share": self.host_far_share} if near else None
        costs = {"price_per_hour": self.price_per_hour, "watts": self.watts}
        costs |= {FAR_MEMORY: far, CACHED_DISK: self.disk_cached_gb_per_s}
        notes |= {name: value for name, value in costs.items() if value is not None}
        return Hardware(
            name=self.name,
            device="cuda",
            lines=lines,
            device_memory=parse_bytes(self.device_memory),
            host_memory=parse_bytes(self.host_memory),
            disk_memory=parse_bytes(self.disk_memory),
            source=self.source,
            notes=notes,
            device_reserve=parse_bytes(self.device_reserve),
            attends_in_place=self.attends_in_place,
        )

    def _shares_in_words(self) -> str:
        """Return in words which shares of the peaks apply, for a file without ``rates``."""
        others = [f"{name} {value:g}" for name, value in self.shares.items() if value != SHARES[name]]
        return "shares of datasheet peaks" + (f"; its file has {' and '.join(others)}" if others else "")

    def to_json(self) -> str:
        """Return the file's text: the fields that differ from their defaults."""
        usual = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return json.dumps({"format": FORMAT, **changed}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the file by rename, so that a reader never sees half a file."""
        write_by_rename(Path(path), self.to_json() + "\n")


def left_by_link(link_rate: float, host_peak: float) -> float:
    """Return the share of the host memory's peak that a busy link leaves; both arguments in bytes/s. The link's copies
    and attention on the host use the same memory."""
    return max(HOST_MEMORY_SHARED - link_rate / host_peak, HOST_MEMORY_LEAST)


def load_datasheet(path: str | Path) -> Datasheet:
    """Read a datasheet. Raise InputError, with the file and the field, for another format or a wrong value."""
    data = load_json(path, "hardware file ")
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise InputError(f'{path} is no datasheet: it lacks "format": "{FORMAT}"')
    known = [of.name for of in fields(Datasheet)]
    if strange := [name for name in data if name not in known]:
        raise InputError(f"{path}: {unknown('field', strange[0], known)}")
    needed = [of.name for of in fields(Datasheet) if of.default is MISSING and of.default_factory is MISSING]
    if missing := [name for name in needed if name not in data]:
        raise InputError(f"{path}: the field {missing[0]!r} is missing; a machine needs {', '.join(needed)}")
    try:
        sheet = Datasheet(**data)
        sheet.hardware()  # raises if a memory size cannot be parsed
        noted = data.get("in_place_of", {})
        if strange := [key for key, own in noted.items() if own.keys() - sheet.lines.get(key, {}).keys()]:
            raise InputError(f"in_place_of: {strange[0]} has rates that lines has not in their place")
        for key, name in ((key, name) for key, rates in sheet.replaced().items() for name in rates):
            own, rate = sheet.lines[key][name], sheet.replaced()[key][name]
            if name not in noted.get(key, {}) and not isclose(rate, own):
                remedy = f'remove it, or replace them with "in_place_of": {json.dumps({key: {name: rate}})}'
                raise InputError(f"lines: {key} has {name} {own:g}, but peaks and shares give {rate:g}: {remedy}")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return sheet


def is_record(path: str | Path) -> bool:
    """Return whether a file is a measured record, not a datasheet. Raise InputError if it cannot be read."""
    data = load_json(path, "hardware file ")
    return isinstance(data, dict) and data.get("format") == RECORD


def load_machine(path: str | Path) -> Hardware:
    """Read a machine's file, a datasheet or a measured record. Raise InputError if the file is neither or has a wrong
    value."""
    data = load_json(path, "hardware file ")
    form = data.get("format") if isinstance(data, dict) else None
    if form == FORMAT:
        return load_datasheet(path).hardware()
    if form is None:
        raise InputError(
            f'{path} is not a hardware file: it lacks "format": "{FORMAT}" (a datasheet; `flexhybrid hardware --out` '
            f'writes one) or "{RECORD}" (what `flexhybrid profile` measures)'
        )
    return load_hardware(path)


def in_rates(line: Line) -> dict[str, float]:
    """Return a line's overhead_us, tflops and gb_per_s; a rate is absent if its cost is zero."""
    rates = {"tflops": 1e12 * line.s_per_flop, "gb_per_s": 1e9 * line.s_per_byte}
    rates = {"overhead_us": 1e6 * line.overhead_s} | {name: 1 / cost for name, cost in rates.items() if cost}
    return {name: float(f"{rate:.12g}") for name, rate in rates.items()}


def _positive(value: object) -> bool:
    return is_number(value) and 0 < value < float("inf")


def _check_table(where: str, table: Mapping, known: Collection[str]) -> None:
    """Raise InputError unless the table is an object of known names and numbers above 0 (an overhead may be 0)."""
    check(where, table, isinstance(table, Mapping), "an object")
    for name, value in table.items():
        if name not in known:
            raise unknown(f"name in {where}", name, known)
        no_overhead = "overhead" in f"{where} {name}" and value == 0
        check(f"{where}, {name}", value, no_overhead or _positive(value), "a number above 0")
