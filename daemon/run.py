"""`sluice run`: one generation by the same engine without a daemon, for tests and measurement."""

from __future__ import annotations

import itertools
import json
import queue
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.daemon.options import Config, Json, Model, Preset, Sets, Threads, settings_from
from sluice.io.errors import PresetError, SluiceError


def run(
    model: Model = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, encoded as it stands.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=2.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    ignore_stop: Annotated[bool, typer.Option(help="Generate past stop tokens.")] = False,
    threads: Threads = None,
    preset: Preset = None,
    config: Config = None,
    sets: Sets = None,
    logits: Annotated[
        Path | None, typer.Option(help="Write the logit rows that chose each token (float32 .npy).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write which experts each token took, one JSON object a line.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate from a checkpoint without a daemon, and say what it cost."""
    if (prompt is None) == (ids is None):
        raise PresetError("give either --prompt TEXT or --ids 1,2,3")
    from sluice.daemon.engine.requests import Sampling

    settings = settings_from(model, preset, config, sets, threads)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    report = generate(
        settings,
        prompt if prompt is not None else parse_ids(ids or ""),
        max_tokens,
        sampling,
        stop=not ignore_stop,
        logits_file=logits,
        trace_file=trace,
        stream=None if as_json else sys.stdout,
    )
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    timings = report["timings"]
    print(
        f"\n[{len(report['ids'])} tokens, {report['finish_reason']}; load {timings['load']:.2f} s, "
        f"prefill {timings['prefill']:.2f} s, {timings['decode_tokens_per_second']:.2f} tokens/s; "
        f"peak {report['memory']['peak_rss_bytes'] / 1e9:.2f} GB "
        f"of {report['memory']['plan_bytes'] / 1e9:.2f} GB planned; logits {report['logits_fingerprint']}]"
    )


def parse_ids(text: str) -> list[int]:
    """Token ids from "1,2,3". Raises PresetError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PresetError(f"--ids {text!r}: write whole numbers separated by commas, such as 1,2,3") from None


def generate(
    settings: Any,
    prompt: str | Seq[int],
    max_tokens: int,
    sampling: Any,
    *,
    stop: bool = True,
    logits_file: Path | None = None,
    trace_file: Path | None = None,
    stream: Any = None,
) -> dict[str, Any]:
    """Load, generate, unload; the report is what `--json` prints.

    prompt: text (encoded in text mode) or token ids. stream: a text file that gets the text as it comes.
    Raises SluiceError.
    """
    import numpy as np

    from sluice.daemon.chat.detokenizer import Detokenizer
    from sluice.daemon.chat.tokenizer import load_tokenizer
    from sluice.daemon.engine.assembly import configure_compute, running_engine
    from sluice.daemon.engine.planning import plan_engine, read_model
    from sluice.daemon.engine.requests import Event, Finished, GenerationRequest, Token
    from sluice.daemon.engine.trace import RouteTrace
    from sluice.io.files import write_atomically

    began = time.monotonic()
    files = read_model(settings)
    plan = plan_engine(files, settings)
    configure_compute(settings)
    tokenizer = None
    if isinstance(prompt, str) or has_tokenizer(files.folder):
        tokenizer = load_tokenizer(files.folder, files.config.vocab_size, chat=False)
    prompt_ids = tokenizer.encode_text(prompt) if tokenizer and isinstance(prompt, str) else [int(i) for i in prompt]
    stop_ids = set(files.config.eos_token_ids) | (set(tokenizer.stop_ids) if tokenizer else set())
    request = GenerationRequest(
        tuple(prompt_ids), max_tokens, sampling, stop_ids=frozenset(stop_ids) if stop else frozenset()
    )
    rows: list[np.ndarray] = []
    routes = RouteTrace() if trace_file else None
    events: queue.SimpleQueue[Event | SluiceError | None] = queue.SimpleQueue()
    keep = (lambda _, row: rows.append(row.copy())) if logits_file else None
    with running_engine(files, plan, settings, on_logits=keep, on_route=routes) as running:
        loaded = time.monotonic()
        running.engine.submit(request, events.put)
        finished: Finished | None = None
        generated: list[int] = []
        times: list[float] = []
        detokenizer, text = Detokenizer(), ""
        while (event := events.get()) is not None:
            if isinstance(event, SluiceError):
                raise event
            if isinstance(event, Token):
                generated.append(event.id)
                times.append(time.monotonic())
                if tokenizer is not None and event.id not in request.stop_ids:
                    piece = detokenizer.feed(tokenizer.token_bytes(event.id))
                    text += piece
                    if stream is not None:
                        print(piece, end="", file=stream, flush=True)
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None
        text += detokenizer.flush()
        status = running.memory_and_io()
    if logits_file is not None:
        write_atomically(logits_file, lambda out: np.save(out, np.stack(rows).astype("<f4")))
    if routes is not None and trace_file is not None:
        write_atomically(trace_file, routes.write)
    per_token = [b - a for a, b in itertools.pairwise(times)]
    return {
        "prompt_ids": prompt_ids,
        "ids": generated,
        "text": text,
        "finish_reason": finished.finish_reason,
        "seed": finished.seed,
        "logits_fingerprint": finished.logits_fingerprint,
        "system_fingerprint": running.fingerprint,
        "timings": {
            "load": loaded - began,
            "prefill": finished.prefill_seconds,
            "per_token": per_token,
            "decode_tokens_per_second": len(per_token) / sum(per_token) if sum(per_token) > 0 else 0.0,
        },
        "memory": status["memory"],
        "io": status["io"],
    }


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tiktoken.model", "tokenizer.json"))
