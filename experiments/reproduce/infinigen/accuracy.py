"""InfiniGen's accuracy tables and figures on small models, from what ``experiments.studies.accuracy_study`` measured.

The models are small (4 M parameters; the paper's have 6.7 to 30 billion), so none of the paper's numbers is judged:
they stand beside ours. A study is measured on texts of different documents. Intervals are 95 %, a bootstrap over
documents; of two policies the difference is paired, text by text, and called one where its interval excludes none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from experiments import reference
from experiments.reproduce.experiment import Experiment, Figure, Row, bars, lines
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.infinigen.accuracy_policies import at_ratio, h2o, infinigen, quantized
from experiments.reproduce.paper import INFINIGEN, context
from flexhybrid.jobs.accuracy import bootstrap
from flexhybrid.jobs.accuracy.bootstrap import Interval

Study = dict  #: what ``experiments.studies.accuracy_study`` has written of a model
OVER_FULL, LOOKED = "perplexity over the full cache's", "% of tokens that choosing layers look at"


# ---- the stored studies, rows and points with intervals


@cache
def studies() -> dict[str, Study]:
    """Return model -> its measurements, for all models that were measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(studied.RESULTS.glob("*.json"))}


def beside(folder: Path) -> dict[str, dict]:
    """Return model -> what another study has written of it into ``folder``, of the models with a study of accuracy."""
    paths = {model: folder / f"{model}.json" for model in studies()}
    return {model: json.loads(path.read_text(encoding="utf-8")) for model, path in paths.items() if path.is_file()}


def by_policy(part: dict) -> dict[str, dict]:
    """Return policy -> its row, of a part of a study."""
    return {row["policy"]: row for row in part["policies"]}


def cell(row: dict, name: str) -> Interval:
    """Return a figure of a stored row with its interval."""
    ends = (row[name], row[f"{name}_low"], row[f"{name}_high"])
    return Interval(*(math.nan if end is None else end for end in ends))


def row(quantity: str, found: Interval, unit: str = "", times: float = 1.0, **more) -> Row:
    """Return a context row of a figure with its interval, both multiplied by ``times``."""
    ends = {"low": times * found.low, "high": times * found.high}
    return context(quantity, times * found.value, unit) | ends | more


def point(found: Interval, x: str, at: object, series: str, times: float = 1.0) -> dict:
    """Return the point of a figure, with its interval as an error bar."""
    value, low, high = (times * number for number in found)
    return {x: at, "y": value, "series": series, "low": low, "high": high}


def against(part: dict, ours: dict, others: dict) -> Interval:
    """Return the perplexity of a policy over another one's of the same texts."""
    name = "logprob_by_document"
    return bootstrap.perplexity_ratio(ours[name], others[name], part["texts_by_document"])


def comparison(quantity: str, part: dict, ours: dict, others: dict) -> tuple[Row, str]:
    """Return the row of a paired comparison, and what it says in words."""
    found = against(part, ours, others)
    is_shown = found.excludes(1.0)
    verdict = "no difference shown" if not is_shown else "worse" if found.value > 1 else "better"
    words = f"{quantity}: {found.value:.3f} [{found.low:.3f}, {found.high:.3f}], {verdict}"
    return row(quantity, found, shown=verdict), words


def _figure(model: str, points: list[dict], x_label: str, y_label: str, log: str = "") -> Figure:
    """Return a model's lines over ``points`` (x, y, series)."""
    return lines(model.lower(), points, model, x_label, y_label, log=log)


def _paper_model(study: Study) -> str:
    return "OPT-6.7B" if study["family"] == "opt" else "Llama-2-7B"


# ---- tables and figures


def figure_4() -> Experiment:
    """Attention weights under H2O and InfiniGen against the full cache's."""
    compared = (
        ("H2O", "plain", h2o(0.1)),
        ("H2O, no layer whole,", "plain", h2o(0.1, 0)),
        ("InfiniGen", "skewed", infinigen(cap=0.1)),
    )
    rows, figures = [], []
    for model, study in studies().items():
        points = []
        for name, part, policy in compared:
            found = by_policy(study[part])[policy]
            rows.append(row(f"{model}: {name} at 10 %, mean of layers", cell(found, "cosine")))
            for layer, cosine in enumerate(found["cosine_by_layer"]):
                points.append({"layer": layer, "cosine": cosine, "series": f"{name} 10 %"})
        figures.append(_figure(model, points, "layer", "cosine with the full cache's weights"))
    return INFINIGEN.experiment("infinigen-accuracy-fig4", rows, figures)


