"""config.json -> ModelConfig: every number of the network, checked once and then trusted.

Owns: the three forms a configuration is met in, the names other tools give the same key, and every refusal.
Leaves to others: whether the tensors on disk agree (`names.check_tensors`).

The forms (specification 1.1, 1.2, 6):

    K3            the text model's keys lie under `text_config`
    Kimi-Linear   the same keys at the root; keys that are absent switch their feature off
    flat          test fixtures: no `linear_attn_config` object, its keys at the root under other names

Nothing is defaulted. Where an absent key has a meaning of its own (Kimi-Linear's softplus decay, plain residual,
low-rank gate, experts on the hidden width) that holds only in Kimi-Linear's form, because there the published
file says it that way; K3 must spell everything out, or a mis-nested file would run as another model.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sluice.io.errors import StoreError

LARGEST_CONFIG_BYTES = 16 * 2**20
LARGEST_DIM = 2**31 - 1  # kernels index with 32 bits; two such dims still multiply within 64
MOST_LAYERS = 10_000  # lists of layers are made before the index is looked at

ALIASES = {
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_experts": ("n_routed_experts",),
    "num_shared_experts": ("n_shared_experts",),
    "moe_renormalize": ("norm_topk_prob",),
    "num_expert_group": ("n_group",),
    "max_position_embeddings": ("model_max_length",),
    "activation_situ_beta": ("situ_beta",),
    "activation_situ_linear_beta": ("situ_linear_beta",),
}
FLAT_LINEAR = {  # key of linear_attn_config -> its name at the root of the flat form
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
    "short_conv_kernel_size": "short_conv_kernel_size",
    "gate_lower_bound": "gate_lower_bound",
    "full_attn_layers": "full_attn_layers",
}
FLAT_IMPLIES = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "linear_attn_config.use_full_rank_gate": True,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One network, as checked. Layers are 0-based here; dims are counts of elements.

    mla_layers: ascending; every other layer is KDA. gate_lower_bound None: softplus decay. attn_res_block_size
    None: plain residual. q_lora_rank None: one query matrix. routed_expert_hidden_size None: experts work on the
    hidden width. max_positions None: the file states no limit. situ betas are 0.0 where hidden_act is "silu".
    latent_norm_eps is that of the two MLA latent norms, on which the sources disagree (specification 3.2).
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    latent_norm_eps: float
    hidden_act: str
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int | None
    mla_layers: tuple[int, ...]
    kda_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    first_k_dense_replace: int
    intermediate_size: int
    renormalize: bool
    routed_scaling_factor: float
    max_positions: int | None
    mxfp4_declared: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def kda_width(self) -> int:
        """Channels of q, k, v and the gate of a KDA layer: heads x dim."""
        return self.kda_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers an MLA layer keeps per token: the normalised latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expert_width(self) -> int:
        """What routed experts read and write."""
        return self.hidden_size if self.routed_expert_hidden_size is None else self.routed_expert_hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def bank_size(self) -> int:
        """Snapshots the attention residual holds at the end of a pass; 0 for the plain residual."""
        return 0 if self.attn_res_block_size is None else -(-self.num_hidden_layers // self.attn_res_block_size)


def read_config(path: Path, *, latent_norm_eps: float | None = None) -> ModelConfig:
    """The configuration in `path`, a config.json or a folder that holds one.

    latent_norm_eps: overrides `rms_norm_eps` in the two MLA latent norms. Raises StoreError naming every missing
    and every contradictory key at once.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            raw = stream.read(LARGEST_CONFIG_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from None
    if len(raw) > LARGEST_CONFIG_BYTES:
        raise StoreError(f"{file}: larger than {LARGEST_CONFIG_BYTES} bytes; this is not a model configuration")
    try:
        root = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file}: not valid JSON ({error})") from None
    return parse_config(root, source=str(file), latent_norm_eps=latent_norm_eps)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return fields


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number a configuration may hold")


def parse_config(root: object, *, source: str = "config.json", latent_norm_eps: float | None = None) -> ModelConfig:
    """The same from a parsed JSON value. `source` is what errors call it."""
    if not isinstance(root, dict):
        raise StoreError(f"{source}: the file holds {_kind(root)}, not an object")
    nested = root.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise StoreError(f"{source}: text_config is {_kind(nested)}, not an object")
    read = _Fields(root if nested is None else nested, k3=nested is not None or root.get("model_type") == "kimi_k3")
    config = _read(read, root, latent_norm_eps)
    read.finish(source)
    assert config is not None  # finish raised otherwise
    return config


