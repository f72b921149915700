"""The reader of profiles: values by element, and each way in which a folder can be wrong."""

import pytest

from stronghold.planner.profiled.files import models_in, read_profile
from stronghold.planner.profiled.layouts import Share
from tests.planner.profiled.small_profiles import HEAD, write_profile

MIB = 2**20
GPT = [
    *("encoder-embedding", "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax"),
    *("enc-attention-dropout", "enc-attention-context", "enc-attention-dense", "enc-post-attention-dropout"),
    *("enc-2nd-layernorm", "enc-MLP-GEMM-1", "enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout"),
    *("final-layernorm", "gpt-post-process"),
]


def test_values_are_seconds_and_bytes(tmp_path):
    write_profile(tmp_path, "toy_a", ["one", "two"])
    (tmp_path / "toy_a_mbs2_tp1_algo0.csv").write_text(f"{HEAD}\none,10,20,3,4,5,6,7,8\ntwo,1,2,3,4,5,6,7,9.5\n")
    profile = read_profile(tmp_path, "toy_a")
    assert profile.operators == ["one", "two"]
    assert profile.rows == [0, 1]
    costs = profile.costs_of(4, Share(1, 2))[1]
    assert costs[:2] == pytest.approx((1e-6, 2e-6))
    assert list(costs[2:]) == [3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB, 7 * MIB, 9.5 * MIB]
    assert profile.links.collectives["all_gather"][2][7] == pytest.approx(0.24e-3)


def test_messages_take_the_speed_of_their_size(tmp_path):
    links = read_profile(write_profile(tmp_path, "toy_a", ["one"]), "toy_a").links
    speeds = {1: 20, 3.9: 20, 4: 21, 8: 22, 200: 26, 4096: 27}  # GB/s; below 4 MiB the first, then by powers of two
    for size, speed in speeds.items():
        assert links.send_s(size * MIB, across=False) == pytest.approx(size / (1000 * speed)), size
    assert links.send_s(4 * MIB, across=True) == pytest.approx(4 / (1000 * 4.25))
    assert links.send_s(0, across=True) == 0


def test_layers_are_repeated(tmp_path):
    write_profile(tmp_path, "gpt_toy", GPT)
    profile = read_profile(tmp_path, "gpt_toy", 3)
    assert profile.rows == [0, *list(range(1, 14)) * 3, 14, 15]
    assert profile.operators == [GPT[0], *GPT[1:14] * 3, *GPT[14:]]


def test_a_missing_link_between_nodes_is_as_fast_as_within(tmp_path):
    write_profile(tmp_path, "toy_a", ["one"])
    (tmp_path / "p2p_inter_node.csv").unlink()
    links = read_profile(tmp_path, "toy_a").links
    assert list(links.between) == list(links.within)


def test_models_are_listed(tmp_path):
    write_profile(write_profile(tmp_path, "toy_b", ["one"]), "toy_a", ["one"])
    assert models_in(tmp_path) == ["toy_a", "toy_b"]


