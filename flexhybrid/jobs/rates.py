"""Sets rates of a machine that the user gives, and describes the origin of its rates."""

from collections.abc import Mapping
from dataclasses import replace

from flexhybrid.core.errors import InputError, check, flag
from flexhybrid.core.hardware import LIFTED_PACE, PACE, Hardware, Line, crosses_link, resource_of_line

#: Keys of a point, and flags, for a rate in place of the machine's own.
RATES = ("link_gb_per_s", "disk_gb_per_s", "gemm_tflops", "host_memory_gb_per_s")
DISK_OVERHEAD_S = 1e-4  #: seconds per request to an added disk, as for the catalogue's disks


def with_given_rates(hardware: Hardware, point: Mapping) -> Hardware:
    """Return the machine with the rates of a point, and a note of them in its ``rates``.

    ``link_gb_per_s``: for a catalogue machine, the rate of the link's standard, of which copies reach the machine's
    share; for a measured machine, the rate of copies. ``disk_gb_per_s``: may add a disk, with ``disk_memory``. Raise
    InputError for a rate that is not above 0, or a new disk with only one of rate and size.
    """
    given = {name: point[name] for name in RATES if point.get(name) is not None}
    for name, rate in given.items():
        check(flag(name), rate, 0 < rate < float("inf"), "a number above 0")
    own, size = hardware.rates, point.get("disk_memory")
    disk = given.get("disk_gb_per_s")
    if size is not None and disk is None and not hardware.has_disk:
        raise InputError(f"--disk-memory {size}: {hardware.name} has no disk; give its rate too, --disk-gb-per-s")
    if disk is not None:
        if size is None and hardware.disk_memory is None:
            raise InputError(f"--disk-gb-per-s {disk:g}: {hardware.name} has no disk; give its size too, --disk-memory")
        line = Line(DISK_OVERHEAD_S, s_per_byte=1e-9 / disk)
        hardware = replace(hardware, lines={**hardware.lines, "disk_read": line, "disk_write": line})
    if "link_gb_per_s" in given:
        hardware = _at_link_rate(hardware, given["link_gb_per_s"])
    if "host_memory_gb_per_s" in given:
        hardware = _at_host_rate(hardware, given["host_memory_gb_per_s"])
    if "gemm_tflops" in given:
        hardware = hardware.with_gemm_rate(given["gemm_tflops"])
    return replace(hardware, notes={**hardware.notes, "rates": {**own, "given": given}}) if given else hardware


def _at_link_rate(hardware: Hardware, gb_per_s: float) -> Hardware:
    """Return the machine with another rate of the link's standard; copies reach the same shares of it.
    On a machine without a datasheet, copies reach the whole rate."""
    peak = hardware.notes.get("link_bytes_per_s")
    if peak is None:
        return replace(hardware.with_link_rate(gb_per_s), notes={**hardware.notes, PACE: None})
    slower = 1e-9 * peak / gb_per_s
    lines = {
        key: replace(line, s_per_byte=slower * line.s_per_byte, samples=()) if crosses_link(key) else line
        for key, line in hardware.lines.items()
    }
    return replace(hardware, lines=lines, notes={**hardware.notes, "link_bytes_per_s": 1e9 * gb_per_s})


def _at_host_rate(hardware: Hardware, gb_per_s: float) -> Hardware:
    """Return the machine with another peak rate of the host's memory; attention reaches the same share of it.
    On a machine without a datasheet, attention reaches the whole rate. The rate of scattering, by one core, stays."""
    peak, rate, lines = hardware.notes.get("host_memory_bytes_per_s"), 1e9 * gb_per_s, dict(hardware.lines)
    for key, line in hardware.lines.items():
        if resource_of_line(key) == "host_compute" and line.s_per_byte and not key.startswith("scatter"):
            lines[key] = replace(line, s_per_byte=line.s_per_byte * peak / rate if peak else 1 / rate, samples=())
    given = {"host_memory_bytes_per_s": rate} if peak else {}
    return replace(hardware, lines=lines, notes={**hardware.notes, **given})


def pace_of_link(hardware: Hardware) -> str:
    """Return a note if a CPU's link is imitated at some rate, or was while profiling; else an empty text."""
    notes = hardware.notes
    if notes.get(PACE):
        return f"the link is imitated, paced at {notes[PACE]:g} GB/s"
    if pace := notes.get(LIFTED_PACE):
        return (
            f"measured with a link paced at {pace:g} GB/s, which predictions leave out (`flexhybrid profile` "
            "measures without one)"
        )
    return ""


def company_note(hardware: Hardware | None) -> str | None:
    """Return a note on what disturbed the measurement of a record; None if nothing did."""
    if hardware is None or not hardware.company:
        return None
    again = "measure again when the machine is idle (run --reprofile, or flexhybrid profile)"
    return f"{hardware.company}: predictions may be far off; {again}"


def costs(hardware: Hardware, tokens_per_s: float) -> dict[str, float]:
    """Return the cost of a million generated tokens in dollars and kWh, if the record has price and power."""
    hours, found = 1e6 / max(tokens_per_s, 1e-300) / 3600, {}
    if (price := hardware.notes.get("price_per_hour")) is not None:
        found["dollars_per_million_tokens"] = price * hours
    if (watts := hardware.notes.get("watts")) is not None:
        found["kwh_per_million_tokens"] = 1e-3 * watts * hours
    return found


def describe_costs(hardware: Hardware, tokens_per_s: float) -> str:
    """Return ``costs`` as a line; an empty text without price and power."""
    found, notes = costs(hardware, tokens_per_s), hardware.notes
    parts = []
    if (dollars := found.get("dollars_per_million_tokens")) is not None:
        parts.append(f"${dollars:.3g} at ${notes['price_per_hour']:g} an hour")
    if (energy := found.get("kwh_per_million_tokens")) is not None:
        parts.append(f"{energy:.3g} kWh at {notes['watts']:g} W")
    return f"  a million tokens: {', '.join(parts)}" if parts else ""


def without_given(hardware: Hardware, rate: str) -> Hardware:
    """Return the machine without the note that ``rate`` was given, for a rate that is varied (and shown) anyway."""
    rates = dict(hardware.rates)
    if given := {name: value for name, value in rates.pop("given", {}).items() if name != rate}:
        rates["given"] = given
    return replace(hardware, notes={**hardware.notes, "rates": rates})


def describe_rates(hardware: Hardware) -> str:
    """Return the origin of a machine's rates as a line."""
    rates = hardware.rates
    words = {"measured": "measured", "fitted": "fitted to published runs", "assumed": "assumed, not measured"}
    said = f"  rates of {hardware.name}: {words.get(rates['kind'], 'as its file states')}"
    said += f" of {rates['engine']}'s code, which every system gets here" if rates.get("engine") else ""
    said += f" ({rates['on']})" if rates.get("on") else ""
    said += f"; host {rates['host']} by its datasheet" if rates.get("host") else ""
    said += f"; not fitted: {rates['held_out']}" if rates.get("held_out") else ""
    said += (paced := pace_of_link(hardware)) and f"; {paced}"
    texts = {name: f"{flag(name)} {value:g}" for name, value in rates.get("given", {}).items()}
    if "link_gb_per_s" in texts and hardware.notes.get("link_bytes_per_s") and hardware.lines["h2d"].s_per_byte:
        texts["link_gb_per_s"] += f" (of which copies reach {1e-9 / hardware.lines['h2d'].s_per_byte:.3g})"
    return f"{said}; but {', '.join(texts.values())}" if texts else said