def _by_size(study: Study) -> Iterator[tuple[str, str, str, float]]:
    """Yield method, part of the study, policy and the share of the context that its choosing layers look at."""
    for share in studied.SHARES:
        yield "H2O", "plain", h2o(share), share
    yield "H2O, no layer whole", "plain", h2o(0.1, 0), 0.1
    for share in studied.SHARES:
        yield "InfiniGen", "skewed", infinigen(cap=share), share
    for share in studied.SHARES:
        yield "InfiniGen, not skewed", "plain", infinigen(cap=share), share
    for bits in sorted(studied.BITS):
        yield "fewer bits", "plain", quantized(bits), (bits + 32 / study["kv_group"]) / 16


def _against_size(column: str, y_label: str, log: str = "x") -> tuple[list[Row], list[Figure]]:
    """Return rows and figures of a column against the relative size of the cache."""
    rows, figures = [], []
    for model, study in studies().items():
        points = []
        for method, part, policy, share in _by_size(study):
            measured = by_policy(study[part])[policy]
            found = cell(measured, column)
            points.append(point(found, "share", 100 * share, method))
            rows.append(row(f"{model}: {method}, {share:.0%}", found, moved_of_all_layers=measured["moved"]))
        x_label = "relative size of the cache, % (choosing layers)"
        figure = _figure(model, points, x_label, y_label, log=log)
        figures.append(replace(figure, title=f"{model}, {study['length']} tokens"))
    return rows, figures


def _h2o_against_infinigen() -> tuple[list[Row], list[str]]:
    """Return the paired comparisons of H2O with InfiniGen, at equal shares and at the largest threshold that moves no
    more bytes, as rows and in words."""
    rows, said = [], []
    for model, study in studies().items():
        plain, skewed = by_policy(study["plain"]), by_policy(study["skewed"])
        for share in studied.SHARES:
            quantity = f"{model}: H2O over InfiniGen at {share:.0%} of choosing layers"
            compared = comparison(quantity, study["plain"], plain[h2o(share)], skewed[infinigen(cap=share)])
            rows.append(compared[0])
            said.append(compared[1])
        for share in studied.SHARES:
            most = plain[h2o(share)]["moved"]
            alpha = max((a for a in studied.ALPHAS if skewed[infinigen(a)]["moved"] <= most), default=None)
            if alpha is not None:
                moved = f"{most:.1%} and {skewed[infinigen(alpha)]['moved']:.1%} of the bytes moved"
                quantity = f"{model}: H2O at {share:.0%} over InfiniGen at alpha {alpha:g}, {moved}"
                compared = comparison(quantity, study["plain"], plain[h2o(share)], skewed[infinigen(alpha)])
                rows.append(compared[0])
                said.append(compared[1])
        for policy in (infinigen(study["alpha"], 0.2, whole_layers=1), infinigen(cap=0.05, whole_layers=1)):
            found = cell(skewed[policy], "over_full")
            quantity = f"{model}: {policy}, perplexity over full cache"
            rows.append(row(quantity, found, moved_of_all_layers=skewed[policy]["moved"]))
        fewest = min(by_policy(study["skewed"]).values(), key=lambda each: each["moved"] or 1)
        found, moved = cell(fewest, "over_full"), fewest["moved"]
        said.append(
            f"{model}: the least that moves is {moved:.1%} of the cache ({fewest['policy']}): perplexity over the full "
            f"cache's {found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
        )
    return rows, said


def figure_11() -> Experiment:
    """Greedy tokens against the relative size of the cache, on the local task."""
    rows, figures = _against_size("agreement", "greedy tokens that are the full cache's")
    of_tasks, drawn, said = _tasks()
    return INFINIGEN.experiment("infinigen-accuracy-fig11", [*rows, *of_tasks], [*figures, *drawn], said=said)


def _tasks() -> tuple[list[Row], list[Figure], list[str]]:
    """Return right answers to the harness's tasks: rows, bars, and comparisons with the full cache in words."""
    rows, figures, said = [], [], []
    for model, found in beside(studied.TASK_RESULTS).items():
        points = []
        for task, policies in found["tasks"].items():
            full = policies["full cache"]
            for name, answered in policies.items():
                right = bootstrap.mean(answered["right"], answered["questions"])
                points.append(point(right, "policy", name, task, times=100))
                rows.append(row(f"{model}, {task}: {name}, right answers", right, "%", times=100))
                if name != "full cache":
                    less = bootstrap.mean_difference(answered["right"], full["right"], full["questions"])
                    verdict = "no difference shown" if not less.excludes(0.0) else "shown"
                    quantity = f"{model}, {task}: {name} less full cache"
                    rows.append(row(quantity, less, "points", times=100, shown=verdict))
                    value, low, high = (100 * number for number in less)
                    said.append(f"{quantity}: {value:+.1f} points [{low:+.1f}, {high:+.1f}], {verdict}")
        figures.append(bars(f"{model.lower()}-tasks", points, model, "policy", "% right, chance is 25"))
    return rows, figures, said


