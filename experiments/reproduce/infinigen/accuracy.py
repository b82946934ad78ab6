"""InfiniGen's accuracy tables and figures on small models, from what ``experiments.studies.accuracy_study`` measured.

The models are small (4 M parameters, 4 layers; the paper's have 6.7 to 30 billion), so none of the paper's numbers is
judged: they stand beside ours. With layers 0 and 1 whole, four layers move half of the cache at least; where the paper
has a relative size of the cache, the share that the other layers look at is shown too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import Experiment, Figure, Row, bars, lines
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.infinigen.accuracy_policies import h2o, infinigen, quantized, share_of_all_layers
from experiments.reproduce.paper import INFINIGEN, context

OVER_FULL, LOOKED = "perplexity over the full cache's", "% of tokens that choosing layers look at"


@cache
def studies() -> dict[str, dict]:
    """Return model -> its measurements, for all models that were measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(studied.RESULTS.glob("*.json"))}


def _rows(study: dict, part: str) -> dict[str, dict]:
    """Return policy -> its row of a part of a study."""
    return {row["policy"]: row for row in study[part]["policies"]}


def _figure(model: str, points: list[dict], x_label: str, y_label: str, log: str = "") -> Figure:
    """Return a model's lines over ``points`` (x, y, series)."""
    return lines(model.lower(), points, model, x_label, y_label, log=log)


def _paper_model(study: dict) -> str:
    return "OPT-6.7B" if study["family"] == "opt" else "Llama-2-7B"


# ---- what attention looks like


def table_1() -> Experiment:
    """Cosine of a block's input with the input and the outputs of the block before."""
    names = {"block input": "Tblock_in_{i-1}", "attention output": "Attn_out_{i-1}", "FFN output": "FFN_out_{i-1}"}
    rows, points = [], []
    for model, study in studies().items():
        paper_model, inputs = _paper_model(study), study["inputs"]
        for name, item in names.items():
            paper = reference.value("infinigen_tables", table=1, model=paper_model, item=item)
            mean, source = np.mean(inputs[name][1:]), f"infinigen Table 1, {paper_model}"
            rows.append(context(f"{model}: {name}, mean of layers 2 and later", mean, "", paper, source))
            rows.append(context(f"{model}: {name}, layer 1", inputs[name][0]))
        for layer, cosine in enumerate(inputs["normed input"], 1):
            rows.append(context(f"{model}: normed input, layer {layer}", cosine))
        points += [
            {"layer": layer, "cosine": cosine, "series": f"{model}, {name}"}
            for name in (*names, "normed input")
            for layer, cosine in enumerate(inputs[name], 1)
        ]
    figure = lines("cosine", points, "A block's input and the block before", "layer i", "cosine")
    return INFINIGEN.experiment("infinigen-accuracy-table1", rows, [figure])


def figure_4() -> Experiment:
    """Attention weights of H2O, InfiniGen and the best possible choice against the full cache's."""
    rows, figures = [], []
    for model, study in studies().items():
        share = studied.KEPT * 2 / (1 + studied.PROMPT_SHARE) / study["length"]  # the best KEPT, of the mean context
        layers, points = study["attention"]["layers"], []
        compared = (
            ("H2O", "plain", h2o(0.2)),
            ("H2O, no layer whole,", "plain", h2o(0.2, 0)),
            ("InfiniGen", "skewed", infinigen(cap=0.2)),
        )
        for name, part, policy in compared:
            points += [
                {"position": row["end"], "cosine": row["cosine"], "series": f"{name} 20 %"}
                for row in study[part]["chunks"]
                if row["policy"] == policy
            ]
            for layer, cosine in enumerate(_rows(study, part)[policy]["cosine_by_layer"]):
                rows.append(context(f"{model}: {name} at 20 %, layer {layer}", cosine))
        best, series = f"best {studied.KEPT} tokens", f"best {studied.KEPT} tokens of each query"
        by_chunk = np.mean([layer["best_cosine_by_chunk"] for layer in layers], axis=0)
        for chunk, cosine in enumerate(by_chunk, 1):
            end = min(256 * chunk, study["length"])
            if end > study["prompt_tokens"]:
                points.append({"position": end, "cosine": float(cosine), "series": series})
        for number, layer in enumerate(layers):
            quantity = f"{model}: {best} ({share:.0%} of the context), layer {number}"
            rows.append(context(quantity, layer["best_cosine_by_chunk"][-1]))
        figures.append(_figure(model, points, "position in the text", "cosine with the full cache's weights"))
    return INFINIGEN.experiment("infinigen-accuracy-fig4", rows, figures)


