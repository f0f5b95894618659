"""Train the mini model, a small K3 that speaks, on the CPU; write its checkpoint and its reference logits.

    python -P tools/train_mini.py prepare --work DIR            packages, texts, tokenizer
    python -P tools/train_mini.py train --work DIR --minutes 60 the run; resumes from DIR/state.pt
    python -P tools/train_mini.py export --work DIR             the checkpoint and the golden files

Needs the optional dependency group `train` (PyTorch for the CPU) and Debian's apt-get; running sluice needs neither.
Owns the run: processes, schedule, balancing, log, resume. The graph, the text, the optimiser and the file format are
in `tools/train/`. Two processes with one thread each share the weights: on a busy machine that is several times
faster than two threads that wait for each other after every small product.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `train` is a package of this folder, installed or not

ROW = 256  # tokens a row: one conversation of a few turns
SEED = 20261129
SLOW = 4


def learning_scale(progress: float, decay: float) -> float:
    """Rate over the run's progress 0..1: short warm-up, flat, then linear to zero over the last `decay` of it."""
    return min(1.0, progress / 0.01) * min(1.0, (1 - progress) / decay)


def prepare(work: Path, ranks: int) -> None:
    """Unpack the texts and train the tokenizer into `work`."""
    from train import corpus

    texts = corpus.Texts(corpus.unpack(work / "packages"))
    tokens = corpus.train_tokenizer(texts, ranks, SEED)
    (work / "tiktoken.model").write_text(corpus.tiktoken_lines(tokens))
    print(json.dumps({"characters": texts.sizes, "ranks": len(tokens)}))


def load_texts(work: Path) -> Any:
    """The free texts and the codec of a prepared folder."""
    import base64

    from train import corpus

    lines = (work / "tiktoken.model").read_text().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    return corpus.Texts(corpus.unpack(work / "packages")), corpus.Codec(tokens)


def build_shape(vocab: int) -> Any:
    """The mini model's sizes."""
    from train.network import Shape

    return Shape(vocab_size=vocab, num_experts=48, moe_intermediate_size=64)


