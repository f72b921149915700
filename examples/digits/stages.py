"""The same training in stages, one in each process, and what each of them takes.

torchrun --nproc-per-node 2 examples/digits/stages.py [--balance time|memory|layers|4,3] [--micro-batches 4] …
"""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory import memory, table
from rich.console import Console
from run import Run
from task import arguments, batches, digits, network
from torch import Tensor

import stronghold


class CountingLoss:
    """Cross-entropy; the last stage, which alone has the scores, counts those that are right while it is tested."""

    right = 0

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.right += int((scores.argmax(1) == targets).sum())
        return F.cross_entropy(scores, targets)

    def take(self) -> int:
        """Returns in all processes how many were right since it was last called."""
        right = torch.tensor(self.right)
        dist.broadcast(right, src=dist.get_world_size() - 1)
        self.right = 0
        return int(right)


def balance(text: str) -> str | list[int]:
    return text if text in ("time", "memory", "layers") else [int(size) for size in text.split(",")]


parser = arguments(__doc__)
parser.add_argument(
    "--balance", type=balance, default="time", help="least time or least memory as measured, layers, or 4,3 (time)"
)
parser.add_argument("--micro-batches", type=int, default=4, help="of a batch (4)")
options = parser.parse_args()
if not dist.is_torchelastic_launched():
    parser.error(f"stages are processes: start it with torchrun --nproc-per-node 2 {parser.prog}")
stages = int(os.environ["WORLD_SIZE"])
device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)

learned, tested = digits()
counting = CountingLoss()
model = stronghold.pipeline(
    network(options.width),
    loss=counting,
    stages=stages,
    micro_batches=options.micro_batches,
    balance=options.balance,
    inputs=learned[: options.batch][0],
    device=device,
)
optimizer = stronghold.AdamW(model.parameters(), lr=options.lr)

run = Run(options, quiet=dist.get_rank() > 0)
for _ in range(options.epochs):
    for images, targets in batches(learned, options.batch):
        loss = model.forward_backward(images, targets)
        optimizer.step()
        optimizer.zero_grad()
        run.learned(loss.item())
    tested_loss = model.evaluate(*tested)
    run.tested(tested_loss.item(), counting.take() / len(tested[0]))

everyone: list[Any] = [None] * stages
dist.all_gather_object(everyone, memory(model, device))
Console(quiet=run.quiet).print(table(everyone, options))
run.write(stages=stages, balance=options.balance, micro_batches=options.micro_batches, memory=everyone)
dist.destroy_process_group()
