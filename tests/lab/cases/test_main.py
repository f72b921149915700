"""The command of the cases: its table and figure, and what it says to bad input."""

import json

import pytest

from stronghold.lab.cases.__main__ import main
from tests.lab.cases.conftest import HOST, artifact_log, make_record


@pytest.fixture
def results(tmp_path):
    def write(*records):
        path = tmp_path / "results"
        path.mkdir(exist_ok=True)
        (path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


def test_the_table_is_printed_and_written(results, capsys):
    folder = results(make_record(), {"old": 1})
    assert main(["extract", "5", "--machine", "tiny", "--results", folder]) == 0
    printed = capsys.readouterr()
    assert "Case 5, figure 9" in printed.out
    assert "0.5000" in printed.out
    assert "record 2 is left out: it has no settings and no summary" in printed.err
    with open(f"{folder}/case5_tiny.csv") as file:
        assert 'measured,"Some CPU, 2 cores, 8.00 GiB",tiny,,stronghold,2,1,2000,iteration_s,0.5,' in file.read()


def test_what_is_wrong_is_listed(results, capsys):
    folder = results(make_record(wrong="its loss differs in step 3"))
    assert main(["extract", "5", "--machine", "tiny", "--results", folder]) == 0
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    assert "wrong: stronghold, 2 layers, window 1: its loss differs in step 3" in printed.err


def test_the_figure_is_written(results, tmp_path):
    folder = results(make_record())
    assert main(["draw", "4", "--machine", "tiny", "--results", folder]) == 0
    assert main(["draw", "4", "--machine", "tiny", "--results", folder, "-o", str(tmp_path / "mine")]) == 0
    for stem in (tmp_path / "results" / "case4_tiny", tmp_path / "mine"):
        assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in stem.with_suffix(".svg").read_text()


def test_a_log_of_the_artifact_alone_is_enough(tmp_path, capsys):
    (tmp_path / "log_a.txt").write_text(artifact_log())
    assert main(["extract", "5", "--results", str(tmp_path)]) == 0
    assert "6.000" in capsys.readouterr().out


def test_machines_are_not_mixed(results, capsys):
    folder = results(make_record(), make_record(window=2, machine={"host": HOST | {"processor": "Other"}}))
    arguments = ["extract", "5", "--machine", "tiny", "--results", folder]
    assert main(arguments) == 2
    assert "case 5: error: the results of case 5 must be of one machine" in capsys.readouterr().err
    assert main([*arguments, "--measured-on", "Other"]) == 0
    assert "Some CPU" not in capsys.readouterr().out


def test_no_results_are_an_error_with_the_remedy(results, capsys, tmp_path):
    assert main(["draw", "3", "--machine", "tiny", "--results", results(make_record(layers=5))]) == 2
    assert "run examples/case3_run.sh --machine tiny first" in capsys.readouterr().err
    assert main(["extract", "3", "--results", str(tmp_path / "none")]) == 2
    assert "results must be a folder or a file that exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["run", "6"], ["draw", "1", "--machine", "k80"], ["draw", "1", "-x"]]
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("action", ["run", "extract", "draw"])
def test_help_names_cases_and_machines(action, capsys):
    with pytest.raises(SystemExit) as ended:
        main([action, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for expected in (
        "1  The largest trainable model (figure 6a)",
        "5  ",
        "v100  the paper's",
        "cpu ",
        "tiny ",
        "--results",
    ):
        assert expected in printed


def test_a_table_that_cannot_be_written_is_named(results, capsys, tmp_path):
    (tmp_path / "file").touch()
    folder = results(make_record())
    extract = ["extract", "5", "--machine", "tiny", "--results", folder, "--csv"]
    assert main([*extract, f"{tmp_path}/file/x.csv"]) == 2
    refused = f"case 5: error: --csv must be a file that can be written (got '{tmp_path}/file/x.csv': Not a directory)"
    assert refused in capsys.readouterr().err
    assert main(["draw", "5", "--machine", "tiny", "--results", folder, "-o", f"{tmp_path}/file/x"]) == 2
    assert f"--output must be a file that can be written (got '{tmp_path}/file/x.png'" in capsys.readouterr().err
    assert main(["run", "5", "--machine", "tiny", "--results", f"{tmp_path}/file"]) == 2
    assert "--results must be a folder that can be written" in capsys.readouterr().err
    assert main([*extract, "/dev/full"]) == 1
    assert (
        "case 5: error: [Errno 28] No space left on device; free space there, or pass a path on another disk\n"
        in capsys.readouterr().err
    )


def test_runs_end_with_the_command_that_has_their_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("stronghold.lab.cases.__main__.run_case", lambda *_: False)
    assert main(["run", "5", "--machine", "tiny", "--results", str(tmp_path / "of mine")]) == 0
    told = f"; examples/case5_extract.sh --machine tiny --results '{tmp_path}/of mine' has the table"
    assert told in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["run", "5"]) == 0
    assert "results in results; examples/case5_extract.sh has the table" in capsys.readouterr().out