class _Fields:
    """Reads keys one by one and remembers everything that is wrong, so that one error can name it all.

    After a problem the reader goes on with a stand-in value; `finish` raises before anyone can use it.
    """

    def __init__(self, fields: Mapping[str, Any], *, k3: bool) -> None:
        self._fields = fields
        self._linear = fields.get("linear_attn_config")
        self.flat = self._linear is None and any(name in fields for name in FLAT_LINEAR.values())
        self.spelled_out = k3 or self.flat  # whether a missing feature key is an error rather than "off"
        self.missing: list[str] = []
        self.wrong: list[str] = []
        if self._linear is not None and not isinstance(self._linear, dict):
            self.wrong.append(f"linear_attn_config is {_kind(self._linear)}, not an object")
            self._linear = {}

    def finish(self, source: str) -> None:
        problems = [f"missing: {', '.join(self.missing)}"] if self.missing else []
        problems += self.wrong
        if problems:
            raise StoreError(f"{source}: {'; '.join(problems)}")

    def find(self, name: str) -> tuple[str, Any]:
        """The name under which the key is in the file, and its value (None where absent)."""
        if name.startswith("linear_attn_config."):
            key = name.removeprefix("linear_attn_config.")
            if self._linear is not None:
                return name, self._linear.get(key)
            if not self.flat:
                return name, None
            flat = FLAT_LINEAR.get(key, key)
            return flat, self._fields.get(flat, FLAT_IMPLIES.get(name))
        present = [n for n in (name, *ALIASES.get(name, ())) if self._fields.get(n) is not None]
        if len(present) > 1 and any(self._fields[n] != self._fields[present[0]] for n in present):
            said = ", ".join(f"{n} {self._fields[n]!r}" for n in present)
            self.wrong.append(f"one value under two names, and they differ: {said}")
        if present:
            return present[0], self._fields[present[0]]
        return name, FLAT_IMPLIES.get(name) if self.flat else None

    def has(self, name: str) -> bool:
        """Whether the key is there at all, be it null."""
        if name.startswith("linear_attn_config."):
            return self.find(name)[1] is not None
        return any(n in self._fields for n in (name, *ALIASES.get(name, ())))

    def _value(self, name: str, required: bool) -> tuple[str, Any]:
        said, value = self.find(name)
        if value is None and required:
            self.missing.append(said)
        return said, value

    def integer(self, name: str, *, low: int = 1, high: int = LARGEST_DIM, required: bool = True) -> int | None:
        said, value = self._value(name, required)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong.append(f"{said} is {_kind(value)}, not an integer")
            return None
        if not low <= value <= high:
            self.wrong.append(f"{said} is {value}; it must be {low} to {high}")
            return None
        return value

    def dim(self, name: str, *, low: int = 1) -> int:
        value = self.integer(name, low=low)
        return max(low, 1) if value is None else value

    def number(self, name: str, *, required: bool = True) -> float | None:
        said, value = self._value(name, required)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong.append(f"{said} is {_kind(value)}, not a number")
            return None
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.wrong.append(f"{said} is not finite")
            return None
        return value

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value is not None and value <= 0:
            self.wrong.append(f"{self.find(name)[0]} is {value}; it must be above 0")
        return 1.0 if value is None else value

    def boolean(self, name: str, *, required: bool = True) -> bool | None:
        said, value = self._value(name, required)
        if value is not None and not isinstance(value, bool):
            self.wrong.append(f"{said} is {_kind(value)}, not true or false")
            return None
        return value

    def feature(self, name: str) -> bool:
        """A switch that Kimi-Linear turns off by leaving it out. Its truth counts, not its presence."""
        return bool(self.boolean(name, required=self.spelled_out))

    def word(self, name: str, allowed: tuple[str, ...]) -> str:
        said, value = self._value(name, True)
        if value is not None and value not in allowed:
            self.wrong.append(f"{said} is {value!r}; supported: {', '.join(allowed)}")
        return value if value in allowed else allowed[0]

    def only(self, name: str, allowed: object, why: str) -> None:
        """A key that may be absent, but if present must hold the one value that is implemented."""
        said, value = self.find(name)
        if value is not None and (type(value) is not type(allowed) or value != allowed):
            self.wrong.append(f"{said} is {value!r}; only {allowed!r} is supported: {why}")

    def layer_list(self, name: str, layers: int, *, required: bool) -> tuple[int, ...] | None:
        """A strictly increasing list of 1-based layers, returned 0-based."""
        said, value = self._value(name, required)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
            self.wrong.append(f"{said} is not a list of integers")
            return None
        outside = [n for n in value if not 1 <= n <= layers]
        if outside:
            self.wrong.append(f"{said} names layer {outside[0]}; layers are 1 to {layers} (num_hidden_layers)")
            return None
        if any(a >= b for a, b in itertools.pairwise(value)):
            self.wrong.append(f"{said} is not strictly increasing")
            return None
        return tuple(n - 1 for n in value)


