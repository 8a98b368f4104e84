"""The record on disk, and its picture."""

import json
import sys

import pytest

from jdecode.training import record

RECORD = {
    "config": {"name": "tiny"},
    "history": [{"tokens": 10, "loss": 5.5}, {"tokens": 20, "loss": 4.25}],
    "held_out": [{"tokens": 20, "nats_a_token": 4.5}],
}


def test_json_is_replaced_in_one_go(tmp_path):
    path = tmp_path / record.RECORD_NAME
    path.write_text("old and longer than what comes " * 50)
    record.write_json(path, RECORD)
    assert json.loads(path.read_text()) == RECORD
    assert [file.name for file in tmp_path.iterdir()] == ["training.json"]


def test_a_record_that_cannot_be_said_leaves_the_old_one(tmp_path):
    path = tmp_path / record.RECORD_NAME
    record.write_json(path, RECORD)
    with pytest.raises(TypeError):
        record.write_json(path, {"config": object()})
    assert json.loads(path.read_text()) == RECORD


def test_picture(tmp_path, monkeypatch: pytest.MonkeyPatch):
    axes = pytest.importorskip("matplotlib.axes")
    drawn = []
    plot = axes.Axes.plot

    def note(self, x, y, **words):
        drawn.append((list(x), list(y)))
        return plot(self, x, y, **words)

    monkeypatch.setattr(axes.Axes, "plot", note)
    path = tmp_path / record.PLOT_NAME
    assert record.write_plot(path, RECORD)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert drawn == [([10, 20], [5.5, 4.25]), ([20], [4.5])]


def test_a_name_with_dollar_signs_is_no_formula(tmp_path):
    pytest.importorskip("matplotlib")
    assert record.write_plot(tmp_path / record.PLOT_NAME, {**RECORD, "config": {"name": "for $_$ or less"}})


def test_no_picture_without_the_extra(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not record.write_plot(tmp_path / record.PLOT_NAME, RECORD)
    assert not list(tmp_path.iterdir())
