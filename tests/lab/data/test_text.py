"""Files to documents, and what is said of files that give none."""

import errno
import json
import os
import sysconfig
from pathlib import Path

import pytest

from stronghold.lab.data.text import find_files, read_documents, standard_library


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first é", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": ""}\n{"text": "fourth", "x": 1}\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").touch()
    return tmp_path


def test_a_directory_is_all_its_files_in_order_without_hidden_ones(folder):
    assert list(read_documents(folder)) == ["first é", "second", "third", "fourth"]


def test_a_directory_s_links_are_followed_and_a_folder_that_is_there_twice_is_read_once(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "d.txt").write_text("fifth")
    (elsewhere / "back").symlink_to(folder)
    (folder / "a-link").symlink_to(folder / "sub")
    (folder / "z").symlink_to(elsewhere)
    assert list(read_documents(folder)) == ["first é", "second", "third", "fourth", "fifth"]
    assert folder / "sub" / "c.jsonl" in find_files(folder)


def test_what_a_directory_has_and_cannot_be_read_is_refused_and_not_left_out(folder, monkeypatch):
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    with pytest.raises(ValueError, match=r"No such file or directory for '.*gone\.txt'.*leave it out with a glob"):
        find_files(folder)
    (folder / "gone.txt").unlink()
    iterdir = Path.iterdir

    def closed(path):  # as for a user who has no right to look into it, which the tests' own user may have
        if path.name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(ValueError, match=r"Permission denied for '.*sub'.*grant this user the rights"):
        find_files(folder)


def test_a_path_is_one_file_and_a_glob_is_what_matches(folder):
    assert list(read_documents(folder / "b.txt")) == ["second"]
    assert [file.name for file in find_files(f"{folder}/**/*.jsonl")] == ["c.jsonl"]
    assert list(read_documents(f"{folder}/[ab].txt")) == ["first é", "second"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(folder):
    (folder / "[x].txt").write_text("odd")
    assert list(read_documents(f"{folder}/[x].txt")) == ["odd"]


def test_a_byte_order_mark_is_no_text(folder):
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbfmarked")
    assert list(read_documents(folder / "b.txt")) == ["marked"]


@pytest.mark.parametrize("source", ["nowhere.txt", "*.nothing", "void"])
def test_a_source_without_files_is_refused_with_its_name(folder, source):
    (folder / "void").mkdir()
    with pytest.raises(ValueError, match="which gives none"):
        find_files(folder / source)


def test_a_file_that_is_not_text_is_refused_with_the_byte_and_its_offset(folder):
    (folder / "b.txt").write_bytes(b"fine \xff")
    with pytest.raises(ValueError, match=r"byte 0xff at offset 5 of '.*b\.txt'.*convert it"):
        list(read_documents(folder / "b.txt"))


@pytest.mark.parametrize("content", [b"MZ\0\0", "text".encode("utf-16-le")])
def test_a_file_with_zeros_is_no_text_though_it_is_utf_8(folder, content):
    (folder / "b.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"byte 0x00 at offset \d of '.*b\.txt'"):
        list(read_documents(folder / "b.txt"))


@pytest.mark.parametrize("name", ["d.json", "d.ndjson", "d.JSONL"])
def test_json_lines_of_texts_are_taken_whatever_they_are_called(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(read_documents(tmp_path)) == ["one", "two"]


CHAT = {"conversations": [{"from": "human", "value": "hello"}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", json.dumps([CHAT, CHAT]), r"d\.json:1: got a list\); .*records as one on each line"),
        ("d.json", json.dumps([CHAT], indent=1), r"d\.json:1: not JSON: .*records as one on each line"),
        ("d.json", json.dumps(CHAT, indent=1), r"d\.json:1: not JSON: .*records as one on each line"),
        ("d.jsonl", json.dumps(CHAT), "its fields are: 'conversations'.*write its 'conversations' as one text"),
        ("d.jsonl", '{"messages": []}', "write its 'messages' as one text, such as a tokenizer's apply_chat_template"),
        ("d.jsonl", "[" * 100_000, "not JSON"),
        ("d.txt", json.dumps([CHAT], indent=1), r"got JSON in '.*d\.txt'"),
        ("d", "\n" + json.dumps(CHAT) + "\n" + json.dumps(CHAT), r"got JSON lines in '.*d'\); call .* \.jsonl"),
        ("d.csv", "text,id\na,1\n", r"got a table, '.*d\.csv'"),
        ("d.PARQUET", "PAR1", r"got a table, '.*d\.PARQUET'"),
    ],
)
def test_records_of_another_shape_are_refused_and_not_trained_on_as_text(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("text", ["[1] A footnote.", "{not: json}", "{{{", "[]", "[" * 100_000, "[1, 2]\n[3, 4]"])
def test_text_that_only_begins_like_json_is_text(tmp_path, text):
    (tmp_path / "d.txt").write_text(text)
    assert list(read_documents(tmp_path)) == [text]


@pytest.mark.parametrize("name", ["a.txt", "sub/c.jsonl"])
def test_a_file_that_cannot_be_read_is_refused_with_its_name(folder, name, monkeypatch):
    def refuse(self, *arguments, **keywords):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match=f"Permission denied for '.*{name}'"):
        list(read_documents(folder / name))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"body": "x", "id": 3}', "its fields are: 'body', 'id'"),
        ('{"text": 5}', '"text" is a int'),
        ('["text"]', "got a list"),
        ("{text}", "not JSON"),
        ('{"text": "cut', "not JSON"),
    ],
)
def test_a_jsonl_line_without_text_is_refused_with_file_and_line(tmp_path, line, problem):
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "good"}) + "\n\n" + line + "\n")
    documents = read_documents(tmp_path / "d.jsonl")
    assert next(documents) == "good"
    with pytest.raises(ValueError) as refusal:
        next(documents)
    assert f"{tmp_path / 'd.jsonl'}:3: " in str(refusal.value)
    assert problem in str(refusal.value)


def test_the_standard_library_is_its_source_without_tests():
    documents = list(standard_library())
    total = sum(map(len, documents))
    assert total > 5_000_000
    own = Path(os.__file__).read_text(encoding="utf-8")
    assert own in documents
    assert documents == list(standard_library())
    assert not any("class OSFileTestCase" in text for text in documents)
    assert pytest.__doc__ not in documents


def test_of_the_standard_library_what_is_installed_there_is_not_even_looked_at(tmp_path, monkeypatch):
    for name in ("b/c.py", "b-c.py", "a.py", "b/test/x.py", "site-packages/p/y.py", "b/empty.py", "b/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    visited = []
    listed = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: visited.append(Path(path)) or listed(path))
    assert list(standard_library()) == ["a.py", "b/c.py", "b-c.py"]  # by path, a folder at a time
    assert visited == [tmp_path, tmp_path / "b"]
