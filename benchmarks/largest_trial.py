"""Three steps of the reference GPT as PyTorch's ordinary loop or as DeepSpeed trains it: a trial of largest.py.

    python benchmarks/largest_trial.py pytorch --layers 8 --log LOG.jsonl [--dtype bf16]
    python benchmarks/largest_trial.py zero-infinity --layers 8 --log LOG.jsonl --store DIR

Each appends to LOG the model's size and the loss of every step, as ``stronghold train`` does, on the same batches.
Activations are computed again in the backward pass, as stronghold does: what is compared is what else a method holds.
``--prepare`` lets DeepSpeed compile its operators (zero-infinity needs libaio's headers), and trains nothing.

ZeRO-Infinity and ZeRO-Offload run on DeepSpeed's CPU accelerator, in one process, with the settings of ``zero_config``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stronghold.lab.command import ERROR, in_one_line
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import standard_library
from stronghold.lab.data.tokens import ByteTokenizer, tokenize
from stronghold.lab.methods import decay_groups
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import append_record

DEVICES = {"zero-infinity": "nvme", "zero-offload": "cpu"}
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class Loss(nn.Module):
    """The loss alone, for DeepSpeed looks for tensors in what its outermost module returns."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens, labels=tokens).loss
        assert loss is not None
        return loss


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    if options.method == "pytorch":
        config = shape(options)
        train(options, config, pytorch(config, options.dtype, options.lr))
        return
    begin_deepspeed()
    if options.prepare:
        prepare(DEVICES[options.method])
        return
    config = shape(options)
    train(options, config, zero(config, zero_config(config, DEVICES[options.method], options.store, options.lr)))


def pytorch(config: GPTConfig, dtype: str, lr: float) -> Callable[[Tensor], float]:
    """Returns the step of the ordinary loop. With ``dtype`` bf16 all of it is: weights, gradients and both moments."""
    torch.set_default_dtype({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model = GPT(config)
    recompute(model)
    optimizer = torch.optim.AdamW(decay_groups(model, WEIGHT_DECAY), lr=lr, betas=BETAS, fused=True)

    def step(tokens: Tensor) -> float:
        loss = model(tokens, labels=tokens).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def zero(config: GPTConfig, settings: dict[str, Any]) -> Callable[[Tensor], float]:
    """Returns the step of DeepSpeed's engine. The model never exists whole: each module is filled by itself."""
    import deepspeed

    importlib.import_module("torch._dynamo")  # while zero.Init has Tensor.__new__ replaced, torch fails to import it
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT(config)
    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
                model.initialize_module(module)
    recompute(model)
    # The head is the embedding's weight, used outside of that module: ZeRO 3 has to be told.
    deepspeed.zero.register_external_parameter(model, model.embedding.weight)
    engine, *_ = deepspeed.initialize(model=Loss(model), config=settings)

    def step(tokens: Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def zero_config(config: GPTConfig, device: str, path: str, lr: float) -> dict[str, Any]:
    """Returns DeepSpeed's settings for the least memory: nothing is kept, nothing is read ahead.

    ``device`` is "nvme" or "cpu". A buffer must hold the largest parameter, here the embedding, and two are the fewest:
    it and one matrix. AdamW's buffers hold the largest group: a group is closed as soon as it has as many elements as
    ``sub_group_size``, so that of the embedding has no other parameter in it. Gradients larger than their bucket do
    without. Pinned memory takes as much as it would hold, and a limit on locked memory would refuse it.
    """
    matrix = 4 * config.hidden**2
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": device,
                "nvme_path": path,
                "buffer_count": 2,
                "buffer_size": max(matrix, config.rows * config.hidden),
                "max_in_cpu": 0,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": device,
                "nvme_path": path,
                "buffer_count": 4,
                "pin_memory": False,
                "pipeline_read": False,
                "pipeline_write": False,
                "fast_init": True,
            },
            "sub_group_size": matrix,
            "reduce_bucket_size": matrix,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


def begin_deepspeed() -> None:
    """Tells DeepSpeed, before it is imported, that the CPU is its accelerator and this process is alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone | {"DS_ACCELERATOR": "cpu"})


def prepare(device: str) -> None:
    """Compiles what a trial uses, so that the compiler's memory is not counted as the trial's."""
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    deepspeed.init_distributed(dist_backend="gloo")
    CPUAdamBuilder().load()
    if device == "nvme":
        AsyncIOBuilder().load()


def recompute(model: GPT) -> None:
    """Lets each layer keep its input alone, and run again in the backward pass."""
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)


def train(options: argparse.Namespace, config: GPTConfig, step: Callable[[Tensor], float]) -> None:
    """Trains, and logs the size and each step as it ends."""
    tokens = tokenize(standard_library(), ByteTokenizer(config.separator))
    batches = Batches(tokens, batch=1, sequence=config.sequence)
    append_record(options.log, {"event": "start", "parameters": config.parameters})
    for number in range(options.steps):
        begin_s = time.perf_counter()
        loss = step(batches[number])
        append_record(
            options.log,
            {
                "event": "step",
                "step": number + 1,
                "loss": loss,
                "iteration_s": time.perf_counter() - begin_s,
                "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            },
        )


def shape(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        sequence=options.sequence,
        vocabulary=options.vocabulary,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("pytorch", *DEVICES))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=51200)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of pytorch (default: fp32)")
    parser.add_argument("--store", default=".", metavar="DIR", help="where ZeRO-Infinity swaps to")
    parser.add_argument("--log", metavar="FILE", help="the JSON lines to append to")
    parser.add_argument("--prepare", action="store_true", help="compile DeepSpeed's operators and end")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{ERROR}{in_one_line(error)}")  # as the command line tells it, for largest.py to find
