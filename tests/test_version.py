from pathlib import Path

import stronghold


def test_the_version_is_that_of_the_package():
    lines = (Path(__file__).parents[1] / "pyproject.toml").read_text().splitlines()
    assert f'version = "{stronghold.__version__}"' in lines
