"""An ordinary loop in replicas, in which something befalls one process in its third step: ends.py FAULT RANK."""

import os
import signal
import sys

import torch
import torch.nn.functional as F

import stronghold
from stronghold.distributed import watch
from tests.distributed.cases import residual


def befall(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "end":
        sys.exit(0)


if __name__ == "__main__":
    fault, rank = sys.argv[1:]
    torch.set_num_threads(1)
    watch.BEAT_S, watch.LOST_S, watch.ENDED_S = 0.5, 6.0, 1.0
    model = stronghold.replicate(residual(), device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters())
    for step in range(100):
        if step == 2 and os.environ["RANK"] == rank:
            befall(fault)
        F.cross_entropy(model(torch.randn(4, 3, 4)), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