def _read(read: _Fields, root: Mapping[str, Any], latent_norm_eps: float | None) -> ModelConfig | None:
    layers = read.integer("num_hidden_layers", high=MOST_LAYERS) or 1
    linear = "linear_attn_config."
    hidden_act = read.word("hidden_act", ("situ", "silu"))
    situ = read.find("hidden_act")[1] == "situ"
    attention_heads = read.dim("num_attention_heads")
    experts = read.dim("num_experts")
    read.integer("num_experts_per_token", high=experts)
    eps = read.positive("rms_norm_eps")
    if latent_norm_eps is not None and not (math.isfinite(latent_norm_eps) and latent_norm_eps > 0):
        read.wrong.append(f"the setting model.latent_norm_eps is {latent_norm_eps}; it must be above 0")

    lower_bound = read.number(linear + "gate_lower_bound", required=read.spelled_out)
    if lower_bound is not None and lower_bound >= 0:
        read.wrong.append(f"{read.find(linear + 'gate_lower_bound')[0]} is {lower_bound}; it must be below 0")
    if not read.has("q_lora_rank"):
        read.missing.append("q_lora_rank")
    block = read.integer("attn_res_block_size", required=read.spelled_out)
    latent = read.integer("routed_expert_hidden_size", required=read.spelled_out)
    mxfp4 = _quantisation(read, root)
    moe_inner = read.dim("moe_intermediate_size")
    if mxfp4:
        for name, size in (("moe_intermediate_size", moe_inner), ("routed_expert_hidden_size", latent)):
            if size is not None and size % 32:
                read.wrong.append(f"{name} is {size}; MXFP4 experts need a multiple of 32")

    read.only("mla_use_nope", True, "rotary position encoding is not part of this model")
    if read.find("mla_use_nope")[1] is None:
        read.missing.append("mla_use_nope")
    read.word("moe_router_activation_func", ("sigmoid",))
    read.only("num_expert_group", 1, "group-limited routing is not implemented")
    read.only("topk_group", 1, "group-limited routing is not implemented")
    read.only("topk_method", "noaux_tc", "the bias selects, the unbiased score weighs")
    read.only("moe_layer_freq", 1, "every layer from first_k_dense_replace on is a mixture of experts")
    read.only("num_nextn_predict_layers", 0, "layers for several tokens ahead are not implemented")
    read.only("num_key_value_heads", attention_heads, "it must equal num_attention_heads")

    config = ModelConfig(
        hidden_size=read.dim("hidden_size"),
        num_hidden_layers=layers,
        vocab_size=read.dim("vocab_size"),
        # absent reads as false, which is checked: then the index must hold a head of its own
        tie_word_embeddings=bool(read.boolean("tie_word_embeddings", required=False)),
        rms_norm_eps=eps,
        latent_norm_eps=eps if latent_norm_eps is None else latent_norm_eps,
        hidden_act=hidden_act,
        situ_beta=read.positive("activation_situ_beta") if situ else 0.0,
        situ_linear_beta=read.positive("activation_situ_linear_beta") if situ else 0.0,
        attn_res_block_size=block,
        mla_layers=_mla_layers(read, layers),
        kda_heads=read.dim(linear + "num_heads"),
        kda_head_dim=read.dim(linear + "head_dim"),
        conv_kernel_size=read.dim(linear + "short_conv_kernel_size"),
        gate_lower_bound=lower_bound,
        full_rank_gate=read.feature(linear + "use_full_rank_gate"),
        num_attention_heads=attention_heads,
        q_lora_rank=read.integer("q_lora_rank", required=False),
        kv_lora_rank=read.dim("kv_lora_rank"),
        qk_nope_head_dim=read.dim("qk_nope_head_dim"),
        qk_rope_head_dim=read.dim("qk_rope_head_dim"),
        v_head_dim=read.dim("v_head_dim"),
        mla_output_gate=read.feature("mla_use_output_gate"),
        num_experts=experts,
        num_experts_per_token=read.find("num_experts_per_token")[1],
        num_shared_experts=read.dim("num_shared_experts", low=0),
        moe_intermediate_size=moe_inner,
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=latent is not None and bool(read.boolean("latent_moe_use_norm")),
        first_k_dense_replace=_dense_layers(read, layers),
        intermediate_size=read.dim("intermediate_size"),
        renormalize=bool(read.boolean("moe_renormalize")),
        routed_scaling_factor=read.positive("routed_scaling_factor"),
        max_positions=read.integer("max_position_embeddings", required=not read.flat),
        mxfp4_declared=mxfp4,
        bos_token_id=_token(read, root, "bos_token_id"),
        eos_token_ids=_tokens(read, root, "eos_token_id"),
        pad_token_id=_token(read, root, "pad_token_id"),
    )
    _products(read, config)
    return None if read.missing or read.wrong else config


