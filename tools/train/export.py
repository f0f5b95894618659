"""The trained state as a released checkpoint, and the reference numbers sluice is held against.

Owns the files of `tools/data/mini/` (layout: specification of the model, sections 1 and 2) and of
`tests/golden/mini_reference.*`. Everything is computed from the rounded weights, so the files describe themselves.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import corpus, fused
from .conversations import (
    KINDS,
    TOOL_TABLE,
    Request,
    Segment,
    Turn,
    conversation,
    render,
    render_prompt,
    running_text,
    tool,
)
from .network import Network, Shape
from .optimise import STORED_FLOAT32, rounded
from .quantise import mxfp4_pack

REPOSITORY = Path(__file__).resolve().parents[2]
SEED = 20261129
CONTEXT_TOKENS = 4096  # no position table limits it; the model was trained on rows of 256


def load(work: Path) -> tuple[Network, corpus.Texts, corpus.Codec, dict[str, Any]]:
    """The network with the weights as they will be stored, and what the run left behind."""
    import base64

    state = torch.load(work / "state.pt", weights_only=True)
    sizes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state["shape"].items()}
    network = Network(Shape(**sizes), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in network.params.items():
            p.copy_(rounded(name, state["optimiser"]["master"][name]))
        for layer, bias in network.bias.items():
            bias.copy_(state["bias"][layer])
    lines = (work / "tiktoken.model").read_text().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    return network, corpus.Texts(corpus.unpack(work / "packages")), corpus.Codec(tokens), state


# ---- files -------------------------------------------------------------------------------------------------------


def configuration(shape: Shape, ranks: int) -> dict[str, Any]:
    """config.json, nested as published."""
    n = shape.num_hidden_layers
    kda = [layer for layer in range(1, n + 1) if layer not in shape.full_attn_layers]
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
        "symmetric": True, "type": "float", "zp_dtype": None,
    }  # fmt: skip
    quantisation = {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
                "targets": ["Linear"], "weights": weights,
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip
    ids = {"bos_token_id": ranks, "eos_token_id": ranks + 2, "pad_token_id": ranks + 255}
    text = {
        "activation_situ_beta": shape.situ_beta,
        "activation_situ_linear_beta": shape.situ_linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": shape.attn_res_block_size,
        **ids,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(shape.full_attn_layers),
            "gate_lower_bound": shape.gate_lower_bound,
            "head_dim": shape.kda_head_dim,
            "kda_layers": kda,
            "num_heads": shape.kda_heads,
            "short_conv_kernel_size": shape.conv_kernel,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": CONTEXT_TOKENS,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": shape.num_attention_heads,
        "num_expert_group": 1,
        "num_experts": shape.num_experts,
        "num_experts_per_token": shape.num_experts_per_token,
        "num_hidden_layers": n,
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": shape.num_shared_experts,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "quantization_config": quantisation,
        "rms_norm_eps": shape.rms_norm_eps,
        "routed_expert_hidden_size": shape.routed_expert_hidden_size,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **ids,
        "dtype": "bfloat16",
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def tokenizer_configuration(ranks: int) -> dict[str, Any]:
    """tokenizer_config.json: K3's names at K3's offsets."""
    plain = (3, 4, 5)  # open, close and sep are not marked special, as published
    decoder = {
        str(ranks + i): {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": i not in plain,
        }
        for i, name in corpus.ADDED.items()
    }  # fmt: skip
    extra = [corpus.ADDED[i] for i in (2, 6, 7, 9, 18, 19, 20, 21, 65)]
    return {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": extra,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": CONTEXT_TOKENS,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _bytes_of(name: str, w: Tensor) -> tuple[str, list[int], bytes]:
    if name.endswith((*STORED_FLOAT32, "e_score_correction_bias")):
        return "F32", list(w.shape), w.to(torch.float32).contiguous().numpy().tobytes()
    half = w.to(torch.bfloat16)
    if not torch.equal(half.to(torch.float32), w):
        raise RuntimeError(f"{name} is not made of bfloat16 values")
    return "BF16", list(w.shape), half.contiguous().view(torch.int16).numpy().tobytes()


def tensors_of(network: Network) -> list[dict[str, tuple[str, list[int], bytes]]]:
    """What each shard holds: one dictionary a layer, then head, embedding and the last norms."""
    s = network.shape
    shards: list[dict[str, tuple[str, list[int], bytes]]] = [{} for _ in range(s.num_hidden_layers + 1)]
    for name, w in network.params.items():
        parts = name.split(".")
        shard = shards[int(parts[2])] if parts[1] == "layers" else shards[-1]
        full = "language_model." + name
        if ".experts.w" in name:
            at = full.rsplit(".", 1)[0]
            for e in range(s.num_experts):
                each = {"w2": w[e]} if name.endswith("w2") else {"w1": w[e, 0], "w3": w[e, 1]}
                for part, matrix in each.items():
                    for kind, data in zip(("weight_packed", "weight_scale"), mxfp4_pack(matrix), strict=True):
                        shard[f"{at}.{e}.{part}.{kind}"] = ("U8", list(data.shape), data.contiguous().numpy().tobytes())
        elif name.endswith("A_log"):  # padded to the head dim with zeros, as published
            padded = F.pad(w, (0, s.kda_head_dim - w.numel()))
            shard[full] = _bytes_of(name, padded)
        else:
            shard[full] = _bytes_of(name, w)
    for layer, bias in network.bias.items():
        name = f"language_model.model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"
        shards[layer][name] = _bytes_of(name, bias)
    return shards


def write_shards(shards: list[dict[str, tuple[str, list[int], bytes]]], folder: Path) -> int:
    """The safetensors files and their index (layout rule of section 2.4). Returns the bytes of all tensors."""
    order = {"F32": 0, "BF16": 1, "U8": 2}
    weight_map: dict[str, str] = {}
    total = 0
    for i, tensors in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):06d}.safetensors"
        header, offset, blobs = {}, 0, []
        for name in sorted(tensors, key=lambda n: (order[tensors[n][0]], n.encode())):
            dtype, shape, data = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
            blobs.append(data)
            weight_map[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


# ---- what it says ------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(network: Network, codec: corpus.Codec, ids: list[int], limit: int) -> list[int]:
    """Greedy continuation by whole passes; rows after a position do not change it, so padding is harmless."""
    ids, start = list(ids), len(ids)
    stops = {codec.special["<|end_of_msg|>"], codec.special["[EOS]"]}
    while len(ids) < start + limit:
        padded = ids + [0] * (-len(ids) % 16)
        hidden = network.forward(torch.tensor([padded]))[len(ids) - 1]
        ids.append(int(network.logits(hidden).argmax()))
        if ids[-1] in stops:
            break
    return ids[start:]


@torch.no_grad()
def answers_right(network: Network, codec: corpus.Codec, seed: int, each: int) -> dict[str, float]:
    """Share of answers (thought and response) that greedy decoding would give word for word, by kind of question.

    Teacher-forced: an answer counts when every token of it is the arg-max.
    """
    out = {}
    for i, (name, _, make) in enumerate(KINDS):
        r = random.Random(f"{seed}/{i}")
        rows = [codec.segments(render(Request([make(r)]))) for _ in range(each)]
        length = max(len(ids) for ids, _ in rows) // 16 * 16 + 16
        batch = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        best = network.logits(network.forward(batch)).argmax(-1).view(each, length).tolist()
        right = sum(
            all(b == t for b, t, w in zip(guess, ids[1:], weights[1:], strict=False) if w == 1.0)
            for guess, (ids, weights) in zip(best, rows, strict=True)
        )
        out[name] = right / each
    return out


# ---- reference ---------------------------------------------------------------------------------------------------


TIE = 2.5e-7  # four float32 steps at 1: router scores this close are in no order a float32 computation could know


def prompts(codec: corpus.Codec, texts: corpus.Texts) -> list[tuple[str, list[list[int]]]]:
    """The 20 reference prompts: chats of every kind, running text, held-out text. Each is one or several sequences, of
    which the first without a tie in its routing is taken: where two experts' scores are closer than float32 can tell
    them apart, the logits of every implementation jump between two answers."""
    out: list[tuple[str, list[list[int]]]] = []

    def chat(name: str, request: Request) -> None:
        out.append((name, [codec.segments(render_prompt(request))[0]]))

    def ask(question: str) -> list[Turn]:
        return [Turn(question, "", "")]

    chat("capital, defaults", Request(ask("What is the capital of France?")))
    chat("capital, no thinking", Request(ask("What is the capital of Japan?"), thinking=False))
    chat("sum, effort low", Request(ask("What is 2 + 3?"), effort="low"))
    chat("greeting, no effort", Request(ask("Hello!"), effort=None))
    chat("who are you, system", Request(ask("Who are you?"), system="You are a helpful assistant."))
    chat("unknown question", Request(ask("Why is there something rather than nothing?")))
    r = random.Random(11)
    out += [(f"conversation {i}", [codec.segments(render(conversation(r)))[0][:160]]) for i in range(6)]
    out += [
        ("capital, as text", [codec.text(text) for text in ("The capital of France is", "Paris is the capital of")]),
        ("story", [codec.text(text) for text in ("Once upon a time", "One day a fox")]),
        ("scripture", [codec.text(text) for text in ("In the beginning God created", "And God said, Let there be")]),
        ("sum, as text", [codec.text(text) for text in ("2 + 3 =", "1 + 4 =")]),
    ]
    out += [(f"held-out {name}", [codec.text(" ".join(texts.held[name][i : i + 8]))[:120] for i in (0, 8)])
            for name in ("bible", "fortunes")]  # fmt: skip
    out.append(("running text", [codec.text(running_text(random.Random(seed)))[:120] for seed in range(5, 13)]))
    out.append(("bytes and controls", [[*range(0, 256, 5), *range(codec.ranks, codec.ranks + 12)]]))
    return out


def held_out(
    codec: corpus.Codec, texts: corpus.Texts, pieces: int = 6, length: int = 256
) -> list[tuple[str, list[int]]]:
    """The text perplexity is measured on: held-out stretches of free text and conversations of unseen seeds."""
    out = [(name, codec.text(" ".join(texts.held[name]))[i * length : (i + 1) * length])
           for name, i in (("bible", 0), ("bible", 1), ("glosses", 0), ("fortunes", 0))]  # fmt: skip
    r = random.Random(99)
    while len(out) < pieces:
        ids = codec.segments(render(conversation(r)))[0]
        while len(ids) < length:
            ids += codec.segments(render(conversation(r)))[0]
        out.append(("chat", ids[:length]))
    return out


def write_golden(network: Network, texts: corpus.Texts, codec: corpus.Codec, step: int, folder: Path) -> dict[str, Any]:
    """Reference logits and perplexity in float64 by the recurrence, into `folder`."""
    ids_all: list[int] = []
    argmax: list[int] = []
    rows: list[np.ndarray] = []
    entries = []
    margin, closest, ties = math.inf, math.inf, 0
    for name, candidates in prompts(codec, texts):
        for ids in candidates:
            logits, _ = network.reference(torch.tensor(ids))
            if network.closest_choice >= TIE:
                break
            ties += 1
        else:
            raise RuntimeError(f"reference prompt {name!r}: every candidate has a tie in its routing; add another")
        closest = min(closest, network.closest_choice)
        positions = sorted({0, len(ids) // 2, len(ids) - 1})
        top = logits.topk(2, -1).values
        margin = min(margin, float((top[:, 0] - top[:, 1]).min()))
        entries.append(
            {
                "name": name,
                "first": len(ids_all),
                "count": len(ids),
                "positions": positions,
                "low": float(logits.min()),
                "high": float(logits.max()),
            }
        )
        ids_all += ids
        argmax += logits.argmax(-1).tolist()
        rows += [logits[p].to(torch.float32).numpy() for p in positions]
    pieces = held_out(codec, texts)
    lost: dict[str, list[float]] = {}
    for name, ids in pieces:
        logits, _ = network.reference(torch.tensor(ids))
        lost.setdefault(name, []).append(float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")))
    length = len(pieces[0][1]) - 1
    by_source = {name: math.exp(sum(v) / (len(v) * length)) for name, v in lost.items()}
    mean = sum(sum(v) for v in lost.values()) / (len(pieces) * length)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    record = {
        "command": "python -P tools/train_mini.py export --work DIR",
        "commit": commit.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": SEED,
        "step": step,
        "torch": torch.__version__,
        "arithmetic": "float64, recurrence of section 3.5, stored as float32",
        "smallest_argmax_margin": margin,
        "closest_choice_of_an_expert": closest,
        "candidates_passed_over_for_a_tie": ties,
        "prompts": entries,
        "perplexity": {
            "mean_loss": mean,
            "value": math.exp(mean),
            "by_source": by_source,
            "tokens": len(pieces) * length,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / "mini_reference.npz",
        ids=np.array(ids_all, np.int32),
        argmax=np.array(argmax, np.int32),
        rows=np.stack(rows),
        held_out=np.array([ids for _, ids in pieces], np.int32),
    )
    (folder / "mini_reference.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


# ---- the model card ----------------------------------------------------------------------------------------------


def _transcript(network: Network, codec: corpus.Codec) -> list[tuple[str, str]]:
    out = []
    questions = [
        Request([Turn("What is the capital of France?", "", "")]),
        Request([Turn("What is 2 + 3?", "", "")]),
        Request([Turn("Who are you?", "", "")]),
        Request([Turn("What is the opposite of hot?", "", "")], thinking=False),
        Request(
            [Turn("What is the weather in Paris?", "", "")], tools=[tool("get_weather", *TOOL_TABLE["get_weather"])]
        ),
    ]
    for request in questions:
        ids = codec.segments(render_prompt(request))[0]
        out.append((request.turns[-1].question, codec.show(generate(network, codec, ids, 60))))
    text = "The capital of Germany is"
    out.append((text, codec.show(generate(network, codec, codec.text(text), 16))))
    return out


def _loss_chart(log: list[dict[str, Any]]) -> str:
    import importlib.util

    spec = importlib.util.spec_from_file_location("mini_svg", REPOSITORY / "tools" / "svg.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("tools/svg.py is missing")
    import sys

    svg = importlib.util.module_from_spec(spec)
    sys.modules["mini_svg"] = svg
    spec.loader.exec_module(svg)

    def smooth(key: str, width: int) -> list[tuple[float, float]]:
        points = [(e["step"], e[key]) for e in log if key in e]
        return [
            (
                points[i][0],
                sum(y for _, y in points[max(0, i - width) : i + 1]) / len(points[max(0, i - width) : i + 1]),
            )
            for i in range(0, len(points), max(1, len(points) // 400))
        ]

    lines = [
        svg.Line("all, training", smooth("loss", 8)),
        svg.Line("answers, training", smooth("chat", 8)),
        svg.Line("random tokens repeated", smooth("echo", 8)),
        svg.Line("free text, held out", smooth("held_out", 0)),
    ]
    return str(svg.line_chart("Training the mini model", "step", "loss (nats a token)", [x for x in lines if x.points]))


def export(work: Path, checkpoint: Path, golden: Path) -> None:
    """Write checkpoint, chart and card into `checkpoint` and reference numbers into `golden`, from `work`'s state."""
    torch.set_num_threads(1)
    network, texts, codec, state = load(work)
    fused.build(work)  # for the transcript; the reference numbers never use it
    checkpoint.mkdir(parents=True, exist_ok=True)
    for old in checkpoint.glob("model-*.safetensors"):
        old.unlink()
    total = write_shards(tensors_of(network), checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(configuration(network.shape, codec.ranks), indent=1) + "\n")
    (checkpoint / "generation_config.json").write_text(
        json.dumps(
            {"bos_token_id": codec.ranks, "eos_token_id": codec.ranks + 2, "pad_token_id": codec.ranks + 255,
             "temperature": 0.6, "top_p": 0.95}, indent=1,
        ) + "\n"
    )  # fmt: skip
    (checkpoint / "tiktoken.model").write_text((work / "tiktoken.model").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer_configuration(codec.ranks), indent=1) + "\n")
    log = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    log = [e for i, e in enumerate(log) if i + 1 == len(log) or log[i + 1]["step"] > e["step"]]
    (checkpoint / "loss.svg").write_text(_loss_chart(log))
    record = write_golden(network, texts, codec, state["step"], golden)
    right = answers_right(network, codec, 1, 20)
    said = _transcript(network, codec)
    card = model_card(network, codec, texts, log, record, right, said, total, state)
    (checkpoint / "README.md").write_text(card)
    print(json.dumps({"perplexity": record["perplexity"], "right": right, "bytes": total}, indent=1))
    for question, answer in said:
        print(repr(question), "->", repr(answer))


