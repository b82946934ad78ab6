"""Test the reproduction's report: right errors, escaped text, pictures inside, and the same bytes every time."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from forced_machine import every_format

from experiments import reference
from experiments.reproduce import gate, registry, report
from experiments.reproduce.experiment import Constant, Experiment, Figure, errors, is_judged, summary, table
from experiments.reproduce.paper import COMPARED, PAPERS
from figures import FORMATS
from figures.reproduce import draw
from figures.style import look
from flexhybrid.core.errors import InputError

ROWS = [
    {"what": "OPT-6.7B, batch 32", "batch": 32, "paper": 10.0, "ours": 11.0, "unit": "tokens/s", "role": "calibrate"},
    {"what": "OPT-6.7B, batch 64", "batch": 64, "paper": 20.0, "ours": 15.0, "unit": "tokens/s", "role": "validate"},
    {"what": "OPT-6.7B, batch 128", "batch": 128, "paper": 40.0, "ours": 40.8, "unit": "tokens/s", "role": "validate"},
    {"what": "OPT-30B & <friends>", "batch": 32, "paper": 8.0, "ours": 4.0, "role": "context", "source": "Figure 3"},
    {"what": "not in the paper", "batch": 32, "ours": 123456.7},
]


def curve(**changes) -> Figure:
    frame = pd.DataFrame({"batch": [1, 2, 4, 8], "rate": [1.0, 2.0, 3.5, 5.0], "system": "ours"})
    fields = dict(
        name="rate", kind="line", frame=frame, x="batch", y="rate", series="system", title="Throughput",
        x_label="batch", y_label="tokens/s", paper=frame.assign(rate=frame["rate"] * 1.1), log_x=True,
    )  # fmt: skip
    return Figure(**{**fields, **changes})


def bars(**changes) -> Figure:
    frame = pd.DataFrame({"model": ["a", "a", "b", "b"], "system": ["x", "y"] * 2, "rate": [1.0, 2.0, 3.0, 4.0]})
    return curve(
        **{"name": "bars", "kind": "bar", "frame": frame, "x": "model", "paper": None, "log_x": False, **changes}
    )


def constant(name, value, unit, low, high, why, fitted_on=None) -> Constant:
    return Constant(name=name, value=value, unit=unit, low=low, high=high, why=why, fitted_on=fitted_on)


def experiment(**changes) -> Experiment:
    fields = dict(
        name="fig-3", paper="A paper, 2024", title="Figure 3", description="They ran <b>OPT</b> & more.\nTwice.",
        rows=table(ROWS), figures=(curve(), bars()),
        constants=(constant("launch_s", 5e-6, "s", 1e-6, 1e-4, "a kernel launch", fitted_on="calibrate rows"),
                   constant("gemm_share", 0.71, "of peak", 0.5, 0.95, "datasheet")),
        notes=("decode only",), mismatches=("batch 64 is <25 %> too slow",),
    )  # fmt: skip
    return Experiment(**{**fields, **changes})


class Page(HTMLParser):
    """A parsed page: balanced tags, texts and attributes."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def cells(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


def two_experiments() -> list[Experiment]:
    return [experiment(), experiment(name="table-1", title="Table 1", figures=(bars(),))]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with every_format():
        path = report.write(two_experiments(), folder)
    return folder, Page(path.read_text(encoding="utf-8"))


def test_errors_by_hand():
    found = errors([10, 20, 0, math.nan, 8], [11, 15, 3, 1, math.nan])
    np.testing.assert_allclose(found, [0.1, -0.25, math.nan, math.nan, math.nan], rtol=1e-12)


def test_table_fills_what_is_not_given_and_computes_errors():
    rows = table(ROWS)
    assert list(rows.columns) == ["what", "batch", "paper", "ours", "unit", "error", "role", "source"]
    np.testing.assert_allclose(rows["error"], [0.1, -0.25, 0.02, -0.5, math.nan], rtol=1e-12)
    assert list(rows["role"]) == ["calibrate", "validate", "validate", "context", ""]
    assert list(rows["unit"])[3:] == ["", ""]


