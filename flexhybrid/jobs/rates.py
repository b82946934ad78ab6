"""Rates of a machine that a user sets, and descriptions of where all rates come from."""

from collections.abc import Mapping
from dataclasses import replace

from flexhybrid.core.errors import InputError, check, flag
from flexhybrid.core.hardware import LIFTED_PACE, PACE, Hardware, Line, crosses_link, resource_of_line

#: Keys of a point, and flags, that set a rate in place of the machine's own.
RATES = ("link_gb_per_s", "disk_gb_per_s", "gemm_tflops", "host_memory_gb_per_s")
DISK_OVERHEAD_S = 1e-4  #: of a request to a disk that the machine's record does not have, as the catalogue's


def with_given_rates(hardware: Hardware, point: Mapping) -> Hardware:
    """Return the machine at the rates that a point sets, with a note of them in its ``rates``.

    The link's rate is the one that ``flexhybrid hardware`` shows: a standard's, of which copies reach the share that
    they reach on this machine, or, of a measured machine, what copies reach. A disk may be added, with its rate and its
    size. Raise InputError for a rate that is not above 0, for a disk without a size, and for the size of a disk without
    a rate.
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
    """Return the machine with a link of another standard's rate, of which all copies reach the shares that they did;
    one without a datasheet with a link that copies reach all of."""
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
    """Return the machine with a host's memory of another peak, of which attention reaches the share that it did; one
    without a datasheet with a memory that attention reaches all of. A core's scattering stays as it is."""
    peak, rate, lines = hardware.notes.get("host_memory_bytes_per_s"), 1e9 * gb_per_s, dict(hardware.lines)
    for key, line in hardware.lines.items():
        if resource_of_line(key) == "host_compute" and line.s_per_byte and not key.startswith("scatter"):
            lines[key] = replace(line, s_per_byte=line.s_per_byte * peak / rate if peak else 1 / rate, samples=())
    given = {"host_memory_bytes_per_s": rate} if peak else {}
    return replace(hardware, lines=lines, notes={**hardware.notes, **given})


def pace_of_link(hardware: Hardware) -> str:
    """Return in words that a CPU's link was imitated at a pace, for these predictions or during profiling; empty if
    not."""
    notes = hardware.notes
    if notes.get(PACE):
        return f"the link is imitated, paced at {notes[PACE]:g} GB/s"
    if pace := notes.get(LIFTED_PACE):
        return (
            f"measured with a link paced at {pace:g} GB/s, which predictions leave out (`flexhybrid profile` "
            "measures without)"
        )
    return ""


def company_note(hardware: Hardware | None) -> str | None:
    """Return what disturbed the measurement of a record, and how to renew it; None for an undisturbed record."""
    if hardware is None or not hardware.company:
        return None
    again = "measure again when the machine is idle (run --reprofile, or flexhybrid profile)"
    return f"{hardware.company}: predictions may be far off; {again}"


def costs(hardware: Hardware, tokens_per_s: float) -> dict[str, float]:
    """Return the cost of a million generated tokens: dollars and kWh, as far as the record has them."""
    hours, found = 1e6 / max(tokens_per_s, 1e-300) / 3600, {}
    if (price := hardware.notes.get("price_per_hour")) is not None:
        found["dollars_per_million_tokens"] = price * hours
    if (watts := hardware.notes.get("watts")) is not None:
        found["kwh_per_million_tokens"] = 1e-3 * watts * hours
    return found


def describe_costs(hardware: Hardware, tokens_per_s: float) -> str:
    """Return ``costs`` in a line; empty without a price and a power."""
    found, notes = costs(hardware, tokens_per_s), hardware.notes
    parts = []
    if (dollars := found.get("dollars_per_million_tokens")) is not None:
        parts.append(f"${dollars:.3g} at ${notes['price_per_hour']:g} an hour")
    if (energy := found.get("kwh_per_million_tokens")) is not None:
        parts.append(f"{energy:.3g} kWh at {notes['watts']:g} W")
    return f"  a million tokens: {', '.join(parts)}" if parts else ""


def without_given(hardware: Hardware, rate: str) -> Hardware:
    """Return the machine without the note that a rate was given: of a rate that is varied, its own place says it."""
    given = {name: value for name, value in hardware.rates.get("given", {}).items() if name != rate}
    if given == hardware.rates.get("given", {}):
        return hardware
    rates = {key: value for key, value in hardware.rates.items() if key != "given"} | (
        {"given": given} if given else {}
    )
    return replace(hardware, notes={**hardware.notes, "rates": rates})


def describe_rates(hardware: Hardware) -> str:
    """Return the origin of a machine's rates in a line."""
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
