"""`sluice bench`: how fast this machine computes, against how fast it reads its own memory in the same minute.

Kernels: every figure stands beside the memory rate measured by the same threads in the same round, so that a busy or
slow machine shows as such. With --model also end to end, each run in a process of its own: resident and streamed.
--numerics says what int8 activations cost in accuracy. Owns measuring and reporting; computes nothing itself.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.daemon.options import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDS = 5
TRUNK_RATE, EXPERT_RATE = "bf16 12288x7168, one row", "expert of 17.5 MB"
LATENT, INNER, HIDDEN, WIDE = 3584, 3072, 7168, 12288  # K3's own widths (specification 2.2)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. value in unit (a rate: more is better; "us" and "error": less is); share: of the memory rate
    of the same round, for figures that read weights from memory, else None."""

    name: str
    value: float
    unit: str
    share: float | None = None

    @property
    def more_is_better(self) -> bool:
        return self.unit not in ("us", "s", "error", "x floor")


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the benchmark: on what, and what came of it."""

    machine: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)


def bench(
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads (default: physical cores).")] = None,
    isa: Annotated[str, typer.Option("--isa", help="Instruction set, or auto.")] = "auto",
    model: Annotated[str | None, typer.Option("--model", help="Also measure this checkpoint end to end.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens to decode end to end.", min=2)] = 8,
    prompt: Annotated[int, typer.Option("--prompt", help="Length of the prompt end to end.", min=1)] = 64,
    numerics: Annotated[bool, typer.Option("--numerics", help="What int8 activations cost in accuracy.")] = False,
    kernels_too: Annotated[bool, typer.Option("--kernels/--no-kernels", help="Measure the kernels.")] = True,
    compare: Annotated[Path | None, typer.Option("--compare", help="JSON of an earlier run to stand beside.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a chart of rate over rows, as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Measure kernels (and a model) against the memory of the same run."""
    from sluice import kernels
    from sluice.io.errors import PresetError

    earlier = read_report(compare) if compare else None
    try:
        if isa != "auto":
            kernels.set_isa(isa)
        kernels.configure_threads(threads or len(kernels.physical_cores()), kernels.physical_cores())
    except ValueError as error:
        raise PresetError(f"bench: {error}") from None
    report = Report(describe_machine())
    if not as_json:
        print("  ".join(f"{key} {value}" for key, value in report.machine.items()))
    sources: list[Iterator[Figure]] = []
    if kernels_too:
        sources.append(kernel_figures())
    if numerics:
        sources.append(numeric_figures(model))
    if model is not None:
        sources.append(end_to_end_figures(model, threads, isa, prompt, tokens, report.figures))
        sources.append(overlap_figures(model, threads, isa, tokens))
    for source in sources:
        for figure in source:
            report.figures.append(figure)
            if not as_json:
                print(line_of(figure, earlier))
    if plot is not None:
        plot.write_text(chart(report), encoding="utf-8")
    print(json.dumps(asdict(report), ensure_ascii=False))


