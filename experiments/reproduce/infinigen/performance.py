"""InfiniGen's performance figures (OSDI 2024, Fig. 2, 14 to 18), reproduced."""

import numpy as np

from experiments.reproduce.experiment import ARITHMETIC, Experiment, Figure, bars, lines
from experiments.reproduce.infinigen import setup
from experiments.reproduce.infinigen.setup import GENERATED, OPT_13B, PARTIAL_RATIO, POLICIES, PROMPT
from experiments.reproduce.paper import INFINIGEN, context, contexts, points
from flexhybrid.core.context.selection import (
    GROWS_AS,
    REPORTED,
    REPORTED_ALPHA,
    counted_tokens,
    kept_tokens,
    selected_tokens,
)
from flexhybrid.core.model.shape import shape_by_name
from sim import presets

GIB = 2**30
#: Largest speedup over FlexGen at batch 8 (Fig. 16a).
SEQUENCE_ROWS = {"InfiniGen": "ih053", "INT4": "ih054", "H2O": "ih055"}


# ---- sizes


def figure_2() -> Experiment:
    """Weights and cache of OPT-30B, from the same formulas as every run."""
    shape = shape_by_name("opt-30b")
    batch, length = int(INFINIGEN.value("ih006")), int(INFINIGEN.value("ih007"))
    lengths, batches = np.array([512, 1024, 2048, 4096, 8192]), np.array([2, 4, 8, 16, 32, 64])
    weights, token = setup.model_bytes(shape), setup.kv_bytes(shape, 1, 1)
    by_length, by_batch = setup.kv_bytes(shape, batch, lengths) / 1e9, setup.kv_bytes(shape, batches, length) / 1e9

    def figure(name: str, x: str, xs, cache, title: str) -> Figure:
        sizes = {"KV cache": cache, "weights": np.full(len(xs), weights / 1e9)}
        return lines(name, points(sizes, xs, x, "GB", "part"), title, x, "GB", log="x")

    rows = [
        INFINIGEN.headline("ih006", batch, "batch size of (a), taken as it is"),
        INFINIGEN.headline("ih007", length, "sequence length of (b), taken as it is"),
        context("weights", weights / 1e9, "GB"),
        context("keys and values of one token", token, "B"),
        context(f"length at which the cache passes the weights, batch {batch}", weights / token / batch, "tokens"),
        context(f"batch at which it does, {length} tokens", weights / token / length, "requests"),
        *contexts({"KV cache": by_length}, lengths, f"{{series}}, batch {batch}, {{x}} tokens", "GB"),
        *contexts({"KV cache": by_batch}, batches, f"{{series}}, batch {{x}}, {length} tokens", "GB"),
    ]
    return INFINIGEN.experiment(
        "infinigen-fig2",
        rows,
        [
            figure("length", "sequence length", lengths, by_length, f"OPT-30B, batch {batch}"),
            figure("batch", "batch", batches, by_batch, f"OPT-30B, {length} tokens"),
        ],
    )


# ---- whole runs