def figure_19() -> Experiment:
    """Perplexity against the relative size, and with a fixed number of tokens against the length."""
    rows, figures = _against_size("over_full", OVER_FULL)
    for model, study in studies().items():
        points = []
        for length, of_length in study["by_length"].items():
            for method, name in (("H2O", "h2o"), ("InfiniGen", "infinigen")):
                _, measured = of_length[name]["policies"]
                found = cell(measured, "over_full")
                points.append(point(found, "length", int(length), method))
                rows.append(row(f"{model}: {method}, {studied.KEPT} of {length} tokens, over full cache", found))
        title, name = f"{model}, {studied.KEPT} tokens kept", f"{model.lower()}-lengths"
        figures.append(lines(name, points, title, "tokens of a text", OVER_FULL))
    compared, said = _h2o_against_infinigen()
    of_choice, known = _choices()
    rows += [*compared, *of_choice]
    return INFINIGEN.experiment("infinigen-accuracy-fig19", rows, figures, said=[*said, *known])


def _choices() -> tuple[list[Row], list[str]]:
    """Return what a share of the keys costs where their true weights are known: perplexities over the full cache's."""
    rows, said = [], []
    for model, found in beside(studied.CHOICE_RESULTS).items():
        full = {"logprob_by_document": found["full"]}
        where = {"layer": f"layer {found['layer']}, the broadest", "others": "the other choosing layers"}
        for rule, variants in found["rules"].items():
            for part, logprobs in variants.items():
                quantity = f"{model}: {found['share']:.0%} of the keys, {rule}, in {where[part]}, over full cache"
                compared = comparison(quantity, found, {"logprob_by_document": logprobs}, full)
                rows.append(compared[0])
                said.append(compared[1])
    return rows, said


def figure_12() -> Experiment:
    """Perplexity by chunk of 256 positions."""
    rows, figures = [], []
    for model, study in studies().items():
        points, followed = [], study["by_position"]
        early = 0.5
        paths = {
            "INT4": ("plain", quantized(4)),
            "H2O, 10 %": ("plain", h2o(0.1, prompt_share=early)),
            "InfiniGen, 10 %": ("skewed", infinigen(cap=0.1)),
        }
        for name, (part, policy) in paths.items():
            for chunk in followed[part]["chunks"]:
                if chunk["policy"] == policy:
                    found = cell(chunk, "over_full")
                    points.append(point(found, "position", chunk["end"], name))
                    perplexity = chunk["perplexity"]
                    rows.append(row(f"{model}: {name}, positions to {chunk['end']}", found, perplexity=perplexity))
        figures.append(_figure(model, points, "position in the text", OVER_FULL))
    return INFINIGEN.experiment("infinigen-accuracy-fig12", rows, figures)


def figure_13() -> Experiment:
    """With and without skewing at fixed shares of the cache and of the columns."""
    rows, figures, said = [], [], []
    for model, study in studies().items():
        points = []
        plain, skewed = by_policy(study["plain"]), by_policy(study["skewed"])
        settings = [(ratio, share) for ratio in studied.SKEWED_RATIOS for share in studied.SKEWED_SHARES]
        settings += [(studied.PARTIAL, share) for share in studied.SHARES]
        for ratio, share in settings:
            policy, where = at_ratio(share, ratio), f"{ratio:g} of columns, {share:.0%}"
            for name, of_part in (("skewed", skewed), ("not skewed", plain)):
                found = cell(of_part[policy], "over_full")
                points.append(point(found, "share", f"{ratio:g}, {share:.0%}", name))
                agreement = of_part[policy]["agreement"]
                rows.append(row(f"{model}: {name}, {where}, perplexity over full cache", found, agreement=agreement))
            quantity = f"{model}: skewed over not skewed, {where}"
            compared = comparison(quantity, study["plain"], skewed[policy], plain[policy])
            rows.append(compared[0])
            said.append(compared[1])
        figures.append(bars(model.lower(), points, model, "share of columns, share fetched", OVER_FULL))
    return INFINIGEN.experiment("infinigen-accuracy-fig13", rows, figures, said=said)


