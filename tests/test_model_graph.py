"""The layer graph: against the float64 reference on random networks, and the same bits however it is run.

How conditioning is decided: float32 arithmetic perturbs a network about as much as perturbing every weight by 1e-7
(relative, normal) does; so the reference is run a second time with its weights perturbed like that, and its own
answer says how far apart two honest float32 engines may be. Where that response stays below 1e-5 of the logit range
the network is called well conditioned and must be met within 2e-5 of the range; the others must be met within four
times their own response. Most seeds must be of the first kind.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import reference as ref
from helpers.sources import chunks, fingerprint, network
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.model.batch import Segment
from sluice.daemon.model.graph import Lookahead, Network
from sluice.daemon.model.scratch import activation_bytes
from sluice.daemon.model.state import SequenceState
from sluice.io.errors import ContextExceeded, RequestError, StorageError, StoreError

F32 = NDArray[np.float32]
SEEDS = range(8)
WELL_CONDITIONED = 1e-5
TOLERANCE = 2e-5


def drawn(flavour: str, seed: int, tokens: int = 13, **changes: int) -> tuple[ref.Config, ref.Tensors, list[int]]:
    rng = np.random.default_rng([seed, len(flavour)])
    config = ref.random_config(rng, flavour) | changes
    tensors = ref.random_tensors(
        config, rng, experts="mxfp4" if flavour == "k3" else "bf16", small=("f32", "bf16")[seed % 2]
    )
    return config, tensors, rng.integers(0, config["vocab_size"], tokens).tolist()


def ids(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def run(net: Network, tokens: list[int], chunk: int | None = None, state: SequenceState | None = None) -> F32:
    """Logits of every position, the tokens taken in runs of `chunk`."""
    state = state or net.new_state(len(tokens))
    parts = [net.forward([Segment(state, part, "all")]).logits[0] for part in chunks(tokens, chunk or len(tokens))]
    return np.concatenate(parts)


def response(reference: ref.Reference, tokens: list[int], exact: ref.F64) -> float:
    """How far the logits move, in parts of their range, when every weight is perturbed by 1e-7."""
    rng = np.random.default_rng(0)
    moved = ref.Reference(reference.config, reference.tensors, reference.latent_eps)
    for name, values in reference._widened.items():
        moved._widened[name] = values * (1 + 1e-7 * rng.standard_normal(values.shape))
    return float(np.abs(moved.logits(tokens) - exact).max() / np.ptp(exact))


def meets_the_reference(config: ref.Config, tensors: ref.Tensors, tokens: list[int]) -> float:
    """Assert it, and return the reference's response."""
    reference = ref.Reference(config, tensors)
    exact = reference.logits(tokens)
    net, _, _ = network(config, tensors)
    error = float(np.abs(run(net, tokens) - exact).max() / np.ptp(exact))
    moved = response(reference, tokens, exact)
    assert error < (TOLERANCE if moved < WELL_CONDITIONED else 4 * moved), (error, moved)
    return moved


@pytest.mark.parametrize("flavour", ["k3", "kimi-linear"])
def test_random_networks_agree_with_the_float64_reference(flavour: str) -> None:
    moved = [meets_the_reference(*drawn(flavour, seed)) for seed in SEEDS]
    assert sum(m < WELL_CONDITIONED for m in moved) > len(SEEDS) / 2, moved


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_expert_hidden_size": ..., "latent_moe_use_norm": ...},
        {"attn_res_block_size": ...},
        {"linear_attn_config": {"gate_lower_bound": ...}},
        {"linear_attn_config": {"use_full_rank_gate": ...}},
        {"linear_attn_config": {"short_conv_kernel_size": 1}},
        {"mla_use_output_gate": ...},
        {"q_lora_rank": None},
        {"hidden_act": "silu"},
        {"latent_moe_use_norm": False, "routed_scaling_factor": 2.446},
        {"moe_renormalize": False},
        {"num_experts_per_token": 12},
        {"tie_word_embeddings": True},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 8},
        {"attn_res_block_size": 1},
        {"attn_res_block_size": 20},
    ],
    ids=str,
)
def test_every_single_part_of_k3_can_be_exchanged_for_kimi_linear_s(changes: ref.Config) -> None:
    linear = changes.get("linear_attn_config", {})
    config = ref.k3_config(**{k: v for k, v in changes.items() if k != "linear_attn_config"})
    config["linear_attn_config"] |= linear
    config["linear_attn_config"] = {k: v for k, v in config["linear_attn_config"].items() if v is not ...}
    rng = np.random.default_rng(5)
    tensors = ref.random_tensors(config, rng, experts="f32")
    tokens = rng.integers(0, config["vocab_size"], 9).tolist()
    meets_the_reference(config, tensors, tokens)