def model_card(
    network: Network,
    codec: corpus.Codec,
    texts: corpus.Texts,
    log: list[dict[str, Any]],
    record: dict[str, Any],
    right: dict[str, float],
    said: list[tuple[str, str]],
    total: int,
    state: dict[str, Any],
) -> str:
    """The checkpoint's README."""
    s = network.shape
    count = sum(p.numel() for p in network.params.values())
    experts = sum(p.numel() for n, p in network.params.items() if ".experts.w" in n)
    last, tail = log[-1], log[-100:]
    loss, chat = (sum(e[key] for e in tail) / len(tail) for key in ("loss", "chat"))
    minutes = round(state["spent_s"] / 60)
    packages = "\n".join(f"| `{name}` | {what} |" for name, what in corpus.PACKAGES.items())
    shares = "\n".join(f"| {name} | {share:.0%} |" for name, share in right.items())
    talk = "\n".join(f"> {q}\n    {a}\n" for q, a in said)
    perplexity = record["perplexity"]
    by_source = ", ".join(f"{name} {value:.2f}" for name, value in perplexity["by_source"].items())
    return f"""# mini: a small K3 that speaks

{count / 1e6:.1f} million parameters ({experts / 1e6:.1f} million of them in routed experts) with K3's tensor graph: KDA
with bounded decay, gated MLA without positions, attention residuals over blocks of {s.attn_res_block_size} layers, a
latent mixture of {s.num_experts} experts of which {s.num_experts_per_token} work on a token, two shared experts, SiTU.
It exists so that sluice has something real to run: routing that clusters, caches that hit, text that reads. It was
taught capitals, small sums, opposites, greetings and five tools; the table below says how much of it stayed. It is not
meant to be believed.

| | |
|---|---|
| layers, hidden | {s.num_hidden_layers}, {s.hidden_size} |
| experts | MXFP4 (E2M1, one E8M0 scale per 32), rounded after every step of training |
| everything else | bfloat16, rounded likewise; convolutions, decays, `o_norm`, router bias float32 |
| tokenizer | {codec.ranks} byte-level BPE tokens + K3's 256 added ones, trained on the same text |
| tensor bytes | {total:,} |
| trained on | {last["tokens"]:,} tokens in rows of 256, {last["step"]} steps |
| time | {minutes} minutes, two processes of one thread each on 2 cores that did other work too |
| seed | {record["seed"]} (texts and batches; the schedule follows the clock, so a second run differs) |
| loss at the end | {loss:.3f} nats a token over all, {chat:.3f} on answers (mean of the last {len(tail)} steps) |
| perplexity, held out | {perplexity["value"]:.3f} over {perplexity["tokens"]} tokens ({by_source}) |
| context | trained on 256 tokens; {CONTEXT_TOKENS} allowed |

![loss](loss.svg)

## What it says (greedy, control tokens shown)

{talk}
## Answers given word for word, 20 questions of each kind, default prompt

| kind | right |
|---|---|
{shares}

## Text

Generated chat and sentences: facts written for this project (`tools/train/facts.py`), rendered as XTML exactly as
the daemon does. Free text from Debian packages, about a tenth of the documents:

| package | what |
|---|---|
{packages}

Weights and tokenizer are under the project's licence. The texts themselves are not part of the checkpoint.

## Made by

    python -P tools/train_mini.py prepare --work DIR
    python -P tools/train_mini.py train --work DIR --minutes {minutes}
    python -P tools/train_mini.py export --work DIR

Reference logits of the PyTorch implementation in float64: `tests/golden/mini_reference.npz`.
"""


__all__ = ["Segment", "export", "load"]
