"""examples/reproduce.ipynb runs from top to bottom in the small setting, and shows every case's figure."""

import base64
import functools
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "reproduce.ipynb"


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """Returns a function that gives the notebook as run on the tiny machine, and the folder of its results.

    It is run whole, or without the other cases' cells, each of the two once.
    """

    @functools.cache
    def run(alone=None):
        results = tmp_path_factory.mktemp("results")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        parameters.source = f'machine = "tiny"\nresults = {str(results)!r}'
        if alone is not None:
            first, begin = case_at(notebook, 1), case_at(notebook, alone)
            notebook.cells = notebook.cells[:first] + notebook.cells[begin : begin + 4]
        NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
        return notebook, results

    return run


def case_at(notebook, number):
    (at,) = [i for i, cell in enumerate(notebook.cells) if cell.source.startswith(f"## 2.{number} CASE")]
    return at


def texts(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize(
    ("number", "alone"), [(5, True), *(pytest.param(number, False, marks=pytest.mark.long) for number in range(1, 6))]
)
def test_a_case_has_a_heading_its_runs_its_table_and_its_figure(execute, number, alone):
    notebook, results = execute(number if alone else None)
    at = case_at(notebook, number)
    run, extract, draw = notebook.cells[at + 1 : at + 4]
    assert f"case {number}, " in texts(run)
    assert "stronghold is left out" not in texts(run)
    assert f"Case {number}, figure" in texts(extract)
    assert "STRONGHOLD" in texts(extract)
    (image,) = [output["data"]["image/png"] for output in draw.outputs if "image/png" in output.get("data", {})]
    assert base64.b64decode(image) == (results / f"case{number}_tiny.png").read_bytes()
    assert (results / f"case{number}_tiny.svg").exists()