def _over_infinigen(runs: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return InfiniGen's speedup over each other system."""
    own = sum(runs["InfiniGen"])
    return {name: sum(parts) / own for name, parts in runs.items() if name != "InfiniGen"}


def figure_14() -> Experiment:
    """Latency of six systems at batch 20."""
    runs = setup.latency(20)
    gains = _over_infinigen(runs)
    printed = {name: 20 * GENERATED / INFINIGEN.value(row) for name, row in setup.VALIDATE.items()}
    printed["UVM"] = INFINIGEN.value("ih039") * printed["InfiniGen"]
    fused, own_s = sum(setup.uvm(20, h2o=True, eager=False)), sum(runs["InfiniGen"])
    least, most = min(gains, key=lambda name: gains[name]), max(gains, key=lambda name: gains[name])
    rows = [
        INFINIGEN.headline("ih038", gains[least], f"least speedup of InfiniGen (here over {least})"),
        INFINIGEN.headline("ih039", gains[most], f"largest speedup of InfiniGen (here over {most})"),
    ]
    for name, (prefill_s, decode_s) in runs.items():
        paper = printed.get(name, np.nan)
        source = "the text's throughputs of Fig. 15; UVM from ih039" if name in printed else ""
        parts = {"prefill_s": prefill_s, "decode_s": decode_s, "infinigen_speedup": gains.get(name, np.nan)}
        rows.append(context(f"{name}, whole run", prefill_s + decode_s, "s", paper, source, **parts))
    rows.append(context("UVM + H2O with fused prefill attention", fused, "s", infinigen_speedup=fused / own_s))
    phases = {"prefill": [p for p, _ in runs.values()], "decode": [d for _, d in runs.values()]}
    frame = points(phases, list(runs), "system", "seconds", "phase")
    totals = [{"system": name, "seconds": sum(parts)} for name, parts in runs.items()]
    paper = [{"system": name, "seconds": seconds} for name, seconds in printed.items()]
    return INFINIGEN.experiment(
        "infinigen-fig14",
        rows,
        [
            bars("phases", frame, "OPT-13B, batch 20", "", "seconds"),
            bars("total", totals, "OPT-13B, batch 20", "", "seconds", paper=paper),
        ],
        setup.constants(),
        fused=fused,
        printed=INFINIGEN.value("ih038"),
    )


def figure_15() -> Experiment:
    """Throughput over batch sizes."""
    batches, ids = setup.BATCHES, {4: setup.CALIBRATE, 20: setup.VALIDATE}
    rates = {name: setup.throughput(name, np.array(batches)) for name in POLICIES}
    runs = {batch: setup.latency(batch) for batch in batches}
    for name in ("UVM", "UVM + H2O"):
        rates[name] = np.array([batch * GENERATED / sum(runs[batch][name]) for batch in batches])
    gains = {(batch, name): gain for batch in batches for name, gain in _over_infinigen(runs[batch]).items()}
    least, most = min(gains, key=lambda run: gains[run]), max(gains, key=lambda run: gains[run])
    capacity = setup.testbed().usable_memory("device") or np.inf
    first = next(batch for batch in batches if setup.uvm_working_set_bytes(batch) > capacity)
    jump = rates["UVM"][batches.index(first) - 1] / rates["UVM"][batches.index(first)]
    rows = []
    for batch, by_name in ids.items():
        for name, row_id in by_name.items():
            rate = rates[name][batches.index(batch)]
            rows.append(INFINIGEN.headline(row_id, rate, f"{name}, batch {batch}", batch=batch))
    over_int4, over_h2o = rates["InfiniGen"][-1] / rates["INT4"][-1], rates["InfiniGen"][0] / rates["H2O"][0]
    rows += [
        INFINIGEN.headline("ih001", over_int4, "InfiniGen over INT4, batch 20", batch=20),
        INFINIGEN.headline("ih040", gains[least], f"least speedup of InfiniGen (here over {least[1]})", batch=least[0]),
        INFINIGEN.headline("ih041", gains[most], f"largest speedup of InfiniGen (here over {most[1]})", batch=most[0]),
        INFINIGEN.headline("ih042", first, "first batch whose working set exceeds the GPU", aside=ARITHMETIC),
        context("UVM's working set there", setup.uvm_working_set_bytes(first) / GIB, "GiB", batch=first),
        context("UVM's throughput just below over the one there", jump, "x", batch=first),
        context("InfiniGen over H2O, batch 4", over_h2o, "x", batch=4),
    ]
    for name, numbers in rates.items():
        for batch, rate in zip(batches, numbers, strict=True):
            if name not in ids.get(batch, ()):
                rows.append(context(f"{name}, batch {batch}", rate, "tokens/s", batch=batch))
    printed = {name: [INFINIGEN.value(by_name[name]) for by_name in ids.values()] for name in setup.CALIBRATE}
    frame, paper = (
        points(series, xs, "batch", "rate", "system") for series, xs in ((rates, batches), (printed, list(ids)))
    )
    figure = lines("throughput", frame, "OPT-13B", "batch", "tokens/s", paper=paper)
    return INFINIGEN.experiment(
        "infinigen-fig15",
        rows,
        [figure],
        setup.constants(),
        first=first,
        gain=gains[least],
        least=least,
        printed=INFINIGEN.value("ih040"),
        h2o=gains[4, "H2O"],
    )


def figure_16a() -> Experiment:
    """Speedup over FlexGen against sequence length."""
    prompts = np.array([int(INFINIGEN.value(row_id)) for row_id in ("ih049", "ih050", "ih051", "ih052")])
    gains = setup.speedups(8, prompts)
    lengths = [int(n) + GENERATED for n in prompts]
    known, counts = (column[1:] for column in counted_tokens()[REPORTED][REPORTED_ALPHA])
    largest = 100 * max(tokens / length for length, tokens in zip(known, counts, strict=True))
    taken = [INFINIGEN.headline("ih028", largest, "InfiniGen's largest share of the cache, below")]
    for row_id, length, tokens in zip(("ih056", "ih057", "ih058", "ih059"), known, counts, strict=True):
        taken.append(INFINIGEN.headline(row_id, tokens, f"important tokens of {length}: taken as they are"))
    rows = []
    for name, row_id in SEQUENCE_ROWS.items():
        rows.append(INFINIGEN.headline(row_id, gains[name].max(), f"{name} over FlexGen, at most"))
    of_h2o = int(kept_tokens(POLICIES["H2O"].selection, 2048, 2048, 2048))
    rows.append(INFINIGEN.headline("ih060", of_h2o, "tokens that H2O loads of 2048 (whole blocks)", aside=ARITHMETIC))
    rows += [row | {"role": "context"} for row in taken]
    rows += contexts(gains, lengths, "{series} over FlexGen, {x} tokens", "x")
    frame = points(gains, lengths, "length", "speedup", "system")
    figure = lines("speedup", frame, "OPT-13B, batch 8", "sequence length", "speedup over FlexGen")
    rises = "rises" if (np.diff(gains["InfiniGen"]) > 0).all() else "does not rise"
    grows = {name: values[-1] / values[-2] - 1 for name, values in gains.items()}
    return INFINIGEN.experiment("infinigen-fig16a", rows, [figure], setup.constants(), rises=rises, grows=grows)


#: Shares of OPT-30B's layers on the device: what the scripts' "70 30" means for whole matrices, and what it says.
MATRICES, NOMINAL = 7 / 12, 0.7


def figure_16b() -> Experiment:
    """Speedup over FlexGen against model size."""
    models = {name: shape_by_name(name) for name in ("opt-6.7b", "opt-13b", "opt-30b")}
    large, on_device = models["opt-30b"], {"opt-30b": MATRICES}
    gains = {
        model: setup.speedups(4, shape=shape, weights_device=on_device.get(model, 1.0))
        for model, shape in models.items()
    }
    nominal = setup.speedups(4, shape=large, weights_device=NOMINAL)
    of_size = {"InfiniGen": "ih064", "INT4": "ih065", "H2O": "ih066"}
    growth = float(gains["opt-13b"]["InfiniGen"][0] / gains["opt-6.7b"]["InfiniGen"][0])
    offloaded = 0.01 * INFINIGEN.value("ih062") * setup.model_bytes(large)
    at_prompt, at_end = (offloaded / setup.kv_bytes(large, 4, tokens) for tokens in (PROMPT, PROMPT + GENERATED))
    parameters = "30 % of the parameters over 1920 tokens' cache"
    rows = [
        INFINIGEN.headline("ih061", growth, "InfiniGen's speedup, OPT-13B over OPT-6.7B"),
        INFINIGEN.headline("ih063", at_prompt, parameters, aside=ARITHMETIC),
        INFINIGEN.beside("ih063", at_end, "30 % of the parameters over 2048 tokens' cache"),
    ]
    for name, row_id in of_size.items():
        rows.append(INFINIGEN.headline(row_id, gains["opt-30b"][name][0], f"{name} over FlexGen, OPT-30B"))
        quantity = f"{name} over FlexGen, OPT-30B, 30 % of the weights cross"
        rows.append(INFINIGEN.beside(row_id, nominal[name][0], quantity))
    for model in ("opt-6.7b", "opt-13b"):
        for name, gain in gains[model].items():
            rows.append(context(f"{name} over FlexGen, {model.upper()}", gain[0], "x"))
    extra_s, tokens = setup.growth_needs(models["opt-6.7b"], float(gains["opt-13b"]["InfiniGen"][0]))
    by_system = {name: [float(gains[model][name][0]) for model in models] for name in of_size}
    frame = points(by_system, [model.upper() for model in models], "model", "speedup", "system")
    paper = points({name: [INFINIGEN.value(row)] for name, row in of_size.items()}, ["OPT-30B"], *frame.columns)
    figure = bars("speedup", frame, "batch 4", "", "speedup over FlexGen", paper=paper)
    return INFINIGEN.experiment(
        "infinigen-fig16b",
        rows,
        [figure],
        setup.constants(),
        growth=growth,
        printed=INFINIGEN.value("ih061"),
        extra_ms=1000.0 * extra_s,
        tokens=tokens,
        known=int(counted_tokens()[REPORTED][REPORTED_ALPHA][1][-1]),
        fig5=INFINIGEN.value("ih016"),
    )


# ---- InfiniGen's memory, one block


def figure_17() -> Experiment:
    """Latency against alpha, latency and memory against the partial weight ratio."""
    ratios, alphas = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), np.arange(1.0, 10.0)
    batch, small = int(INFINIGEN.value("ih067")), shape_by_name("opt-6.7b")
    seconds, memory, by_alpha, rows = {}, {}, {}, []
    for shape in (small, OPT_13B):
        model = shape.name.upper()
        policies = [presets.infinigen(alpha, PARTIAL_RATIO, setup.CAP) for alpha in alphas]
        runs = [setup.times("InfiniGen", batch, shape=shape, policy=policy) for policy in policies]
        by_alpha[model] = [float(run.sum(axis=0)[0]) for run in runs]
        for alpha, policy, run_s in zip(alphas, policies, by_alpha[model], strict=True):
            share = 100 * float(selected_tokens(policy.selection, 2048)) / 2048
            rows.append(context(f"{model}, alpha {alpha:g}", run_s, "s", percent_fetched_of_2048=share))
        policies = [presets.infinigen(setup.ALPHA, ratio, setup.CAP) for ratio in ratios]
        runs = [setup.times("InfiniGen", batch, shape=shape, policy=policy) for policy in policies]
        seconds[model] = [float(run.sum(axis=0)[0]) for run in runs]
        memory[model] = [sum(setup.overhead_bytes(shape, batch, ratio)[:2]) / GIB for ratio in ratios]
        for ratio, run_s, gib in zip(ratios, seconds[model], memory[model], strict=True):
            rows.append(context(f"{model}, ratio {ratio:g}", run_s, "s", memory_gib=gib))
    doubled, once = (sum(setup.overhead_bytes(small, batch, n * PARTIAL_RATIO)[:2]) for n in (2, 1))
    weights, keys, cache = setup.overhead_bytes(OPT_13B, batch, PARTIAL_RATIO)
    of_parameters = 100 * weights / setup.model_bytes(OPT_13B)
    rows = [
        INFINIGEN.headline("ih071", doubled / once, "memory overhead at twice the ratio", aside=ARITHMETIC),
        INFINIGEN.headline("ih077", of_parameters, "partial query weights, of all parameters", aside=ARITHMETIC),
        INFINIGEN.headline("ih078", 100 * keys / cache, "partial keys, of the whole cache", aside=ARITHMETIC),
        *rows,
    ]

    def figure(name: str, values: dict, y_label: str, xs=ratios, x_label: str = "partial weight ratio") -> Figure:
        return lines(name, points(values, xs, "x", "y", "model"), f"batch {batch}", x_label, y_label)

    spread = {model: max(values) / min(values) - 1 for model, values in seconds.items()}
    return INFINIGEN.experiment(
        "infinigen-fig17",
        rows,
        [
            figure("alpha", by_alpha, "latency (s)", alphas, "alpha"),
            figure("latency", seconds, "latency (s)"),
            figure("memory", memory, "partial weights and keys (GiB)"),
        ],
        setup.constants(),
        spreads=", ".join(
            f"{share:.1%} for {model} from {ratios[0]:g} to {ratios[-1]:g}" for model, share in spread.items()
        ),
        own_ratio=PARTIAL_RATIO,
        growth=by_alpha[small.name.upper()][-1] / by_alpha[small.name.upper()][3],
        grows_as=GROWS_AS,
    )


