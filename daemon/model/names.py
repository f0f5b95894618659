"""What the tensors of a network are called, in which order a pass uses them, and what their shapes must be.

Owns: names, the order of use, expert naming, and the check of an index against a configuration. Leaves bytes,
offsets and drives to `sluice.io`: it asks only for a tensor's dtype and shape. Specification section 2.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sluice.daemon.model.config import ModelConfig
from sluice.io.errors import StoreError
from sluice.io.store import ExpertNaming
from sluice.io.trunk import MatrixUse

log = logging.getLogger("sluice.model")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
OUTPUT_RES = "model.output_attn_res"
PREFIX = "language_model."
PLAIN = ("BF16", "F32", "F16")
MXFP4_PARTS = ("weight_packed", "weight_scale")
ROUTER = "block_sparse_moe.gate"
EXPERT_MATRICES = ("w1", "w2", "w3")  # gate, down, up: the order in which a published expert lies on disk


class TensorFacts(Protocol):
    """What an index knows of a tensor: dtype in safetensors' words, shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, [rows, cols], by its name within the layer without `.weight`."""

    name: str
    rows: int
    cols: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """A small tensor of a layer, always resident. `at_least`: any shape of no fewer elements (A_log, 2.2)."""

    name: str
    shape: tuple[int, ...]
    at_least: bool = False


def detect_prefix(names: Iterable[str]) -> str:
    """ "language_model." or "", by what the index holds (1.1). Raises StoreError when it holds both or neither."""
    found = [prefix for prefix in ("", PREFIX) if prefix + EMBEDDING in names]
    if len(found) != 1:
        said = "two" if found else "no"
        raise StoreError(f"the index holds {said} token embedding: expected {EMBEDDING} or {PREFIX + EMBEDDING}")
    return found[0]


def layers_prefix(prefix: str) -> str:
    return prefix + "model.layers."


def layer_prefix(prefix: str, layer: int) -> str:
    return f"{layers_prefix(prefix)}{layer}."


def layer_matrices(config: ModelConfig, layer: int) -> list[Matrix]:
    """The plain matrices of a layer, in the order in which the layer graph uses them (3.4 to 3.8)."""
    return [*_attention_matrices(config, layer), *_ffn_matrices(config, layer)]


