"""InfiniGen's accuracy tables and figures on small models, from what ``experiments.studies.accuracy_study`` measured.

The models are small (4 M parameters, 4 layers; the paper's have 6.7 to 30 billion), so none of the paper's numbers is
judged: they stand beside ours. With layers 0 and 1 whole, four layers move half of the cache at least; where the paper
has a relative size of the cache, the share that the other layers look at is shown too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.experiment import Experiment, Figure, table
from experiments.reproduce.infinigen.accuracy_policies import (
    ALPHAS,
    KEPT,
    LOUD,
    PARTIAL,
    POOL,
    PROMPT_SHARE,
    QUIET,
    RATIOS,
    RESULTS,
    SHARES,
    h2o,
    infinigen,
    whole_share,
)
from experiments.reproduce.infinigen.setup import PAPER, context, paper_value

SMALL = "A small model (four layers, four million parameters), not one of the paper's: nothing here is judged."
HOW = (
    SMALL,
    "Through the executor, float32, the held-out text's own tokens fed one by one behind a prompt of three quarters of "
    "each text (python -m experiments.studies.accuracy_study). H2O's budget is set to a mean share of the context.",
)


@cache
def studies() -> dict[str, dict]:
    """Model -> what was measured of it, for all models that were."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def _rows(study: dict, part: str) -> dict[str, dict]:
    """Policy -> its row."""
    return {row["policy"]: row for row in study[part]["policies"]}


def _figure(name: str, frame: list[dict], x: str, y: str, title: str, x_label: str, y_label: str, **more) -> Figure:
    kind = more.pop("kind", "line")
    return Figure(name, kind, pd.DataFrame(frame), x, y, "series", title, x_label, y_label, **more)


def _experiment(number: str, title: str, what: str, rows: list[dict], figures: list[Figure], *notes: str,
                mismatches: tuple[str, ...] = ()) -> Experiment:  # fmt: skip
    name = f"infinigen-accuracy-{number}"
    return Experiment(name, PAPER, f"InfiniGen {title}, on small models", what, table(rows), tuple(figures),
                      notes=(*HOW, *notes), mismatches=mismatches)  # fmt: skip


def _slug(model: str) -> str:
    return model.lower()


# ---- what attention looks like


def table_1() -> Experiment:
    """How alike a block's input is to what the block before takes in and gives."""
    names = {"block input": "Tblock_in_{i-1}", "attention output": "Attn_out_{i-1}", "FFN output": "FFN_out_{i-1}"}
    rows, frame = [], []
    for model, study in studies().items():
        paper_model = "OPT-6.7B" if study["family"] == "opt" else "Llama-2-7B"
        for name, item in names.items():
            values = study["inputs"][name]
            paper = reference.value("infinigen_tables", table=1, model=paper_model, item=item)
            source = f"infinigen Table 1, {paper_model}"
            rows += [
                context(f"{model}: {name}, mean of layers 2 and later", np.mean(values[1:]), "", paper, source),
                context(f"{model}: {name}, layer 1", values[0]),
            ]
        normed = study["inputs"]["normed input"]
        rows += [context(f"{model}: normed input, layer {i}", value) for i, value in enumerate(normed, 1)]
        frame += [{"series": f"{model}, {name}", "layer": i, "cosine": value}
                  for name in (*names, "normed input") for i, value in enumerate(study["inputs"][name], 1)]  # fmt: skip
    return _experiment(
        "table1", "Table 1: cosine of a block's input with what the block before takes in and gives",
        "Mean cosine over the tokens of a random sentence of 2000 tokens from PG-19; mean over layers.", rows,
        [_figure("cosine", frame, "layer", "cosine", "A block's input and the block before", "layer i", "cosine")],
        "Guessing rests on the normed inputs of attention being alike. From layer 2 on they are; layer 0's FFN makes "
        "all of layer 1's input, so that layer 0 cannot guess for layer 1: layers 0 and 1 look at all tokens, as in "
        "InfiniGen's own code.",
    )  # fmt: skip


