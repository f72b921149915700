"""benchmarks/gpu: what is read out of a trace, what a step's spans come to, and what the probe's records say."""

import importlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER / "gpu")
    return importlib.import_module


@pytest.fixture
def spans(load):
    return load("trace_spans")


# ---- intervals ----


def test_intervals_are_merged_and_intersected(spans):
    assert spans.merged([(4, 5), (0, 1), (0.5, 2), (2, 3)]) == [(0, 3), (4, 5)]
    assert spans.common([(0, 3), (4, 6)], [(1, 2), (2.5, 4.5), (7, 8)]) == [(1, 2), (2.5, 3), (4, 4.5)]
    assert spans.common([], [(0, 1)]) == []
    assert spans.length_s([(0, 3), (4, 5)]) == 4


def test_of_calls_within_calls_the_outermost_stay(spans):
    calls = [spans.Call(name, *times) for name, times in {"b": (1, 2), "a": (0, 3), "c": (3, 5), "d": (3, 4)}.items()]
    assert [call.name for call in spans.outermost(calls)] == ["a", "c"]


# ---- gaps ----


def step(spans, *kernels, **given):
    works = [spans.Work(*kernel) for kernel in kernels]
    return spans.Step(begin_s=0.0, end_s=10.0, kernels=works, compute=works, **given)


def test_a_kernel_that_was_launched_before_waits_for_what_its_stream_was_told_to(spans):
    traced = step(
        spans,
        ("gemm", 0.0, 4.0, 0.0, 1),
        ("norm", 6.0, 10.0, 2.0, 1),
        waits=[spans.Call("wait UPDATED", -1.0, -0.9, 1), spans.Call("wait FETCHED", 1.0, 1.1, 1)],
        host=[spans.Call("cudaLaunchKernel", 2.0, 2.1, 1)],
    )
    assert spans.gaps_of(traced) == [spans.Gap(4.0, 6.0, "gemm", "norm", "device: wait FETCHED")]
    without = spans.gaps_of(replace(traced, waits=()))
    assert [gap.why for gap in without] == ["device: between two kernels that were launched"]


def test_a_kernel_that_is_launched_late_is_the_hosts_doing(spans):
    kernels = [("gemm", 0.0, 4.0, 0.0, 1), ("norm", 6.0, 10.0, 5.9, 1)]
    calls = [spans.Call("backward", 0.0, 9.0, 1), spans.Call("hook", 4.1, 5.5, 1), spans.Call("other", 4.0, 6.0, 2)]
    assert [gap.why for gap in spans.gaps_of(step(spans, *kernels, host=calls))] == ["host: hook"]
    assert [gap.why for gap in spans.gaps_of(step(spans, *kernels, host=calls[:1]))] == ["host: backward"]
    assert [gap.why for gap in spans.gaps_of(step(spans, *kernels))] == [spans.NO_OPERATION]
    waits = [spans.Call("wait WEIGHTS_READ", 4.2, 5.8, 1)]
    gaps = spans.gaps_of(step(spans, *kernels, host=calls, waits=waits))
    assert [gap.why for gap in gaps] == ["host: wait WEIGHTS_READ"]


def test_the_step_before_its_first_kernel_and_behind_its_last_is_a_gap_too(spans):
    gaps = spans.gaps_of(step(spans, ("one", 1.0, 5.0), ("within", 2.0, 3.0), ("two", 5.0, 9.0)))
    assert [(gap.begin_s, gap.end_s, gap.before, gap.after) for gap in gaps] == [
        (0.0, 1.0, "the step's beginning", "one"),
        (9.0, 10.0, "two", "the step's end"),
    ]


