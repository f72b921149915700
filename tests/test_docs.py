"""README and docs: code runs, commands parse, links lead somewhere, and the pages build without a warning."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from stronghold.lab import cli
from tests import documented

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "docker" / "README.md",
    ROOT / "benchmarks" / "gpu" / "README.md",
    *ROOT.glob("examples/*/*.md"),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text(encoding="utf-8")], ids=name_of)
def test_the_code_of_a_page_runs_from_its_first_block_to_its_last(page, tmp_path, monkeypatch, capsys):
    documented.here(monkeypatch, tmp_path)
    document = Sybil([PythonCodeBlockParser(), SkipParser()], path=str(page.parent)).parse(page)
    document.namespace.update(documented.namespace(tmp_path))
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    assert count >= page.read_text(encoding="utf-8").count("```python")


@pytest.mark.parametrize(("number", "processes"), [(0, 4), (1, 2)], ids=["pipeline", "replicate"])
def test_the_code_for_several_processes_runs_in_them(number, processes):
    page = ROOT / "docs" / "tutorials" / "devices.md"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, "-m", "tests.documented", str(page), str(number)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_the_schedule_on_the_page_is_what_its_code_prints(capsys):
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (code,) = (block for language, block in FENCE.findall(text) if language == "python")
    (printed,) = (block for language, block in FENCE.findall(text) if language == "")
    exec(code, {})
    assert capsys.readouterr().out.split() == printed.split()


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each command on a page, with what a prompt, a loop or a comment adds left out."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("bash", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    found.append(words)
    return found


COMMANDS = [
    pytest.param(words, id=f"{name_of(page)}: {' '.join(words)[:60]}") for page in PAGES for words in commands(page)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_a_page_is_one(words, monkeypatch):
    """What it names is there; those of ours are parsed, and not run."""
    if words[0] in ("until", "while"):
        words = words[1 : words.index("do")]
        words[-1] = words[-1].removesuffix(";")
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "stronghold":
        parser = cli._parser()
        parser.parse_args(words[1:])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0].startswith("./"):
        assert os.access(ROOT / words[0], os.X_OK)
        if words[0] == "./examples/run.sh":
            known = subprocess.run([ROOT / words[0], "--help"], capture_output=True, text=True, check=True).stdout
            for word in words[1:]:
                if re.fullmatch(r"-\w|--[a-z-]+", word):
                    assert re.search(rf"(?<![\w-]){word}(?![\w-])", known), word
    else:
        pytest.fail(f"no test knows what {words[0]} is")


LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|\!\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {"schedule.svg", *(f"results/{path.name}" for path in (ROOT / "results").glob("*.png"))}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=name_of)
def test_a_link_leads_to_a_file_and_a_heading_of_it(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in (one or other for one, other in LINK.findall(text)):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if page.is_relative_to(ROOT / "docs") and path in GENERATED:
            continue
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
            assert anchor in slugs, link


def test_each_line_of_what_works_names_a_test_that_is_there():
    text = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)(?:::([\w:]+))?`", text)
    assert len(named) > 30
    for path, name in named:
        file = ROOT / "tests" / path
        assert file.is_file(), path
        for part in filter(None, name.split("::")):
            assert re.search(rf"^ *(?:def|class) {part}\b", file.read_text(encoding="utf-8"), re.M), f"{path}::{name}"


def test_the_docs_build_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "https://fonts" not in page


def test_the_front_door_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
