"""``flexhybrid hardware``: lists the catalogue's machines, and writes a machine file from datasheet numbers."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from flexhybrid.core.errors import InputError, flag
from flexhybrid.core.files import check_new_file
from flexhybrid.core.hardware import is_of_disk
from flexhybrid.core.units import gib, parse_bytes
from flexhybrid.jobs.rates import describe_rates
from sim import catalogue
from sim.datasheet import HOST, SHARES, Datasheet, in_rates, load_datasheet

#: Field of a datasheet, and flag -> its help.
PEAKS = {
    "tflops": 'tensor cores in FP16 with FP32 sums, dense (half of a rate "with sparsity")',
    "memory_gb_per_s": "the device's memory, by its datasheet",
    "link_gb_per_s": "one direction of the link by its standard (PCIe 3.0 x16 15.75, 4.0 31.5, 5.0 63), of which "
    "copies reach --link-share",
    "host_memory_gb_per_s": f"the host's memory, by its channels (default: {HOST['host_memory_gb_per_s']:g}, two of "
    "DDR4-3200)",
    "host_tflops": f"the host's cores in FP32 (default: {HOST['host_tflops']:g})",
    "disk_read_gb_per_s": "disk reads",
    "disk_write_gb_per_s": "disk writes",
}
SIZES = {
    "device_memory": "memory of the device, like 24GiB",
    "host_memory": "memory of the host, like 128GiB (default: unlimited)",
    "disk_memory": "size of the disk, like 1TB (default: no disk)",
    "device_reserve": "device memory that programs cannot use (default: 1GiB)",
    "host_near_memory": "memory of the host's NUMA node next to the link, like 441GiB (default: all of it)",
}
OTHERS = {
    "price_per_hour": "price of the machine in US dollars an hour",
    "watts": "power that the device draws under load, in watts",
    "disk_cached_gb_per_s": "10^9 bytes a second of disk reads from the page cache, for systems that use it",
    "host_far_share": "share of the link's rate that copies from the host's other NUMA node reach",
}
NEEDED = ("tflops", "memory_gb_per_s", "link_gb_per_s", "device_memory")  #: fields that every new machine needs


def add_hardware(commands) -> None:
    """Add the command ``hardware``."""
    parser = commands.add_parser(
        "hardware",
        help="list the machines of the catalogue, or write a machine file from datasheet numbers",
        description="Without options, list the catalogue. With a name, show that machine's numbers and their sources. "
        "With --out, write a file for --hardware of simulate, search, sweep and run. It has the numbers given as "
        "flags; the others come from --like, or are assumed. The file can be edited by hand.",
    )
    parser.add_argument("name", nargs="?", help="a machine to show, by name or file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="machine file to write, .json")
    parser.add_argument("--overwrite", dest="fresh", action="store_true", help="overwrite an existing file")
    parser.add_argument("--like", metavar="NAME", help="machine, by name or file, that gives the other numbers")
    for field, text in PEAKS.items():
        unit = "10^12 a second" if "tflops" in field else "10^9 bytes a second"
        parser.add_argument(flag(field), type=float, help=f"{unit}: {text}")
    for field, text in OTHERS.items():
        parser.add_argument(flag(field), type=float, help=text)
    for field, text in SIZES.items():
        parser.add_argument(flag(field), help=text)
    for share, usual in SHARES.items():
        parser.add_argument(f"{flag(share)}-share", type=float, help=f"share of the peak reached (default: {usual:g})")
    parser.set_defaults(run=run_hardware)


def run_hardware(args: argparse.Namespace) -> dict:
    """List the catalogue, show a machine or write a file. Raise InputError for a missing, wrong or unused number."""
    given = {field: getattr(args, field) for field in (*PEAKS, *SIZES, *OTHERS) if getattr(args, field) is not None}
    shares = {share: value for share in SHARES if (value := getattr(args, f"{share}_share")) is not None}
    if args.out is None:
        if given or shares or args.like:
            first = [*map(flag, given), *(f"{flag(share)}-share" for share in shares), "--like"][0]
            raise InputError(f"{first} describes a machine to write: name its file with --out")
        return _shown(args) if args.name else _listed(args)
    if args.name:
        raise InputError(f"{args.name!r} cannot be shown with --out: to start from its numbers use --like {args.name}")
    if args.out.suffix.lower() != ".json":
        raise InputError(
            f"--out {args.out}: a machine is a .json file, not {args.out.suffix or 'one without a suffix'}"
        )
    check_new_file(args.out)
    if args.out.exists() and not args.fresh:
        raise InputError(f"--out {args.out} exists; choose another file, or overwrite it with --overwrite")
    sheet = new_sheet(args.out.stem, given, shares, sheet_of(args.like) if args.like else None)
    sheet.hardware()  # raises InputError for impossible numbers
    sheet.save(args.out)
    args.show(f"{args.out}: {describe_sheet(sheet)}")
    return {"path": str(args.out), **asdict(sheet)}


def sheet_of(name_or_path: str) -> Datasheet:
    """Return a machine's datasheet. Raise InputError for an unknown machine or a measured one, which has none."""
    path = catalogue.path_of(name_or_path)
    if path is None:
        catalogue.load(name_or_path)  # raises InputError for an unknown machine
        raise InputError(f"{name_or_path!r} was measured and has no datasheet; name a machine of the catalogue")
    return load_datasheet(path)


