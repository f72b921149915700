"""Fine-tunes a model of 7 B parameters by LoRA over a base on disk, and says what memory that takes.

    python -m benchmarks.lora_memory --directory /mnt/nvme/lora [--base bf16] [--layers 32] [--steps 3] [--tokens 64]

A checkpoint of a Llama of 7 B's shape with random weights in bf16 is written there first, 13.5 GB, if there is none;
with 64 layers it has 26.5 GB. Then a process of its own reads it by ``stronghold.load`` into a store on the same disk,
in four bits (``quantize="nf4_nested"``, 4 GB) or as it is, adds adapters of PEFT's to all linear layers, and takes some
steps on one sequence of random tokens, which it learns by heart. Memory is the process's peak resident set (VmHWM), the
interpreter and its libraries with it. Appends one JSON line to results/lora_memory.jsonl.
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

RESULTS = Path(__file__).parent.parent / "results" / "lora_memory.jsonl"
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def write(folder: Path, layers: int) -> None:
    """Writes a Llama with random weights."""
    import torch
    import transformers

    from benchmarks.random_checkpoint import write_checkpoint

    config = transformers.LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **SHAPE)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    write_checkpoint(folder, config, model)


def run(directory: Path, base: str, steps: int, tokens: int) -> None:
    """Trains in this process and prints, as JSON, what it took."""
    import peft
    import torch

    import stronghold

    shutil.rmtree(directory / "store", ignore_errors=True)
    load_begin = time.perf_counter()
    model = stronghold.load(
        directory / "model",
        quantize=None if base == "bf16" else base,
        frozen=True,
        device="cpu",
        window=2,
        store=str(directory / "store"),
    )
    load_s = time.perf_counter() - load_begin
    print(f"loaded in {load_s:.0f} s", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()
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
        print(f"step {len(losses)}/{steps}: loss {losses[-1]:.4f} in {seconds[-1]:.0f} s", file=sys.stderr, flush=True)
    report = stronghold.report(model)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    elements = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    print(
        json.dumps(
            {
                "peak_resident_bytes": int(peak.split()[1]) * 1024,
                "disk_bytes": report.disk_bytes,
                "device_bytes": report.device_bytes,
                "host_bytes": report.host_bytes,
                "elements_as_packed": elements,
                "trained": report.trainable_parameters,
                "losses": losses,
                "step_s": seconds,
                "load_s": load_s,
            }
        )
    )


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.inner:
        run(options.directory, options.base, options.steps, options.tokens)
        return
    from stronghold.lab.records.json_lines import append_record, describe_machine
    from stronghold.units import format_bytes

    folder = options.directory / "model"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, options.layers)
    command = [sys.executable, __file__, "--inner", "--directory", str(options.directory)]
    command += ["--base", options.base, "--steps", str(options.steps), "--tokens", str(options.tokens)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    shutil.rmtree(options.directory / "store", ignore_errors=True)
    asked = {"layers": options.layers, "base": options.base, "tokens": options.tokens}
    checkpoint_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    record = {**SHAPE, **asked, "checkpoint_bytes": checkpoint_bytes, **found, "machine": describe_machine()}
    append_record(options.out, record)
    print(
        f"{options.layers} layers of width {SHAPE['hidden_size']}, LoRA over {options.base} from disk: "
        f"{format_bytes(found['peak_resident_bytes'])} resident at the peak, {format_bytes(found['disk_bytes'])} on "
        f"disk, losses {', '.join(f'{loss:.3f}' for loss in found['losses'])}, {found['step_s'][-1]:.0f} s a step"
    )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        metavar="DIR",
        help="on a disk with 20 GB free, in bf16 twice the checkpoint",
    )
    parser.add_argument("--base", choices=("nf4_nested", "bf16"), default="nf4_nested", help="(default: nf4_nested)")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of the sequence (default: 64)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the record")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
