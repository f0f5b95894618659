"""`sluice pack` and `sluice diskbench` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.shared import shared_path
from typer.testing import CliRunner

from sluice.daemon.cli import app
from sluice.io import rates
from sluice.io.errors import PresetError, StorageError, StoreError
from sluice.io.packed import PackedStore
from sluice.io.store import Store


def sluice(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


def test_packing_a_checkpoint_and_checking_it(tmp_path):
    model, outs = shared_path("fixtures/peer/tiny_k3"), [tmp_path / "a", tmp_path / "b"]
    args = [x for out in outs for x in ("--out", out)]
    result = sluice("pack", "--model", model, *args, "--rates", "2,1", "--verify", "--json")
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["written_bytes"] > 3_000_000
    assert report["shares"] == [2.0, 1.0]
    store = Store.open(outs[0])
    assert isinstance(store, PackedStore)
    assert len(store.tensors) == 916
    assert (outs[0] / "config.json").exists()
    again = sluice("pack", "--model", model, *args)
    assert "0.0 GB in" in again.stdout
    assert "every checksum is right" in sluice("pack", "--verify", *args).stdout
    with open(outs[1] / "experts.1.bin", "r+b") as file:
        file.seek(5000)
        file.write(b"\x55\xaa")
    damaged = sluice("pack", "--verify", *args)
    assert isinstance(damaged.exception, StorageError)
    assert "experts.1.bin" in str(damaged.exception)


def test_pack_refuses_what_makes_no_sense(tmp_path):
    model = shared_path("fixtures/peer/tiny_k3")
    for arguments, kind in (
        (("--out", tmp_path / "a"), PresetError),
        (("--model", model, "--out", tmp_path / "a", "--rates", "1,2"), PresetError),
        (("--model", model, "--out", tmp_path / "a", "--rates", "-1"), PresetError),
        (("--model", tmp_path / "nothing", "--out", tmp_path / "a"), StoreError),
        (("--verify", "--out", tmp_path / "nothing"), StoreError),
    ):
        assert isinstance(sluice("pack", *arguments).exception, kind), arguments


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_diskbench_measures_alone_and_together_and_leaves_nothing(tmp_path, backend):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    options = ("--seconds", "0.05", "--size", "52MiB", "--expert-bytes", 1_000_000, "--backend", backend, "--json")
    result = sluice("diskbench", *folders, *options)
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout.splitlines()[-1])
    assert len(report["rates"]) == 3 * (6 + 3)
    assert all(rate["gb_s"] > 0 for rate in report["rates"])
    assert {len(rate["paths"]) for rate in report["rates"]} == {1, 2}
    assert not any(list(folder.iterdir()) for folder in folders)


def test_diskbench_refuses_what_makes_no_sense(tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"1234")
    for arguments in ((tmp_path / "nothing",), (small,), (tmp_path, "--size", "1MiB"), (tmp_path, "--backend", "x")):
        assert isinstance(sluice("diskbench", *arguments).exception, PresetError), arguments


def test_a_rate_no_drive_can_have_is_doubted(tmp_path, monkeypatch):
    def rate(gb_s: float, direct: bool = True) -> rates.Rate:
        return rates.Rate((str(tmp_path),), "random", 1, 4096, 1.0, int(gb_s * 1e9), "uring", direct)

    monkeypatch.setattr(rates, "link_gb_s", lambda path: None)
    assert rates.believable(rate(3.0)) == ""
    assert "cache" in rates.believable(rate(30.0))
    assert "cache" in rates.believable(rate(3.0, direct=False))
    monkeypatch.setattr(rates, "link_gb_s", lambda path: 2.0)
    assert "link" in rates.believable(rate(3.0))


def test_the_link_of_a_drive_is_read_where_the_kernel_tells_it(tmp_path: Path):
    link = rates.link_gb_s(tmp_path)
    assert link is None or link > 0
