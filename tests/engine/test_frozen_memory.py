"""A frozen base takes what its packed weights take: to the byte by the report, to 2 % by a process's resident set.

The process reads a base of 150 MB and more into RAM, adds an adapter and takes a step. By then its resident set may
have grown by the packed weights, counted here from the shapes, and by the slots and the adapter. It has done the same
with a small model before, so that libraries and what they keep are there. What the C library's heap holds free is given
back before each look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import stronghold

ROOT = Path(__file__).parents[2]
WIDTH, WIDE = 1536, 4224
LINEAR = 4 * WIDTH * WIDTH + 3 * WIDTH * WIDE
"""Elements of a layer's linear weights."""
LAYERS = {"bf16": 3, "nf4": 11}
PACKED = {"bf16": 2.0, "nf4": 0.5 + 4 / 64}
"""Bytes per element: of NF4 half a byte, and a scale in fp32 for each 64."""
WORDS = 16

PROGRAM = """
import json, os, sys
import peft, torch
import stronghold
from stronghold.native import return_free_memory

torch.set_num_threads(1)

def resident():
    return_free_memory()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def trained(folder, layers):
    before = resident()
    model = stronghold.load(folder, dtype=torch.bfloat16, frozen=True, device="cpu", window=1)
    report, loaded = stronghold.report(model), resident() - before
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[layers - 1])
    model = peft.get_peft_model(model, config).train()
    ids = torch.arange(4)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    grown, adapted = resident() - before, stronghold.report(model)
    stronghold.close(model)
    beside = adapted.device_bytes + adapted.host_bytes - report.host_bytes
    return {"host_bytes": report.host_bytes, "loaded": loaded, "beside": beside, "trained": grown}

folder = sys.argv[1]
for kind in ("nf4", "bf16"):
    trained(f"{folder}/{kind}-small", 2)
print(json.dumps({kind: trained(f"{folder}/{kind}", layers) for kind, layers in json.loads(sys.argv[2]).items()}))
"""


def write(folder: Path) -> None:
    """Writes a Llama of two layers and one of many, whose layers are all alike, in bf16 and in NF4."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=WIDE, num_hidden_layers=2, num_attention_heads=24, vocab_size=WORDS
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "bf16-small")
    model = stronghold.load(folder / "bf16-small", quantize="nf4", device="cpu", window=1)
    model.save_pretrained(folder / "nf4-small")
    stronghold.close(model)
    for kind, layers in LAYERS.items():
        tensors = load_file(folder / f"{kind}-small" / "model.safetensors")
        many = {
            name.replace("layers.0.", f"layers.{number}."): tensor.clone()
            for number in range(layers)
            for name, tensor in tensors.items()
            if "layers.1." not in name
        }
        (folder / kind).mkdir()
        save_file(many, folder / kind / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / f"{kind}-small" / "config.json").read_text())
        (folder / kind / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": layers}))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("bases")
    write(folder)
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(LAYERS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, found.stderr
    result: dict[str, dict[str, int]] = json.loads(found.stdout.splitlines()[-1])
    print(result)
    return result


@pytest.mark.parametrize("kind", LAYERS)
def test_a_frozen_base_takes_what_its_packed_weights_take(measured: dict[str, dict[str, int]], kind: str) -> None:
    vectors_and_words = (2 * LAYERS[kind] + 1 + 2 * WORDS) * WIDTH
    packed = int(LAYERS[kind] * LINEAR * PACKED[kind]) + 2 * vectors_and_words
    found = measured[kind]
    assert packed > 150_000_000
    assert found["host_bytes"] == packed  # and the 16 bits that weights in bf16 have to be trained were never there
    assert found["loaded"] == pytest.approx(packed, rel=0.02)
    assert found["trained"] - found["beside"] == pytest.approx(packed, rel=0.02)