def figure_4() -> Experiment:
    """Attention weights of H2O, InfiniGen and the best possible choice against the full cache's."""
    rows, figures = [], []
    for model, study in studies().items():
        share = KEPT * 2 / (1 + PROMPT_SHARE) / study["length"]  # the best KEPT tokens, of the mean context
        chosen = {"H2O": h2o(0.2), "InfiniGen": infinigen(cap=0.2)}
        frame = []
        for name, policy in chosen.items():
            part = "plain" if name == "H2O" else "skewed"
            frame += [{"series": f"{name}, 20 %", "position": row["end"], "cosine": row["cosine"]}
                      for row in study[part]["chunks"] if row["policy"] == policy]  # fmt: skip
            for layer, value in enumerate(_rows(study, part)[policy]["cosine_by_layer"]):
                rows.append(context(f"{model}: {name} at 20 %, layer {layer}", value))
        best = np.mean([layer["best_cosine_by_chunk"] for layer in study["attention"]["layers"]], axis=0)
        ends = [min(256 * (i + 1), study["length"]) for i in range(len(best))]
        frame += [{"series": f"best {KEPT} tokens of each query", "position": end, "cosine": float(value)}
                  for end, value in zip(ends, best, strict=True) if end > study["prompt_tokens"]]  # fmt: skip
        for layer, of in enumerate(study["attention"]["layers"]):
            rows.append(context(f"{model}: best {KEPT} tokens ({share:.0%} of the context), layer {layer}",
                                of["best_cosine_by_chunk"][-1]))  # fmt: skip
        figures.append(_figure(_slug(model), frame, "position", "cosine", model, "position in the text",
                               "cosine with the full cache's weights"))  # fmt: skip
    return _experiment(
        "fig4", "Fig. 4: attention weights of H2O and of the best choice against the full cache's",
        "OPT-6.7B, a sentence of 2000 tokens: cosine of attention weights with 200 tokens that H2O keeps, or that are "
        "best at each iteration (Optimal).", rows, figures,
    )  # fmt: skip


def figure_5() -> Experiment:
    """How many key tokens make up 0.9 of the weight."""
    rows, figures = [], []
    rows_of = {500: "ih013", 1000: "ih014", 1500: "ih015", 2000: "ih016", 998: "ih017", 999: "ih018", 1001: "ih020",
               1002: "ih021"}  # fmt: skip
    for model, study in studies().items():
        layers, frame = study["attention"]["layers"], []
        for layer in (0, len(layers) - 1):
            counts = np.array(layers[layer]["histogram"])
            frame += [{"series": f"layer {layer}", "tokens": study["attention"]["bin"] * i, "queries": float(n)}
                      for i, n in enumerate(counts / counts.sum())]  # fmt: skip
        for layer, of in enumerate(layers):
            entropy = of["relative_entropy_by_head"]
            rows.append(context(f"{model}: entropy over even weights', layer {layer}", np.mean(entropy)))
        for query, needed in layers[-1]["needed_at"].items():
            row_id = rows_of[int(query)]
            rows.append(context(f"{model}: key tokens of query {query}, layer {len(layers) - 1}", needed, "tokens",
                                paper_value(row_id), row_id))  # fmt: skip
        figures.append(_figure(_slug(model), frame, "tokens", "queries", model, "key tokens for 0.9 of the weight",
                               "share of queries and heads"))  # fmt: skip
    return _experiment(
        "fig5", "Fig. 5: key tokens needed for 0.9 of the attention weight",
        "OPT-6.7B, layers 0 and 18, a sentence of 2000 tokens: histogram in bins of 16.", rows, figures,
        "As in the paper the first layer looks at very many tokens and the last at few.",
    )  # fmt: skip