def _attention_matrices(c: ModelConfig, layer: int) -> list[Matrix]:
    h, at = c.hidden_size, "self_attn."
    if not c.is_mla(layer):
        width, dim = c.kda_width, c.kda_head_dim
        gate = (
            [Matrix(at + "g_proj", width, h)]
            if c.full_rank_gate
            else [Matrix(at + "g_a_proj", dim, h), Matrix(at + "g_b_proj", width, dim)]
        )
        return [
            *(Matrix(f"{at}{n}_proj", width, h) for n in "qkv"),
            Matrix(at + "b_proj", c.kda_heads, h),
            Matrix(at + "f_a_proj", dim, h),
            Matrix(at + "f_b_proj", width, dim),
            *gate,
            Matrix(at + "o_proj", h, width),
        ]
    heads, values = c.num_attention_heads, c.num_attention_heads * c.v_head_dim
    if c.q_lora_rank is None:
        query = [Matrix(at + "q_proj", heads * c.qk_head_dim, h)]
    else:
        query = [
            Matrix(at + "q_a_proj", c.q_lora_rank, h),
            Matrix(at + "q_b_proj", heads * c.qk_head_dim, c.q_lora_rank),
        ]
    gate = [Matrix(at + "g_proj", values, h)] if c.mla_output_gate else []
    return [
        *query,
        Matrix(at + "kv_a_proj_with_mqa", c.cache_width, h),
        # used twice in one layer, before and after attention: W_UK on the query, W_UV on the context
        Matrix(at + "kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank, whole=True),
        *gate,
        Matrix(at + "o_proj", h, values),
    ]


def _ffn_matrices(c: ModelConfig, layer: int) -> list[Matrix]:
    h = c.hidden_size
    if not c.is_moe(layer):
        return _gated_mlp("mlp.", c.intermediate_size, h)
    at = "block_sparse_moe."
    matrices = [Matrix(ROUTER, c.num_experts, h)]
    if c.routed_expert_hidden_size is not None:
        matrices.append(Matrix(at + "routed_expert_down_proj", c.routed_expert_hidden_size, h))
    if c.num_shared_experts:
        matrices += _gated_mlp(at + "shared_experts.", c.shared_intermediate_size, h)
    if c.routed_expert_hidden_size is not None:
        matrices.append(Matrix(at + "routed_expert_up_proj", h, c.routed_expert_hidden_size))
    return matrices


def _gated_mlp(at: str, inner: int, hidden: int) -> list[Matrix]:
    return [
        Matrix(at + "gate_proj", inner, hidden),
        Matrix(at + "up_proj", inner, hidden),
        Matrix(at + "down_proj", hidden, inner),
    ]


def layer_vectors(c: ModelConfig, layer: int) -> list[Vector]:
    """The small tensors of a layer, full names within the layer."""
    h, at = c.hidden_size, "self_attn."
    vectors = [Vector("input_layernorm.weight", (h,)), Vector("post_attention_layernorm.weight", (h,))]
    if c.attn_res_block_size is not None:
        for site in ("self_attention_res", "mlp_res"):
            vectors += [Vector(site + "_norm.weight", (h,)), Vector(site + "_proj.weight", (1, h))]
    if c.is_mla(layer):
        if c.q_lora_rank is not None:
            vectors.append(Vector(at + "q_a_layernorm.weight", (c.q_lora_rank,)))
        vectors.append(Vector(at + "kv_a_layernorm.weight", (c.kv_lora_rank,)))
    else:
        conv = (c.kda_width, 1, c.conv_kernel_size)
        vectors += [Vector(f"{at}{n}_conv1d.weight", conv) for n in "qkv"]
        vectors += [
            Vector(at + "A_log", (c.kda_heads,), at_least=True),
            Vector(at + "dt_bias", (c.kda_width,)),
            Vector(at + "o_norm.weight", (c.kda_head_dim,)),
        ]
    if c.is_moe(layer):
        vectors.append(Vector("block_sparse_moe.gate.e_score_correction_bias", (c.num_experts,)))
        if c.latent_moe_use_norm:
            vectors.append(Vector("block_sparse_moe.routed_expert_norm.weight", (c.expert_width,)))
    return vectors


def top_vectors(c: ModelConfig) -> list[Vector]:
    vectors = [Vector(FINAL_NORM, (c.hidden_size,))]
    if c.attn_res_block_size is not None:
        vectors += [
            Vector(OUTPUT_RES + "_norm.weight", (c.hidden_size,)),
            Vector(OUTPUT_RES + "_proj.weight", (1, c.hidden_size)),
        ]
    return vectors


def head_name(config: ModelConfig, prefix: str) -> str:
    return prefix + (EMBEDDING if config.tie_word_embeddings else HEAD)


def matrix_order(config: ModelConfig, prefix: str, *, pin_routers: bool = False) -> list[MatrixUse]:
    """Every plain matrix in the order of one full pass, the head last. The embedding is read by rows and is not
    in the list (unless it is the head). pin_routers: keep routers resident, so that the next layer's experts can
    be foreseen."""
    uses = [
        MatrixUse(
            f"{layer_prefix(prefix, layer)}{matrix.name}.weight",
            whole=matrix.whole,
            pin=pin_routers and matrix.name == ROUTER,
        )
        for layer in range(config.num_hidden_layers)
        for matrix in layer_matrices(config, layer)
    ]
    return [*uses, MatrixUse(head_name(config, prefix))]


def vector_names(config: ModelConfig, prefix: str) -> list[str]:
    """Every small tensor, by full name."""
    names = [
        layer_prefix(prefix, layer) + vector.name
        for layer in range(config.num_hidden_layers)
        for vector in layer_vectors(config, layer)
    ]
    return names + [prefix + vector.name for vector in top_vectors(config)]


def expert_prefix(prefix: str, layer: int, expert: int) -> str:
    """What every tensor of one expert begins with."""
    return f"{layer_prefix(prefix, layer)}block_sparse_moe.experts.{expert}."


def expert_parts(config: ModelConfig, *, packed: bool) -> dict[str, tuple[int, int]]:
    """Part name -> shape of one expert's tensors, in published order ("w1.weight_packed", ... or "w1.weight", ...)."""
    width, inner = config.expert_width, config.moe_intermediate_size
    shapes = {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}
    if not packed:
        return {f"{name}.weight": shapes[name] for name in EXPERT_MATRICES}
    parts: dict[str, tuple[int, int]] = {}
    for name in EXPERT_MATRICES:
        rows, cols = shapes[name]
        parts[f"{name}.weight_packed"] = (rows, cols // 2)
        parts[f"{name}.weight_scale"] = (rows, cols // 32)
    return parts


def expert_naming(config: ModelConfig, prefix: str, tensors: Mapping[str, TensorFacts]) -> ExpertNaming | None:
    """How routed experts are called, for `Store.declare_experts`; None for a network without any."""
    if not config.moe_layers:
        return None
    packed = expert_prefix(prefix, config.moe_layers[0], 0) + "w1.weight_packed" in tensors
    template = expert_prefix(prefix, 0, 0).replace(".0.", ".{layer}.", 1).replace(".0.", ".{expert}.", 1) + "{part}"
    return ExpertNaming(
        template=template,
        parts=tuple(expert_parts(config, packed=packed)),
        layers=config.moe_layers,
        experts=config.num_experts,
    )


@dataclass(frozen=True, slots=True)
class Binding:
    """A checked index, as `sluice.io` wants to hear of it: what to keep, in which order to read, how experts are
    called. row_tables: matrices read by single rows."""

    prefix: str
    order: tuple[MatrixUse, ...]
    vectors: tuple[str, ...]
    row_tables: tuple[str, ...]
    experts: ExpertNaming | None


def bind(config: ModelConfig, tensors: Mapping[str, TensorFacts], *, pin_routers: bool = False) -> Binding:
    """Check the index against the configuration and say how it is used. Raises StoreError (see `check_tensors`)."""
    prefix = check_tensors(config, tensors)
    return Binding(
        prefix=prefix,
        order=tuple(matrix_order(config, prefix, pin_routers=pin_routers)),
        vectors=tuple(vector_names(config, prefix)),
        row_tables=(prefix + EMBEDDING,),
        experts=expert_naming(config, prefix, tensors),
    )


def check_tensors(config: ModelConfig, tensors: Mapping[str, TensorFacts]) -> str:
    """Compare an index with what `config` implies; returns the prefix the text model's names carry.

    Raises StoreError naming what is missing, misshapen, of a wrong dtype, stored twice, or unknown inside
    `model.layers.`. Unknown tensors elsewhere (a vision tower) are logged once. Whether an expert is MXFP4 is
    decided by what the index holds, never by the configuration (1.4). Shapes are looked at in each layer's first
    expert; that all others are like it is for `Store.declare_experts` to see (K3 has half a million of them).
    """
    prefix = detect_prefix(tensors)
    experts = len(config.moe_layers) * config.num_experts
    if experts > len(tensors):  # before anything is laid out for each of them
        raise StoreError(f"num_experts is {config.num_experts}: {experts} experts do not fit {len(tensors)} tensors")
    check = _Check(config, prefix, tensors)
    for vector in top_vectors(config):
        check.expect(prefix + vector.name, vector.shape, PLAIN)
    check.plain(prefix + EMBEDDING.removesuffix(".weight"), config.vocab_size, config.hidden_size)
    if not config.tie_word_embeddings:
        check.plain(prefix + HEAD.removesuffix(".weight"), config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        at = layer_prefix(prefix, layer)
        for vector in layer_vectors(config, layer):
            check.expect(at + vector.name, vector.shape, PLAIN, vector.at_least)
        for matrix in layer_matrices(config, layer):
            check.plain(at + matrix.name, matrix.rows, matrix.cols)
        if config.is_moe(layer):
            check.experts(layer)
    check.finish()
    return prefix


class _Check:
    """An index being compared: collects all that is wrong and tells it in one line, a bounded number of names.

    Names of experts are not kept: one byte for each of K3's half a million says that it was met.
    """

    SHOWN = 5

    def __init__(self, config: ModelConfig, prefix: str, tensors: Mapping[str, TensorFacts]) -> None:
        self._config, self._prefix, self._tensors = config, prefix, tensors
        self._parts = {True: expert_parts(config, packed=True), False: expert_parts(config, packed=False)}
        count = config.num_experts
        self._met = {
            (layer, part): bytearray(count)
            for layer in config.moe_layers
            for parts in self._parts.values()
            for part in parts
        }
        self._unclaimed: set[str] = set()  # of the names that are not an expert's
        self._kinds: set[bool] = set()  # of experts met: packed or not
        self._missing: list[str] = []
        self._wrong: list[str] = []
        expert = re.compile(re.escape(layers_prefix(prefix)) + r"(\d+)\.block_sparse_moe\.experts\.(0|[1-9]\d*)\.(.*)")
        for name in tensors:
            match = expert.fullmatch(name)
            met = self._met.get((int(match[1]), match[3])) if match else None
            if match and met is not None and int(match[2]) < count:
                met[int(match[2])] = 1
            else:
                self._unclaimed.add(name)

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], at_least: bool = False) -> None:
        """A tensor that must be there: of this shape, or (at_least) of any shape with as many elements."""
        if name not in self._unclaimed:
            self._missing.append(name)
            return
        self._unclaimed.remove(name)
        self._compare(name, shape, dtypes, at_least)

    def _compare(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], at_least: bool = False) -> None:
        facts = self._tensors[name]
        if facts.dtype not in dtypes:
            self._wrong.append(f"{name} is {facts.dtype}, expected {' or '.join(dtypes)}")
        elif at_least and _elements(facts.shape) < _elements(shape):
            self._wrong.append(f"{name} has {_elements(facts.shape)} elements, at least {shape[0]} are needed")
        elif not at_least and tuple(facts.shape) != shape:
            self._wrong.append(f"{name} is {list(facts.shape)}, expected {list(shape)}")

    def plain(self, name: str, rows: int, cols: int) -> None:
        """A matrix that must be there and may not be quantised."""
        packed = {f"{name}.{part}" for part in MXFP4_PARTS} & self._unclaimed
        if packed:
            self._unclaimed -= packed
            self._wrong.append(f"{name} is stored as MXFP4; only routed experts may be")
        self.expect(name + ".weight", (rows, cols), PLAIN)

    def experts(self, layer: int) -> None:
        """All experts of a layer: of one kind, the same in every layer; the first one's shapes."""
        met = {packed: [self._met[layer, part] for part in parts] for packed, parts in self._parts.items()}
        kinds = {packed for packed, columns in met.items() if any(map(any, columns))}
        self._kinds |= kinds
        # with neither, the packed names are reported missing only where the configuration declares MXFP4
        packed = True in kinds or (self._config.mxfp4_declared and not kinds)
        for (part, shape), column in zip(self._parts[packed].items(), met[packed], strict=True):
            if not all(column):
                absent = (e for e, there in enumerate(column) if not there)
                self._missing += [expert_prefix(self._prefix, layer, e) + part for e in absent]
            if column[0]:
                name = expert_prefix(self._prefix, layer, 0) + part
                self._compare(name, shape, ("U8",) if packed else PLAIN)

    def finish(self) -> None:
        """Raise StoreError if anything was wrong."""
        wrong = []
        if len(self._kinds) > 1:
            wrong.append("routed experts are stored both as MXFP4 and plain")
        elif True in self._kinds:
            dims = {
                "moe_intermediate_size": self._config.moe_intermediate_size,
                "expert width": self._config.expert_width,
            }
            wrong += [f"{n} is {d}; MXFP4 experts need a multiple of 32" for n, d in dims.items() if d % 32]
        layers = layers_prefix(self._prefix)
        unknown = sorted(name for name in self._unclaimed if name.startswith(layers))
        said = [
            f"{what}: {self._some(names)}"
            for what, names in (("wrong", wrong + self._wrong), ("missing", self._missing), ("unknown", unknown))
            if names
        ]
        if said:
            raise StoreError(f"the tensors do not fit the configuration; {'; '.join(said)}")
        if self._unclaimed:
            count, example = len(self._unclaimed), min(self._unclaimed)
            log.warning("%d tensors are not part of the text model and are ignored, %s among them", count, example)

    def _some(self, names: list[str]) -> str:
        more = f" and {len(names) - self.SHOWN} more" if len(names) > self.SHOWN else ""
        return ", ".join(names[: self.SHOWN]) + more


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