def test_the_latent_norm_eps_reaches_the_two_latent_norms_and_nothing_else() -> None:
    config, tensors, tokens = drawn("k3", 1)
    exact = ref.Reference(config, tensors, latent_norm_eps=0.3).logits(tokens)
    net, _, _ = network(config, tensors, latent_norm_eps=0.3)
    assert np.abs(run(net, tokens) - exact).max() < 1e-4 * np.ptp(exact)
    plain, _, _ = network(config, tensors)
    assert np.abs(run(plain, tokens) - exact).max() > 1e-2 * np.ptp(exact)


@pytest.mark.parametrize("form", [np.float16, np.float32])
def test_plain_weights_may_be_stored_in_any_float_format(form: type) -> None:
    """The same numbers give the same bits, whatever they are stored as."""
    config, tensors, tokens = drawn("kimi-linear", 2)
    stored = {name: ref.widen(array).astype(form) for name, array in tensors.items()}
    single = {name: array.astype(np.float32) for name, array in stored.items()}
    assert fingerprint(run(network(config, stored)[0], tokens)) == fingerprint(run(network(config, single)[0], tokens))
    if form is np.float32:
        assert fingerprint(run(network(config, tensors)[0], tokens)) == fingerprint(
            run(network(config, single)[0], tokens)
        )