def figure_20() -> Experiment:
    """Share of queries that look at less than a percent of the tokens, by position; keys that matter again."""
    rows, frame, figures = [], [], []
    for model, study in studies().items():
        layers, spikes = study["attention"]["layers"], []
        for i, _ in enumerate(layers[0]["needed_by_chunk"]):
            share = np.mean([layer["below_a_percent_by_chunk"][i] for layer in layers])
            end = min(study["length"], 256 * (i + 1))
            frame.append({"series": model, "position": end, "share": 100 * float(share)})
            rows.append(context(f"{model}: positions up to {end}", 100 * share, "%"))
        for number, layer in enumerate(layers):
            again = layer["revival"]
            first = study["length"] - len(again["weights"])
            series = f"layer {number}, head {again['head']}, key {again['key']}"
            spikes += [{"series": series, "position": first + i, "weight": max(weight, 1e-6)}
                       for i, weight in enumerate(again["weights"])]  # fmt: skip
            rows.append(context(f"{model}: weights of {LOUD:g} on keys below {QUIET:g} before, layer {number}",
                                100 * again["of_loud"], "%", largest=max(again["weights"])))  # fmt: skip
        figures.append(_figure(f"{_slug(model)}-again", spikes, "position", "weight", model, "position of the query",
                               "attention weight of one key", log_y=True))  # fmt: skip
    share = _figure("share", frame, "position", "share", "0.9 of the weight on less than 1 % of the tokens",
                    "position in the text", "% of queries and heads")  # fmt: skip
    return _experiment(
        "fig20", "Fig. 20: queries that attend to few keys, and keys that matter again",
        "Llama-3-8B-1048K, up to a million tokens: (a) share of query tokens for which less than 1 % of the key tokens "
        "matter, against the length; (b) weights of sampled keys over the last 16,000 iterations: sudden spikes.",
        rows, [share, *figures],
        f"Here to a model's 2,048 tokens at most. (b): queries of a text's last quarter; of the keys with a weight of "
        f"{LOUD:g} in its second half, the share that all queries of its first half gave less than {QUIET:g}. What "
        f"drops keys for good (H2O) may have lost these.",
    )  # fmt: skip


# ---- what a policy costs


def _by_size(study: dict) -> dict[str, list[tuple[dict, float]]]:
    """Method -> (row, share of the context that its choosing layers look at) by growing share."""
    plain, skewed = _rows(study, "plain"), _rows(study, "skewed")
    return {
        "H2O": [(plain[h2o(share)], share) for share in SHARES],
        "InfiniGen": [(skewed[infinigen(cap=share)], share) for share in SHARES],
        "InfiniGen, not skewed": [(plain[infinigen(cap=share)], share) for share in SHARES],
        "fewer bits": [(plain[f"INT{bits}"], (bits + 0.5) / 16) for bits in (4, 8)],
    }


def _against_size(number: str, title: str, what: str, column: str, label: str, *notes: str, **more) -> Experiment:
    rows, figures = [], []
    for model, study in studies().items():
        frame = []
        for method, points in _by_size(study).items():
            for row, share in points:
                frame.append({"series": method, "share": 100 * share, column: row[column]})
                rows.append(context(f"{model}: {method}, {share:.0%}", row[column], moved_of_all_layers=row["moved"]))
        for share in (0.1, 0.2):  # H2O with as many bytes as InfiniGen moves over all layers
            of_all = whole_share(study["num_layers"], share)
            row = _rows(study, "plain")[h2o(of_all)]
            rows.append(context(f"{model}: H2O, {of_all:.0%}: what InfiniGen moves at {share:.0%}", row[column],
                                moved_of_all_layers=row["moved"]))  # fmt: skip
        full = _rows(study, "plain")["full_cache"][column]
        frame += [{"series": "full cache", "share": 100 * share, column: full} for share in SHARES]
        rows.append(context(f"{model}: full cache", full))
        figures.append(_figure(_slug(model), frame, "share", column, f"{model}, {study['length']} tokens",
                               "relative size of the cache, % (choosing layers)", label, log_x=True,
                               **more))  # fmt: skip
    return _experiment(number, title, what, rows, figures, *notes)


def figure_11() -> Experiment:
    """Greedy tokens against the relative size of the cache: the local task that there is."""
    return _against_size(
        "fig11", "Fig. 11: accuracy against the relative size of the cache",
        "Five models on five tasks of lm-evaluation-harness, 5-shot: accuracy against the relative size of the cache.",
        "agreement", "greedy tokens that are the full cache's",
        "The paper's tasks are downloads and beyond a model of this size: here the task is the next token of a "
        "held-out text, and right is what the full cache says.",
    )  # fmt: skip