FILE = "toy_a_mbs1_tp2_algo0.csv"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (FILE, f"{HEAD}\none,1,2,3\n", r"mbs1_tp2_algo0.csv, line 2: .*two times and six sizes \(got 4 columns\)"),
        (FILE, f"{HEAD}\none,1,2,3,4,5,6,7,8\ntwo,1,fast,3,4,5,6,7,8\n", r"line 3: .*from 0 to 1e.12 \(got 'fast'\)"),
        (FILE, f"{HEAD}\none,1,2,3,-4,5,6,7,8\ntwo,1,2,3,4,5,6,7,8\n", r"line 2: .*\(got '-4'\)"),
        (FILE, f"{HEAD}\none,1,2,3,nan,5,6,7,8\ntwo,1,2,3,4,5,6,7,8\n", r"line 2: .*\(got 'nan'\)"),
        (FILE, f"{HEAD}\none,1e308,2,3,4,5,6,7,8\ntwo,1,2,3,4,5,6,7,8\n", r"line 2: .*\(got '1e308'\)"),
        (FILE, f"{HEAD}\none,1e20,2,3,4,5,6,7,8\ntwo,1,2,3,4,5,6,7,8\n", r"line 2: .*\(got '1e20'\)"),
        (FILE, f"{HEAD}\none,0,0,3,4,5,6,7,8\ntwo,0,0,3,4,5,6,7,8\n", r"must take some time \(got 0 for all 2\)"),
        (FILE, f"{HEAD}\n{'o' * 200_000},1,2,3,4,5,6,7,8\n", r"mbs1_tp2_algo0.csv: field larger than"),
        (FILE, f"{HEAD}\n", r"a line for each operator \(got none\)"),
        (FILE, f"{HEAD}\none,1,2,3,4,5,6,7,8\n2,1,2,3,4,5,6,7,8\n", r"same operators .*mbs1_tp2.*differs.*line 3"),
        (FILE, f"{HEAD}\none,1,2,3,4,5,6,7,8\n", r"same operators .*mbs1_tp2.*differs.*line 3"),
        ("p2p_intra_node.csv", None, r"must have p2p_intra_node.csv"),
        ("p2p_intra_node.csv", "1,2\n", r"a line of sizes and one of speeds"),
        (
            "p2p_inter_node.csv",
            "1,2\n3,0\n",
            r"_inter_node.csv, line 2: speeds must be 1e-09 GB/s or more \(got 3, 0\)",
        ),
        ("p2p_intra_node.csv", "1,2\n3,1e-320\n", r"p2p_intra_node.csv, line 2: speeds must be 1e-09 GB/s or more"),
        ("prim_toy_a_all_gather_2gpus.csv", "a,b\n1,2,3\n", r"a size and a time \(got 3 columns\)"),
        ("prim_toy_a_all_gather_2gpus.csv", "a,b\n", r"2gpus.csv: must have a line for each size \(got none\)"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, name, text, told):
    write_profile(tmp_path, "toy_a", ["one", "two"])
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=told):
        read_profile(tmp_path, "toy_a")


def test_what_is_not_there_is_told_with_what_is(tmp_path):
    with pytest.raises(ValueError, match="must be a folder"):
        read_profile(tmp_path / "nothing", "toy_a")
    write_profile(tmp_path, "toy_a", ["one"])
    with pytest.raises(ValueError, match=r"toy_b_mbs.*with toy_a"):
        read_profile(tmp_path, "toy_b")
    with pytest.raises(ValueError, match=r"must not be given.*layers=4"):
        read_profile(tmp_path, "toy_a", 4)
    write_profile(tmp_path, "gpt_toy", GPT)
    with pytest.raises(ValueError, match=r"must be given.*layers=None"):
        read_profile(tmp_path, "gpt_toy")
    for layers in (0, -1):
        with pytest.raises(ValueError, match=rf"layers must be 1 or more \(got -l {layers}\)"):
            read_profile(tmp_path, "gpt_toy", layers)
    write_profile(tmp_path, "gpt_less", GPT[:-1])
    with pytest.raises(ValueError, match=r"must have 16 operators \(got 15"):
        read_profile(tmp_path, "gpt_less", 2)


def test_a_degree_that_is_not_there_is_told_with_those_that_are(tmp_path):
    profile = read_profile(write_profile(tmp_path, "toy_a", ["one"]), "toy_a")
    with pytest.raises(ValueError, match=r"degree 4.*1x1, 1x2, 2x1, 2x2"):
        profile.costs_of(2, Share(4, 1))
    with pytest.raises(ValueError, match=r"micro-batch of 3 over 2 replicas"):
        profile.costs_of(3, Share(1, 2))


def test_a_file_of_no_samples_or_no_degree_is_none_of_the_profile(tmp_path):
    folder = write_profile(tmp_path, "toy_a", ["one"])
    for name in ("toy_a_mbs0_tp1_algo0.csv", "toy_a_mbs1_tp0_algo0.csv"):
        (folder / name).write_text((folder / FILE).read_text())
    assert set(read_profile(folder, "toy_a").costs) == {(m, d, 0) for m in (1, 2) for d in (1, 2)}