def test_summary_leaves_context_out():
    rows = table(ROWS)
    every, held_out, others = summary(rows), summary(rows, "validate"), summary(rows, "")
    assert (every.num_rows, every.worst_what) == (3, "OPT-6.7B, batch 64")
    np.testing.assert_allclose([every.mean, every.median, every.worst], [0.37 / 3, 0.1, -0.25])
    np.testing.assert_allclose([held_out.num_rows, held_out.mean, held_out.worst], [2, 0.135, -0.25])
    assert others.num_rows == 0 and math.isnan(others.median) and others.in_words == "No row is held out."


def test_coverage_counts_what_is_put_aside_or_not_computed():
    lacking = [{**ROWS[1], "ours": math.nan}, {**ROWS[1], "aside": "again"}, {**ROWS[1], "aside": "arithmetic"}]
    found = summary(table([*ROWS, *lacking]), "validate")
    assert (found.num_rows, found.num_judged, found.num_aside) == (2, 3, 2)
    assert found.coverage == pytest.approx(2 / 5)
    assert "2 held-out rows" in found.in_words and "40% of" in found.in_words


def test_the_page_is_self_contained(written):
    _, page = written
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object"), tag
        for name in ("src", "href"):
            if value := attrs.get(name):
                assert value.startswith("data:image/png;base64," if name == "src" else "#")
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {attrs["href"][1:] for attrs in page.cells("a")} == ids == {"fig-3", "table-1", "quoted", "notes"}


def test_its_pictures_are_the_files_beside_it(written):
    folder, page = written
    images = [base64.b64decode(attrs["src"].split(",")[1], validate=True) for attrs in page.cells("img")]
    names = ["fig-3-rate.png", "fig-3-bars.png", "table-1-bars.png"]
    assert images == [(folder / name).read_bytes() for name in names]
    for image in images:
        pixels = matplotlib.image.imread(io.BytesIO(image), format="png")
        assert pixels.shape[0] > 300 and pixels.shape[1] > 800
        assert pixels[..., :3].min() < 0.2 and pixels[..., :3].std() > 0.05  # something is on it
    files = [f"{name.removesuffix('png')}{ending}" for name in names for ending in FORMATS]
    tables = ["report.html", "summary.csv", "fig-3.csv", "table-1.csv"]
    assert {path.name for path in folder.iterdir()} == {*files, *tables}
    assert (folder / "fig-3-rate.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (folder / "fig-3-rate.svg").read_text(encoding="utf-8")


def test_its_numbers(written):
    _, page = written
    for words in (
        "OPT-6.7B, batch 64", "15", "−25.0%", "+2.0%", "+10.0%", "−50.0%", "123,457", "tokens/s", "Figure 3",
        "Held out: 2 rows, |error| 13.5% in the mean, 13.5% in the median, worst −25.0% (OPT-6.7B, batch 64).",
        "Fitted on: 1 row, |error| 10.0% in the mean, 10.0% in the median, worst +10.0%",
        "All 4 held-out rows: |error| 13.5% in the mean",
        "launch_s", "5e-06", "1e-06 to 0.0001", "calibrate rows", "not fitted", "0.71", "decode only",
    ):  # fmt: skip
        assert words in page.text, words


def test_the_first_page_lists_rows_that_are_far_off():
    rows = table([*ROWS, {**ROWS[1], "what": "far off", "ours": 30.0}])
    page = Page(report.page([experiment(rows=rows, figures=())], [[]]))
    assert "Held-out rows beyond 30 %, and why" in page.text and "fig-3: far off" in page.text and "+50.0%" in page.text
    assert "beyond 30 %, and why" not in Page(report.page([experiment(figures=())], [[]])).text


def test_errors_have_the_colour_of_their_size_and_context_none():
    page = Page(report.rows_table(table(ROWS)))
    assert [attrs["class"] for attrs in page.cells("td") if "n e" in attrs.get("class", "")] == ["n e1", "n e2", "n e0"]
    assert [report._color(error) for error in (0, -0.05, 0.051, -0.2, 0.3, -0.31, math.inf)] == [
        "e0", "e0", "e1", "e2", "e2", "e3", "e3",
    ]  # fmt: skip


def test_text_is_escaped(written):
    _, page = written
    assert "They ran <b>OPT</b> & more." in page.text and page.cells("b") == []
    assert "OPT-30B & <friends>" in page.text and "batch 64 is <25 %> too slow" in page.text
    hostile = '"><script>alert(1)</script>'
    made = experiment(
        paper=hostile, title=hostile, description=hostile, notes=(hostile,), mismatches=(hostile,),
        rows=table([{"what": hostile, hostile: hostile, "ours": 1, "unit": hostile, "source": hostile}]),
        constants=(constant(hostile, 1, hostile, 0, 2, hostile, fitted_on=hostile),),
        figures=(curve(title=hostile, x_label=hostile, y_label=hostile),),
    )  # fmt: skip
    page = Page(report.page([made], [[b""]]))
    assert page.cells("script") == [] and page.text.count("alert(1)") == 16
    assert page.cells("img")[0]["alt"].count("<script>") == 3


def test_the_same_records_give_the_same_bytes(written, tmp_path):
    with every_format(), matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        report.write(two_experiments(), tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (written[0] / path.name).read_bytes(), path.name


def test_csv_holds_the_rows_exactly(written):
    folder, _ = written
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "fig-3.csv", keep_default_na=False, na_values={"paper": [""], "error": [""]}),
        table(ROWS),
        check_dtype=False,
    )


