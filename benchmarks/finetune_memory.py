"""What fine-tuning takes of host memory per parameter: LoRA over a base in bf16, and all of a Flux-shaped transformer.

    python benchmarks/finetune_memory.py [--kind lora|flux] [--size 768] [--steps 2]

Each is trained for some steps in a process of its own, all layers in RAM and two in the window, on the CPU. What counts
is what ``report`` says of the host: of LoRA's base, frozen, before there are adapters; of the other all but the
layers' inputs, gradients on their way with it. Beside it stands by how much the process's resident set (VmRSS) has
grown from before the model was built to behind the last step. Appends JSON lines to results/finetune_memory.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results" / "finetune_memory.jsonl"
KINDS = ("lora", "flux")


def resident_bytes() -> int:
    from stronghold.native import return_free_memory

    gc.collect()
    return_free_memory()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def lora(size: int, steps: int) -> dict[str, Any]:
    """Trains LoRA adapters in fp32 over a frozen Llama in bf16, with 12 layers."""
    import peft
    import torch
    import transformers
    from accelerate import init_empty_weights

    import stronghold

    config = transformers.LlamaConfig(
        hidden_size=size,
        intermediate_size=size * 11 // 4,
        num_hidden_layers=12,
        num_attention_heads=size // 64,
        vocab_size=2000,
        use_cache=False,
    )
    before = resident_bytes()
    with init_empty_weights(include_buffers=False):
        model = transformers.LlamaForCausalLM(config)
    weights = model._init_weights
    model = model.requires_grad_(False)
    stronghold.offload(model, device="cpu", window=2, dtype=torch.bfloat16, weights=weights)
    base = stronghold.report(model)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear")).train()
    optimizer = stronghold.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-4)
    ids = torch.randint(0, 2000, (1, 64))
    losses = trained(optimizer, lambda: adapted(input_ids=ids, labels=ids).loss, steps)
    report = stronghold.report(adapted)
    return {
        "parameters": base.parameters,
        "base_host_bytes": base.host_bytes,
        "trained": report.trainable_parameters,
        "host_bytes": report.host_bytes,
        "device_bytes": report.device_bytes,
        "grown_bytes": resident_bytes() - before,
        "bytes_per_parameter": base.host_bytes / base.parameters,
        "losses": losses,
    }


def flux(size: int, steps: int) -> dict[str, Any]:
    """Trains all of a Flux-shaped transformer, of half the depth, with exact masters and moments in eight bits."""
    import torch

    import stronghold

    spec = importlib.util.spec_from_file_location("flux", Path(__file__).parents[1] / "examples" / "flux.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    before = resident_bytes()
    torch.manual_seed(0)
    model = example.Flux(double=9, single=19, size=size, axes=(16, 24, 24)).to(torch.bfloat16)
    stronghold.offload(model, device="cpu", window=2, dtype=torch.bfloat16, activations="host")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-4, states="8bit", update="in_backward")
    given, generator = example.batch("cpu", torch.bfloat16, samples=2), torch.Generator().manual_seed(1)
    losses = trained(optimizer, lambda: example.flow_matching_loss(model, generator=generator, **given), steps)
    report = stronghold.report(model)
    return {
        "parameters": report.parameters,
        "trained": report.trainable_parameters,
        "host_bytes": report.host_bytes,
        "inputs_host_bytes": report.inputs_host_bytes,
        "device_bytes": report.device_bytes,
        "grown_bytes": resident_bytes() - before,
        "bytes_per_parameter": (report.host_bytes - report.inputs_host_bytes) / report.parameters,
        "losses": losses,
    }


def trained(optimizer: Any, loss_of: Callable[[], Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.wait()
    return losses


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.inner:
        print(json.dumps({"lora": lora, "flux": flux}[options.kind](options.size, options.steps)))
        return
    from stronghold.lab.records.json_lines import append_record, describe_machine
    from stronghold.units import format_bytes

    for kind in KINDS if options.kind is None else (options.kind,):
        command = [sys.executable, __file__, "--inner", "--kind", kind]
        command += ["--size", str(options.size), "--steps", str(options.steps)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        append_record(options.out, {"kind": kind, "size": options.size, **found, "machine": describe_machine()})
        print(
            f"{kind}: {found['parameters'] / 1e6:.0f} M parameters, {found['bytes_per_parameter']:.3f} bytes each in "
            f"host memory, {format_bytes(found['host_bytes'])} in all; the process has grown by "
            f"{format_bytes(found['grown_bytes'])}"
        )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, help="(default: both)")
    parser.add_argument("--size", type=int, default=768, metavar="N", help="width of the model (default: 768)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