def _dense_layers(read: _Fields, layers: int) -> int:
    value = read.integer("first_k_dense_replace", low=0, high=layers)
    return 0 if value is None else value


def _mla_layers(read: _Fields, layers: int) -> tuple[int, ...]:
    name = "linear_attn_config.full_attn_layers"
    full = read.layer_list(name, layers, required=True)
    if full is None:
        return ()
    if not 0 < len(full) < layers:
        read.wrong.append(f"{read.find(name)[0]} names {len(full)} of {layers} layers; the model has both kinds")
    kda = read.layer_list("linear_attn_config.kda_layers", layers, required=False)
    if kda is not None and set(kda) != set(range(layers)) - set(full):
        read.wrong.append("linear_attn_config.kda_layers is not the complement of full_attn_layers")
    return full


def _quantisation(read: _Fields, root: Mapping[str, Any]) -> bool:
    """Whether MXFP4 experts are declared (1.4). The index, not this block, says which tensors are quantised."""
    inner, outer = read.find("quantization_config")[1], root.get("quantization_config")
    if inner is not None and outer is not None and inner != outer:
        read.wrong.append("quantization_config stands at the root and in text_config, and they differ")
    block = outer if inner is None else inner
    if block is None:
        return False
    if not isinstance(block, dict):
        read.wrong.append(f"quantization_config is {_kind(block)}, not an object")
        return False
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        read.missing.append("quantization_config.config_groups")
        groups = {}
    expected: list[tuple[str, Any, object]] = [
        ("quant_method", block.get("quant_method"), "compressed-tensors"),
        ("format", block.get("format"), "mxfp4-pack-quantized"),
    ]
    for group_name, group in groups.items():
        at = f"config_groups.{group_name}."
        weights = group.get("weights")
        weights = weights if isinstance(weights, dict) else {}
        expected += [(at + f"weights.{key}", weights.get(key), value) for key, value in MXFP4_WEIGHTS.items()]
        expected += [(at + key, group.get(key), None) for key in ("input_activations", "output_activations")]
    for name, value, only in expected:
        if type(value) is not type(only) or value != only:
            read.wrong.append(f"quantization_config.{name} is {value!r}; only {only!r} is supported")
    return True


MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "zp_dtype": None,
}


def _token(read: _Fields, root: Mapping[str, Any], name: str) -> int | None:
    ids = _tokens(read, root, name)
    return ids[0] if ids else None


def _tokens(read: _Fields, root: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Ids of a special token: an integer, a list of integers, or absent. K3 states them at the root too."""
    value = read.find(name)[1]
    value = root.get(name) if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        read.wrong.append(f"{name} is {value!r}, not a token id")
        return ()
    return tuple(ids)


def _products(read: _Fields, config: ModelConfig) -> None:
    """The largest products of dims must stay within 63 bits: offsets are computed from them."""
    matrix = config.expert_width * config.moe_intermediate_size
    for what, product in (
        ("num_experts x expert width x moe_intermediate_size", 12 * config.num_experts * matrix),
        ("num_heads x head_dim x hidden_size", 4 * config.kda_width * config.hidden_size),
        (
            "num_attention_heads x head dims x hidden_size",
            4 * config.num_attention_heads * config.qk_head_dim * config.hidden_size,
        ),
        (
            "num_shared_experts x moe_intermediate_size x hidden_size",
            4 * config.shared_intermediate_size * config.hidden_size,
        ),
    ):
        if product * config.num_hidden_layers >= 2**63:
            read.wrong.append(f"{what} over all layers overflows 64 bits")


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, bool):
        return "true or false"
    for kind, word in (
        (dict, "an object"),
        (list, "a list"),
        (str, "text"),
        (int, "an integer"),
        (float, "a fraction"),
    ):
        if isinstance(value, kind):
            return word
    return "null"