def new_sheet(name: str, given: dict, shares: dict, like: Datasheet | None = None) -> Datasheet:
    """Return a datasheet with the given numbers and shares, and the others of ``like`` (None: assumed).

    Raise InputError for a missing or wrong number.
    """
    said = dict.fromkeys(given, "given on the command line")
    if shares:
        said["shares"] = f"given on the command line: {', '.join(f'{k} {v:g}' for k, v in shares.items())}"
    if like is None:
        if missing := [flag(field) for field in NEEDED if field not in given]:
            raise InputError(f"a machine needs {', '.join(missing)} (or --like, a machine to start from)")
        said |= {field: "assumed" for field in HOST if field not in given}
        said.setdefault("shares", "assumed")
        return Datasheet(name=name, **given, shares=SHARES | shares, sources=said)
    faster = given.keys() & PEAKS.keys() or shares
    rates = {"kind": "assumed", "on": f"those of {like.name}, scaled to other peaks"} if faster else like.rates
    disk = any("disk" in field for field in given.keys() & PEAKS.keys())  # a given rate replaces measured disk lines
    tables = {"lines": like.lines, "in_place_of": like.in_place_of}
    tables = {name: {k: v for k, v in table.items() if not (disk and is_of_disk(k))} for name, table in tables.items()}
    sources, shares = like.sources | said, SHARES | like.shares | shares
    return replace(like, name=name, **given, **tables, shares=shares, rates=rates, sources=sources)


def describe_sheet(sheet: Datasheet) -> str:
    """Return a machine's peaks, sizes and costs as a line."""
    sizes = f"{sheet.device_memory} device, {sheet.host_memory or 'unlimited'} host"
    disk = f", {sheet.disk_memory} disk" if sheet.disk_memory else ""
    kind = sheet.rates.get("kind", "assumed")
    peaks = f"{sheet.tflops:g} TFLOP/s, memory {sheet.memory_gb_per_s:g} GB/s, link {sheet.link_gb_per_s:g} GB/s"
    costs = f"; ${sheet.price_per_hour:g} an hour" if sheet.price_per_hour is not None else ""
    costs += f"; {sheet.watts:g} W" if sheet.watts is not None else ""
    return f"{peaks}; {sizes}{disk}{costs}; rates {kind}"


def _listed(args) -> dict:
    """Print the catalogue; return its machines."""
    sheets = {name: sheet_of(name) for name in catalogue.names()}
    args.show(f"{'name':16} {'TFLOP/s':>8} {'memory':>7} {'link':>6} {'device':>8} {'host':>8}  rates")
    rows = []
    for name, sheet in sheets.items():
        kind = sheet.rates.get("kind", "assumed")
        numbers = f"{sheet.tflops:8.1f} {sheet.memory_gb_per_s:7.0f} {sheet.link_gb_per_s:6.1f}"
        args.show(f"{name:16} {numbers} {sheet.device_memory:>8} {sheet.host_memory or '':>8}  {kind:8} {sheet.gpu}")
        rows.append(
            {"name": name, "gpu": sheet.gpu, "rates": kind} | {field: getattr(sheet, field) for field in NEEDED}
        )
    args.show("memory and link (one direction) in GB/s; `flexhybrid hardware NAME` shows the sources")
    return {"machines": rows}


def _shown(args) -> dict:
    """Print a machine; return its numbers."""
    hardware = catalogue.load(args.name)
    if catalogue.path_of(args.name) is None:
        args.show(f"{hardware.name}: measured; {hardware.source}\n{describe_rates(hardware)}")
        return {"name": hardware.name, "rates": hardware.rates, "source": hardware.source}
    sheet = sheet_of(args.name)
    reserve = parse_bytes(sheet.device_reserve)
    args.show(
        f"{sheet.name} ({sheet.gpu}): {describe_sheet(sheet)}{f'; {gib(reserve)} for the driver' if reserve else ''}"
    )
    args.show(describe_rates(hardware))
    shares = hardware.notes["efficiency"]
    limited = " (what the link leaves)" * (sheet.host_share < (SHARES | sheet.shares)["host_memory"])
    said = (f"{name} {value:.3g}{limited * (name == 'host_memory')}" for name, value in shares.items())
    args.show(f"  shares reached: {', '.join(said)}")
    for key in sheet.lines:
        args.show(f"  line {key}: {', '.join(f'{k} {v:.4g}' for k, v in in_rates(hardware.lines[key]).items())}")
    for field, text in {"source": sheet.source, **sheet.sources}.items():
        args.show(f"  {field}: {text}")
    return asdict(sheet)
