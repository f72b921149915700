"""Every byte of a checkpoint is held to its checksum: each damage is found and named."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

import pytest
import torch

from stronghold.errors import CheckpointError, CorruptionError
from stronghold.formats.manifest import NAME, read_manifest
from stronghold.formats.reader import FileReader, verify
from tests.checkpoint.training import of_kind


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    training, kind = of_kind("normed", states="8bit", dtype=torch.bfloat16, window=1)
    del kind
    path = training.save(tmp_path_factory.mktemp("run") / "saved", extra={"a": 1})
    return path


def flip(path: Any, offset: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        octet = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([octet ^ (1 << bit)]))


def test_every_flipped_bit_is_found_and_named(saved: Any) -> None:
    manifest = read_manifest(saved)
    verify(manifest)
    generator = random.Random(0)
    for name, entry in manifest.files.items():
        path, size = saved / name, os.path.getsize(saved / name)
        assert size == entry.length_bytes
        header = entry.header_bytes
        for offset in (0, 9, header - 1, header, size - 1, *(generator.randrange(size) for _ in range(10))):
            bit = generator.randrange(8)
            flip(path, offset, bit)
            with pytest.raises(CorruptionError, match=rf"file of {re.escape(entry.unit)} .*{name}") as caught:
                verify(manifest)
            assert caught.value.offset <= offset < caught.value.offset + caught.value.length
            assert caught.value.path == str(path)
            flip(path, offset, bit)
    verify(manifest)


def test_every_flipped_bit_of_the_manifest_is_found(saved: Any) -> None:
    path = saved / NAME
    content, generator = path.read_bytes(), random.Random(0)
    for offset in (0, len(content) - 1, len(content) - 8, *(generator.randrange(len(content)) for _ in range(40))):
        flip(path, offset, generator.randrange(8))
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(saved)
        path.write_bytes(content)
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it is cut off or"):
            read_manifest(saved)
    path.write_bytes(content)
    read_manifest(saved)


@pytest.mark.parametrize("length", [0, 5, -1, 1])
def test_a_file_of_another_length_is_named(saved: Any, length: int) -> None:
    manifest, name = read_manifest(saved), "layer-00001.safetensors"
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[:length] if length <= 5 and length != 1 else content + b"x")
    with pytest.raises(CheckpointError, match=rf"layers\.1 must have {len(content)} bytes \(got \d+: .*{name}\)"):
        verify(manifest)
    (saved / name).write_bytes(content)


def test_a_missing_file_is_named(saved: Any) -> None:
    manifest, path = read_manifest(saved), saved / "root-00001.safetensors"
    path.rename(saved / "away")
    with pytest.raises(CheckpointError, match=r"into\.bias cannot be read \(No such file.*root-00001"):
        verify(manifest)
    (saved / "away").rename(path)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"must be a directory with a manifest\.json \(No such file"):
        read_manifest(tmp_path)


def test_another_format_is_told_from_damage(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.formats.manifest._READ", (4,))
    with pytest.raises(CheckpointError, match=r"must be of format 4 \(got format 3 in .*version of stronghold"):
        read_manifest(saved)


def test_the_manifest_is_json_that_tells_the_step_and_the_files(saved: Any) -> None:
    content = json.loads((saved / NAME).read_text())
    assert content["format"] == 3
    assert content["model"] == "Residual"
    assert content["states"] == "8bit"
    assert content["extra"] == {"a": 1}
    assert content["parameters"]["layers.1.norm.weight"]["file"] == "layer-00001.safetensors"
    assert set(content["files"]) | {NAME} == set(os.listdir(saved))


def test_a_file_that_ends_while_it_is_read_is_an_error(saved: Any) -> None:
    manifest, name = read_manifest(saved), "layer-00000.safetensors"
    content = (saved / name).read_bytes()
    with FileReader(manifest, name) as file:
        os.truncate(saved / name, len(content) - 1)
        with pytest.raises(CheckpointError, match="ended at byte"):
            for tensor in file.entry.tensors:
                file.check(tensor)
    (saved / name).write_bytes(content)