def figure_19() -> Experiment:
    """Perplexity against the relative size, and with a fixed number of tokens against the length."""
    one = _against_size(
        "fig19", "Fig. 19: perplexity against the relative size of the cache and against the length",
        "Llama-2-7B-32K on WikiText-2: (a) 32,768 tokens, relative sizes; (b) lengths up to that with 64 tokens kept.",
        "perplexity", "perplexity", "At most 2,048 tokens here.", log_y=True,
    )  # fmt: skip
    rows, figures = [one.rows], list(one.figures)
    for model, study in studies().items():
        frame = []
        for length, of in study["by_length"].items():
            for name, found in of.items():
                full, chosen = found
                over = chosen["perplexity"] / full["perplexity"]
                label = "H2O" if name == "h2o" else "InfiniGen"
                frame.append({"series": label, "length": int(length), "over": over})
                rows.append(table([context(f"{model}: {label}, {KEPT} of {length} tokens, over full cache", over)]))
        figures.append(_figure(f"{_slug(model)}-lengths", frame, "length", "over", f"{model}, {KEPT} tokens kept",
                               "tokens of a text", "perplexity over the full cache's"))  # fmt: skip
    return Experiment(one.name, one.paper, one.title, one.what, pd.concat(rows, ignore_index=True), tuple(figures),
                      notes=one.notes)  # fmt: skip


def figure_12() -> Experiment:
    """Perplexity by chunk of 256 positions."""
    rows, figures = [], []
    for model, study in studies().items():
        frame = []
        paths = {"full cache": ("plain", "full_cache"), "INT4": ("plain", "INT4"), "H2O, 20 %": ("plain", h2o(0.2)),
                 "InfiniGen": ("skewed", infinigen(study["alpha"], 0.2))}  # fmt: skip
        for name, (part, policy) in paths.items():
            for row in study[part]["chunks"]:
                if row["policy"] == policy:
                    frame.append({"series": name, "position": row["end"], "perplexity": row["perplexity"]})
                    rows.append(context(f"{model}: {name}, positions to {row['end']}", row["perplexity"]))
        figures.append(_figure(_slug(model), frame, "position", "perplexity", model, "position in the text",
                               "perplexity of 256 tokens", log_y=True))  # fmt: skip
    return _experiment(
        "fig12", "Fig. 12: perplexity by decoding chunk of 256 tokens",
        "OPT-13B (2048 tokens) and Llama-2-13B (4096) on WikiText-2; H2O with as much cache as InfiniGen.", rows,
        figures,
    )  # fmt: skip


def figure_13() -> Experiment:
    """With and without skewing at fixed shares of the cache."""
    rows, figures = [], []
    for model, study in studies().items():
        frame = []
        for name, part in (("skewed", "skewed"), ("not skewed", "plain")):
            for share in SHARES:
                row = _rows(study, part)[infinigen(cap=share)]
                frame.append({"series": name, "share": f"{share:.0%}", "over": row["over_full"]})
                rows.append(context(f"{model}: {name}, {share:.0%}, perplexity over full cache", row["over_full"],
                                    agreement=row["agreement"]))  # fmt: skip
        for layer, held in enumerate(study["columns"]):
            for part in ("query", "key"):
                rows.append(context(f"{model}: squares of {part} in {PARTIAL:.0%} of columns, layer {layer}",
                                    held[f"skewed {part}"], not_skewed=held[f"plain {part}"]))  # fmt: skip
        rows.append(context(f"{model}: largest change of a logit by skewing alone", study["skewing_alone"]))
        figures.append(_figure(_slug(model), frame, "share", "over", model, "share fetched in layers that choose",
                               "perplexity over the full cache's", kind="bar"))  # fmt: skip
    return _experiment(
        "fig13", "Fig. 13: the effect of skewing", "OPT-6.7B, a fixed 20 % of the cache: accuracy with and without.",
        rows, figures,
    )  # fmt: skip


