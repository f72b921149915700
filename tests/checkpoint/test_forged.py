"""Whoever alters a manifest can renew its checksum: what is loaded is refused whole, or is what a manifest can say."""

from __future__ import annotations

import copy
import gc
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import stronghold
from stronghold.errors import CheckpointError, CorruptionError, StoreError
from stronghold.formats.manifest import NAME
from tests.checkpoint.test_dcp import states_of
from tests.checkpoint.training import Training, of_kind
from tests.formats.forged import content, forge, write
from tests.reference import differences, snapshot
from tests.small import Residual

LAYER, ROOT = "layer-00001.safetensors", "root-00001.safetensors"
WEIGHT = "layers.1.norm.weight"


@pytest.fixture(scope="module", params=["fp32", "8bit"])
def saved(request: Any, tmp_path_factory: Any) -> Any:
    training, kind = of_kind("normed", states=request.param)
    training.steps(kind.batches(1))
    path = training.save(tmp_path_factory.mktemp("run") / "saved", extra={"a": 1})
    secret = path.parent / "secret.safetensors"
    shutil.copy(path / LAYER, secret)  # what a name may not lead to
    other, _ = of_kind("normed", seed=1, states=request.param)
    other.steps(kind.batches(2))
    return path, (path / NAME).read_bytes(), other


def entry(*path: Any, **fields: Any) -> Any:
    """Returns what updates the entry at ``path`` with ``fields``."""

    def change(found: Any) -> None:
        for key in path:
            found = found[key]
        found.update(fields)

    return change


def put(*path: Any, value: Any) -> Any:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


def drop(*path: Any) -> Any:
    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        del found[path[-1]]

    return change


def renamed(name: str) -> Any:
    """Returns what gives a file another name."""

    def change(found: Any) -> None:
        found["files"][name] = found["files"].pop(LAYER)
        for parameter in found["parameters"].values():
            parameter["file"] = name if parameter["file"] == LAYER else parameter["file"]

    return change


def twice(found: Any) -> None:
    found["optimizer"]["group_names"][0].append(found["optimizer"]["group_names"][1][0])


def in_two_files(found: Any) -> None:
    found["parameters"][WEIGHT]["beside"] = LAYER


def of_another_file(found: Any) -> None:
    found["parameters"][WEIGHT]["file"] = ROOT