@pytest.mark.parametrize("value, low, high", [(0.4, 0.5, 1), (1.1, 0.5, 1), (math.nan, 0, 1), (1, 2, 0), ("1", 0, 2)])
def test_a_constant_outside_its_range_is_refused(value, low, high):
    with pytest.raises(InputError, match="gemm_share"):
        constant("gemm_share", value, "of peak", low, high, "datasheet")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: experiment(name="../x"), "../x"),
        (lambda: experiment(rows=table(ROWS).drop(columns="source")), "'source'"),
        (lambda: experiment(rows=table(ROWS).assign(error=0.0)), "ours / paper"),
        (lambda: experiment(rows=table([{**ROWS[0], "role": "guess"}])), "'guess'"),
        (lambda: experiment(figures=(curve(), curve())), "'rate'"),
        (lambda: experiment(notes="one text"), "notes"),
        (lambda: table([{"what": "x", "ours": "fast"}]), "'ours'"),
        (lambda: table([{"what": "x", "ours": 1, "error": 0}]), "computed"),
        (lambda: table([{"what": "x"}]), "'ours'"),
        (lambda: curve(kind="pie"), "'pie'"),
        (lambda: curve(y="speed"), "'speed'"),
        (lambda: curve(paper=pd.DataFrame({"batch": [1]})), "paper has no column 'rate'"),
        (lambda: curve(y="system"), "must be numbers"),
    ],
)
def test_wrong_records_are_refused(wrong, words):
    with pytest.raises(InputError) as refused:
        wrong()
    assert words in str(refused.value)


