"""examples/pipeline_cnn: partitions of ResNet-50 and VGG-16 beside one another, in a small setting."""

from __future__ import annotations

import importlib.util
import json
import statistics

import pytest
import torch

from tests.examples.started import EXAMPLES, lines_of_tables, printed, printed_by, start

SMALL = ("--width", 4, "--image", 64, "--batch", 4, "--micro-batches", 2, "--batches", 1, 4, "--steps", 3)
NAMES = ["layers", "parameters", "memory", "time"]
LAYERS = {"resnet50": 18, "vgg16": 16}


@pytest.fixture(scope="module")
def models():
    specification = importlib.util.spec_from_file_location("models", EXAMPLES / "pipeline_cnn" / "models.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Returns what the program printed, its records, and where these are."""
    out = tmp_path_factory.mktemp("cnn") / "runs.jsonl"
    text = printed_by(2, "pipeline_cnn/compare.py", *SMALL, "--out", out)
    return text, [json.loads(line) for line in out.read_text().splitlines()], out


def records_of(measured, model, table):
    return [record for record in measured[1] if (record["model"], record["table"]) == (model, table)]


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("vgg16", 138_357_544)])
def test_the_models_are_those_of_the_papers(models, name, parameters):
    with torch.device("meta"):
        model = getattr(models, name)()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(any(True for _ in child.parameters()) for child in model) == LAYERS[name]
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("model", LAYERS)
def test_every_partition_is_measured_and_the_best_is_marked(measured, model):
    records = records_of(measured, model, "partitions")
    assert [record["balance"] for record in records] == NAMES
    for record in records:
        assert len(record["layers"]) == 2
        assert sum(record["layers"]) == LAYERS[model]
        assert len(record["losses"]) == 5
        assert record["losses"] == pytest.approx(records[0]["losses"], rel=1e-5)
        assert len(record["batch_seconds"]) == 3  # two of five are warm-up
        assert record["seconds"] == statistics.median(record["batch_seconds"])
        assert record["over_ideal"] == pytest.approx(record["seconds"] / record["ideal_seconds"] - 1)
        assert record["best"] == (record["seconds"] == min(other["seconds"] for other in records))
    printed_lines = [line for line in lines_of_tables(measured[0]) if line[0] in NAMES]
    lines = printed_lines[:4] if model == "resnet50" else printed_lines[4:]
    assert lines == [
        [
            record["balance"],
            " ".join(map(str, record["layers"])),
            f"{record['seconds']:.3f}",
            f"{min(record['batch_seconds']):.3f}",
            f"{max(record['batch_seconds']):.3f}",
            f"{4 / record['seconds']:.2f}",
            f"{record['over_ideal']:+.1%}",
            "best" if record["best"] else "",
        ]
        for record in records
    ]


@pytest.mark.parametrize("model", LAYERS)
def test_the_best_is_then_measured_batch_by_batch(measured, model):
    (best,) = (record for record in records_of(measured, model, "partitions") if record["best"])
    records = records_of(measured, model, "batches")
    assert [(record["batch"], record["micro_batches"], record["layers"]) for record in records] == [
        (1, 1, best["layers"]),
        (4, 2, best["layers"]),
    ]
    assert records[1]["losses"] == best["losses"]
    assert records[0]["images_per_second"] == pytest.approx(1 / records[0]["seconds"])


@pytest.mark.parametrize("model", LAYERS)
def test_equal_parameters_are_as_equal_as_can_be(measured, models, model):
    counts = [n for child in getattr(models, model)(4) if (n := sum(p.numel() for p in child.parameters()))]
    fullest = {cut: max(sum(counts[:cut]), sum(counts[cut:])) for cut in range(1, len(counts))}
    (record,) = (one for one in records_of(measured, model, "partitions") if one["balance"] == "parameters")
    assert fullest[record["layers"][0]] == min(fullest.values())


def test_the_partitions_are_drawn(measured, tmp_path):
    printed("pipeline_cnn/draw.py", measured[2], "-o", tmp_path / "partitions.png")
    assert (tmp_path / "partitions.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_refused():
    code, said = start("pipeline_cnn/compare.py")
    assert code == 2
    assert "start it with torchrun --nproc-per-node 4" in said
    code, said = start("pipeline_cnn/compare.py", "--image", 32)
    assert code == 2
    assert "--image must be 64 or more" in said