PICKLE = {"$tensor": {"dtype": "load", "shape": [1], "data": "AAAA"}}
FORGERIES = {
    "a list for the manifest": lambda found: [found],
    "a text for the manifest": lambda found: {"format": 2, "x": "y"},
    "no format": drop("format"),
    "a list for a format": entry(format=[2]),
    "a key too many": entry(more=1),
    "a key too few": drop("random"),
    "a number for the model": entry(model=3),
    "a text for the step": entry(step="three"),
    "an endless step": entry(step=1e999),
    "states of another format": entry(states="4bit"),
    "states of the other format": lambda f: f.update(states={"fp32": "8bit", "8bit": "fp32"}[f["states"]]),
    "a list for the files": entry(files=[]),
    "no files": entry(files={}),
    "a list for a file": put("files", LAYER, value=[]),
    "nothing for a file": put("files", LAYER, value=None),
    "no length": drop("files", LAYER, "length_bytes"),
    "a negative length": entry("files", LAYER, length_bytes=-1),
    "a length that is no number": entry("files", LAYER, length_bytes="long"),
    "half a byte": entry("files", LAYER, length_bytes=1.5),
    "a header longer than its file": entry("files", LAYER, header_bytes=10**9),
    "a header of more bytes than there are": entry("files", LAYER, header_bytes=10**40),
    "no header": entry("files", LAYER, header_bytes=0),
    "a checksum that is none": entry("files", LAYER, header_crc32c=2**32),
    "truth for a checksum": entry("files", LAYER, header_crc32c=True),
    "a list for the tensors": entry("files", LAYER, tensors=[]),
    "a tensor less": drop("files", LAYER, "tensors", WEIGHT),
    "an unknown dtype": entry("files", LAYER, "tensors", WEIGHT, dtype="float33"),
    "a function for a dtype": entry("files", LAYER, "tensors", WEIGHT, dtype="load"),
    "a dtype that torch does not compute with": entry("files", LAYER, "tensors", WEIGHT, dtype="qint8"),
    "another dtype": entry("files", LAYER, "tensors", WEIGHT, dtype="int32"),
    "a negative size": entry("files", LAYER, "tensors", WEIGHT, shape=[-16]),
    "a size that is no number": entry("files", LAYER, "tensors", WEIGHT, shape=["16"]),
    "another shape of as many": entry("files", LAYER, "tensors", WEIGHT, shape=[4, 4]),
    "a longer shape": entry("files", LAYER, "tensors", WEIGHT, shape=[17]),
    "a shape that is none": entry("files", LAYER, "tensors", WEIGHT, shape=16),
    "a name that leads out": renamed("../secret.safetensors"),
    "a name that leads far out": renamed("/etc/passwd"),
    "a name that leads into a folder": renamed("inside/layer-00001.safetensors"),
    "a name of the folder itself": renamed("."),
    "an empty name": renamed(""),
    "a name that ends early": renamed("layer\0"),
    "a name that is no text": renamed("\ud800"),
    "a name too long": renamed("a" * 300),
    "an absolute path": renamed("/tmp/layer-00001.safetensors"),
    "a list for the parameters": entry(parameters=[]),
    "no parameters": entry(parameters={}),
    "a parameter less": drop("parameters", WEIGHT),
    "nothing for a parameter": put("parameters", WEIGHT, value=None),
    "a parameter without a file": drop("parameters", WEIGHT, "file"),
    "a parameter in no file": entry("parameters", WEIGHT, file="layer-00009.safetensors"),
    "a parameter in a file that is not named": entry("parameters", WEIGHT, file="../secret.safetensors"),
    "a parameter in another file": of_another_file,
    "a parameter in one file twice": in_two_files,
    "a number for a file": entry("parameters", WEIGHT, file=1),
    "a parameter of another shape": entry("parameters", WEIGHT, shape=[4, 4]),
    "a step before the first": entry("parameters", WEIGHT, step=-3),
    "half a step": entry("parameters", WEIGHT, step=2.5),
    "infinitely many steps": entry("parameters", WEIGHT, step=1e999),
    "more steps than can be counted": entry("parameters", WEIGHT, step=1e20),
    "a text for a parameter's step": entry("parameters", WEIGHT, step="1"),
    "a list for the buffers": entry(buffers=[]),
    "a buffer that is in no file": put("buffers", "x", value={"dtype": "float32", "shape": [], "persistent": False}),
    "a buffer of another shape": entry("buffers", "layers.0.norm.running_mean", shape=[8, 2]),
    "a buffer of another dtype": entry("buffers", "layers.0.norm.running_mean", dtype="int32"),
    "a buffer that is neither": entry("buffers", "layers.0.norm.running_mean", persistent=1),
    "a list for the optimizer": entry(optimizer=[]),
    "no groups": drop("optimizer", "groups"),
    "a text for the groups": entry("optimizer", groups="none"),
    "a group less": lambda f: f["optimizer"]["groups"].pop(),
    "a list for a group": put("optimizer", "groups", 0, value=[]),
    "parameters in a group": put("optimizer", "groups", 0, "params", value=[]),
    "a group without a rate": drop("optimizer", "groups", 0, "lr"),
    "a rate that is no number": put("optimizer", "groups", 0, "lr", value={"$float": "nan"}),
    "a text for a rate": put("optimizer", "groups", 0, "lr", value="fast"),
    "a list for a rate": put("optimizer", "groups", 0, "lr", value=[1]),
    "a rate of more digits than a float has": put("optimizer", "groups", 0, "lr", value=10**400),
    "a rate that is two": put(
        *("optimizer", "groups", 0, "lr"), value={"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAAAAAAAAA="}}
    ),
    "a function for a rate": put("optimizer", "groups", 0, "lr", value=PICKLE),
    "a beta of one": put("optimizer", "groups", 0, "betas", value={"$tuple": [0.9, 1.0]}),
    "one beta": put("optimizer", "groups", 0, "betas", value={"$tuple": [0.9]}),
    "a negative eps": put("optimizer", "groups", 0, "eps", value=-1e-8),
    "amsgrad": put("optimizer", "groups", 0, "amsgrad", value=True),
    "maximize": put("optimizer", "groups", 0, "maximize", value=True),
    "Adam's decay": put("optimizer", "groups", 0, "decoupled_weight_decay", value=False),
    "a text for the names": put("optimizer", "group_names", 0, value="names"),
    "lists for names": put("optimizer", "group_names", 0, value=[[]]),
    "a name that nothing has": lambda f: f["optimizer"]["group_names"][0].append("nothing"),
    "a name in two groups": twice,
    "a negative count": entry("optimizer", skipped_steps=-1),
    "a text for a count": entry("optimizer", skipped_steps="none"),
    "a list for the scheduler": entry(scheduler=[1]),
    "a number for the scheduler": entry(scheduler=3),
    "nothing for the scheduler": entry(scheduler=None),
    "another optimizer in the scheduler": put("scheduler", "optimizer", value=1),
    "a method in the scheduler": put("scheduler", "step", value=1),
    "a value of a kind that is none": put("scheduler", "last_epoch", value={"$tensor": 1}),
    "a list for the random states": entry(random=[]),
    "no random states": entry(random={}),
    "a text for random states": put("random", "python", value="seed"),
    "half of a random state": put(
        "random", "torch", value={"$tensor": {"dtype": "uint8", "shape": [1], "data": "AA=="}}
    ),
    "a number for the processes": put("random", "processes", value=3),
    "numbers for the processes": put("random", "processes", value=[3]),
    "a value that is not of base 64": entry(extra={"$array": {"dtype": "<f4", "shape": [1], "data": "*"}}),
    "values without a place": entry(extra={"$tensor": {"dtype": "float32", "shape": [10**12], "data": ""}}),
    "values that are objects": entry(extra={"$array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}}),
    "keys that cannot be": entry(extra={"$dict": [[[1], 2]]}),
}


def refused(path: Path, training: Training) -> None:
    """Asserts that loading raises one of our errors and changes nothing."""
    before = snapshot(training.model, training.optimizer)
    others = copy.deepcopy(training.optimizer.state_dict()["param_groups"]), training.scheduler.state_dict()
    state = torch.get_rng_state()
    with pytest.raises((CheckpointError, CorruptionError)) as caught:
        training.load(path)
    assert len(str(caught.value)) > 20
    assert differences(snapshot(training.model, training.optimizer), before) == []
    assert (training.optimizer.state_dict()["param_groups"], training.scheduler.state_dict()) == others
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused_and_nothing_changes(name: str, saved: Any) -> None:
    path, kept, training = saved
    try:
        forge(path, FORGERIES[name])
        refused(path, training)
    finally:
        (path / NAME).write_bytes(kept)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "{",
        '{"format": 2, "format": 2',
        '{"format": 2, "step": NaN',
        '{"format": 2, "step": ' + "1" * 5000,
        '{"format": 2, "model": "\ud800"',
        '{"format": 2, ',
        " ",
    ],
)
def test_what_is_no_json_is_refused(text: str, saved: Any) -> None:
    path, kept, training = saved
    try:
        write(path, text)
        refused(path, training)
    finally:
        (path / NAME).write_bytes(kept)