def test_folders_that_cannot_be_written_and_names_twice(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        report.write([experiment()], tmp_path / "file")
    with pytest.raises(InputError, match="'fig-3'"):
        report.write([experiment(), experiment()], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_experiment_without_numbers_of_the_paper(tmp_path):
    bare = experiment(rows=table([{"what": "only ours", "ours": 1.0}]), figures=(), constants=(), mismatches=())
    page = Page(report.write([bare], tmp_path).read_text(encoding="utf-8"))
    assert "No row has a number of the paper" in page.text
    assert report.MISSING in page.text


@pytest.mark.parametrize(
    "figure",
    [
        curve(series=None),
        curve(x="system", series=None),
        curve(log_y=True),
        curve(frame=curve().frame.assign(rate=[1.0, math.nan, -3.0, 2.0])),
        bars(series=None),
        bars(paper=bars().frame.iloc[:2]),
        bars(frame=pd.DataFrame({"model": [f"a rather long name {i}" for i in range(9)], "rate": 1.0}), series=None),
        curve(
            title="$1 a token, $2 $^ more", frame=pd.concat([curve().frame.assign(system=f"s{i}") for i in range(14)])
        ),
    ],
)
def test_every_kind_of_figure_is_drawn(figure):
    assert draw(figure)["png"].startswith(b"\x89PNG")


@pytest.fixture
def axes_of(monkeypatch):
    """Return a function that draws a figure and returns its axes."""
    import figures.style as style

    shown = {}
    monkeypatch.setattr(style.plt, "close", lambda canvas: shown.update(axes=canvas.axes[0]))

    def axes(figure):
        draw(figure)
        return shown["axes"]

    return axes


@pytest.mark.parametrize("rates", [[1.01, 1.02, 1.05, 1.11], [9.3, 8.8, 10.5, 14.0], [1, 40, 900, 30000], [99.5, 101]])
def test_a_log_axis_has_numbers(axes_of, rates):
    """It may span less than a decade."""
    frame = pd.DataFrame({"batch": range(1, len(rates) + 1), "rate": rates})
    axes = axes_of(curve(frame=frame, paper=None, series=None, log_y=True))
    low, high = axes.get_ylim()
    numbers = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert len([text for text in numbers if text]) >= 3


def test_no_two_series_look_alike(axes_of):
    looks = [look(index) for index in range(100)]
    assert len({(one.color, one.marker) for one in looks}) == len({(one.color, one.hatch) for one in looks}) == 100
    many = pd.concat([curve().frame.assign(system=f"s{i}", rate=i + 1.0) for i in range(14)])
    drawn = [line for line in axes_of(curve(frame=many, paper=None)).lines if len(line.get_xdata())]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 14
    wide, narrow = pd.concat([curve().frame.assign(system="a"), curve().frame.assign(system="b")]), curve(paper=None)
    drawn = [line for line in axes_of(replace(narrow, frame=wide)).lines if len(line.get_xdata())]
    assert drawn[0].get_linewidth() > drawn[1].get_linewidth()  # one lies on the other, and both are seen


def test_error_bars_reach_what_is_given(axes_of):
    frame = curve().frame.assign(low=lambda rows: rows["rate"] - 0.5, high=lambda rows: rows["rate"] + 1)
    for figure in (curve(frame=frame, paper=None), curve(frame=frame, paper=None, kind="bar")):
        (stems,) = [one for one in axes_of(figure).collections if len(one.get_segments()) == 4]
        np.testing.assert_allclose([stem[:, 1] for stem in stems.get_segments()], frame[["low", "high"]])


def test_bars_over_a_log_axis_are_points(axes_of):
    """The axis has no zero, so a bar's height would have no meaning."""
    axes = axes_of(replace(bars(), log_y=True))
    assert not axes.patches and len(axes.lines) == 4


def test_what_is_drawn_is_what_is_given(axes_of):
    shuffled = curve().frame.iloc[[2, 0, 3, 1]]
    paper, ours = axes_of(replace(curve(), frame=shuffled)).lines
    np.testing.assert_array_equal(ours.get_xydata(), [[1, 1], [2, 2], [4, 3.5], [8, 5]])
    np.testing.assert_allclose(paper.get_ydata(), [1.1, 2.2, 3.85, 5.5])
    assert paper.get_markerfacecolor() == "none" and paper.get_linestyle() == "--"
    heights = [patch.get_height() for patch in axes_of(bars(paper=bars().frame)).patches]
    assert heights == [1, 3, 1, 3, 2, 4, 2, 4]


def test_rows_put_aside_are_shown_and_not_judged():
    aside = {**ROWS[1], "ours": 2000.0, "aside": "the paper contradicts it (note 16)"}
    rows = table([*ROWS, aside])
    assert summary(rows, "validate")._replace(num_aside=0) == summary(table(ROWS), "validate")
    assert summary(rows).num_aside == 1 and is_judged(rows).tolist() == [True, True, True, False, False, False]
    page = Page(report.rows_table(rows))
    assert "the paper contradicts it (note 16)" in page.text and "+9,900.0%" in page.text
    assert len([one for one in page.cells("td") if "n e" in one.get("class", "")]) == 3


def test_notes_and_quoted_numbers_are_in_the_page():
    """A reader needs no other file: cited notes, notes cited in them, and each id's passage are included."""
    made = experiment(
        rows=table([{**ROWS[0], "source": "ch020 (Sec. 5.2)", "aside": "arithmetic (notes 28 and 29)"}]),
        mismatches=("It contradicts eq. 8 (note 16).",),
    )
    page = Page(report.page([made], [[b"", b""]]))
    assert [one["value"] for one in page.cells("li") if "value" in one] == ["16", "28", "29"]
    assert "Table 1's recompute latency against eq. 8" in page.text and "KVPR has the same kink" in page.text
    assert "2.19 x" in page.text and reference.value("capture_headlines", id="ch020") == 2.19
    assert reference.rows("capture_headlines", id="ch020")["quote"].iloc[0] in page.text


def test_the_summary_has_every_row_with_a_number_but_context(written):
    folder, _ = written
    found = pd.read_csv(folder / "summary.csv")
    assert found["experiment"].tolist() == ["fig-3"] * 3 + ["table-1"] * 3
    assert tuple(found.columns) == COMPARED
    np.testing.assert_allclose(found["error"], [0.1, -0.25, 0.02] * 2)


def test_the_terminal_table_is_of_held_out_rows():
    row = registry._row(experiment(rows=table([*ROWS, {**ROWS[1], "aside": "again"}])))
    assert (row["num_held_out"], row["num_fitted"], row["num_aside"]) == (2, 1, 1)
    assert row["median_error"] == pytest.approx(0.135) and row["worst"] == "OPT-6.7B, batch 64"
    result = {"experiments": [row], "held_out": {"in_words": "All."}, "report": "r.html", "summary": "s.csv"}
    said = registry.describe(result | {"without_effect": ["t4.tflops=1"]})
    assert "13.5%" in said and "aside: not judged" in said and "note: --set t4.tflops=1 changed nothing" in said


def test_a_machines_field_can_be_set(tmp_path):
    """Twice the link of PCIe 4.0, which no fit may find there, halves loads; half the products' rate doubles KV-Gen."""
    changes = ["rtx4090-capture.link_gb_per_s=63", "rtx4090-capture.lines.kv_gen.tflops=82.6"]
    registry.change_machines(changes, tmp_path)
    before, (experiment,) = registry.run("capture-fig11").rows, registry.run_all(["capture-fig11"], 1, True, tmp_path)
    after = experiment.rows
    assert "rtx4090-capture" in experiment.machines and "t4" not in experiment.machines
    for verb, ratio in (("load_kv", 0.5), ("kv_gen", 2.0)):
        of_verb = before["what"] == f"T_{verb}'s slope, one layer"
        assert after["ours"][of_verb].item() == pytest.approx(ratio * before["ours"][of_verb].item(), rel=1e-3)
    assert "changed machines: " + ", ".join(changes) in Page(report.page([], [], changes)).text


@pytest.mark.parametrize(
    "change, words",
    [
        ("h100.tflops=1", "unknown machine 'h100'; known: rtx4090-capture, a100-kvpr"),
        ("t4.tflop=1", "unknown field 'tflop'; did you mean tflops? known: name, tflops"),
        ("t4.lines.h2d.rate=1", "known: tflops, gb_per_s, overhead_us"),
        ("t4.tflops=-1", "machine t4: tflops is -1; it must be a number above 0"),
        ("t4.tflops.x=1", "tflops has no fields"),
        ("t4=1", "write MACHINE.FIELD=VALUE"),
        ("t4.tflops", "write MACHINE.FIELD=VALUE"),
    ],
)
def test_a_field_that_cannot_be_set_is_refused(change, words, tmp_path):
    with pytest.raises(InputError) as refused:
        registry.change_machines([change], tmp_path)
    assert words in str(refused.value) and str(tmp_path) not in str(refused.value)


def test_changed_machines_never_replace_the_rows_that_are_kept():
    with pytest.raises(InputError, match="name another folder"):
        registry.reproduce(["capture-fig11"], gate.FILE.parent, changes=["t4.tflops=1"], quiet=True)


@pytest.mark.parametrize("paper", PAPERS.values(), ids=list(PAPERS))
def test_the_first_page_says_what_holds_of_each_paper_with_its_numbers(paper):
    kept = gate.kept()
    holds, fails = paper.verdict(kept.loc[kept["experiment"].str.startswith(f"{paper.key}-")])
    assert holds and fails and not any("{" in text for text in (*holds, *fails))