# --- Reporting ------------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Machine, instruction set and threads, as they are printed first."""
    from sluice import kernels
    from sluice.tools.doctor import cpu_model

    try:
        cpu = cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        cpu = platform.processor() or "unknown processor"
    return {
        "cpu": cpu,
        "isa": kernels.isa(),
        "threads": kernels.thread_count(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def read_report(path: Path) -> Report:
    """A report that `--json` printed: the last line of the file. Raises PresetError when it is none."""
    from sluice.io.errors import PresetError

    try:
        data = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
        return Report(dict(data["machine"]), [Figure(**f) for f in data["figures"]])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise PresetError(f"--compare {path}: not a report of sluice bench ({error})") from None


def line_of(figure: Figure, earlier: Report | None) -> str:
    """One line of the table."""
    share = "" if figure.share is None else f"{figure.share:7.0%} of memory"
    text = f"{figure.name:<44} {figure.value:10.3g} {figure.unit:<10}{share:<18}"
    before = next((f for f in earlier.figures if f.name == figure.name), None) if earlier else None
    if before is not None and before.value > 0:
        ratio = figure.value / before.value
        text += f"  {ratio:5.2f} x before" + ("" if figure.more_is_better else " (less is better)")
    return text.rstrip()


def chart(report: Report) -> str:
    """Multiply-adds a second over rows in one call, a line for each kind of weights. Raises PresetError without any."""
    from sluice.io.errors import PresetError
    from sluice.tools.svg import Line, line_chart

    lines: dict[str, list[tuple[float, float]]] = {}
    for figure in report.figures:
        kind, _, rows = figure.name.partition(", rows ")
        if rows.isdecimal() and figure.unit == "GMAC/s":
            lines.setdefault(kind, []).append((float(rows), figure.value))
    if not lines:
        raise PresetError("--plot: nothing to draw without --kernels")
    machine = report.machine
    return line_chart(
        f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads",
        "rows in one call",
        "10^9 multiply-adds a second",
        [Line(name, points) for name, points in lines.items()],
        log_x=True,
    )


# --- Kernels --------------------------------------------------------------------------------------------------------


def beside(work: Callable[[], object], reference: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of `work`, and of its ratio to `reference` measured in the same round. One round warms up."""
    times, ratios = [], []
    for turn in range(rounds + 1):
        t0 = time.perf_counter()
        reference()
        t1 = time.perf_counter()
        work()
        t2 = time.perf_counter()
        if turn:
            times.append(t2 - t1)
            ratios.append((t2 - t1) / (t1 - t0))
    return statistics.median(times), statistics.median(ratios)


def kernel_figures() -> Iterator[Figure]:
    """Figures of the kernels at K3's widths. Needs about 0.7 GB of memory."""
    import numpy as np

    from sluice import kernels

    rng = np.random.default_rng(1)

    def floats(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    store = rng.integers(0, 256, 1 << 28, dtype=np.uint8)  # beyond any cache

    def read() -> None:
        kernels.read_memory(store)

    seconds, _ = beside(read, read)
    yield Figure("memory read", store.nbytes / seconds / 1e9, "GB/s", 1.0)
    for _ in range(20):
        kernels.wake_seconds()
    yield Figure(
        "all threads at work, spinning", statistics.median(kernels.wake_seconds() for _ in range(50)) * 1e6, "us"
    )
    asleep = []
    for _ in range(10):
        time.sleep(0.02)
        asleep.append(kernels.wake_seconds())
    yield Figure("all threads at work, from sleep", statistics.median(asleep) * 1e6, "us")

    trunk = np.full((WIDE, HIDDEN), 0x3C00, np.uint16)
    trunk += rng.integers(0, 256, trunk.shape, dtype=np.uint16)
    for rows in (1, 2, 4, 16, 64):
        x, out = floats(rows, HIDDEN), np.empty((rows, WIDE), np.float32)

        def whole(x: Any = x, out: Any = out, w: Any = trunk) -> None:
            kernels.matmul(x, w, out)

        taken, ratio = beside(whole, read, ROUNDS if rows < 16 else 3)
        yield from _rates("bf16 12288x7168", rows, trunk.size, trunk.nbytes, taken, ratio, store.nbytes)
    del trunk

    def packed(n: int, k: int) -> kernels.Mxfp4:
        return kernels.Mxfp4(
            rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(118, 124, (n, k // 32), dtype=np.uint8)
        )

    experts = [(packed(INNER, LATENT), packed(INNER, LATENT), packed(LATENT, INNER)) for _ in range(16)]
    matrices = [m for expert in experts for m in expert[:2]]
    weights, packed_bytes = sum(m.packed.size * 2 for m in matrices), sum(m.packed.nbytes for m in matrices)
    alone: dict[int, float] = {}
    for kind, multiply in (("MXFP4", kernels.matmul), ("MXFP4, int8 activations", kernels.matmul_int8)):
        for rows in (1, 2, 4, 16, 64):
            x, out = floats(rows, LATENT), np.empty((rows, INNER), np.float32)

            def all_of_them(x: Any = x, out: Any = out, multiply: Any = multiply) -> None:
                for m in matrices:
                    multiply(x, m, out)

            taken, ratio = beside(all_of_them, read, ROUNDS if rows < 16 else 2)
            yield from _rates(f"{kind} 3072x3584", rows, weights, packed_bytes, taken, ratio, store.nbytes)
            if multiply is kernels.matmul:
                alone[rows] = taken
            else:
                yield Figure(f"int8 against float activations, rows {rows}", alone[rows] / taken, "x")
    yield Figure("MXFP4, 16 rows together against 16 alone", 16 * alone[1] / alone[16], "x")

    x, slots, first = floats(1, LATENT), np.empty((len(experts), LATENT), np.float32), np.zeros(1, np.int32)
    held, places = [kernels.ExpertWeights(*e) for e in experts], list(np.arange(len(experts), dtype=np.int32)[:, None])
    expert_bytes = sum(m.packed.nbytes + m.scales.nbytes for m in experts[0])
    act = kernels.Situ(4.0, 25.0)
    for name, int8 in (("expert", False), ("int8 expert", True)):

        def every(int8: bool = int8) -> None:
            kernels.experts(x, held, [first] * len(held), act, slots, places, int8)

        taken, ratio = beside(every, read)
        size = expert_bytes * len(experts)
        yield Figure(f"{name} of 17.5 MB", size / taken / 1e9, "GB/s", size / store.nbytes / ratio)

    yield from _small_figures(floats, read)


def _rates(
    kind: str, rows: int, weights: int, size: int, taken: float, ratio: float, read_bytes: int
) -> Iterator[Figure]:
    if rows == 1:
        yield Figure(f"{kind}, one row", size / taken / 1e9, "GB/s", size / read_bytes / ratio)
    yield Figure(f"{kind}, rows {rows}", rows * weights / taken / 1e9, "GMAC/s")


def _small_figures(floats: Callable[..., NDArray[np.float32]], read: Callable[[], None]) -> Iterator[Figure]:
    """What is not a product with weights, in microseconds a call."""
    import numpy as np

    from sluice import kernels

    heads, dim, context = 96, 128, 2048
    q, k, v, z = (floats(1, heads, dim) for _ in range(4))
    alpha, beta = np.exp(-np.abs(z)), np.full((1, heads), 0.5, np.float32)
    state, out = np.zeros((heads, dim, dim), np.float32), np.empty_like(q)
    latent_q, cache = floats(1, heads, 576), floats(context, 576)
    mixed = np.empty((1, heads, 512), np.float32)
    bank, prefix, folded = floats(8, 1, HIDDEN), floats(1, HIDDEN), floats(HIDDEN)
    calls: tuple[tuple[str, Callable[[], None]], ...] = (
        ("KDA recurrence, one token", lambda: kernels.kda_recurrence(q, k, v, alpha, beta, state, out)),
        (
            f"latent attention over {context}, one token",
            lambda: kernels.mla_attention(latent_q, cache, context - 1, 192**-0.5, mixed),
        ),
        ("AttnRes mix of 9, one token", lambda: kernels.attnres_mix(bank, 8, prefix, folded, 1e-5, prefix.copy())),
        ("RMSNorm of 7168", lambda: kernels.rmsnorm(prefix, folded, 1e-5, prefix)),
    )
    for name, call in calls:
        call()
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        yield Figure(name, statistics.median(times) * 1e6, "us")


# --- Numerics -------------------------------------------------------------------------------------------------------


def numeric_figures(model: str | None) -> Iterator[Figure]:
    """Relative error (L2) of int8 activations: in one product, in one expert, and in the logits of a model."""
    import numpy as np

    from sluice import kernels

    rng = np.random.default_rng(2)
    packed = [
        kernels.Mxfp4(
            rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(118, 122, (n, k // 32), dtype=np.uint8)
        )
        for n, k in ((INNER, LATENT), (INNER, LATENT), (LATENT, INNER))
    ]
    x = rng.standard_normal((16, LATENT), dtype=np.float32)
    rows = np.arange(16, dtype=np.int32)

    def relative(near: Any, exact: Any) -> float:
        return float(np.linalg.norm(near.astype(np.float64) - exact) / np.linalg.norm(exact.astype(np.float64)))

    products = [np.empty((16, INNER), np.float32) for _ in range(2)]
    kernels.matmul(x, packed[0], products[0])
    kernels.matmul_int8(x, packed[0], products[1])
    yield Figure("int8 activations: error of one product", relative(products[1], products[0]), "error")
    answers = [np.empty((16, LATENT), np.float32) for _ in range(2)]
    weights = kernels.ExpertWeights(*packed)
    for int8, slots in zip((False, True), answers, strict=True):
        kernels.experts(x, [weights], [rows], kernels.Situ(4.0, 25.0), slots, [rows], int8)
    yield Figure("int8 activations: error of one expert", relative(answers[1], answers[0]), "error")
    yield from _model_numerics(model or "mini", relative)


def _model_numerics(model: str, relative: Callable[[Any, Any], float]) -> Iterator[Figure]:
    """Both forms read the float form's own continuation, so that every row of logits answers the same question."""
    import tempfile

    import numpy as np

    ids = [3 + 17 * i % 200 for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "logits.npy"
        answer = run_model(model, ids, 24, ["compute.activations=f32"], target)["ids"]
        floats = np.load(target)
        rows = []
        for i in range(0, len(answer), 4):  # a fresh prefill for every fourth position
            run_model(model, ids + answer[:i], 1, ["compute.activations=int8"], target)
            rows.append((floats[i], np.load(target)[0]))
    exact, near = (np.stack(part) for part in zip(*rows, strict=True))
    yield Figure(f"int8 activations: error of logits, {model}", relative(near, exact), "error")
    agree = float((near.argmax(axis=1) == exact.argmax(axis=1)).mean())
    yield Figure(f"int8 activations: same first token, {model}", agree, "share")


# --- End to end -----------------------------------------------------------------------------------------------------


def run_model(model: str, ids: Sequence[int], tokens: int, sets: Sequence[str], logits: Path | None = None) -> Any:
    """What `sluice run --json` reports, from a process of its own. Raises StoreError with its words if it fails."""
    from sluice.io.errors import StoreError

    command = [
        sys.executable,
        "-m",
        "sluice.daemon",
        "run",
        "--model",
        model,
        "--json",
        "--ids",
        ",".join(map(str, ids)),
    ]
    command += ["--max-tokens", str(tokens), "--temperature", "0"]
    for item in sets:
        command += ["--set", item]
    if logits is not None:
        command += ["--logits", str(logits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stdout.strip() or done.stderr.strip()).splitlines()
        raise StoreError(f"sluice run failed ({done.returncode}): {words[-1] if words else 'no word'}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def bytes_of_a_token(model: str) -> tuple[int, int]:
    """Bytes that one decoded token multiplies with: trunk matrices with the head, and routed experts."""
    from sluice.daemon.engine.planning import read_model
    from sluice.daemon.options import settings_from

    files = read_model(settings_from(model=model))
    trunk = sum(files.store.tensors[use.name].nbytes for use in files.binding.order)
    chosen = files.config.num_experts_per_token
    return trunk, sum(files.store.expert(layer, 0).nbytes * chosen for layer in files.config.moe_layers)


def floor_seconds(trunk_bytes: int, expert_bytes: int, figures: Sequence[Figure]) -> float | None:
    """The least a resident token can take at the kernel rates measured in this run; None without those."""
    rates = {f.name: f.value * 1e9 for f in figures}
    trunk, expert = rates.get(TRUNK_RATE), rates.get(EXPERT_RATE)
    return None if trunk is None or expert is None else trunk_bytes / trunk + expert_bytes / expert


def end_to_end_figures(
    model: str, threads: int | None, isa: str, prompt: int, tokens: int, measured: Sequence[Figure]
) -> Iterator[Figure]:
    """Prefill and decode of one sequence: everything resident where it fits, and the trunk streamed. `measured`:
    figures of this run so far, for the floor of a resident step."""
    from sluice.io.errors import SluiceError

    ids = [3 + 31 * i % 250 for i in range(prompt)]
    common = [f"compute.isa={isa}"] + ([f"compute.threads={threads}"] if threads else [])
    for name, sets in (
        ("resident", ["memory.preload=true"]),
        ("streamed", ["memory.trunk=0", "memory.expert_cache=0"]),
    ):
        try:
            report = run_model(model, ids, tokens, [*common, *sets])
        except SluiceError as error:
            print(f"{name}: not measured: {error}", file=sys.stderr)
            continue
        timings = report["timings"]
        yield Figure(f"prefill of {prompt}, {name}", prompt / timings["prefill"], "tokens/s")
        steps = timings["per_token"][1:] or timings["per_token"]  # the first step still fills caches
        if steps:
            yield Figure(f"decode, {name}", 1 / statistics.median(steps), "tokens/s")
            floor = floor_seconds(*bytes_of_a_token(model), measured) if name == "resident" else None
            if floor is not None:
                yield Figure("decode, resident, against its floor", statistics.median(steps) / floor, "x floor")
        if report["io"]["elapsed_seconds"] > 0:
            yield Figure(
                f"read from disk, {name}", report["io"]["bytes"] / report["io"]["elapsed_seconds"] / 1e9, "GB/s"
            )


def overlap_figures(model: str, threads: int | None, isa: str, tokens: int) -> Iterator[Figure]:
    """A streamed decode beside the drives' rates of the same run (see `overlap`): nothing pinned, nothing cached."""
    from sluice.io.errors import SluiceError
    from sluice.tools.overlap import measure

    try:
        seen = measure(model, [f"compute.isa={isa}", "memory.trunk=0", "memory.expert_cache=0"], tokens, threads)
    except SluiceError as error:
        print(f"overlap: not measured: {error}", file=sys.stderr)
        return
    yield Figure("streamed token, bytes read", seen.read_bytes / 1e9, "GB")
    yield Figure("streamed token, bytes read of bytes planned", seen.read_bytes / seen.planned_bytes, "x planned")
    yield Figure("drives, in order", seen.sequential_gb_s, "GB/s")
    yield Figure("drives, expert-sized at random", seen.random_gb_s, "GB/s")
    yield Figure("streamed token, time over the drives' floor", seen.over_floor, "x floor")
    yield Figure("streamed token, share of time with reads in flight", 100 * seen.flying_share, "%")
    yield Figure("streamed token, share of time with cores busy", 100 * seen.busy_share, "%")
    yield Figure("I/O loop, lag p99", 1e3 * seen.lag_p99_seconds, "ms")
    yield Figure("streamed, memory held of planned", seen.resident_bytes / seen.plan_bytes, "x planned")