@pytest.mark.parametrize("config", [ref.k3_config(hidden_size=256), ref.kimi_linear_config(hidden_size=256)])
def test_a_pass_takes_no_more_memory_than_planned(config: ref.Config) -> None:
    tensors = ref.random_tensors(config, np.random.default_rng(0))
    net, _, _ = network(config, tensors)
    state, other = net.new_state(400), net.new_state(400)
    parts = [Segment(state, ids([7] * 150), "none"), Segment(other, ids([9] * 150), "last")]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        net.forward(parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    lent_by_fakes = 2**20  # copies of single matrices and experts, which the fakes make
    planned = activation_bytes(net.config, 300, 1)
    assert 0.5 * planned < peak - before < planned + lent_by_fakes


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.fixture(scope="module", params=["k3", "kimi-linear"])
def case(request: pytest.FixtureRequest) -> tuple[ref.Config, ref.Tensors, list[int], str]:
    """A network with its expected fingerprint: 70 tokens at once, alone, on one thread. Wide enough that products
    of a single row are split between threads too."""
    config, tensors, tokens = drawn(request.param, 3, tokens=70, hidden_size=288, vocab_size=600)
    before = kernels.thread_count()
    kernels.configure_threads(1, None)
    net, _, _ = network(config, tensors)
    expected = fingerprint(run(net, tokens))
    kernels.configure_threads(before, None)
    return config, tensors, tokens, expected


@pytest.mark.parametrize("chunk", [1, 7, 64, 70])
def test_the_chunk_size_never_changes_a_bit(case: tuple[ref.Config, ref.Tensors, list[int], str], chunk: int) -> None:
    config, tensors, tokens, expected = case
    net, _, _ = network(config, tensors)
    assert fingerprint(run(net, tokens, chunk)) == expected


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = kernels.thread_count()
    yield lambda n: kernels.configure_threads(n, None)
    kernels.configure_threads(before, None)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_number_of_threads_never_changes_a_bit(
    case: tuple[ref.Config, ref.Tensors, list[int], str], threads: Callable[[int], None], count: int
) -> None:
    config, tensors, tokens, expected = case
    threads(count)
    net, _, _ = network(config, tensors)
    assert fingerprint(run(net, tokens, 33)) == expected


@pytest.fixture
def isa() -> Iterator[Callable[[str], None]]:
    before = kernels.isa()
    yield kernels.set_isa
    kernels.set_isa(before)


@pytest.mark.parametrize("name", ["scalar", "avx2", "avx512"])
def test_the_instruction_set_never_changes_a_bit(
    case: tuple[ref.Config, ref.Tensors, list[int], str], isa: Callable[[str], None], name: str
) -> None:
    if name not in kernels.available_isas():
        pytest.skip(f"this CPU lacks {name}")
    config, tensors, tokens, expected = case
    isa(name)
    net, _, _ = network(config, tensors)
    assert fingerprint(run(net, tokens, 33)) == expected


@pytest.mark.parametrize("block_rows", [1, 5, 16])
def test_the_size_of_a_matrix_s_runs_and_the_order_of_arrival_never_change_a_bit(
    case: tuple[ref.Config, ref.Tensors, list[int], str], block_rows: int
) -> None:
    config, tensors, tokens, expected = case
    net, _, experts = network(config, tensors, block_rows=block_rows, shuffle=block_rows)
    assert fingerprint(run(net, tokens, 33)) == expected
    assert experts.open == 0


@pytest.mark.parametrize("size", [1, 33])
def test_experts_in_memory_taken_in_one_call_give_the_same_bits(
    case: tuple[ref.Config, ref.Tensors, list[int], str], size: int
) -> None:
    config, tensors, tokens, expected = case
    net, _, experts = network(config, tensors, shuffle=3, resident=True)
    assert fingerprint(run(net, tokens, size)) == expected
    assert experts.open == 0


def test_a_sequence_beside_others_gets_the_bits_it_gets_alone(
    case: tuple[ref.Config, ref.Tensors, list[int], str],
) -> None:
    """One sequence decodes beside another's prefill, a third leaves half-way: nobody notices."""
    config, tensors, tokens, expected = case
    net, _, _ = network(config, tensors, shuffle=1)
    first, second, third = net.new_state(80), net.new_state(80), net.new_state(80)
    rows, other = [], []
    net.forward([Segment(second, ids(tokens[:3]), "none")])
    parts = list(chunks(tokens, 14))
    for number, part in enumerate(parts):
        segments = [Segment(second, ids(tokens[3 + number : 4 + number]), "last"), Segment(first, part, "all")]
        if number == 1:
            segments.insert(1, Segment(third, ids(tokens[:5]), "all"))
        leave = 1 if number == 1 else None
        result = net.forward(segments, lambda layer, leave=leave: [leave] if layer == 2 and leave is not None else [])
        if number == 1:
            assert result.logits.pop(1) is None
        rows.append(result.logits[1])
        other.append(result.logits[0])
    assert fingerprint(np.concatenate(rows)) == expected
    assert not third.valid
    alone, _, _ = network(config, tensors)
    assert fingerprint(np.stack(other)) == fingerprint(run(alone, tokens[: 3 + len(parts)])[3:])


@pytest.mark.parametrize("width", [1, 4])
def test_foreseeing_experts_never_changes_a_bit(
    case: tuple[ref.Config, ref.Tensors, list[int], str], width: int
) -> None:
    config, tensors, tokens, expected = case
    net, _, experts = network(config, tensors, lookahead=Lookahead(width, layers=2))
    assert fingerprint(run(net, tokens, 35)) == expected
    hinted = {layer for layer, _ in experts.hinted}
    assert hinted == set(net.config.moe_layers) - {0}
    assert all(0 <= e < config["num_experts"] for _, chosen in experts.hinted for e in chosen)


def test_what_is_foreseen_is_often_what_is_needed_and_the_best_guess_comes_first() -> None:
    config, tensors, tokens = drawn("k3", 0)
    net, _, experts = network(config, tensors, lookahead=Lookahead(config["num_experts_per_token"]))
    run(net, tokens, 1)
    needed = dict(enumerate(experts.asked))
    hits = []
    for number, (layer, guess) in enumerate(experts.hinted):
        following = [asked for at, asked in needed.values() if at == layer]
        hits.append(len(set(guess) & set(following[number // len({at for at, _ in experts.hinted})])) / len(guess))
    chance = config["num_experts_per_token"] / config["num_experts"]
    assert np.mean(hits) > chance


# ------------------------------------------------------------------------------------------------ state and position


def test_a_snapshot_brings_a_sequence_back_to_where_it_was() -> None:
    config, tensors, tokens = drawn("k3", 3)
    net, _, _ = network(config, tensors)
    state = net.new_state(32)
    run(net, tokens[:5], 2, state)
    kept = state.snapshot()
    expected = fingerprint(run(net, tokens[5:], 3, state))
    for target in (state, net.new_state(20)):
        target.restore(kept)
        assert target.position == 5
        assert fingerprint(run(net, tokens[5:], None, target)) == expected
    state.reset()
    assert fingerprint(run(net, tokens, None, state)[5:]) == expected


def test_logits_are_given_for_the_rows_that_were_asked_for_and_the_head_is_left_out_otherwise() -> None:
    config, tensors, tokens = drawn("k3", 3)
    net, trunk, _ = network(config, tensors)
    everything = run(net, tokens)
    a, b, c = (net.new_state(32) for _ in range(3))
    result = net.forward(
        [Segment(a, ids(tokens), "none"), Segment(b, ids(tokens), "last"), Segment(c, ids(tokens), "all")]
    )
    assert result.logits[0] is None
    assert result.failed == {}
    assert np.array_equal(result.logits[1], everything[-1])
    assert np.array_equal(result.logits[2], everything)
    assert net.forward([Segment(a, ids(tokens), "none")]).logits == [None]
    assert trunk.expected == []
    assert trunk.aborted == 0
    assert (a.position, b.position) == (2 * len(tokens), len(tokens))


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (ids([]), RequestError),
        (ids([-1]), RequestError),
        (ids([3, 10_000]), RequestError),
        (np.array([1.0]), RequestError),
        (ids([[1]]), RequestError),
        (ids([1] * 9), ContextExceeded),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_touched(tokens: NDArray, error: type[Exception]) -> None:
    config, tensors, _ = drawn("k3", 3)
    net, trunk, _ = network(config, tensors)
    state, other = net.new_state(8), net.new_state(8)
    with pytest.raises(error):
        net.forward([Segment(other, ids([1]), "last"), Segment(state, tokens, "last")])
    assert state.valid
    assert other.valid
    assert trunk.expected == []


def test_one_state_cannot_stand_in_a_pass_twice() -> None:
    config, tensors, _ = drawn("k3", 3)
    net, _, _ = network(config, tensors)
    state = net.new_state(8)
    with pytest.raises(RequestError, match="share a state"):
        net.forward([Segment(state, ids([1]), "last"), Segment(state, ids([1]), "last")])


def test_a_context_beyond_the_model_s_own_is_refused() -> None:
    config, tensors, _ = drawn("k3", 3)
    net, _, _ = network(config, tensors)
    with pytest.raises(ContextExceeded, match="4096"):
        net.new_state(4097)


# ------------------------------------------------------------------------------------------------ failing alone


def two(net: Network, tokens: list[int]) -> tuple[SequenceState, SequenceState, list[Segment]]:
    a, b = net.new_state(32), net.new_state(32)
    return a, b, [Segment(a, ids(tokens[:4]), "last"), Segment(b, ids(tokens[4:]), "last")]


def test_a_trunk_that_cannot_be_read_ends_everyone_and_the_next_pass_is_whole() -> None:
    config, tensors, tokens = drawn("k3", 3)
    net, trunk, _ = network(config, tensors)
    expected = fingerprint(run(net, tokens))
    a, b, segments = two(net, tokens)
    trunk.fail_at = "model.layers.2.block_sparse_moe.gate.weight"
    with pytest.raises(StorageError):
        net.forward(segments)
    assert not a.valid
    assert not b.valid
    assert trunk.aborted == 1
    with pytest.raises(StoreError, match="failed pass"):
        net.forward(segments)
    with pytest.raises(StoreError, match="failed pass"):
        a.snapshot()
    trunk.fail_at = None
    a.reset()
    assert fingerprint(run(net, tokens, None, a)) == expected


def test_an_expert_that_cannot_be_read_ends_those_who_need_it_alone() -> None:
    config, tensors, tokens = drawn("k3", 3)
    net, _, experts = network(config, tensors)
    alone = [run(net, part)[-1] for part in (tokens[:4], tokens[4:])]
    layer = net.config.moe_layers[1]
    experts.asked.clear()
    wanted = []
    for part in (tokens[:4], tokens[4:]):
        run(net, part)
        wanted.append(next(set(chosen) for at, chosen in experts.asked if at == layer))
        experts.asked.clear()
    ends_first, ends_second = wanted[0] - wanted[1], wanted[1] - wanted[0]
    assert ends_first
    assert ends_second
    for index, failing in ((0, ends_first), (1, ends_second)):
        broken, trunk, source = network(config, tensors, shuffle=4, failing={(layer, min(failing))})
        a, b, segments = two(broken, tokens)
        result = broken.forward(segments)
        assert set(result.failed) == {index}
        assert isinstance(result.failed[index], StorageError)
        assert result.logits[index] is None
        assert fingerprint(result.logits[1 - index]) == fingerprint(alone[1 - index])
        assert [a.valid, b.valid] == [index == 1, index == 0]
        assert source.open == 0
        assert trunk.expected == []


def test_an_expert_that_everyone_needs_ends_everyone() -> None:
    config, tensors, tokens = drawn("k3", 3)
    layer = config["first_k_dense_replace"]
    broken, trunk, _ = network(config, tensors, failing={(layer, e) for e in range(config["num_experts"])})
    _, _, segments = two(broken, tokens)
    result = broken.forward(segments)
    assert set(result.failed) == {0, 1}
    assert result.logits == [None, None]
    assert trunk.aborted == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_ends_its_own_request(value: float) -> None:
    """One embedding row is damaged: whoever uses the token fails by name, the other does not notice."""
    config, tensors, tokens = drawn("k3", 3)
    net, _, _ = network(config, tensors)
    good = fingerprint(run(net, tokens[:4])[-1])
    damaged = next(t for t in range(config["vocab_size"]) if t not in tokens)
    name = "model.embed_tokens.weight"
    tensors = tensors | {name: ref.widen(tensors[name]).astype(np.float32)}
    tensors[name][damaged, 3] = value
    net, trunk, _ = network(config, tensors)
    a, b = net.new_state(8), net.new_state(8)
    result = net.forward([Segment(a, ids([1, damaged, 2]), "last"), Segment(b, ids(tokens[:4]), "last")])
    assert set(result.failed) == {0}
    assert isinstance(result.failed[0], StoreError)
    assert "finite" in str(result.failed[0])
    assert fingerprint(result.logits[1]) == good
    assert (a.valid, b.valid) == (False, True)
    assert trunk.expected == []


def test_damage_in_the_last_layers_is_seen_in_the_logits() -> None:
    config, tensors, tokens = drawn("kimi-linear", 3)
    name = f"model.layers.{config['num_hidden_layers'] - 1}.block_sparse_moe.shared_experts.down_proj.weight"
    tensors = tensors | {name: tensors[name].copy()}
    tensors[name][0, 0] = 0x7FC0  # not a number, in bfloat16
    net, _, _ = network(config, tensors)
    state = net.new_state(32)
    result = net.forward([Segment(state, ids(tokens), "last")])
    assert set(result.failed) == {0}
    assert result.logits == [None]
    assert not state.valid


def test_an_mxfp4_scale_of_255_is_not_a_number_and_ends_the_request() -> None:
    config, tensors, tokens = drawn("k3", 3)
    scales = [name for name in tensors if name.endswith("w2.weight_scale")]
    tensors = tensors | {name: tensors[name].copy() for name in scales}
    for name in scales:
        tensors[name][0, 0] = 255
    net, _, _ = network(config, tensors)
    assert set(net.forward([Segment(net.new_state(32), ids(tokens), "last")]).failed) == {0}


def test_everyone_leaving_ends_the_pass_early() -> None:
    config, tensors, tokens = drawn("k3", 3)
    net, trunk, experts = network(config, tensors)
    _, _, segments = two(net, tokens)
    seen = []
    result = net.forward(segments, lambda layer: seen.append(layer) or ([0, 1] if layer == 2 else []))
    assert seen == [0, 1, 2]
    assert result.logits == [None, None]
    assert result.failed == {}
    assert trunk.aborted == 1
    assert max(layer for layer, _ in experts.asked) < 2


def test_experts_of_a_chunk_are_asked_for_once_in_router_order_over_rows() -> None:
    config, tensors, tokens = drawn("k3", 3)
    single, _, one_by_one = network(config, tensors)
    run(single, tokens, 1)
    told: list[tuple[int, list[list[int]]]] = []
    net, _, experts = network(config, tensors, on_route=lambda layer, chosen: told.append((layer, chosen.tolist())))
    run(net, tokens)
    layers = net.config.moe_layers
    assert [layer for layer, _ in experts.asked] == list(layers)
    for layer, chosen in experts.asked:
        rows = [asked for at, asked in one_by_one.asked if at == layer]
        assert chosen == list(dict.fromkeys(e for row in rows for e in row))
        assert (layer, rows) in told
