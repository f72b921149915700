"""Saving and loading a model on disk takes the memory of a tensor or two, however large the model is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, threading, time
import torch
from torch import nn
import stronghold

torch.set_num_threads(1)
SIZE, LAYERS = 1024, 24  # 4 MiB a tensor; 96 MiB of weights and 192 MiB of moments on disk

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

class Peak:
    def __enter__(self):
        self.begin = self.peak = resident()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.stop.wait(0.0005):
            self.peak = max(self.peak, resident())
    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        print((self.peak - self.begin) >> 20)

folder = sys.argv[1]
def prepare(number):
    model = stronghold.offload(Model(), window=1, store=f"{folder}/store{number}", device="cpu")
    return model, stronghold.AdamW(model.parameters())

model, optimizer = prepare(0)
model(torch.randn(1, SIZE)).backward()
optimizer.step()
optimizer.zero_grad()
optimizer.wait()
stronghold.checkpoint.save(f"{folder}/warm", model, optimizer)
model(torch.randn(1, SIZE)).backward()
optimizer.step()
optimizer.wait()
with Peak():
    path = stronghold.checkpoint.save(f"{folder}/saved", model, optimizer)
with Peak():
    stronghold.checkpoint.load(path, model, optimizer)
"""


def test_saving_and_loading_from_disk_is_bounded_by_a_few_tensors(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    saving, loading = map(int, found.stdout.split())
    assert saving <= 16, f"{saving} MiB more while saving 288 MiB"
    assert loading <= 36, f"{loading} MiB more while loading 288 MiB"