def figure_5() -> Experiment:
    """How many key tokens make up 0.9 of the weight."""
    rows, figures = [], []
    ids = ("ih013", "ih014", "ih015", "ih016", "ih017", "ih018", "ih020", "ih021")
    id_of: dict[int, str] = dict(zip((500, 1000, 1500, 2000, 998, 999, 1001, 1002), ids, strict=True))  #: by query
    for model, study in studies().items():
        layers, points = study["attention"]["layers"], []
        last = len(layers) - 1
        for layer in (0, last):
            counts = np.array(layers[layer]["histogram"])
            points += [
                {"tokens": study["attention"]["bin"] * i, "queries": float(share), "series": f"layer {layer}"}
                for i, share in enumerate(counts / counts.sum())
            ]
        for number, layer in enumerate(layers):
            entropy = np.mean(layer["relative_entropy_by_head"])
            rows.append(context(f"{model}: entropy over even weights', layer {number}", entropy))
        for query, needed in layers[-1]["needed_at"].items():
            quantity = f"{model}: key tokens of query {query}, layer {last}"
            rows.append(INFINIGEN.beside(id_of[int(query)], needed, quantity))
        figures.append(_figure(model, points, "key tokens for 0.9 of the weight", "share of queries and heads"))
    return INFINIGEN.experiment("infinigen-accuracy-fig5", rows, figures)


def figure_20() -> Experiment:
    """Share of queries that look at less than a percent of the tokens, by position; keys that matter again."""
    rows, shares, figures = [], [], []
    for model, study in studies().items():
        layers, spikes = study["attention"]["layers"], []
        for i, _ in enumerate(layers[0]["needed_by_chunk"]):
            share = 100 * float(np.mean([layer["below_a_percent_by_chunk"][i] for layer in layers]))
            end = min(study["length"], 256 * (i + 1))
            shares.append({"position": end, "share": share, "series": model})
            rows.append(context(f"{model}: positions up to {end}", share, "%"))
        for number, layer in enumerate(layers):
            revival = layer["revival"]
            weights, loud = revival["weights"], 100 * revival["of_loud"]
            series = f"layer {number}, head {revival['head']}, key {revival['key']}"
            for position, weight in enumerate(weights, study["length"] - len(weights)):
                spikes.append({"position": position, "weight": max(weight, 1e-6), "series": series})
            quantity = f"{model}: weights of {studied.LOUD:g} on keys below {studied.QUIET:g} before, layer {number}"
            rows.append(context(quantity, loud, "%", largest=max(weights)))
        figure = _figure(model, spikes, "position of the query", "attention weight of one key", log="y")
        figures.append(replace(figure, name=f"{figure.name}-again"))
    title = "0.9 of the weight on less than 1 % of the tokens"
    share_figure = lines("share", shares, title, "position in the text", "% of queries and heads")
    return INFINIGEN.experiment(
        "infinigen-accuracy-fig20", rows, [share_figure, *figures], loud=studied.LOUD, quiet=studied.QUIET
    )


# ---- what a policy costs


def _by_size(study: dict) -> dict[str, list[tuple[dict, float]]]:
    """Return method -> (row, share of the context that its choosing layers look at) by growing share."""
    plain, skewed = _rows(study, "plain"), _rows(study, "skewed")
    return {
        "H2O": [(plain[h2o(share)], share) for share in studied.SHARES],
        "H2O, no layer whole": [(plain[h2o(share, 0)], share) for share in studied.SHARES],
        "InfiniGen": [(skewed[infinigen(cap=share)], share) for share in studied.SHARES],
        "InfiniGen, not skewed": [(plain[infinigen(cap=share)], share) for share in studied.SHARES],
        "fewer bits": [(plain[quantized(bits)], (bits + 32 / study["kv_group"]) / 16) for bits in sorted(studied.BITS)],
    }


