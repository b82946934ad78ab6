"""PowerInfer's table (CAPTURE Table I, HybridServe Table 2) beside what its host can compute: arithmetic, no preset.

A policy places weights and says what crosses the link; that a host multiplies with weights where they lie, and which
neurons a batch needs, is nothing that a policy can say, and the papers print neither share nor rate of it.
"""

import numpy as np

from experiments import reference
from experiments.reproduce.capture import setup
from experiments.reproduce.experiment import Experiment, lines
from experiments.reproduce.paper import CAPTURE, context, points
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape, shape_by_name

GENERATED = 128  #: assumed, as in the other figures; only the size of keys and values hangs on it


def host_parameters(shape: ModelShape, hardware: Hardware) -> float:
    """Return the parameters that the GPU has no room for."""
    elements = shape.num_layers * shape.layer_matrix_elements
    return elements - (hardware.usable_memory("device") or 0) / setup.BYTES


def bound(shape: ModelShape, hardware: Hardware, batch) -> np.ndarray:
    """Return tokens/s where the host multiplies with every weight that the GPU has no room for, once a step for all
    requests: as fast as it reads them or computes, at the catalogue's rates."""
    there = host_parameters(shape, hardware)
    line = hardware.line("attend_host", "host_compute")
    return batch / np.maximum(setup.BYTES * there * line.s_per_byte, 2 * there * batch * line.s_per_flop)


def table1() -> Experiment:
    table, shape, hardware = reference.load("powerinfer_table"), shape_by_name("llama-2-70b"), setup.hardware()
    there, rows = host_parameters(shape, hardware), []
    for record in table.to_dict("records"):
        ours = float(bound(shape, hardware, record["batch"]))
        quantity = f"prompt {record['prompt_len']}, batch {record['batch']}: the host with all other weights, at most"
        rows.append(context(quantity, ours, record["unit"], record["value"], "Table I"))
    one = reference.value("powerinfer_table", batch=1, prompt_len=128)
    most = table["value"].to_numpy().max()
    tflops, peak = 2e-12 * there * most, 1e-12 * hardware.notes["host_peak_flops"]
    read = setup.BYTES * there * one / hardware.notes["host_memory_bytes_per_s"]
    kv = 16 * (128 + GENERATED) * shape.num_layers * shape.kv_token_bytes(setup.BYTES)
    rows += [
        context("parameters that the GPU has no room for", 1e-9 * there, "10^9"),
        context("rate of the host that the table's most tokens/s need, all weights used", tflops, "TFLOP/s"),
        context("of the host's peak", 100 * tflops / peak, "%"),
        context("of the host's memory rate that batch 1 needs, all weights used, prompt 128", 100 * read, "%"),
        context("keys and values of 16 requests of 128 + 128 tokens over all weights", 100 * kv / _bytes(shape), "%"),
    ]
    batches = np.unique(table["batch"])
    frame = points({"host, all other weights": bound(shape, hardware, batches)}, batches, "batch", "rate", "series")
    series = {f"prompt {p}": list(of["value"]) for p, of in table.groupby("prompt_len")}
    printed = points(series, batches, "batch", "rate", "series")
    figure = lines("rates", frame, "Llama-2-70B on an RTX 4090", "batch", "tokens/s", paper=printed, log="xy")
    facts = {"tflops": tflops, "share": tflops / peak, "kv": kv / _bytes(shape), "one": read}
    return CAPTURE.experiment("capture-powerinfer", rows, [figure], **facts)


def _bytes(shape: ModelShape) -> float:
    return shape.num_layers * shape.layer_bytes(setup.BYTES)
