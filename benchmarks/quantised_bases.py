"""Trains LoRA over a streamed base in each of the types that it may be kept in, and says what the base takes.

    python benchmarks/quantised_bases.py [--width 1024] [--layers 4] [--steps 3]

The model is a Llama with random weights in bf16. For each type its layers' linear weights are quantised, by the library
that the type is of; the same model is trained resident by PyTorch and PEFT, and through a window of two layers. A line
has the bytes that the quantised weights take per parameter, what all of the host's memory takes by the report, and
whether losses and every adapter's gradient were those of the resident model, to the bit. Appends JSON lines to
results/quantised_bases.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

import stronghold
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.unit import all_parameters, unit_of

RESULTS = Path(__file__).parent.parent / "results" / "quantised_bases.jsonl"
KINDS = ("bf16", "int8", "torchao int8", "torchao float8", "nf4", "nf4_nested")
TOKENS = 32


def base(kind: str, folder: Path, *, streamed: bool) -> nn.Module:
    """Returns the model with its base in a type: read by transformers, or streamed by stronghold where that can be."""
    own = kind in ("int8", "nf4", "nf4_nested")
    if streamed and own:
        return stronghold.load(folder, quantize=kind, device="cpu", window=2).requires_grad_(False)
    asked: Any = None
    if own:
        asked = transformers.BitsAndBytesConfig(
            load_in_8bit=kind == "int8",
            load_in_4bit=kind != "int8",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=kind == "nf4_nested",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=asked, dtype=torch.bfloat16, device_map="cpu"
    )
    if kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(model.model.layers, Float8WeightOnlyConfig() if "float8" in kind else Int8WeightOnlyConfig())
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.requires_grad_(False)
    return stronghold.offload(model, device="cpu", window=2) if streamed else model


def learn(model: nn.Module, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the losses of ``steps``, and the adapters' gradients in the last one."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()  # type: ignore[arg-type]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.01 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad.clone() for parameter in trained if parameter.grad is not None]


def measure(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    expected = learn(base(kind, folder, streamed=False), options.steps)
    model = base(kind, folder, streamed=True)
    config: Any = model.config
    per_layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    moved = {name: parameter for name, parameter in all_parameters(model) if "layers" in name and "norm" not in name}
    taken = sum(parameter.nbytes for parameter in moved.values())  # the store's own memory: scales are of it too
    report = stronghold.report(model)
    losses, gradients = learn(model, options.steps)
    same = losses == expected[0] and all(map(torch.equal, gradients, expected[1]))
    assert all(unit_of(parameter) is not None for parameter in moved.values())
    return {
        "kind": kind,
        "bytes_per_parameter": taken / (per_layer * options.layers),
        "quantised_parameters": per_layer * options.layers,
        "host_bytes": report.host_bytes,
        "parameters": report.parameters,
        "window": report.window,
        "losses": losses,
        "bitwise": same and len(gradients) == len(expected[1]) > 0,
    }


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    shape = {"hidden_size": options.width, "intermediate_size": options.width * 11 // 4, "vocab_size": 256}
    heads = max(1, options.width // 64)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=options.layers, num_attention_heads=heads, dtype="bfloat16", **shape
        )
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
        for kind in options.kinds:
            found = measure(kind, Path(directory), options)
            record = {**shape, "layers": options.layers, "tokens": TOKENS, **found, "machine": describe_machine()}
            append_record(options.out, record)
            print(
                f"{kind}: {found['bytes_per_parameter']:.4f} bytes per parameter of the linear layers, "
                f"{'bitwise' if found['bitwise'] else 'NOT'} the resident model's",
                flush=True,
            )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, metavar="N", help="of the model (default: 1024)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND", help="(default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the record")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