def figure_17() -> Experiment:
    """Threshold and partial weight ratio."""
    rows, drawn = [], {}
    for model, study in studies().items():
        skewed, alpha = by_policy(study["skewed"]), study["alpha"]
        alphas = {threshold: infinigen(threshold) for threshold in studied.ALPHAS}
        ratios = {ratio: infinigen(alpha, 0.2, partial_ratio=ratio) for ratio in studied.RATIOS}
        ratios[studied.PARTIAL] = infinigen(alpha, 0.2)
        for name, label, policies in (("alpha", "alpha", alphas), ("ratio", "partial weight ratio", ratios)):
            for x, policy in policies.items():
                measured = skewed[policy]
                found, looked = cell(measured, "over_full"), float(np.mean(measured["looked_at_by_layer"][2:]))
                drawn.setdefault((name, label, OVER_FULL), []).append(point(found, "x", x, model))
                looked_point = {"x": x, "y": 100 * looked, "series": model}
                drawn.setdefault((name, label, LOOKED), []).append(looked_point)
                more = {"looked_at": looked, "agreement": measured["agreement"], "moved": measured["moved"]}
                rows.append(row(f"{model}: {label} {x:g}, perplexity over full cache", found, **more))
    figures = [
        lines(f"{name}-{'over' if y_label == OVER_FULL else 'looked'}", points, "Small models", label, y_label)
        for (name, label, y_label), points in drawn.items()
    ]
    of_latency, drawn, said = _latency()
    return INFINIGEN.experiment("infinigen-accuracy-fig17", [*rows, *of_latency], [*figures, *drawn], latency=said)


def _latency() -> tuple[list[Row], list[Figure], list[str]]:
    """Return measured times of a decode iteration over the threshold (Fig. 17a): rows, lines, and what they are of."""
    rows, points, said = [], [], []
    for model, found in beside(studied.LATENCY_RESULTS).items():
        full = found["policies"]["full cache"]
        for name, measured in found["policies"].items():
            step_ms = [1e3 * seconds for seconds in measured["rounds_s"]]
            more = {"low": min(step_ms), "high": max(step_ms), "moved": measured["moved"]}
            rows.append(context(f"{model}: {name}, decode iteration", 1e3 * measured["step_s"], "ms", **more))
            if name != "full cache":
                alpha = float(name.removeprefix("alpha "))
                points.append({"alpha": alpha, "y": 1e3 * measured["step_s"], "series": model, **_ends(step_ms)})
                all_of_it = {"alpha": alpha, "y": 1e3 * full["step_s"], "series": f"{model}, full cache"}
                points.append(all_of_it | _ends([1e3 * seconds for seconds in full["rounds_s"]]))
        said.append(
            f"(a) is measured: {model}, {found['batch']} requests behind {found['prompt_tokens']:,} tokens, a link of "
            f"{found['link_gb_per_s']:g} GB/s, {found['machine']}; error bars are the rounds."
        )
    drawn = [lines("latency", points, "Decode latency", "alpha", "ms an iteration")] if points else []
    return rows, drawn, said


def _ends(values: list[float]) -> dict[str, float]:
    return {"low": min(values), "high": max(values)}


def table_2() -> Experiment:
    """A pool of 80 % and its victims, with prompts that are larger than the pool."""
    rows, points, said = [], [], []
    paper_items = {"fifo": "80-FIFO%", "lru": "80-LRU%", "counter": "80-Counter%"}
    for model, study in studies().items():
        skewed, alpha, paper_model = by_policy(study["skewed"]), study["alpha"], _paper_model(study)
        unlimited = skewed[infinigen(alpha, 0.2)]
        find = {"table": 2, "model": paper_model, "dataset": "WikiText-2"}
        rows.append(row(f"{model}: no limit, perplexity over full cache", cell(unlimited, "over_full")))
        for victim, item in paper_items.items():
            paper, full = (reference.value("infinigen_tables", item=i, **find) for i in (item, "100%"))
            limited = skewed[infinigen(alpha, 0.2, pool=studied.POOL, victim=victim)]
            quantity = f"{model}: pool of {studied.POOL:.0%}, {victim}, over no limit"
            compared, words = comparison(quantity, study["skewed"], limited, unlimited)
            beside = {"paper": paper / full, "source": f"infinigen Table 2, {paper_model}, WikiText-2"}
            rows.append(compared | beside)
            said.append(words)
            points.append(point(against(study["skewed"], limited, unlimited), "victim", victim, model))
    title = f"A pool of {studied.POOL:.0%}, prompts of {studied.PROMPT_SHARE:.0%}"
    figure = bars("over", points, title, "", "perplexity over no limit")
    return INFINIGEN.experiment("infinigen-accuracy-table2", rows, [figure], said=said)
