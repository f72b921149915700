"""Fine-tunes layers of 128 experts by LoRA, whole and in parts, from disk, and says what memory each takes.

    python -m benchmarks.experts_memory --directory /mnt/nvme/experts [--layers 4] [--parts 16] [--tokens 64]

A checkpoint of a Qwen3-30B-A3B of fewer layers with random weights in bf16 is written there first, 1.2 GB a layer, if
there is none. Then processes of their own read it by ``stronghold.load`` into a store on the same disk, once with its
layers whole and once by ``experts_per_part``, each with a window of two, add adapters of PEFT's to the attention, and
take some steps on one sequence of random tokens. Memory is the process's peak resident set (VmHWM), the interpreter
and its libraries with it. The losses must be the same to the bit. Appends one JSON line a way to
results/experts_memory.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "experts_memory.jsonl"
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
}


def write(folder: Path, layers: int) -> None:
    """Writes a model with random weights, experts apart as on hubs."""
    import torch
    import transformers

    from benchmarks.random_checkpoint import write_checkpoint

    config = transformers.Qwen3MoeConfig(num_hidden_layers=layers, dtype="bfloat16", **SHAPE)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    write_checkpoint(folder, config, model)


def run(directory: Path, experts_per_part: int | None, steps: int, tokens: int) -> None:
    """Trains in this process and prints, as JSON, what it took."""
    import peft
    import torch

    import stronghold

    shutil.rmtree(directory / "store", ignore_errors=True)
    model = stronghold.load(
        directory / "model",
        experts_per_part=experts_per_part,
        frozen=True,
        device="cpu",
        window=2,
        store=str(directory / "store"),
    )
    model.config._experts_implementation = "eager"
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(model, adapters).train()
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens))
    losses, seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        print(f"step {len(losses)}/{steps}: loss {losses[-1]:.4f} in {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    report = stronghold.report(model)
    assert report.step is not None
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(
        json.dumps(
            {
                "experts_per_part": experts_per_part,
                "peak_resident_bytes": int(peak.split()[1]) * 1024,
                "process_bytes": report.process_host_bytes,
                "slots_bytes": report.slots_device_bytes,
                "disk_bytes": report.disk_bytes,
                "fetches": report.step.fetches,
                "fetched_bytes": report.step.fetched_bytes,
                "spared_fetches": report.step.spared_fetches,
                "losses": losses,
                "step_s": seconds,
            }
        )
    )


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.inner:
        run(options.directory, options.parts or None, options.steps, options.tokens)
        return
    from stronghold.lab.records.json_lines import append_record, describe_machine
    from stronghold.units import format_bytes

    folder = options.directory / "model"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, options.layers)
    expected = None
    for parts in (0, options.parts):
        command = [sys.executable, __file__, "--inner", "--directory", str(options.directory), "--parts", str(parts)]
        command += ["--steps", str(options.steps), "--tokens", str(options.tokens)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        shutil.rmtree(options.directory / "store", ignore_errors=True)
        record = {**SHAPE, "layers": options.layers, "tokens": options.tokens, **found, "machine": describe_machine()}
        append_record(options.out, record)
        print(
            f"{'layers whole' if not parts else f'{parts} experts a part'}: {format_bytes(found['slots_bytes'])} in "
            f"slots, {format_bytes(found['peak_resident_bytes'])} resident at the peak, {found['spared_fetches']} "
            f"fetches spared, losses {', '.join(f'{loss:.4f}' for loss in found['losses'])}, "
            f"{found['step_s'][-1]:.1f} s a step",
            flush=True,
        )
        if expected is not None and found["losses"] != expected:
            raise SystemExit("the losses differ")
        expected = found["losses"]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, metavar="DIR", help="on a disk with 12 GB free")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--parts", type=int, default=16, metavar="K", help="experts in a part (default: 16)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of the sequence (default: 64)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the record")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