def test_what_a_step_comes_to(spans):
    traced = step(
        spans,
        ("gemm", 0.0, 4.0),
        ("norm", 6.0, 10.0),
        copies=[
            spans.Copy("up", 6_000_000_000, 2.0, 5.0),
            spans.Copy("up", 2_000_000_000, 5.0, 6.0),
            spans.Copy("down", 1_000_000_000, 8.0, 9.0),
        ],
    )
    found = spans.summary(traced, largest=1)
    assert found == {
        "traced_s": 10.0,
        "busy": 0.8,
        "kernels": 2,
        "hidden": 0.6,
        "copies": {
            "up": {"bytes": 8_000_000_000, "copying_s": 4.0, "gb_per_s": 2.0},
            "down": {"bytes": 1_000_000_000, "copying_s": 1.0, "gb_per_s": 1.0},
        },
        "why_s": {spans.NO_OPERATION: 2.0},
        "gaps": [{"at_s": 4.0, "length_s": 2.0, "before": "gemm", "after": "norm", "why": spans.NO_OPERATION}],
    }
    assert spans.summary(replace(traced, copies=()))["hidden"] is None


# ---- the profiler's events ----


def event(cat, name, ts, dur, tid=1, **arguments):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": arguments}


def test_a_trace_of_a_gpu_is_read(load, spans):
    events = load("trace_events")
    found = events.step_of(
        [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", events.STEP, 0, 50),
            event("user_annotation", events.STEP, 100, 100),
            event("user_annotation", "wait FETCHED", 105, 2),
            event("cuda_runtime", "cudaLaunchKernel", 102, 1, correlation=7),
            event("cpu_op", "aten::mm", 101, 3),
            event("kernel", "void gemm<int, A<2>>(float*)", 90, 30, 9, stream=7, correlation=7),
            event("kernel", "void at::native::vectorized(int)", 140, 20, 9, stream=7, correlation=8),
            event("kernel", "beside", 120, 10, 9, stream=20),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 110, 40, 9, stream=20, bytes=8000),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 170, 5, 9, stream=7, bytes=1),
            event("kernel", "of the step before", 10, 5, 9, stream=7),
        ],
        copies=[spans.Copy("down", 0, 0.0, 1.0)],  # not where the trace has them
    )
    us = pytest.approx
    assert (found.begin_s, found.end_s) == (us(100e-6), us(200e-6))
    assert [(w.name, w.begin_s, w.end_s) for w in found.compute] == [
        ("gemm", us(100e-6), us(120e-6)),
        ("vectorized", us(140e-6), us(160e-6)),
        ("Memcpy DtoD", us(170e-6), us(175e-6)),
    ]
    assert [w.name for w in found.kernels] == ["gemm", "beside", "vectorized", "Memcpy DtoD"]
    assert (found.compute[0].issued_s, found.compute[0].thread) == (us(102e-6), 1)
    assert found.compute[1].issued_s is None
    assert [(c.way, c.bytes, c.begin_s) for c in found.copies] == [("up", 8000, us(110e-6))]
    assert [call.name for call in found.waits] == ["wait FETCHED"]
    assert [call.name for call in found.host] == ["cudaLaunchKernel", "aten::mm"]


def test_a_trace_of_the_cpu_has_operations_for_kernels(load, spans):
    events = load("trace_events")
    copies = [spans.Copy("up", 0, 1e-6, 2e-6), spans.Copy("up", 0, 90e-6, 110e-6)]
    found = events.step_of(
        [
            event("user_annotation", events.STEP, 100, 100),
            event("cpu_op", "AddmmBackward0", 110, 50),
            event("cpu_op", "aten::mm", 120, 30),
            event("cpu_op", "aten::empty", 121, 1),
        ],
        copies,
    )
    assert [work.name for work in found.compute] == ["aten::mm"]
    assert [call.name for call in found.host] == ["AddmmBackward0"]
    assert found.copies == copies[1:]


def test_a_trace_without_a_step_is_refused(load):
    with pytest.raises(ValueError, match="must have a step"):
        load("trace_events").step_of([event("cpu_op", "aten::mm", 0, 1)])


def test_names_of_kernels_are_cut_to_what_tells_them_apart(load):
    short = load("trace_events").short
    assert short("void at::native::(anonymous namespace)::add<A<int>, 4>(int, float)") == "add"
    assert short("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT") == "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
    assert len(short("x" * 100)) == 56


# ---- the probe's tables ----


