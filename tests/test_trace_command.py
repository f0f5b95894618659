"""`sluice trace` as it is used: tables, JSON, plots, refusals; and the chart it draws."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.io.errors import PresetError, SluiceError
from sluice.tools.svg import Line, line_chart, ticks
from sluice.tools.trace_cmd import trace

app = typer.Typer()
app.command()(trace)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    file = tmp_path / "t.jsonl"
    rows = [[[i % 3, 3], [0, 1 + i % 2]] for i in range(12)]
    file.write_text("".join(json.dumps({"tok": i, "layers": r}) + "\n" for i, r in enumerate(rows)))
    return file


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_holds_every_finding(recorded: Path) -> None:
    report = json.loads(run(str(recorded), "--json", "--experts", "8", "--capacity", "0", "--capacity", "7"))
    assert (report["tokens"], report["layers"], report["experts"], report["top_k"]) == (12, 2, 8, 2)
    assert (report["requests"], report["distinct"]) == (48, 7)
    none, everything = report["curve"]
    assert {none[p] for p in ("lru", "layer_lru", "lfu", "pinned_lru", "optimal")} == {0.0}
    assert everything["lru"] == everything["optimal"] == pytest.approx(41 / 48, abs=1e-6)
    assert everything["share"] == 7 / 16
    assert report["recall"]["token_before"] == pytest.approx(0.5)


def test_the_table_is_for_reading(recorded: Path) -> None:
    text = run(str(recorded), "--expert-bytes", "1000000000")
    assert "12 tokens in 12 passes, 2 layers of 4 experts, top 2; 48 requests for 7 experts" in text
    assert "7.00 GB" in text
    assert "optimal is Belady's" in text


def test_the_plot_is_well_formed(recorded: Path, tmp_path: Path) -> None:
    run(str(recorded), "--plot", str(tmp_path / "p.svg"))
    root = ET.fromstring((tmp_path / "p.svg").read_text())
    assert len([e for e in root if e.tag.endswith("polyline")]) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--part", "first"], "--part first"),
        (["--experts", "3"], "the trace names expert 3"),
        (["--top-k", "0"], "--top-k"),
        (["--plot", "no/such/folder/p.svg"], "--plot"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(recorded: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(PresetError, match=words):
        run(str(recorded), *arguments)


def test_a_missing_trace_is_refused() -> None:
    with pytest.raises(SluiceError, match=r"gone\.bin"):
        run("gone.bin")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (-3, 12), (1e-9, 2e-9), (0, 1e7)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert 3 <= len(marks) <= 8
    assert all(low - 1e-6 * abs(high) <= m <= high * (1 + 1e-6) for m in marks)


def test_a_chart_escapes_its_words_and_refuses_nothing_to_draw() -> None:
    ET.fromstring(line_chart("a < b & c", "x", "y", [Line("<one>", [(1, 1), (2, 2)])]))
    ET.fromstring(line_chart("flat", "x", "y", [Line("one point", [(1, 1)])], log_x=True))
    with pytest.raises(ValueError, match="at least one point"):
        line_chart("empty", "x", "y", [])
    with pytest.raises(ValueError, match="x > 0"):
        line_chart("zero", "x", "y", [Line("a", [(0, 1)])], log_x=True)
