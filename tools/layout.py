"""Checkpoints as published: which tensors, in which file, at which byte. Pure arithmetic, no values.

Owns the tensor graph of both families (specification sections 2.2 and 6), the layout rule of the shards (2.4) and
the text of config.json. `mini.py` fills what is described here with numbers. Written from the specification alone,
apart from the reader in `sluice.daemon.model`, so that each can catch the other's mistakes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sluice.io.errors import PresetError

ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
DTYPE_ORDER = {dtype: place for place, dtype in enumerate(ITEM_BYTES)}
MXFP4_GROUP = 32
ADDED_TOKENS = 256  # K3 appends 256 control tokens to its ranks, whatever their number
MAX_POSITIONS = 1_048_576

Family = Literal["k3", "kimi-linear"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header. `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Shape:
    """Every number that decides names, shapes and config of a checkpoint; checked once when built.

    `full_attention` counts layers from 1, as the config does. `q_rank` and `latent` are None where the family has
    no such projection; `block` is None for the plain residual stream. Raises PresetError naming the field.
    """

    family: Family
    hidden: int
    layers: int
    vocab: int
    full_attention: tuple[int, ...]
    kda_heads: int
    kda_dim: int
    conv: int
    heads: int
    nope: int
    rope: int
    v_dim: int
    q_rank: int | None
    kv_rank: int
    experts: int
    top_k: int
    shared: int
    inner: int
    latent: int | None
    dense_layers: int
    dense_inner: int
    block: int | None
    vision: bool = False

    def __post_init__(self) -> None:
        optional = {"q_rank", "latent", "block"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("family", "full_attention", "vision") or (value is None and field.name in optional):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if field.name == "rope" else 1):
                raise PresetError(f"{field.name} must be a whole number above zero, not {value!r}")
        full = self.full_attention
        if list(full) != sorted(set(full)) or not full or full[0] < 1 or full[-1] > self.layers:
            raise PresetError(f"full_attention must be ascending layer numbers 1..{self.layers}, not {list(full)}")
        if len(full) == self.layers:
            raise PresetError("full_attention names every layer; at least one must be a KDA layer")
        if self.top_k > self.experts:
            raise PresetError(f"top_k {self.top_k} is more than experts {self.experts}")
        if self.dense_layers > self.layers:
            raise PresetError(f"dense_layers {self.dense_layers} is more than layers {self.layers}")
        if self.family == "k3" and (self.q_rank is None or self.latent is None or self.block is None):
            raise PresetError("family k3 needs q_rank, latent and block")
        if self.family == "kimi-linear" and (self.q_rank, self.latent, self.block) != (None, None, None):
            raise PresetError("family kimi-linear has no q_rank, latent or block")
        if self.mxfp4:
            for name in ("inner", "latent"):
                if getattr(self, name) % MXFP4_GROUP:
                    raise PresetError(f"{name} {getattr(self, name)} is not a multiple of {MXFP4_GROUP} (MXFP4 groups)")

    @property
    def mxfp4(self) -> bool:
        return self.family == "k3"

    @property
    def prefix(self) -> str:
        return "language_model." if self.family == "k3" else ""

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.kda_dim

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert: the latent, or the hidden state where there is none."""
        return self.hidden if self.latent is None else self.latent


FULL_K3 = Shape(
    family="k3",
    hidden=7168,
    layers=93,
    vocab=163840,
    full_attention=(*range(4, 93, 4), 93),
    kda_heads=96,
    kda_dim=128,
    conv=4,
    heads=96,
    nope=128,
    rope=64,
    v_dim=128,
    q_rank=1536,
    kv_rank=512,
    experts=896,
    top_k=16,
    shared=2,
    inner=3072,
    latent=3584,
    dense_layers=1,
    dense_inner=33792,
    block=12,
    vision=True,
)

FULL_KIMI_LINEAR = Shape(
    family="kimi-linear",
    hidden=2304,
    layers=27,
    vocab=163840,
    full_attention=(4, 8, 12, 16, 20, 24, 27),
    kda_heads=32,
    kda_dim=128,
    conv=4,
    heads=32,
    nope=128,
    rope=64,
    v_dim=128,
    q_rank=None,
    kv_rank=512,
    experts=256,
    top_k=8,
    shared=1,
    inner=1024,
    latent=None,
    dense_layers=1,
    dense_inner=9216,
    block=None,
)


