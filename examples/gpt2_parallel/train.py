"""Trains GPT-2 on text in one of four ways, and says how long that took.

    torchrun --nproc-per-node 1 examples/gpt2_parallel/train.py one-process [--out runs.jsonl] …
    torchrun --nproc-per-node 2 examples/gpt2_parallel/train.py data-parallelism …
    torchrun --nproc-per-node 2 examples/gpt2_parallel/train.py stages --micro-batches 4 …
    torchrun --nproc-per-node 2 examples/gpt2_parallel/train.py stages-without-micro-batches …

Whatever the way, the model, the batches and so the losses are the same. A process computes on cores of its own, where
there are as many.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import config, gpt2, loss

import stronghold
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import read_documents, standard_library
from stronghold.lab.data.tokens import ByteTokenizer, tokenize
from stronghold.lab.records.json_lines import append_record, describe_machine

WAYS = {
    "one-process": "one process",
    "data-parallelism": "data parallelism",
    "stages": "stages",
    "stages-without-micro-batches": "stages without micro-batches",
}
SHAPE = ("layers", "hidden", "heads", "sequence")


def main() -> None:
    options = parse()
    processes = int(os.environ["WORLD_SIZE"])
    stages = processes if options.way.startswith("stages") else 1
    replicas = processes // stages
    micro_batches = options.micro_batches if options.way == "stages" else 1
    torch.set_num_threads(options.cores)
    machine = describe_machine()  # with all of its cores
    take_cores(options.cores)

    tokenizer = ByteTokenizer()
    documents = standard_library() if options.text is None else read_documents(options.text)
    batches = Batches(tokenize(documents, tokenizer), batch=options.batch, sequence=options.sequence)
    shape = {name: getattr(options, name) for name in SHAPE}
    torch.manual_seed(0)
    model = stronghold.pipeline(
        gpt2(config(**shape, vocabulary=tokenizer.ids)),
        loss=loss,
        stages=stages,
        replicas=replicas,
        micro_batches=micro_batches,
        balance="layers",
        schedule="1F1B" if micro_batches >= stages else "GPipe",  # 1F1B wants one for each stage
        device="cpu",
        activations="keep",
    )
    optimizer = stronghold.AdamW(model.parameters(), lr=options.lr, threads=options.cores)

    losses = []
    begin = time.perf_counter()
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            dist.barrier()
            begin = time.perf_counter()  # the update of the step before, which is still to be waited for, counts here
        tokens = batches[step]
        losses.append(model.forward_backward(tokens, tokens).item())
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - begin

    # A process counts the tokens whose loss it computes: a replica its part of each batch, the last stage all of it.
    has_loss = stages == 1 or dist.get_rank() == stages - 1
    tokens_counted = options.steps * options.batch * options.sequence // replicas if has_loss else 0
    ranks: list[Any] = [None] * processes
    dist.all_gather_object(ranks, {"training_seconds": seconds, "tokens_per_second": tokens_counted / seconds})
    if dist.get_rank() == 0:
        record = {
            "way": WAYS[options.way],
            "processes": processes,
            "cores_each": options.cores,
            "stages": stages,
            "replicas": replicas,
            "micro_batches": micro_batches,
            **shape,
            "vocabulary": tokenizer.ids,
            "text": "the standard library's source" if options.text is None else str(options.text),
            "batch": options.batch,
            "lr": options.lr,
            "warmup": options.warmup,
            "steps": options.steps,
            "training_seconds": statistics.mean(rank["training_seconds"] for rank in ranks),
            "tokens_per_second": sum(rank["tokens_per_second"] for rank in ranks),
            "ranks": ranks,
            "losses": losses,
            **machine,
        }
        print(
            f"{record['way']}: losses from {losses[0]:.4f} to {losses[-1]:.4f}; {options.steps} steps took "
            f"{record['training_seconds']:.3f} s, {record['tokens_per_second']:,.0f} tokens/s"
        )
        if options.out is not None:
            append_record(options.out, record)
    dist.destroy_process_group()


def take_cores(count: int) -> None:
    """Gives this process ``count`` cores of its own, where there are as many for each."""
    cores = sorted(os.sched_getaffinity(0))
    first = count * int(os.environ["LOCAL_RANK"])
    if len(cores) >= count * int(os.environ["LOCAL_WORLD_SIZE"]):
        os.sched_setaffinity(0, cores[first : first + count])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS, help="each process of several is a replica, or a stage")
    parser.add_argument("--text", type=Path, help="a file or folder of text (the Python standard library's source)")
    parser.add_argument("--layers", type=int, default=8, help="GPT-2's blocks (8)")
    parser.add_argument("--hidden", type=int, default=256, help="its width (256)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens, which are bytes, of a sample (128)")
    parser.add_argument("--batch", type=int, default=8, help="samples per step, of all replicas together (8)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a batch, by the way of stages (4)")
    parser.add_argument("--lr", type=float, default=3e-4, help="AdamW's learning rate (3e-4)")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed (2)")
    parser.add_argument("--steps", type=int, default=6, help="steps that are (6)")
    parser.add_argument("--cores", type=int, default=1, help="of each process, which has as many threads (1)")
    parser.add_argument("--out", type=Path, help="a file to append the run to, as a JSON line")
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 0:
        parser.error(f"--steps must be 1 or more, --warmup 0 or more (got {options.steps} and {options.warmup})")
    alone = options.way == "one-process"
    started = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 0
    if started != 1 if alone else started < 2:
        parser.error(
            f"{options.way} takes {'one process' if alone else 'two processes or more'} of torchrun (got {started}); "
            f"start it with torchrun --nproc-per-node {1 if alone else 2}"
        )
    return options


if __name__ == "__main__":
    main()
