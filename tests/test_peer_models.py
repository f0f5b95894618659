"""Whole models made elsewhere, through our graph: a 13-layer float32 oracle, a tiny checkpoint as released."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import peer
from helpers import reference as ref
from helpers.sources import chunks, network

from sluice.daemon.model.batch import Segment
from sluice.daemon.model.graph import Network


@pytest.fixture(scope="module")
def oracle() -> tuple[dict, Network]:
    record, config, tensors = peer.oracle()
    return record, network(config, tensors, shuffle=0)[0]


def last(net: Network, state: object, ids: list[int]) -> np.ndarray:
    result = net.forward([Segment(state, np.array(ids, np.int32), "last")])
    assert result.failed == {}
    return result.logits[0]


def test_teacher_forcing_predicts_32_of_32(oracle: tuple[dict, Network]) -> None:
    record, net = oracle
    ids = np.array(record["full_ids"], np.int32)
    logits = net.forward([Segment(net.new_state(len(ids)), ids, "all")]).logits[0]
    assert logits.argmax(axis=1).tolist() == record["tf_pred"]
    assert len(ids) == 32
    np.testing.assert_allclose(logits[:, :8], record["logits_head"], atol=2e-5)


def test_greedy_by_prefilling_anew_gives_20_of_20(oracle: tuple[dict, Network]) -> None:
    record, net = oracle
    ids = list(record["prompt_ids"])
    for _ in range(20):
        ids.append(int(last(net, net.new_state(len(ids)), ids).argmax()))
    assert ids == record["full_ids"]


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_greedy_by_incremental_decoding_gives_20_of_20(oracle: tuple[dict, Network], chunk: int) -> None:
    record, net = oracle
    ids, state = list(record["prompt_ids"]), net.new_state(40)
    for part in chunks(ids, chunk):
        logits = last(net, state, part.tolist())
    for _ in range(20):
        ids.append(int(logits.argmax()))
        logits = last(net, state, ids[-1:])
    assert ids == record["full_ids"]


def test_the_tiny_checkpoint_in_the_released_layout() -> None:
    """Another engine reached 6e-6 of the logit range; 2e-5 is the gate."""
    record, config, tensors = peer.tiny_k3()
    net = network(config, tensors)[0]
    logits = last(net, net.new_state(8), record["prompt_ids"])
    assert int(logits.argmax()) == record["argmax"] == 92
    error = np.abs(logits - record["logits"]).max() / np.ptp(record["logits"])
    assert error < 2e-5
    exact = ref.Reference(config, tensors).logits(record["prompt_ids"])[-1]
    assert np.abs(logits - exact).max() < 6e-6 * np.ptp(exact)
