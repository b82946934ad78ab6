"""Test the papers' numbers: strict tables, queries by column, and the separation of fitted and held-out rows."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from experiments import reference
from experiments.reproduce.capture import setup as capture
from experiments.reproduce.infinigen import setup as infinigen
from experiments.reproduce.kvpr import setup as kvpr
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import KNOWN_SHAPES

#: Rows of each table, and how many of them are calibrate and validate rows.
COUNTS = {
    "capture_headlines": (90, 0, 70),
    "capture_table3": (12, 6, 6),
    "cascade_headlines": (104, 0, 74),
    "cascade_tables": (141, 0, 141),
    "hardware": (8, 0, 0),
    "infinigen_headlines": (84, 5, 45),
    "infinigen_tables": (55, 0, 55),
    "kvpr_headlines": (36, 0, 18),
    "kvpr_table1": (9, 0, 9),
    "kvpr_table2": (24, 0, 24),
    "kvpr_table3_4": (96, 48, 48),
    "kvpr_table5": (12, 6, 6),
    "models": (13, 0, 0),
    "published": (31, 26, 5),
}


def test_there_is_a_file_for_each_table_and_no_other():
    assert {path.stem for path in reference.FOLDER.glob("*.csv")} == set(reference.TABLES) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_types(name):
    frame = reference.load(name)
    of_role = frame["role"].value_counts()
    assert (len(frame), of_role.get("calibrate", 0), of_role.get("validate", 0)) == COUNTS[name]
    assert set(frame["role"]) <= set(reference.ROLES)
    types = {"count": "int64", "count?": "Int64", "number": "float64", "number?": "float64", "flag": "bool"}
    for column in reference.TABLES[name].split():
        column, _, kind = column.partition(":")
        if kind in types:
            assert frame[column].dtype == types[kind], column
        else:
            assert all(isinstance(cell, str) for cell in frame[column]), column
    column = reference.VALUE_COLUMN.get(name, "value")
    if column in frame:
        assert np.isfinite(frame[column]).all()


def test_a_table_cannot_be_spoiled_for_the_next_reader():
    frame = reference.load("kvpr_table5")
    frame["value"] = 0.0
    assert reference.load("kvpr_table5")["value"].min() > 1


@pytest.mark.parametrize("name", COUNTS)
def test_nothing_is_both_fitted_and_compared(name):
    frame = reference.load(name)
    numbers = [
        reference.VALUE_COLUMN.get(name, "value"),
        "printed_speedup_over_act_only",
        "id",
        "role",
        "quote",
        "note",
    ]
    told = frame[[column for column in frame.columns if column not in numbers]].astype(object)
    fitted, compared = (
        {tuple(map(str, row)) for row in told[frame["role"] == role].to_numpy()} for role in ("calibrate", "validate")
    )
    assert not fitted & compared


def test_who_may_be_fitted():
    assert set(reference.rows("capture_table3", role="calibrate")["model"]) == {"OPT-6.7B", "OPT-13B"}
    assert set(reference.rows("kvpr_table3_4", role="calibrate")["method"]) == {"Accelerate"}
    assert set(reference.rows("kvpr_table5", role="calibrate")["method"]) == {"FlexGen"}


@pytest.mark.parametrize(
    "fit", [capture.refit, capture.refit_relay, kvpr.fit_host_s.__wrapped__, infinigen.fitted.__wrapped__]
)
def test_no_fit_sees_a_row_that_is_held_out(fit, monkeypatch):
    """Change all numbers of other rows: the fitted constants stay."""
    before, load = fit(), reference.load

    def altered(name):
        frame = load(name)
        column = reference.VALUE_COLUMN.get(name, "value")
        if column in frame:
            frame[column] = frame[column].where(frame["role"] == "calibrate", 7.7 * frame[column])
        return frame

    monkeypatch.setattr(reference, "load", altered)
    assert fit() == before


def test_the_readme_names_every_table_its_rows_and_63_notes():
    text = (reference.FOLDER / "README.md").read_text(encoding="utf-8")
    for name, (count, *_) in COUNTS.items():
        assert re.search(rf"^\| `{name}` \| {count} \|", text, re.MULTILINE), name
    notes = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert notes == list(range(1, 64))
    for paper in {paper for name in COUNTS for paper in reference.load(name).get("paper", [])}:
        for each in paper.split("; "):
            assert f"`{each}`" in text


# --- asking -----------------------------------------------------------------------------------------------------------


def test_rows_and_values():
    found = reference.rows("kvpr_table3_4", model="OPT-13B", method="KVPR", metric="decode_latency")
    assert len(found) == 6 and list(found.index) == list(range(6)) and set(found["table"]) == {4}
    one = dict(model="OPT-6.7B", method="Accelerate", prompt_len=128, gen_len=32)
    assert reference.value("kvpr_table3_4", **one, metric="decode_latency") == 8.905
    assert reference.value("capture_table3", model="OPT-66B", variant="act_only") == 2.96
    assert reference.rows("models", name="OPT-30B")["hidden"].tolist() == [7168]
    assert reference.rows("models", gated_mlp=True)["name"].str.startswith("Llama").all()
    assert len(reference.rows("kvpr_table2", method=None)) == 6
    assert len(reference.rows("hardware", host_mem_gb=None)) == 3
    assert set(reference.rows("capture_headlines", batch=128.0, unit="GB")["value"]) == {168.0}


@pytest.mark.parametrize(
    "name, equals, words",
    [
        ("kvpr_table6", {}, ["unknown reference table 'kvpr_table6'", "did you mean kvpr_table", "models"]),
        (5, {}, ["unknown reference table 5", "kvpr_table1"]),
        ("kvpr_table5", {"methd": "KVPR"}, ["column of kvpr_table5 'methd'", "did you mean method"]),
        ("kvpr_table5", {"method": "kvpr"}, ["kvpr_table5", "method = 'kvpr'", "one of FlexGen, KVPR"]),
        (
            "kvpr_table5",
            {"method": "KVPR", "prompt_len": 128},
            ["prompt_len = 128 where method = 'KVPR'", "256, 512, 1024"],
        ),
        ("kvpr_table5", {"prompt_len": "256"}, ["prompt_len = '256'", "256, 512, 1024"]),
        ("infinigen_tables", {"unit": 1}, ["unit = 1", "one of 1"]),
        ("models", {"gated_mlp": 1}, ["gated_mlp = 1", "False, True"]),
        ("kvpr_table5", {"method": None}, ["method = None", "FlexGen, KVPR"]),
        ("kvpr_table5", {"method": ["KVPR"]}, ["method", "one value", "['KVPR']"]),
        ("capture_headlines", {"batch": 17}, ["one of 16, 128, 64, 32 or blank"]),
        ("cascade_headlines", {"batch": 1}, ["batch is blank there"]),
        ("cascade_headlines", {"quantity": "x"}, ["quantity", "… (43 values)"]),
    ],
)
def test_what_no_row_has_is_answered_with_what_rows_have(name, equals, words):
    for ask in (reference.rows, reference.value):
        with pytest.raises(InputError) as error:
            ask(name, **equals)
        for word in words:
            assert word in str(error.value)
        assert "\n" not in str(error.value)


def test_a_value_is_one_number():
    with pytest.raises(
        InputError, match=r"6 rows match where method = 'KVPR', not one; they differ in prompt_len, gen"
    ):
        reference.value("kvpr_table5", method="KVPR")
    with pytest.raises(InputError, match="hardware has no column of values"):
        reference.value("hardware", paper="infinigen")


def test_only_calibrate_rows_may_be_fitted():
    every = reference.load("kvpr_table5")
    fitted = reference.check_role(every[every["role"] == "calibrate"], "calibrate")
    assert set(fitted["method"]) == {"FlexGen"}
    with pytest.raises(InputError, match="6 of 12 rows are not calibrate rows: the first is validate, of kvpr Table 5"):
        reference.check_role(every, "calibrate")
    with pytest.raises(InputError, match="unknown role 'calibration'; did you mean calibrate"):
        reference.check_role(every, "calibration")
    with pytest.raises(InputError, match="no rows"):
        reference.check_role(every[:0], "validate")


# --- broken files -----------------------------------------------------------------------------------------------------

COLUMNS = "id:key method:text? batch:count? share:number? fast:flag value:number role:role"
HEADER = "id,method,batch,share,fast,value,role\n"
GOOD = HEADER + 'a,"x, y",,,true,1.5e3,calibrate\nb,,2,0.5,false,-.5,context\n'


def test_a_sound_file_is_read_as_written(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(GOOD)
    frame = reference.read_table(path, COLUMNS)
    assert frame["method"].tolist() == ["x, y", ""] and frame["value"].tolist() == [1500.0, -0.5]
    assert frame["batch"].tolist() == [pd.NA, 2] and frame["fast"].tolist() == [True, False]
    assert np.isnan(frame["share"][0]) and frame["share"][1] == 0.5
    path.write_text(HEADER)
    assert reference.read_table(path, COLUMNS).empty


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ["the column 'id' is missing"]),
        (GOOD.replace("value", "values"), ["the column 'value' is missing"]),
        (GOOD.replace("role\n", "role,rol\n"), ["unknown column 'rol'", "did you mean role"]),
        (GOOD.replace("role\n", "role,role\n"), ["a column is there twice"]),
        (GOOD + "c,,1,1,true,1\n", ["row 4", "6 cells where the header has 7"]),
        (GOOD + "\n", ["row 4", "0 cells"]),
        (GOOD + "c,,1,1,true,fast,context\n", ["row 4", "column value", "'fast' is not a number"]),
        (GOOD + "c,,1,1,true,nan,context\n", ["row 4", "column value", "'nan' is not a number"]),
        (GOOD + "c,,1,1,true,,context\n", ["row 4", "column value", "blank"]),
        (GOOD + "c,,1,x,true,1,context\n", ["row 4", "column share", "'x' is not a number"]),
        (GOOD + "c,,1.5,1,true,1,context\n", ["row 4", "column batch", "'1.5' is not a whole number > 0"]),
        (GOOD + "c,,0,1,true,1,context\n", ["row 4", "column batch", "'0'"]),
        (GOOD + "c,,1,1,yes,1,context\n", ["row 4", "column fast", "'yes' is not true or false"]),
        (
            GOOD + "c,,1,1,true,1,fitted\n",
            ["row 4", "column role", "'fitted' is not one of calibrate, validate, context"],
        ),
        (GOOD + "c,,1,1,true,1,\n", ["row 4", "column role", "blank"]),
        (GOOD + "a,,1,1,true,1,context\n", ["row 4", "column id", "'a' is there twice"]),
        (GOOD + ",,1,1,true,1,context\n", ["row 4", "column id", "blank"]),
        (GOOD + 'c,"x,1,1,true,1,context\n', ["cannot read"]),
    ],
)
def test_a_broken_file_is_named_with_row_and_column(tmp_path, text, words):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        reference.read_table(path, COLUMNS)
    for word in ["table.csv", *words]:
        assert word in str(error.value)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="none.csv"):
        reference.read_table(tmp_path / "none.csv", COLUMNS)
    (tmp_path / "table.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="table.csv"):
        reference.read_table(tmp_path / "table.csv", COLUMNS)


# --- the arithmetic the README claims ---------------------------------------------------------------------------------


def test_the_shapes_are_the_projects():
    """The papers' models have the public configurations that the project prices."""
    frame = reference.load("models")
    for row in frame.itertuples():
        shape = KNOWN_SHAPES[row.name.lower()]
        assert (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads) == (
            row.layers, row.hidden, row.heads, row.kv_heads,
        )  # fmt: skip
        assert (shape.ffn, shape.vocab, shape.max_positions) == (row.ffn, row.vocab, row.max_positions)
        assert shape.gated_mlp == row.gated_mlp and shape.rotary == (row.positional == "rotary")
        assert shape.head_dim * row.heads == row.hidden