def product(n, tflops, kind="bf16"):
    return {"call": {"part": "product", "kind": kind, "m": n, "k": n, "n": n}, "tflops": tflops}


def drawn(load, tables, capsys):
    for table in tables:
        load("half_hour").draw(table)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_rates_are_beside_the_speed_of_light_of_the_device(load, capsys):
    probe = load("probe_table")
    records = [product(8192, 742.05), product(4096, 33.45, "fp32")]
    lines = drawn(load, probe.tables(records, "cuda", "NVIDIA H200"), capsys)
    assert "bf16, 8192 x 8192 x 8192 742 989.4 75%" in lines
    assert "fp32, 4096 x 4096 x 4096 33.45 66.9 50%" in lines
    assert "bf16, 8192 x 8192 x 8192 742" in drawn(load, probe.tables(records, "cuda", "Another"), capsys)
    assert probe.best_product(records) == 742.05
    assert probe.best_product([{**product(1, 1), "error": "no"}]) is None


def test_the_most_particular_name_of_a_device_counts(load):
    light_of = load("probe_table").light_of
    assert light_of("NVIDIA H100 PCIe").memory == 2000.0
    assert light_of("NVIDIA H100 80GB HBM3").memory == 3350.0
    assert light_of("") is None


def test_the_link_is_a_table_by_size_and_way_which_says_what_was_not_pinned(load, capsys):
    def link(way, memory, mib, rate, pinned):
        call = {"part": "link", "way": way, "memory": memory, "bytes": mib * 2**20}
        return {"call": call, "gb_per_s": rate, "pinned": pinned}

    records = [link("up", "pinned", 4, 50.04, True), link("up", "pinned", 1, 30.0, True)]
    records += [link("down", "pinned", 4, 9.0, False), link("up", "pageable", 4, 8.0, False)]
    lines = drawn(load, load("probe_table").tables(records, "cuda", "NVIDIA H100"), capsys)
    assert lines[0] == "link of cuda, GB/s of each way (speed of light 64)"
    assert lines[2] == "size up, pinned down, not pinned up, pageable"
    assert lines[4:6] == ["1.00 MiB 30", "4.00 MiB 50 9 8"]


def test_what_was_not_measured_is_told_by_its_reason(load):
    calls = [{"part": "launch", "what": "wait"}, {"part": "launch", "what": "record"}]
    records = [*({"call": call, "error": "no streams"} for call in calls), product(2, 1.0)]
    assert load("probe_table").failures(records) == ["not measured: launch (wait); launch (record): no streams"]


# ---- the large models ----


def test_the_arithmetic_of_the_llama_is_that_of_eight_billion_parameters(load):
    models = load("large_models")
    large = models.MODELS[0]
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert large.layer_parameters == layer == 218_103_808
    forward, head = models.flops_of(large, 2)
    assert forward == 2048 * 32 * (2 * layer + 2 * 1024 * 4096)
    assert head == 2048 * 2 * 128256 * 4096
    assert 32 * layer + 2 * 128256 * 4096 + 65 * 4096 == 8_030_261_248  # as transformers has it


def test_large_models_get_values_everywhere_and_not_the_same_ones(load):
    import torch

    models = load("large_models")
    for large in models.SMALL_MODELS:
        model = large.build()
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.apply(models.tile_initialiser(model))
        values = dict(model.named_parameters())
        assert all(torch.isfinite(value).all() for value in values.values())
        matrices = [value.flatten()[:64] for value in values.values() if value.ndim == 2]
        assert not any(torch.equal(one, other) for one, other in pairwise(matrices))
        assert all(value.eq(1).all() for name, value in values.items() if name.endswith("norm.weight"))


def test_the_loss_without_all_logits_is_that_of_transformers(load):
    import torch

    models = load("large_models")
    torch.manual_seed(0)
    model = models.SMALL_MODELS[0].build()
    tokens = torch.randint(512, (2, 32))
    expected = model.causal(input_ids=tokens, labels=tokens).loss
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(expected.item(), rel=1e-6)