def test_what_is_forged_is_named(saved: Any) -> None:
    path, kept, training = saved
    for name, message in {
        "a name that leads out": r"manifest\.json has been altered: a name in files must be .*\.\./secret",
        "a negative size": rf"files\.{LAYER}\.tensors\.{WEIGHT}\.shape must be .* \(got -16\)",
        "half a step": rf"step of parameter {WEIGHT} must be a whole number .*2\.5",
        "a rate that is no number": "lr must be a number, zero or more .*nan",
        "a parameter in another file": rf"parameters\.{WEIGHT} must be a parameter with {WEIGHT} in its files",
        "half of a random state": "random states must be as they were written",
    }.items():
        forge(path, FORGERIES[name])
        with pytest.raises(CheckpointError, match=message):
            training.load(path)
        (path / NAME).write_bytes(kept)


def test_a_forged_header_of_a_file_is_refused(saved: Any) -> None:
    path, kept, training = saved
    whole = (path / LAYER).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    for change in (
        lambda found: found.pop(WEIGHT),
        lambda found: found.update({WEIGHT: 3}),
        lambda found: found[WEIGHT].update(data_offsets=[10**12, 10**12 + 64]),
        lambda found: found[WEIGHT].update(data_offsets=[-64, 0]),
        lambda found: found[WEIGHT].update(data_offsets="ab"),
        lambda found: found[WEIGHT].update(data_offsets=[0.5, 64.5]),
        lambda found: [found],
    ):
        forged = copy.deepcopy(header)
        changed = change(forged)
        text = json.dumps(changed if isinstance(changed, list) else forged).encode()
        try:
            text += b" " * (length - len(text))
            data = len(text).to_bytes(8, "little") + text
            (path / LAYER).write_bytes(data + whole[8 + length :])
            crc = stronghold.native.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            size = len(data) + len(whole) - 8 - length
            forge(path, entry("files", LAYER, header_bytes=len(data), header_crc32c=crc, length_bytes=size))
            refused(path, training)
        finally:
            (path / LAYER).write_bytes(whole)
            (path / NAME).write_bytes(kept)


