"""The network over `sluice.io`: a checkpoint on disk, found, bound, checked and run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import peer
from helpers import reference as ref
from helpers.sources import DTYPES, network

from sluice.daemon.model import names
from sluice.daemon.model.batch import Segment
from sluice.daemon.model.config import read_config
from sluice.daemon.model.graph import Lookahead, Network
from sluice.io.experts import plan_cache
from sluice.io.service import IoService
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk


def write_checkpoint(folder: Path, config: ref.Config, tensors: ref.Tensors) -> None:
    """One safetensors file and a configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, array in tensors.items():
        span = [at, at := at + array.nbytes]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def logits(path: Path, ids: list[int], trunk_bytes: int = 2**40, cache_bytes: int = 2**40) -> np.ndarray:
    config = read_config(path)
    store = Store.open(path)
    binding = names.bind(config, store.tensors, pin_routers=True)
    if binding.experts is not None:
        store.declare_experts(binding.experts)
    plan = plan_trunk(binding.order, store, trunk_bytes, vectors=binding.vectors, row_tables=binding.row_tables)
    with IoService.open(store, plan, plan_cache(store, cache_bytes)) as io:
        routers = [use.name for use in binding.order if use.pin]
        assert routers
        assert all(io.trunk.peek(name).shape == store.tensors[name].shape for name in routers)
        net = Network(config, io.trunk, io.experts, prefix=binding.prefix, lookahead=Lookahead(2))
        state = net.new_state(len(ids))
        result = net.forward([Segment(state, np.array(ids, np.int32), "all")])
    assert result.failed == {}
    return result.logits[0]


def test_the_peer_s_tiny_checkpoint_from_its_file() -> None:
    record, _, _ = peer.tiny_k3()
    last = logits(peer.shared_path("fixtures/peer/tiny_k3"), record["prompt_ids"])[-1]
    assert int(last.argmax()) == 92
    assert np.abs(last - record["logits"]).max() < 2e-5 * np.ptp(record["logits"])


@pytest.mark.parametrize(
    ("config", "prefix", "experts"),
    [(ref.k3_config(), names.PREFIX, "mxfp4"), (ref.kimi_linear_config(), "", "bf16"), (ref.k3_config(), "", "f32")],
    ids=["k3", "kimi-linear", "k3-plain"],
)
def test_a_checkpoint_on_disk_gives_the_bits_of_its_arrays(
    tmp_path: Path, config: ref.Config, prefix: str, experts: str
) -> None:
    tensors = ref.random_tensors(config, np.random.default_rng(1), prefix=prefix, experts=experts)
    write_checkpoint(tmp_path, config, tensors)
    ids = list(range(20))
    net, _, _ = network(config, tensors)
    state = net.new_state(20)
    expected = net.forward([Segment(state, np.array(ids, np.int32), "all")]).logits[0]
    assert np.array_equal(logits(tmp_path, ids), expected)
    assert np.array_equal(logits(tmp_path, ids, trunk_bytes=0, cache_bytes=0), expected)
