"""The PyTorch side of the mini model: its two forms agree, its roundings are what a checkpoint holds.

Needs the optional group `train`; skipped where PyTorch is not installed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (optional group `train`)")

from sluice.tools.train import fused, network, optimise, quantise  # noqa: E402

SMALL = network.Shape(vocab_size=96, num_experts=8, moe_intermediate_size=32, intermediate_size=64)


@pytest.fixture
def net() -> network.Network:
    """A small network in which every parameter matters: norms not 1, mixes not uniform, a bias that decides."""
    g = torch.Generator().manual_seed(1)
    out = network.Network(SMALL, g)
    for name, p in out.params.items():
        if "res_proj" in name:
            p.copy_(torch.randn(p.shape, generator=g) * 0.1)
        elif "norm" in name or name.endswith("A_log"):
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    for bias in out.bias.values():
        bias.copy_(torch.randn(bias.shape, generator=g) * 0.1)
    return out


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    kept = fused._library
    fused.build(tmp_path_factory.mktemp("fused"))
    yield
    fused._library = kept


def in_float64(net: network.Network) -> None:
    net.params = {n: p.double() for n, p in net.params.items()}
    net.bias = {n: b.double() for n, b in net.bias.items()}


def test_the_training_form_equals_the_reference(net: network.Network) -> None:
    in_float64(net)
    ids = torch.randint(0, 96, (1, 48), generator=torch.Generator().manual_seed(2))
    expected, routes = net.reference(ids[0])
    assert torch.allclose(net.logits(net.forward(ids)), expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    assert len(routes) == 12
    assert all(r.shape == (48, SMALL.num_experts_per_token) for r in routes)


def test_chunks_equal_the_recurrence_also_at_the_strongest_decay() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 48, 8, generator=g, dtype=torch.float64) for _ in range(3))
    q, k = network.l2(q), network.l2(k)
    beta = torch.rand(2, 48, generator=g, dtype=torch.float64)
    for decay in (torch.rand(2, 48, 8, generator=g, dtype=torch.float64) * -5, torch.full((2, 48, 8), -4.99).double()):
        chunked = network.delta_rule_chunked(q, k, v, decay, beta)
        for s in range(2):
            one = [x[s].unsqueeze(1) for x in (q, k, v, decay.exp())]
            assert torch.allclose(chunked[s], network.delta_rule(*one, beta[s].unsqueeze(1))[:, 0], atol=1e-10)


def gradients(f: Callable[[], torch.Tensor], net: network.Network) -> dict[str, torch.Tensor]:
    net.params = {n: p.detach().clone().requires_grad_(True) for n, p in net.params.items()}
    y = f()
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y.dtype)
    (y * pull).sum().backward()
    return {"": y.detach().double()} | {n: p.grad.double() for n, p in net.params.items() if p.grad is not None}


@pytest.mark.parametrize("part", ["kda", "mix", "mlp"])
def test_fused_passes_equal_the_plain_ones_forward_and_backward(net: network.Network, built: None, part: str) -> None:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2, 32, 128, generator=g)
    sources = [torch.randn(40, 128, generator=g) * (i + 1) for i in range(4)]

    def run() -> torch.Tensor:
        dtype = next(iter(net.params.values())).dtype
        if part == "kda":
            return net._kda_chunked(1, x.to(dtype))
        if part == "mlp":
            return net._mlp("model.layers.0.mlp.", x[0].to(dtype))
        mix = network._Mixer(net, fused.available())
        mix.bank = [s.to(dtype) for s in sources[:-1]]
        return mix(sources[-1].to(dtype), "model.layers.5.mlp_res", "model.layers.5.post_attention_layernorm")

    quick = gradients(run, net)
    library, fused._library = fused._library, None
    try:
        in_float64(net)
        plain = gradients(run, net)
    finally:
        fused._library = library
    assert quick.keys() == plain.keys()
    for name, expected in plain.items():
        assert float((quick[name] - expected).norm() / expected.norm()) < 1e-5, name


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_fused_passes_stay_finite_however_large_their_inputs_are(
    net: network.Network, built: None, size: float
) -> None:
    """Gates far beyond where e^x overflows: a trained network has them, and one NaN ends a run."""
    x = torch.randn(1, 32, 128, generator=torch.Generator().manual_seed(11)) * size
    for run in (lambda: net._mlp("model.layers.0.mlp.", x[0]), lambda: net._kda_chunked(1, x)):
        for name, value in gradients(run, net).items():
            assert bool(value.isfinite().all()), name


def test_e2m1_takes_the_nearest_value() -> None:
    ladder = torch.tensor([s * v for v in quantise.LADDER for s in (1, -1)])
    w = torch.linspace(-6, 6, 1201).repeat(32, 1).t().contiguous()
    w[:, 0] = 6.0  # fixes the group's scale at 1
    got = quantise.mxfp4_round(w)[:, 1]
    nearest = (w[:, 1:2] - ladder).abs().min(1).values
    assert torch.allclose((got - w[:, 1]).abs(), nearest, atol=1e-6)


def test_packing_rounded_weights_loses_nothing() -> None:
    g = torch.Generator().manual_seed(6)
    w = torch.randn(64, 96, generator=g) * torch.exp2(torch.randint(-9, 3, (64, 1), generator=g).float())
    rounded = quantise.mxfp4_round(w)
    packed, scale = quantise.mxfp4_pack(rounded)
    assert (packed.shape, scale.shape, packed.dtype) == ((64, 48), (64, 3), torch.uint8)
    assert torch.equal(quantise.mxfp4_unpack(packed, scale), rounded)
    assert float((rounded - w).norm() / w.norm()) < 0.13


def test_the_first_element_of_a_byte_is_in_its_low_nibble() -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1], w[0, 2] = 6.0, -0.5, 1.5
    packed, scale = quantise.mxfp4_pack(w)
    assert packed[0, :2].tolist() == [0x97, 0x03]
    assert scale.tolist() == [[127]]


def test_weights_are_always_what_a_checkpoint_can_hold(net: network.Network) -> None:
    optimiser = optimise.Optimiser(net.params)
    g = torch.Generator().manual_seed(7)
    optimiser.step({n: torch.randn(p.shape, generator=g) for n, p in net.params.items()}, 1.0)
    for name, p in net.params.items():
        if ".experts.w" in name:
            assert torch.equal(quantise.mxfp4_round(p), p), name
        elif not name.endswith(optimise.STORED_FLOAT32):
            assert torch.equal(quantise.bf16_round(p), p), name
    assert any(not torch.equal(optimiser.master[n], p) for n, p in net.params.items())


def test_muon_s_update_is_nearly_orthogonal() -> None:
    for shape in ((3, 40, 64), (3, 64, 40)):
        u = optimise.orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(8)), 5)
        values = torch.linalg.svdvals(u)
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.4


def test_the_correction_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = network.route(logits, torch.tensor([0.0, 0.0, 0.0, 1.0]), 2)
    assert ids.tolist() == [[3, 0]]
    scores = torch.sigmoid(logits[0, [3, 0]])
    assert torch.allclose(weights[0], scores / scores.sum())


def test_a_shape_survives_a_log(tmp_path: Path) -> None:
    assert network.Shape(**SMALL.as_dict()) == SMALL
    assert dataclasses.replace(SMALL, hidden_size=64).hidden_size == 64