def every_fourth(layers: int) -> tuple[int, ...]:
    """Full-attention layers of a net of `layers` layers by K3's pattern: each fourth, and the last. Counted from 1."""
    return tuple(sorted({*range(4, layers + 1, 4), layers}))


# --- tensors (specification 2.2; section 6 for Kimi-Linear) ---------------------------------------------------------


def attention_tensors(shape: Shape, layer: int) -> list[Tensor]:
    """The `self_attn` tensors of 0-based `layer`: KDA, or gated MLA where the layer is listed as full attention."""
    hidden, wide, k3 = shape.hidden, shape.kda_width, shape.family == "k3"
    at = f"{shape.prefix}model.layers.{layer}.self_attn."
    if layer + 1 in shape.full_attention:
        head = shape.nope + shape.rope
        matrices = {
            "kv_a_proj_with_mqa": (shape.kv_rank + shape.rope, hidden),
            "kv_a_layernorm": (shape.kv_rank,),
            "kv_b_proj": (shape.heads * (shape.nope + shape.v_dim), shape.kv_rank),
            "o_proj": (hidden, shape.heads * shape.v_dim),
        }
        if shape.q_rank is None:
            matrices["q_proj"] = (shape.heads * head, hidden)
        else:
            matrices["q_a_proj"] = (shape.q_rank, hidden)
            matrices["q_a_layernorm"] = (shape.q_rank,)
            matrices["q_b_proj"] = (shape.heads * head, shape.q_rank)
        if k3:
            matrices["g_proj"] = (shape.heads * shape.v_dim, hidden)
        return [Tensor(f"{at}{name}.weight", "BF16", size) for name, size in matrices.items()]
    matrices = {
        "q_proj": (wide, hidden),
        "k_proj": (wide, hidden),
        "v_proj": (wide, hidden),
        "b_proj": (shape.kda_heads, hidden),
        "f_a_proj": (shape.kda_dim, hidden),
        "f_b_proj": (wide, shape.kda_dim),
        "o_proj": (hidden, wide),
    }
    if k3:
        matrices["g_proj"] = (wide, hidden)
    else:
        matrices["g_a_proj"] = (shape.kda_dim, hidden)
        matrices["g_b_proj"] = (wide, shape.kda_dim)
    small = "F32" if k3 else "BF16"
    # One decay a head. K3 stores it padded with zeros to the head dimension, Kimi-Linear with three dims of one.
    a_log = (max(shape.kda_heads, shape.kda_dim),) if k3 else (1, 1, shape.kda_heads, 1)
    return [
        *(Tensor(f"{at}{name}.weight", "BF16", size) for name, size in matrices.items()),
        *(Tensor(f"{at}{name}_conv1d.weight", small, (wide, 1, shape.conv)) for name in "qkv"),
        Tensor(f"{at}A_log", "F32", a_log),
        Tensor(f"{at}dt_bias", "F32", (wide,)),
        Tensor(f"{at}o_norm.weight", small, (shape.kda_dim,)),
    ]


