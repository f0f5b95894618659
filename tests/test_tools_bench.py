"""`sluice bench`: what it prints, compares and draws. How fast anything is, is nobody's promise here."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from sluice.io.errors import PresetError
from sluice.tools import bench
from sluice.tools.bench import Figure, Report, beside, chart, line_of, read_report

MACHINE = {"cpu": "a & b", "isa": "avx2", "threads": 2}
REPORT = Report(
    MACHINE,
    [
        Figure("memory read", 20.0, "GB/s", 1.0),
        Figure("MXFP4 3072x3584, rows 1", 12.0, "GMAC/s"),
        Figure("MXFP4 3072x3584, rows 16", 40.0, "GMAC/s"),
        Figure("all threads at work, from sleep", 50.0, "us"),
    ],
)


def _written(tmp_path, text):
    path = tmp_path / "earlier.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_report_reads_back_also_below_a_table(tmp_path):
    path = _written(tmp_path, "memory read   20 GB/s\n" + json.dumps(asdict(REPORT)) + "\n")
    assert read_report(path) == REPORT


@pytest.mark.parametrize("text", ["", "{}", "[1]", "memory read 20", '{"machine": {}, "figures": [{"name": 1}]}'])
def test_what_is_no_report_is_refused_by_name(tmp_path, text):
    with pytest.raises(PresetError, match=r"earlier\.json"):
        read_report(_written(tmp_path, text))
    with pytest.raises(PresetError, match="nothing"):
        read_report(tmp_path / "nothing")


def test_a_line_says_share_and_what_it_was_before():
    line = line_of(Figure("memory read", 30.0, "GB/s", 1.0), REPORT)
    assert "30 GB/s" in line
    assert "100% of memory" in line
    assert "1.50 x before" in line
    assert "less is better" in line_of(Figure("all threads at work, from sleep", 25.0, "us"), REPORT)
    assert "before" not in line_of(Figure("something new", 1.0, "GB/s"), REPORT)


def test_the_chart_has_a_line_for_each_kind_of_weights():
    drawn = chart(REPORT)
    assert drawn.startswith("<svg")
    assert "MXFP4 3072x3584" in drawn
    assert "a &amp; b" in drawn
    with pytest.raises(PresetError, match="--plot"):
        chart(Report(MACHINE))


def test_work_is_measured_in_turn_with_its_reference(monkeypatch):
    ticks = [0.0]
    order = []

    def tick():
        return ticks[0]

    def reference():
        ticks[0] += 2.0
        order.append("reference")

    def work():
        ticks[0] += 6.0
        order.append("work")

    monkeypatch.setattr(bench.time, "perf_counter", tick)
    assert beside(work, reference, rounds=3) == (6.0, 3.0)
    assert order == ["reference", "work"] * 4


def test_end_to_end_tells_resident_from_streamed_and_goes_on_without(monkeypatch, capsys):
    asked = []

    def run(model, ids, tokens, sets, logits=None):
        asked.append((model, len(ids), tokens, tuple(sets)))
        if "memory.preload=true" in sets:
            raise PresetError("it does not fit")
        return {
            "timings": {"prefill": 2.0, "per_token": [9.0, 0.5, 0.5]},
            "io": {"bytes": 4e9, "elapsed_seconds": 2.0},
        }

    monkeypatch.setattr(bench, "run_model", run)
    figures = list(bench.end_to_end_figures("m", 2, "auto", 64, 4, []))
    assert [(f.name, f.value) for f in figures] == [
        ("prefill of 64, streamed", 32.0),
        ("decode, streamed", 2.0),
        ("read from disk, streamed", 2.0),
    ]
    assert asked[0][:3] == ("m", 64, 4)
    assert "it does not fit" in capsys.readouterr().err


def test_numerics_compare_logits_of_the_same_question(monkeypatch):
    def run(model, ids, tokens, sets, logits=None):
        rng = np.random.default_rng(len(ids))
        rows = rng.standard_normal((24, 50)).astype(np.float32)
        if "compute.activations=int8" in sets:
            rows = np.stack([np.random.default_rng(16).standard_normal((24, 50))[len(ids) - 16]]).astype(np.float32)
        np.save(logits, rows[:tokens])
        return {"ids": list(range(tokens))}

    monkeypatch.setattr(bench, "run_model", run)
    figures = {f.name: f.value for f in bench.numeric_figures(None)}
    assert 0 < figures["int8 activations: error of one product"] < 0.02
    assert 0 < figures["int8 activations: error of one expert"] < 0.05
    assert figures["int8 activations: error of logits, mini"] == pytest.approx(0, abs=1e-7)
    assert figures["int8 activations: same first token, mini"] == 1.0


@pytest.mark.parametrize(("isa", "threads"), [("altivec", None), ("auto", 5000)])
def test_what_the_machine_lacks_is_refused(isa, threads):
    with pytest.raises(PresetError, match="bench"):
        bench.bench(threads=threads, isa=isa, kernels_too=False)


def test_the_floor_is_bytes_over_rates_and_unknown_without_them():
    rates = [Figure(bench.TRUNK_RATE, 20.0, "GB/s"), Figure(bench.EXPERT_RATE, 10.0, "GB/s")]
    assert bench.floor_seconds(int(40e9), int(5e9), rates) == pytest.approx(2.5)
    assert bench.floor_seconds(1, 1, rates[:1]) is None
