"""Records and logs as the cases read them, small enough to reckon by hand."""

import pytest

from stronghold.lab.cases.machines import TINY
from stronghold.lab.cases.measurement import from_record

HOST = {"processor": "Some CPU", "cores": 2, "memory_bytes": 8 * 2**30}
MACHINE = {"time": "2026-01-01T00:00:00+00:00", "host": HOST, "gpus": [], "commit": "a" * 40}


def make_record(method="stronghold", layers=2, window=1, seconds=0.5, *, machine=None, **other):
    """Returns a run's record in the settings of the tiny machine: 0.9 to 1.2 times ``seconds`` a step."""
    settings = {"method": method, "path": None, "layers": layers, "window": window, "device": "cpu", **TINY.shape}
    summary = {
        "iteration_s": seconds,
        "iteration_s_p10": seconds * 0.9,
        "iteration_s_p90": seconds * 1.2,
        "steps": 5,
        "first_loss": 6.5,
        "last_loss": 6.25,
        "device_bytes": 1000,
        "peak_device_bytes": 0,
        "peak_host_bytes": 3_000,
    }
    settings |= other.pop("settings", {})
    summary |= other.pop("summary", {})
    record = {"settings": settings, "machine": MACHINE | (machine or {}), "parameters": 1_000 * layers}
    return record | {"summary": summary, "interrupted": False} | other


def make_trial(method="stronghold", layers=2, reason="", **other):
    """Returns a trial's record, under the limits of the tiny machine."""
    limits = {"device_bytes": TINY.device_limit, "host_bytes": TINY.host_limit}
    return make_record(method, layers, limits=limits, reason=reason, **other)


def artifact_log(*, method="stronghold", layers=32, window=15, times=(6600.0, 6000.0, 5900.0, 6100.0), loss="1.0E+01"):
    """Returns a log of the artifact's format, of as many tens of iterations as ``times`` has."""
    arguments = {
        "num_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "seq_length": 1024,
        "params_dtype": "torch.float32",
        "distribute_checkpointed_activations": False,
    }
    if method in ("zero-offload", "zero-infinity", "zero-infinity-nvme"):
        stage = 2 if method == "zero-offload" else 3
        config = "nvme" if method.endswith("nvme") else "cpu"
        arguments |= {"batch_size": 4, "deepspeed": True, "zero_stage": stage, "deepspeed_config": f"a/{config}.json"}
    else:
        arguments |= {"global_batch_size": 4, "micro_batch_size": 4}
        arguments |= {"enable_gl": True, "gl_window_size": window} if method == "stronghold" else {}
        arguments |= {"enable_l2l": True} if method == "l2l" else {}
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (40 - len(name))} {value}" for name, value in arguments.items()]
    lines += ["  scaled_upper_triang_masked_softmax_fusion  False", "--------- end of arguments ---------"]
    lines += [" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1716588544"]
    for number, ms in enumerate(times, start=1):
        lines += [
            f" iteration {10 * number:8}/{50:8} | elapsed time per iteration (ms): {ms:.1f} | learning rate: 4.687E-07 "
            f"| global batch size:     4 | lm loss: {loss} | loss scale: 1.0 | number of nan iterations:   0 |",
            "Effective Tera Flops per GPU: 8.5 and total parameters 1.717 B",
            f"NumWorkers: 1; SamplesPerStep: 4; IterationTime: {ms / 1e3};  SamplesPerSecond: {4e3 / ms}",
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def measure():
    """Gives what turns records into measurements, each with a source of its own."""
    return lambda *records: [from_record(record, f"record {at}") for at, record in enumerate(records, start=1)]