# ---- anything else, by chance ----

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "..", "../x", "/etc/passwd", "float32", "load", "$float", WEIGHT, LAYER]),
    st.sampled_from([[], {}, [[]], [0], [-1], ["x"], {"$tensor": 1}, {"$float": "x"}, {"$tuple": 1}, {"x": {}}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_is_altered_is_refused_or_taken_whole(data: st.DataObject, saved: Any) -> None:
    """Never another error than ours; and where one is raised nothing has changed."""
    path, kept, training = saved
    forged = content(path)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(forged)[1:]))
        holder = forged
        for key in place[:-1]:
            holder = holder[key]
        if isinstance(holder, dict) and data.draw(st.booleans()):
            del holder[place[-1]]
        else:
            holder[place[-1]] = data.draw(VALUES)
    before = snapshot(training.model, training.optimizer)
    groups = copy.deepcopy(training.optimizer.state_dict()["param_groups"])
    try:
        forge(path, lambda _: forged)
        training.load(path)
    except (CheckpointError, CorruptionError):
        assert differences(snapshot(training.model, training.optimizer), before) == []
        assert training.optimizer.state_dict()["param_groups"] == groups
    finally:
        (path / NAME).write_bytes(kept)
        if training.optimizer.state_dict()["param_groups"] != groups:
            training.load(path)


# ---- in the directory of a store ----


def test_a_forged_store_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    training, kind = of_kind("residual", store=str(tmp_path / "store"))
    training.steps(kind.batches(1))
    path = training.save(tmp_path / "store")
    del training
    gc.collect()
    kept, unit = (path / NAME).read_bytes(), "layer-00002.bin"
    name = next(iter(content(path)["files"][unit]["tensors"]))
    other, _ = of_kind("residual", seed=1)
    for change in (
        entry("files", unit, parts=[]),
        entry("files", unit, parts=["../x.bin"]),
        entry("files", unit, parts=[unit, unit]),
        entry("files", unit, parts=[unit, "/tmp/../etc/" + unit]),
        entry("files", unit, parts=[unit, "/tmp/passwd"]),
        entry("files", unit, parts=["layer-00003.bin"]),
        entry("files", unit, stripe_bytes=0),
        entry("files", unit, stripe_bytes=5),
        entry("files", unit, taken_bytes=10**12),
        entry("files", unit, pages_crc32c="x"),
        entry("files", unit, "tensors", name, offset=10**9),
        entry("files", unit, "tensors", name, offset=2),
        entry("files", unit, "tensors", name, offset=-4),
        drop("files", unit, "tensors", name, "offset"),
        lambda f: [t.update(offset=0) for t in f["files"][unit]["tensors"].values()] and None,
    ):
        forge(path, change)
        refused(path, other)
        with pytest.raises((StoreError, CheckpointError)):
            of_kind("residual", store=str(path), weights=str(path))
        (path / NAME).write_bytes(kept)
    for text in ("[" * 100_000, "[]", '{"format": 1, "units": 3}', '{"format": 1, "units": [[]]}', "\udcff"):
        (path / "store.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(StoreError):
            of_kind("residual", store=str(path), weights=str(path))


# ---- what another program saved ----


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("step", "rate"), [(-3.0, 0.1), (2.5, 0.1), (math.inf, 0.1), (1.0, math.nan), (1.0, -1.0)])
def test_a_checkpoint_of_torchs_own_is_held_to_the_same_rules(step: float, rate: float, tmp_path: Path) -> None:
    training, kind = of_kind("residual")
    training.steps(kind.batches(1))
    theirs = Residual()
    groups = [{"params": [p for p in theirs.parameters() if (p.ndim < 2) == flat]} for flat in (False, True)]
    state = states_of(theirs, torch.optim.AdamW(groups))
    state["optimizer"]["state"]["out.weight"]["step"].fill_(step)
    state["optimizer"]["param_groups"][1]["lr"] = rate
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    before = snapshot(training.model, training.optimizer)
    with pytest.raises(CheckpointError, match=r"must be of AdamW \(.*(step of parameter out.weight|lr must be)"):
        training.load(tmp_path / "saved", format="dcp")
    assert differences(snapshot(training.model, training.optimizer), before) == []