def _against_size(column: str, y_label: str, log: str = "x") -> tuple[list[Row], list[Figure]]:
    """Return rows and figures of a column against the relative size of the cache."""
    rows, figures = [], []
    for model, study in studies().items():
        points = []
        for method, of_size in _by_size(study).items():
            for row, share in of_size:
                points.append({"share": 100 * share, column: row[column], "series": method})
                rows.append(context(f"{model}: {method}, {share:.0%}", row[column], moved_of_all_layers=row["moved"]))
        for share in (0.1, 0.2):  # H2O with as many bytes as InfiniGen moves over all layers
            of_all = share_of_all_layers(study["num_layers"], share)
            row = _rows(study, "plain")[h2o(of_all, 0)]
            quantity = f"{model}: H2O, {of_all:.0%} of every layer: what InfiniGen moves in all at {share:.0%}"
            rows.append(context(quantity, row[column], moved_of_all_layers=row["moved"]))
        full = _rows(study, "plain")["full_cache"][column]
        points += [{"share": 100 * share, column: full, "series": "full cache"} for share in studied.SHARES]
        rows.append(context(f"{model}: full cache", full))
        x_label = "relative size of the cache, % (choosing layers)"
        figure = _figure(model, points, x_label, y_label, log=log)
        figures.append(replace(figure, title=f"{model}, {study['length']} tokens"))
    return rows, figures


def figure_11() -> Experiment:
    """Greedy tokens against the relative size of the cache, on the local task."""
    return INFINIGEN.experiment(
        "infinigen-accuracy-fig11", *_against_size("agreement", "greedy tokens that are the full cache's")
    )


def figure_19() -> Experiment:
    """Perplexity against the relative size, and with a fixed number of tokens against the length."""
    rows, figures = _against_size("perplexity", "perplexity", log="xy")
    for model, study in studies().items():
        points = []
        for length, of_length in study["by_length"].items():
            (_, *of_h2o), (_, of_infinigen) = of_length["h2o"], of_length["infinigen"]
            for method, row in zip(("H2O", "H2O, no layer whole", "InfiniGen"), (*of_h2o, of_infinigen), strict=True):
                points.append({"length": int(length), "over": row["over_full"], "series": method})
                quantity = f"{model}: {method}, {studied.KEPT} of {length} tokens, over full cache"
                rows.append(context(quantity, row["over_full"]))
        title, name = f"{model}, {studied.KEPT} tokens kept", f"{model.lower()}-lengths"
        figures.append(lines(name, points, title, "tokens of a text", OVER_FULL))
    return INFINIGEN.experiment("infinigen-accuracy-fig19", rows, figures)


def figure_12() -> Experiment:
    """Perplexity by chunk of 256 positions."""
    rows, figures = [], []
    for model, study in studies().items():
        points = []
        paths = {
            "full cache": ("plain", "full_cache"),
            "INT4": ("plain", quantized(4)),
            "H2O, 20 %": ("plain", h2o(0.2)),
            "H2O, 20 %, no layer whole": ("plain", h2o(0.2, 0)),
            "InfiniGen": ("skewed", infinigen(study["alpha"], 0.2)),
        }
        for name, (part, policy) in paths.items():
            for row in study[part]["chunks"]:
                if row["policy"] == policy:
                    points.append({"position": row["end"], "perplexity": row["perplexity"], "series": name})
                    rows.append(context(f"{model}: {name}, positions to {row['end']}", row["perplexity"]))
        figures.append(_figure(model, points, "position in the text", "perplexity of 256 tokens", log="y"))
    return INFINIGEN.experiment("infinigen-accuracy-fig12", rows, figures)


