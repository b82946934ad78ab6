"""``flexhybrid hardware``: the machines that predictions know, and a file of one's own from datasheet numbers."""

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

#: Flags that are fields of a datasheet -> their help. The first of them, and ``device_memory``, a new machine needs.
PEAKS = {
    "tflops": "tensor cores in FP16 with FP32 sums, dense (half of a figure \"with sparsity\")",
    "memory_gb_per_s": "the device's memory, by its datasheet",
    "link_gb_per_s": "one direction of the link by its standard (PCIe 3.0 x16 15.75, 4.0 31.5, 5.0 63), of which "
    "copies reach --link-share",
    "host_memory_gb_per_s": f"the host's memory by its channels ({HOST['host_memory_gb_per_s']:g}, two of DDR4-3200)",
    "host_tflops": f"the host's cores in FP32 ({HOST['host_tflops']:g})",
    "disk_read_gb_per_s": "the disk, reading",
    "disk_write_gb_per_s": "the disk, writing",
}  # fmt: skip
SIZES = {
    "device_memory": "like 24GiB",
    "host_memory": "like 128GiB (not limited)",
    "disk_memory": "like 1TB (no disk)",
    "device_reserve": "of the device, what no program gets (1GiB)",
    "host_near_memory": "of a host of two nodes, the one that the link is at, like 441GiB (all of it)",
}
OTHERS = {
    "price_per_hour": "US dollars an hour of the machine",
    "watts": "watts that the device draws at work",
    "disk_cached_gb_per_s": "10^9 bytes a second of disk reads from the page cache, for code that reads through it",
    "host_far_share": "of a host of two nodes, the share of the link's rate from the other node's memory",
}
NEEDED = ("tflops", "memory_gb_per_s", "link_gb_per_s", "device_memory")


def add_hardware(commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "hardware",
        help="list the machines that predictions know, or write a file of your own from datasheet numbers",
        description="Without options: the catalogue. With a name: that machine's numbers and their sources. With "
        "--out: write a file that simulate, search, sweep and run take as --hardware, from the numbers given (the "
        "others from --like, or assumed); numbers of that file can be edited by hand, they are the ones that count.",
    )
    parser.add_argument("name", nargs="?", help="a machine to show, by name or file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write, .json")
    parser.add_argument("--overwrite", dest="fresh", action="store_true", help="overwrite a file that is there")
    parser.add_argument(
        "--like", metavar="NAME", help="a machine, by name or file, whose numbers are kept where not given"
    )
    for field, text in PEAKS.items():
        unit = "10^12 a second" if "tflops" in field else "10^9 bytes a second"
        parser.add_argument(flag(field), type=float, help=f"{unit}: {text}")
    for field, text in OTHERS.items():
        parser.add_argument(flag(field), type=float, help=text)
    for field, text in SIZES.items():
        parser.add_argument(flag(field), help=text)
    for share, usual in SHARES.items():
        parser.add_argument(f"{flag(share)}-share", type=float, help=f"share of the peak reached ({usual:g})")
    parser.set_defaults(run=run_hardware)


def run_hardware(args: argparse.Namespace) -> dict:
    """List, show or write. Raise InputError for a number that is missing, wrong or given for nothing."""
    given = {field: getattr(args, field) for field in (*PEAKS, *SIZES, *OTHERS) if getattr(args, field) is not None}
    shares = {share: value for share in SHARES if (value := getattr(args, f"{share}_share")) is not None}
    if args.out is None:
        if given or shares or args.like:
            first = [*map(flag, given), *(f"{flag(share)}-share" for share in shares), "--like"][0]
            raise InputError(f"{first} is of a machine to write: name its file with --out")
        return _shown(args) if args.name else _listed(args)
    if args.name:
        raise InputError(f"{args.name!r} is shown, --out writes: to start from its numbers use --like {args.name}")
    if args.out.suffix.lower() != ".json":
        raise InputError(
            f"--out {args.out}: a machine is a .json file, not {args.out.suffix or 'one without a suffix'}"
        )
    check_new_file(args.out)
    if args.out.exists() and not args.fresh:
        raise InputError(f"--out {args.out}: it exists; choose another file, or overwrite it with --overwrite")
    sheet = new_sheet(args.out.stem, given, shares, sheet_of(args.like) if args.like else None)
    sheet.hardware()  # raises for numbers that no machine has
    sheet.save(args.out)
    args.show(f"{args.out}: {describe_sheet(sheet)}")
    return {"path": str(args.out), **asdict(sheet)}


def sheet_of(name_or_path: str) -> Datasheet:
    """Return a machine's datasheet. Raise InputError for an unknown name, and for a measured record, which has none."""
    path = catalogue.path_of(name_or_path)
    if path is None:
        catalogue.load(name_or_path)  # raises for what is no machine
        raise InputError(f"{name_or_path!r} was measured, it has no datasheet; name a machine of the catalogue")
    return load_datasheet(path)


def new_sheet(name: str, given: dict, shares: dict, like: Datasheet | None = None) -> Datasheet:
    """Return a datasheet of the given numbers, and ``like``'s others; given ones are marked as the user's.

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
    disk = any("disk" in field for field in given.keys() & PEAKS.keys())  # copies reach all of such a rate
    tables = {"lines": like.lines, "in_place_of": like.in_place_of}
    tables = {name: {k: v for k, v in table.items() if not (disk and is_of_disk(k))} for name, table in tables.items()}
    sources, shares = like.sources | said, SHARES | like.shares | shares
    return replace(like, name=name, **given, **tables, shares=shares, rates=rates, sources=sources)


def describe_sheet(sheet: Datasheet) -> str:
    """Return a machine's peaks in a line."""
    sizes = f"{sheet.device_memory} device, {sheet.host_memory or 'unlimited'} host"
    disk = f", {sheet.disk_memory} disk" if sheet.disk_memory else ""
    kind = sheet.rates.get("kind", "assumed")
    peaks = f"{sheet.tflops:g} TFLOP/s, memory {sheet.memory_gb_per_s:g} GB/s, link {sheet.link_gb_per_s:g} GB/s"
    costs = f"; ${sheet.price_per_hour:g} an hour" if sheet.price_per_hour is not None else ""
    costs += f"; {sheet.watts:g} W" if sheet.watts is not None else ""
    return f"{peaks}; {sizes}{disk}{costs}; rates {kind}"


def _listed(args) -> dict:
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
    args.show(
        "GB/s of the device's memory and of one direction of the link; `flexhybrid hardware NAME` has the sources"
    )
    return {"machines": rows}


def _shown(args) -> dict:
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
    args.show(f"  shares reached: {', '.join(f'{name} {value:g}' for name, value in (SHARES | sheet.shares).items())}")
    for key in sheet.lines:
        args.show(f"  line {key}: {', '.join(f'{k} {v:.4g}' for k, v in in_rates(hardware.lines[key]).items())}")
    for field, text in {"source": sheet.source, **sheet.sources}.items():
        args.show(f"  {field}: {text}")
    return asdict(sheet)
