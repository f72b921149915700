"""A machine's file holds what was measured, and nothing that is not checked."""

import json
import math

import pytest

from stronghold.planner.machine_file import MachineFile, Spread
from tests.planner.machines import about, laptop, machine

DISK = dict.fromkeys(("read", "write", "read_beside_write", "write_beside_read"), about(1e9))


def test_a_spread_is_the_quartiles_and_the_median():
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert Spread.of([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize("written", [machine(), laptop(host_call_s=about(3e-6)), machine(disks={"/mnt/nvme": DISK})])
def test_a_file_is_read_as_it_was_written(tmp_path, written):
    written.write(tmp_path / "machine.json")
    assert MachineFile.read(tmp_path / "machine.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_a_file_of_an_older_probe_is_read():
    written = json.loads(machine().to_json())
    assert written.pop("host_call_s") is None
    assert MachineFile.from_json(json.dumps(written)) == machine()


def changed(**changes):
    return json.dumps({**json.loads(machine().to_json()), **changes})


def without(name, *inner):
    found = json.loads(machine().to_json())
    here = found
    for key in inner[:-1] if inner else ():
        here = here[key]
    del (here if not inner else found[name])[inner[-1] if inner else name]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "file of the machine file 'm.json' must be JSON"),
        ("[]", "must be an object"),
        (changed(version=2), r"version of the machine file .* must be 1 \(got 2\)"),
        (changed(colour="red"), "must be an object of"),
        (without("matmul"), "must be an object of"),
        (without("link", "h2d"), r"link .* must be an object with h2d.* \(got 'nothing of h2d'\)"),
        (changed(device=3), "device .* must be a text"),
        (changed(is_host="no"), "is_host .* must be true or false"),
        (changed(cores=-1), "cores .* must be a whole number of 1 or more"),
        (changed(cores=0), "cores .* must be a whole number of 1 or more"),
        (changed(host_memory_bytes=10**400), "host_memory_bytes .* of 0 or more, which 64 bits hold"),
        (changed(device_memory_bytes=1.5), "device_memory_bytes .* must be a whole number"),
        (changed(op_s=[1, 2]), "op_s .* must be three numbers, 0, or from 1e-30 to 1e.30"),
        (changed(op_s=[3, 2, 1]), "op_s .* none below the one before"),
        (changed(launch_s=[math.nan] * 3), "launch_s .* must be three numbers"),
        (changed(launch_s=[0, 0, 10**400]), "launch_s .* must be three numbers"),  # more than a float takes
        (changed(compute_beside_update=[0, 0, 0]), "compute_beside_update .* three numbers, from 1e-30"),
        (changed(elementwise={}), r"elementwise .* must be measurements \(got 'none'\)"),
        (changed(elementwise={"float32": [0, 1, 2]}), r"elementwise\['float32'\] .* three numbers, from 1e-30"),
        # A plan with these divided infinity by infinity, and said that it cannot convert NaN.
        (changed(compute_beside_update=[1, 1, 1e308]), "compute_beside_update .* to 1e.30"),
        (changed(elementwise={"float32": [1e-308] * 3}), "elementwise.* from 1e-30"),
        ("[" * 100_000, "file .* must be JSON .*nested too deeply"),
        (changed(host_update_ns={"float32+fp32": {"alone": [1, 1, 1]}}), "nothing of beside_compute"),
        (changed(disks={"/mnt": {"read": [1, 1, 1]}}), "nothing of write, read_beside_write"),
        (changed(matmul=[{"dtype": "float32"}]), "a list of objects of"),
        (changed(matmul=[{"dtype": "float32", "sizes": [1, 2], "flop_per_s": [1, 1, 1]}]), "3 numbers above 0"),
        (changed(matmul=[{"dtype": "float32", "sizes": [0, 2, 3], "flop_per_s": [1, 1, 1]}]), "3 numbers above 0"),
        (changed(matmul=[{"dtype": 3, "sizes": [1, 2, 3], "flop_per_s": [1, 1, 1]}]), "matmul.dtype|dtype"),
        (changed(versions={"torch": 2}), "versions .* must be texts"),
    ],
)
def test_what_a_file_may_not_hold(text, rule):
    with pytest.raises(ValueError, match=rule) as raised:
        MachineFile.from_json(text, "'m.json'")
    assert str(raised.value).endswith("measure the machine again: stronghold probe -o machine.json")


def test_a_copy_of_nothing_may_take_no_time():
    link = {**json.loads(machine().to_json())["link"], "copy_s": [0, 0, 0]}
    assert MachineFile.from_json(changed(link=link)).link["copy_s"] == (0, 0, 0)