def figure_13() -> Experiment:
    """With and without skewing at fixed shares of the cache."""
    rows, figures = [], []
    for model, study in studies().items():
        points = []
        for name, part in (("skewed", "skewed"), ("not skewed", "plain")):
            for share in studied.SHARES:
                row = _rows(study, part)[infinigen(cap=share)]
                over, agreement = row["over_full"], row["agreement"]
                points.append({"share": f"{share:.0%}", "over": over, "series": name})
                quantity = f"{model}: {name}, {share:.0%}, perplexity over full cache"
                rows.append(context(quantity, over, agreement=agreement))
        for layer, columns in enumerate(study["columns"]):
            for part in ("query", "key"):
                quantity = f"{model}: squares of {part} in {studied.PARTIAL:.0%} of columns, layer {layer}"
                rows.append(context(quantity, columns[f"skewed {part}"], not_skewed=columns[f"plain {part}"]))
        rows.append(context(f"{model}: largest change of a logit by skewing alone", study["skewing_alone"]))
        x_label, y_label = "share fetched in layers that choose", OVER_FULL
        figures.append(bars(model.lower(), points, model, x_label, y_label))
    return INFINIGEN.experiment("infinigen-accuracy-fig13", rows, figures)


def figure_17() -> Experiment:
    """Threshold and partial weight ratio."""
    rows, drawn = [], {}
    for model, study in studies().items():
        skewed, alpha = _rows(study, "skewed"), study["alpha"]
        alphas = {threshold: infinigen(threshold) for threshold in studied.ALPHAS}
        ratios = {ratio: infinigen(alpha, 0.2, partial_ratio=ratio) for ratio in studied.RATIOS}
        ratios[studied.PARTIAL] = infinigen(alpha, 0.2)
        for name, label, policies in (("alpha", "alpha", alphas), ("ratio", "partial weight ratio", ratios)):
            for x, policy in policies.items():
                row = skewed[policy]
                over, looked = row["over_full"], np.mean(row["looked_at_by_layer"][2:])
                drawn.setdefault((name, label, OVER_FULL), []).append({"x": x, "y": over, "series": model})
                drawn.setdefault((name, label, LOOKED), []).append({"x": x, "y": 100 * looked, "series": model})
                quantity = f"{model}: {label} {x:g}, perplexity over full cache"
                rows.append(context(quantity, over, looked_at=looked, agreement=row["agreement"]))
    figures = [
        lines(f"{name}-{'over' if y_label == OVER_FULL else 'looked'}", points, "Small models", label, y_label)
        for (name, label, y_label), points in drawn.items()
    ]
    return INFINIGEN.experiment("infinigen-accuracy-fig17", rows, figures)


def table_2() -> Experiment:
    """A pool of 80 % and its victims."""
    rows, points = [], []
    paper_items = {"fifo": "80-FIFO%", "lru": "80-LRU%", "counter": "80-Counter%"}
    for model, study in studies().items():
        skewed, alpha, paper_model = _rows(study, "skewed"), study["alpha"], _paper_model(study)
        unlimited = skewed[infinigen(alpha, 0.2)]["perplexity"]
        find = {"table": 2, "model": paper_model, "dataset": "WikiText-2"}
        rows.append(context(f"{model}: no limit, perplexity", unlimited))
        for victim, item in paper_items.items():
            paper, full = (reference.value("infinigen_tables", item=i, **find) for i in (item, "100%"))
            over = skewed[infinigen(alpha, 0.2, pool=studied.POOL, victim=victim)]["perplexity"] / unlimited
            points.append({"victim": victim, "over": over, "series": model})
            quantity, source = (
                f"{model}: pool of {studied.POOL:.0%}, {victim}, over no limit",
                f"{paper_model}, WikiText-2",
            )
            rows.append(context(quantity, over, "", paper / full, f"infinigen Table 2, {source}"))
    return INFINIGEN.experiment(
        "infinigen-accuracy-table2",
        rows,
        [bars("over", points, f"A pool of {studied.POOL:.0%}", "", "perplexity over no limit")],
    )
