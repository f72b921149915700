"""Creates, saves, loads, evaluates and copies a model of several hundred MB; prints its peak memory after each.

Run by tests/test_pretrained.py in a process of its own. Holds no tests.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

import stronghold
from stronghold.formats.model_config import build
from stronghold.lab.models.files import initialiser_of

CONFIG = transformers.LlamaConfig(
    vocab_size=512, hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=8
)


def status(field: str) -> int:
    """Returns a line of /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    CONFIG.save_pretrained(folder)
    model = build(folder / "config.json")
    size = sum(p.numel() for p in model.parameters()) * 4
    peaks = {"model": size, "before": status("VmRSS")}
    options = {"device": "cpu", "window": 2, "dtype": torch.bfloat16}
    stronghold.offload(model, store=folder / "created", weights=initialiser_of(model), **options)
    peaks["create"] = status("VmHWM")
    stronghold.save(model, folder / "saved", dtype=torch.float32, max_shard_size="100MB")
    peaks["save"] = status("VmHWM")
    loaded = stronghold.load(folder / "saved", store=folder / "loaded", **options)
    peaks["load"] = status("VmHWM")
    with torch.no_grad():
        logits = [one(torch.arange(40)[None]).logits for one in (model, loaded)]
    assert torch.equal(*logits)
    peaks["evaluate"] = status("VmHWM")
    state = loaded.state_dict()
    peaks["state_dict"] = status("VmHWM")
    del state
    stronghold.save(loaded, folder / "saved")
    peaks["save again"] = status("VmHWM")
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