def expert_tensors(shape: Shape, at: str, expert: int) -> list[Tensor]:
    """The tensors of one routed expert: w1 (gate), w3 (up), w2 (down); packed and scales where it is MXFP4."""
    tensors = []
    for name, rows, columns in (
        ("w1", shape.inner, shape.expert_width),
        ("w2", shape.expert_width, shape.inner),
        ("w3", shape.inner, shape.expert_width),
    ):
        base = f"{at}experts.{expert}.{name}.weight"
        if shape.mxfp4:
            tensors.append(Tensor(f"{base}_packed", "U8", (rows, columns // 2)))
            tensors.append(Tensor(f"{base}_scale", "U8", (rows, columns // MXFP4_GROUP)))
        else:
            tensors.append(Tensor(base, "BF16", (rows, columns)))
    return tensors


def layer_tensors(shape: Shape, layer: int) -> list[Tensor]:
    """Every tensor of 0-based `layer`."""
    hidden, k3 = shape.hidden, shape.family == "k3"
    at = f"{shape.prefix}model.layers.{layer}."
    tensors = [
        Tensor(f"{at}{name}.weight", "BF16", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    if k3:
        for site in ("self_attention_res", "mlp_res"):
            tensors.append(Tensor(f"{at}{site}_norm.weight", "BF16", (hidden,)))
            tensors.append(Tensor(f"{at}{site}_proj.weight", "BF16", (1, hidden)))
    tensors += attention_tensors(shape, layer)
    if layer < shape.dense_layers:
        for name in ("gate", "up", "down"):
            size = (hidden, shape.dense_inner) if name == "down" else (shape.dense_inner, hidden)
            tensors.append(Tensor(f"{at}mlp.{name}_proj.weight", "BF16", size))
        return tensors
    at += "block_sparse_moe."
    tensors.append(Tensor(f"{at}gate.weight", "BF16", (shape.experts, hidden)))
    tensors.append(Tensor(f"{at}gate.e_score_correction_bias", "F32" if k3 else "BF16", (shape.experts,)))
    if shape.latent is not None:
        tensors.append(Tensor(f"{at}routed_expert_down_proj.weight", "BF16", (shape.latent, hidden)))
        tensors.append(Tensor(f"{at}routed_expert_norm.weight", "BF16", (shape.latent,)))
        tensors.append(Tensor(f"{at}routed_expert_up_proj.weight", "BF16", (hidden, shape.latent)))
    shared = shape.shared * shape.inner
    for name in ("gate", "up", "down"):
        size = (hidden, shared) if name == "down" else (shared, hidden)
        tensors.append(Tensor(f"{at}shared_experts.{name}_proj.weight", "BF16", size))
    for expert in range(shape.experts):
        tensors += expert_tensors(shape, at, expert)
    return tensors


def top_tensors(shape: Shape) -> list[Tensor]:
    """Embedding, head, final norm, and for K3 the output mix."""
    at, hidden = shape.prefix, shape.hidden
    tensors = [
        Tensor(f"{at}model.embed_tokens.weight", "BF16", (shape.vocab, hidden)),
        Tensor(f"{at}lm_head.weight", "BF16", (shape.vocab, hidden)),
        Tensor(f"{at}model.norm.weight", "BF16", (hidden,)),
    ]
    if shape.family == "k3":
        tensors.append(Tensor(f"{at}model.output_attn_res_norm.weight", "BF16", (hidden,)))
        tensors.append(Tensor(f"{at}model.output_attn_res_proj.weight", "BF16", (1, hidden)))
    return tensors


def vision_tensors(hidden: int) -> tuple[list[Tensor], list[Tensor]]:
    """Projector and tower of the release (specification 2.2). Only `hidden` is free: the tower has one size."""
    projector = {"proj.0": (4096, 4096), "proj.2": (hidden, 4096), "post_norm": (hidden,)}
    block = {
        "wqkv": (4608, 1024),
        "wo": (1024, 1536),
        "mlp.fc0": (4096, 1024),
        "mlp.fc1": (1024, 4096),
        "norm0": (1024,),
        "norm1": (1024,),
    }
    at = "vision_tower."
    tower = [
        Tensor(f"{at}encoder.blocks.{number}.{name}.weight", "BF16", size)
        for number in range(27)
        for name, size in block.items()
    ]
    tower.append(Tensor(f"{at}encoder.final_layernorm.weight", "BF16", (1024,)))
    tower.append(Tensor(f"{at}patch_embed.pos_emb.weight", "BF16", (64, 64, 1024)))
    tower.append(Tensor(f"{at}patch_embed.proj.weight", "BF16", (1024, 3, 14, 14)))
    return [Tensor(f"mm_projector.{name}.weight", "BF16", size) for name, size in projector.items()], tower


# --- files (specification 2.4) ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: `head` is the 8-byte length and the padded JSON, `tensors` lie after it in this order without gaps."""

    name: str
    head: bytes
    tensors: tuple[Tensor, ...]

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.data_bytes


def in_file_order(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """F32, then BF16, then U8; inside a dtype by the bytes of the name, so experts come as 0, 1, 10, 100, ..."""
    return tuple(sorted(tensors, key=lambda tensor: (DTYPE_ORDER[tensor.dtype], tensor.name.encode())))


def header(tensors: Sequence[Tensor]) -> bytes:
    """The head of a safetensors file that holds `tensors` in this order: length, compact JSON, spaces to 8 bytes."""
    entries, offset = [], 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        entries.append(
            f'"{tensor.name}":{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{offset},{end}]}}'
        )
        offset = end
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards(shape: Shape) -> Iterator[Shard]:
    """All files of the checkpoint: one a layer, one for embedding and head, and for vision one and one."""
    count = shape.layers + (3 if shape.vision else 1)

    def shard(number: int, tensors: Sequence[Tensor]) -> Shard:
        ordered = in_file_order(tensors)
        return Shard(f"model-{number:05d}-of-{count:06d}.safetensors", header(ordered), ordered)

    for layer in range(shape.layers):
        yield shard(layer + 1, layer_tensors(shape, layer))
    yield shard(shape.layers + 1, top_tensors(shape))
    if shape.vision:
        for number, tensors in enumerate(vision_tensors(shape.hidden), start=shape.layers + 2):
            yield shard(number, tensors)


def index_text(total_bytes: int, files: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """model.safetensors.index.json piece by piece; `files` are (file name, names of its tensors).

    The published index is indented by two and ends without a newline, which gives its exact size; the order of its
    keys is not known.
    """
    yield f'{{\n  "metadata": {{\n    "total_size": {total_bytes}\n  }},\n  "weight_map": {{'
    separator = "\n"
    for file, names in files:
        yield separator + ",\n".join(f'    "{name}": "{file}"' for name in names)
        separator = ",\n"
    yield "\n  }\n}"


# --- config.json (specification 1) ------------------------------------------------------------------------------------


def quantization_config() -> dict[str, Any]:
    """The MXFP4 block of the released config (specification 1.4)."""
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": MXFP4_GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def config(shape: Shape) -> dict[str, Any]:
    """config.json: nested under `text_config` for K3, flat for Kimi-Linear (specification 1.1, 1.2, 6).

    Holds every field that changes the computation and none of the library's boilerplate. Control tokens keep K3's
    offsets behind the ranks.
    """
    k3 = shape.family == "k3"
    ranks = max(shape.vocab - ADDED_TOKENS, 0)
    # A vocabulary too small for the control tokens has no tokenizer; its ids only have to be inside the embedding.
    ids = {
        "bos_token_id": min(ranks, shape.vocab - 1),
        "eos_token_id": min(ranks + 2, shape.vocab - 1),
        "pad_token_id": shape.vocab - 1,
    }
    linear: dict[str, Any] = {
        "full_attn_layers": list(shape.full_attention),
        "head_dim": shape.kda_dim,
        "kda_layers": [number for number in range(1, shape.layers + 1) if number not in shape.full_attention],
        "num_heads": shape.kda_heads,
        "short_conv_kernel_size": shape.conv,
    }
    if k3:
        linear |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        **ids,
        "dtype": "bfloat16",
        "first_k_dense_replace": shape.dense_layers,
        "hidden_act": "situ" if k3 else "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_inner,
        "kv_lora_rank": shape.kv_rank,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": shape.inner,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": shape.heads,
        "num_expert_group": 1,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": shape.shared,
        "q_lora_rank": shape.q_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 1.0 if k3 else 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": shape.v_dim,
        "vocab_size": shape.vocab,
    }
    if not k3:
        return text | {"model_max_length": MAX_POSITIONS}
    text |= {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": shape.block,
        "latent_moe_use_norm": True,
        "max_position_embeddings": MAX_POSITIONS,
        "mla_use_output_gate": True,
        "quantization_config": quantization_config(),
        "routed_expert_hidden_size": shape.latent,
        "topk_method": "noaux_tc",
    }
    root: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **ids,
        "dtype": "bfloat16",
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    }
    if shape.vision:
        root["media_placeholder_token_id"] = ranks + 21
    return root


def recipe(shape: Shape, seed: int, mock: bool) -> str:
    """What a made checkpoint was made from, as JSON text: equal recipes give equal files."""
    return json.dumps({"made_by": "sluice synth", "layout": 1, "seed": seed, "mock": mock, **asdict(shape)}, indent=1)