def figure_18() -> Experiment:
    """One block in parts."""
    policies = {"Ideal": presets.ideal(), **POLICIES}
    tasks = {name: setup.block_ms(policy) for name, policy in policies.items()}
    parts = {name: setup.breakdown(by_verb) for name, by_verb in tasks.items()}
    serial, hidden = {}, {}
    for name, by_part in parts.items():
        serial[name] = sum(by_part.values())
        hidden[name] = serial[name] - min(by_part["FFN"], tasks[name].get("load_kv", 0.0))
    transfer = {name: by_part["transfer"] for name, by_part in parts.items()}
    slowdowns = {"InfiniGen": "ih074", "H2O": "ih075", "FlexGen": "ih076"}
    shares = {"FlexGen": "ih072", "H2O": "ih073"}
    rows = []
    for suffix, block, row_of in (
        ("", hidden, INFINIGEN.headline),
        (", one task after the other", serial, INFINIGEN.beside),
    ):
        for name, row_id in shares.items():
            share = 100 * transfer[name] / block[name]
            rows.append(row_of(row_id, share, f"{name}: share of the transfer{suffix}"))
        for name, row_id in slowdowns.items():
            rows.append(row_of(row_id, block[name] / block["Ideal"], f"{name} over Ideal{suffix}"))
    for name, by_part in parts.items():
        milliseconds = {f"{part}_ms": ms for part, ms in by_part.items()}
        rows.append(context(f"{name}: block", hidden[name], "ms") | milliseconds)
    by_kind = {part: [by_part[part] for by_part in parts.values()] for part in setup.PARTS}
    frame = points(by_kind, list(parts), "system", "ms", "part")
    least_ms = 1e3 * (OPT_13B.layer_bytes(setup.BYTES) + setup.kv_bytes(OPT_13B, 8, 2048) / OPT_13B.num_layers) / 768e9
    implied = hidden["FlexGen"] / INFINIGEN.value("ih076")
    return INFINIGEN.experiment(
        "infinigen-fig18",
        rows,
        [bars("parts", frame, "OPT-13B, 2048 tokens, batch 8", "", "ms")],
        setup.constants(),
        hidden=hidden,
        implied=implied,
        share=least_ms / implied,
    )