def figure_17() -> Experiment:
    """Threshold and partial weight ratio."""
    rows, figures = [], []
    for model, study in studies().items():
        skewed, alpha = _rows(study, "skewed"), study["alpha"]
        ratios = {ratio: infinigen(alpha, 0.2, **({} if ratio == PARTIAL else {"partial_ratio": ratio}))
                  for ratio in RATIOS}  # fmt: skip
        for name, label, policies in (("alpha", "alpha", {one: infinigen(one) for one in ALPHAS}),
                                      ("ratio", "partial weight ratio", ratios)):  # fmt: skip
            frame = []
            for x, policy in policies.items():
                row = skewed[policy]
                looked = np.mean(row["looked_at_by_layer"][2:])
                frame += [{"series": "perplexity over the full cache's", "x": x, "y": row["over_full"]},
                          {"series": "share that choosing layers look at", "x": x, "y": looked}]  # fmt: skip
                rows.append(context(f"{model}: {label} {x:g}, perplexity over full cache", row["over_full"],
                                    looked_at=looked, agreement=row["agreement"]))  # fmt: skip
            figures.append(_figure(f"{_slug(model)}-{name}", frame, "x", "y", model, label, ""))
    return _experiment(
        "fig17", "Fig. 17: accuracy against alpha and the partial weight ratio",
        "OPT-6.7B, WinoGrande, 1920 prompt tokens: accuracy and latency over nine alphas (ratio 0.3) and over ratios "
        "(alpha 4). Beyond alpha 4 and a ratio of 0.3 accuracy stays.", rows, figures,
        "Latency is in infinigen-fig17. A share of 20 % caps what the ratios fetch, nothing what the alphas do.",
    )  # fmt: skip


def table_2() -> Experiment:
    """A pool of 80 % and its victims."""
    rows, frame = [], []
    paper_items = {"fifo": "80-FIFO%", "lru": "80-LRU%", "counter": "80-Counter%"}
    for model, study in studies().items():
        skewed, alpha = _rows(study, "skewed"), study["alpha"]
        whole = skewed[infinigen(alpha, 0.2)]["perplexity"]
        paper_model = "OPT-6.7B" if study["family"] == "opt" else "Llama-2-7B"

        def paper(item: str, paper_model=paper_model) -> float:
            return reference.value("infinigen_tables", table=2, model=paper_model, dataset="WikiText-2", item=item)

        rows.append(context(f"{model}: no limit, perplexity", whole))
        for victim, item in paper_items.items():
            over = skewed[infinigen(alpha, 0.2, pool=POOL, victim=victim)]["perplexity"] / whole
            frame.append({"series": model, "victim": victim, "over": over})
            source = f"infinigen Table 2, {paper_model}, WikiText-2"
            rows.append(context(f"{model}: pool of {POOL:.0%}, {victim}, over no limit", over, "",
                                paper(item) / paper("100%"), source))  # fmt: skip
    return _experiment(
        "table2", "Table 2: perplexity with a pool of 80 % and three kinds of victims",
        "Five models on WikiText-2 and PTB, 2048 tokens.", rows,
        [_figure("over", frame, "victim", "over", f"A pool of {POOL:.0%}", "", "perplexity over no limit", kind="bar")],
        "The full pool's size is that of prompt and answer together, so that victims are needed in the last fifth of "
        "a text alone. Layers 0 and 1, which look at every token, count those as fetched that their attention would "
        "have chosen: with their oldest as victims instead, all three were as bad as fifo.",
    )  # fmt: skip


def experiments() -> dict[str, Callable[[], Experiment]]:
    """All of them by name, where a model was measured; else none."""
    functions = {
        "table1": table_1, "table2": table_2, "fig4": figure_4, "fig5": figure_5, "fig11": figure_11,
        "fig12": figure_12, "fig13": figure_13, "fig17": figure_17, "fig19": figure_19, "fig20": figure_20,
    }  # fmt: skip
    return {f"infinigen-accuracy-{name}": one for name, one in functions.items()} if studies() else {}


EXPERIMENTS = experiments()