class Run:
    """What the processes of one run share: weights, gradients, loads, and where they are."""

    def __init__(self, work: Path, workers: int, micro_rows: int, micros: int, minutes: float, decay: float) -> None:
        import torch
        import torch.multiprocessing as mp
        from train import fused
        from train.network import Network

        fused.build(work)
        self.work, self.workers, self.micro_rows, self.micros = work, workers, micro_rows, micros
        self.budget_s, self.decay = minutes * 60, decay
        self.texts, self.codec = load_texts(work)
        self.shape = build_shape(self.codec.ranks + 256)
        self.network = Network(self.shape, torch.Generator().manual_seed(SEED))
        for p in self.network.params.values():
            p.share_memory_()
        for b in self.network.bias.values():
            b.share_memory_()
        self.gradients = [
            {n: torch.zeros_like(p).share_memory_() for n, p in self.network.params.items()} for _ in range(workers)
        ]
        layers = self.shape.num_hidden_layers
        self.loads = torch.zeros(workers, layers, self.shape.num_experts).share_memory_()
        self.losses = torch.zeros(workers, 6, dtype=torch.float64).share_memory_()
        context = mp.get_context("fork")
        self.barrier = context.Barrier(workers)
        self.next_micro = context.Value("i", 0)
        self.progress = context.Value("d", 0.0)
        self.stop = context.Value("i", 0)
        self.save = context.Value("i", 0)
        self.context = context
        names = sorted(self.network.params, key=lambda n: -self.network.params[n].numel())
        self.mine: list[list[str]] = [[] for _ in range(workers)]  # each worker moves a share of about equal size
        filled = [0] * workers
        for n in names:
            w = filled.index(min(filled))
            self.mine[w].append(n)
            filled[w] += self.network.params[n].numel()
        self.first_step, self.tokens, self.spent_s = 0, 0, 0.0
        state = work / "state.pt"
        self.resumed = torch.load(state, weights_only=True) if state.exists() else None
        if self.resumed:
            self.first_step, self.spent_s = self.resumed["step"], self.resumed["spent_s"]
            self.tokens = self.resumed["tokens"]
            for layer, b in self.network.bias.items():
                b.copy_(self.resumed["bias"][layer])

    def batch(self, step: int, micro: int) -> tuple[Any, Any]:
        """The rows of one micro-batch: a function of seed, step and number alone."""
        import torch
        from train.corpus import rows

        source = rows(self.codec, self.texts, random.Random(f"{SEED}/{step}/{micro}"), ROW)
        ids, weights = zip(*(next(source) for _ in range(self.micro_rows)), strict=True)
        return torch.tensor(ids), torch.tensor(weights)

    def validation(self) -> list[Any]:
        """Ids of the held-out text: a few rows of each source."""
        import torch

        out = []
        for name in ("bible", "fortunes", "glosses"):
            ids = self.codec.text(" ".join(self.texts.held[name]))[: 2 * (ROW + 1)]
            out += list(torch.tensor(ids[: len(ids) // (ROW + 1) * (ROW + 1)]).view(-1, ROW + 1))
        return out


def worker(rank: int, run: Run) -> None:
    """One process: gradients of the micro-batches it grabs, then its share of the optimiser's step."""
    import torch
    import torch.nn.functional as F
    from train.conversations import SPOKEN
    from train.corpus import REPEATED
    from train.optimise import Optimiser

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    net = run.network
    optimiser = Optimiser({n: net.params[n] for n in run.mine[rank]})
    if run.resumed:
        optimiser.restore(run.resumed["optimiser"], run.resumed["count"])
    run.barrier.wait()
    shared = net.params
    net.params = {n: p.detach().requires_grad_(True) for n, p in shared.items()}
    for n, p in net.params.items():
        p.grad = run.gradients[rank][n]
    start = time.monotonic() - run.spent_s
    saved = time.monotonic()
    step = run.first_step
    log = (run.work / "log.jsonl").open("a") if rank == 0 else None
    while True:
        if rank == 0:
            run.progress.value = min(1.0, (time.monotonic() - start) / run.budget_s)
            run.stop.value = int(run.progress.value >= 1.0 or (run.work / "stop").exists())
            run.next_micro.value = 0
        for n, g in run.gradients[rank].items():
            if not (_is_slow(n) and step % SLOW):
                g.zero_()
        run.losses[rank].zero_()
        run.loads[rank].zero_()
        run.barrier.wait()
        if run.stop.value:
            break
        while True:
            with run.next_micro.get_lock():
                micro = run.next_micro.value
                run.next_micro.value += 1
            if micro >= run.micros:
                break
            ids, weights = run.batch(step, micro)
            weight = weights[:, 1:].reshape(-1)
            entropy = F.cross_entropy(net.logits(net.forward(ids[:, :-1])), ids[:, 1:].reshape(-1), reduction="none")
            # rows differ little in total weight: dividing by a constant keeps micro-batches independent
            ((entropy * weight).sum() / (run.micros * run.micro_rows * ROW * 0.6)).backward()
            entropy = entropy.detach()
            said, repeated = weight == SPOKEN, weight == REPEATED
            run.losses[rank] += torch.tensor(
                [(entropy * weight).sum(), weight.sum(), entropy[said].sum(), said.sum(), entropy[repeated].sum(),
                 repeated.sum()]
            )  # fmt: skip
            for layer, counts in net.loads.items():
                run.loads[rank, layer] += counts
        run.barrier.wait()
        if not bool(run.losses.isfinite().all()):
            raise RuntimeError(f"step {step}: the loss is not finite; {run.work}/state.pt holds the last good state")
        computed = time.monotonic()
        scale = learning_scale(run.progress.value, run.decay)
        moved = [n for n in run.mine[rank] if step % SLOW == SLOW - 1 or not _is_slow(n)]
        total = {n: sum(g[n] for g in run.gradients) for n in moved}
        optimiser.step(total, scale)
        if rank == run.workers - 1:
            loads = run.loads.sum(0)
            for layer, bias in net.bias.items():
                # the sign rule: an expert chosen less than its share becomes easier to choose
                bias.add_(torch.sign(loads[layer].mean() - loads[layer]), alpha=0.01 * scale)
        step += 1
        if log:
            sums = run.losses.sum(0).tolist()
            share = run.loads.sum(0)[1:]
            entry = {
                "step": step,
                "seconds": round(time.monotonic() - start, 1),
                "tokens": run.tokens + (step - run.first_step) * run.micros * run.micro_rows * ROW,
                "loss": round(sums[0] / sums[1], 4),
                "chat": round(sums[2] / max(1, sums[3]), 4),
                "echo": round(sums[4] / max(1, sums[5]), 4),
                "rate": round(scale, 4),
                "update_s": round(time.monotonic() - computed, 2),
                "imbalance": round(float((share.amax(1) / share.mean(1)).mean()), 3),
            }
            if step % 50 == 0:
                with torch.no_grad():
                    rows = torch.stack(run.validation())
                    kept = net.params
                    net.params = {n: p.detach() for n, p in kept.items()}
                    logits = net.logits(net.forward(rows[:, :-1]))
                    net.params = kept
                    entry["held_out"] = round(float(F.cross_entropy(logits, rows[:, 1:].reshape(-1))), 4)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            run.save.value = int(time.monotonic() - saved > 180)  # one clock decides for all
        run.barrier.wait()
        if run.save.value:
            saved = _save(rank, run, optimiser, step, time.monotonic() - start)
    _save(rank, run, optimiser, step, time.monotonic() - start)


def _is_slow(name: str) -> bool:
    """Experts see few tokens each and are two thirds of the weights: they move every fourth step, on four batches."""
    return ".experts.w" in name


def _save(rank: int, run: Run, optimiser: Any, step: int, spent_s: float) -> float:
    """Every worker writes its share; rank 0 joins them into `state.pt` once both are there."""
    import torch

    torch.save(optimiser.state(), run.work / f"part{rank}.pt")
    run.barrier.wait()
    if rank == 0:
        parts = [torch.load(run.work / f"part{r}.pt", weights_only=True) for r in range(run.workers)]
        merged = {kind: {n: t for p in parts for n, t in p[kind].items()} for kind in ("master", "first", "second")}
        state = {
            "step": step,
            "tokens": run.tokens + (step - run.first_step) * run.micros * run.micro_rows * ROW,
            "spent_s": spent_s,
            "count": parts[0]["count"],
            "optimiser": merged,
            "bias": dict(run.network.bias),
            "shape": run.shape.as_dict(),
        }
        torch.save(state, run.work / "state.tmp")
        os.replace(run.work / "state.tmp", run.work / "state.pt")
    run.barrier.wait()
    return time.monotonic()


def train(work: Path, minutes: float, decay: float, workers: int, micro_rows: int, micros: int) -> None:
    """The run, from scratch or from where `work` left off, until `minutes` of running time are used."""
    import torch

    torch.set_num_threads(1)
    run = Run(work, workers, micro_rows, micros, minutes, decay)
    children = [run.context.Process(target=worker, args=(rank, run)) for rank in range(1, workers)]
    for child in children:
        child.start()
    worker(0, run)
    for child in children:
        child.join()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "train", "export"):
        sub = commands.add_parser(name)
        sub.add_argument("--work", type=Path, required=True, help="folder for packages, state and log")
        if name == "prepare":
            sub.add_argument("--ranks", type=int, default=2816)
        if name == "export":
            here = Path(__file__).resolve().parent
            sub.add_argument("--checkpoint", type=Path, default=here / "data" / "mini")
            sub.add_argument("--golden", type=Path, default=here.parent / "tests" / "golden")
        if name == "train":
            sub.add_argument("--minutes", type=float, default=60.0)
            sub.add_argument("--decay", type=float, default=0.6, help="share of the run in which the rate falls")
            sub.add_argument("--workers", type=int, default=2)
            sub.add_argument("--micro-rows", type=int, default=2)
            sub.add_argument("--micros", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.command == "prepare":
        prepare(args.work, args.ranks)
    elif args.command == "train":
        train(args.work, args.minutes, args.decay, args.workers, args.micro_rows, args.micros)
    else:
        from train.export import export

        export(args.work, args.checkpoint, args.golden)


if __name__ == "__main__":
    main()
