"""Stages train as one process does: every gradient, loss and parameter, for each schedule, window and store."""

from __future__ import annotations

import pytest
import torch

from stronghold.planner.link_bytes import boundary_bytes
from tests.distributed import cases
from tests.distributed.launched import launch, start

CASES = [
    pytest.param(processes, number, marks=() if number in cases.EACH_TIME[processes] else pytest.mark.long)
    for processes, some in cases.CASES.items()
    for number in range(len(some))
]


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Returns what each process made of a case; those of as many processes, if not long, are run in one launch."""
    runs = {}

    def run(processes: int, number: int, device: str = "cpu"):
        each_time = cases.EACH_TIME[processes]
        of = processes, number in each_time, device
        if of not in runs:
            runs[of] = []  # one that fails is not begun again by each test
            folder = tmp_path_factory.mktemp("stages")
            numbers = [n for n in range(len(cases.CASES[processes])) if (n in each_time) == (number in each_time)]
            arguments = [str(processes), device, *map(str, numbers)]
            runs[of] = launch("tests.distributed.cases", "some_cases", processes, folder, *arguments)
        return [one[number] for one in runs[of]]

    return run


@pytest.mark.parametrize(("processes", "number"), CASES)
def test_stages_train_as_one_process_does(staged, processes, number):
    compare(cases.CASES[processes][number], staged(processes, number), "cpu")


@pytest.mark.long
def test_many_steps_are_those_of_one_process(tmp_path):
    ranks = launch("tests.distributed.cases", "long_cases", 2, tmp_path, "cpu")
    for number, case in enumerate(cases.LONG):
        compare(case, [one[number] for one in ranks], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("processes", "number"), CASES)
def test_stages_on_gpus_train_as_one_process_on_a_gpu_does(staged, processes, number):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA devices")
    compare(cases.CASES[processes][number], staged(processes, number, "cuda"), "cuda")


def compare(case: cases.Case, everyone: list[cases.Trained], device: str) -> None:
    expected, processes = cases.alone(case, device), len(everyone)
    seen = {name for trained in everyone for name in trained.parameters}
    assert seen == expected.parameters.keys()
    for trained in everyone:
        assert trained.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        assert trained.evaluated == pytest.approx(expected.evaluated, rel=1e-5)
        for step, gradients in enumerate(trained.gradients):
            held = expected.gradients[step].keys() & trained.parameters.keys()
            assert gradients.keys() == held
            for name, gradient in gradients.items():
                reference = expected.gradients[step][name]
                tolerance = 1e-6 if step == 0 else 1e-4  # later ones are of parameters that AdamW has moved
                assert (gradient - reference).norm() <= tolerance * reference.norm(), (name, step)
        for name, parameter in trained.parameters.items():
            torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-4, atol=2e-5, msg=name)
    each = processes // case.replicas
    for first in range(0, processes, each):
        assert set().union(*(trained.again for trained in everyone[first : first + each])) == case.again
    order = case.order(processes)
    for step, batch in enumerate(cases.batches(case.steps)):
        a_micro_batch = len(batch) // case.replicas // case.micro_batches * batch.shape[1] * cases.CONFIG.hidden * 4
        sent = {(rank, to): count for rank, one in enumerate(everyone) for to, count in one.sent[step].items()}
        assert sent == {
            (first + begin, first + end): count
            for first in range(0, processes, each)
            for (begin, end), count in boundary_bytes(order, a_micro_batch).items()
        }
    copies = [
        trained.parameters["embedding.weight"] for trained in everyone if "embedding.weight" in trained.parameters
    ]
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.fixture(scope="module")
def without_shared_parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    (folder / "store").mkdir()
    return launch("tests.distributed.cases", "without_shared_parameters", 2, folder, str(folder / "store"))


def test_stages_without_shared_parameters_train_to_the_bit_as_micro_batches_do_in_one_process(
    without_shared_parameters,
):
    assert [found["unequal"] for found in without_shared_parameters] == [[], []]


@pytest.mark.long
def test_stages_train_to_the_bit_in_the_other_ways_too(tmp_path):
    (tmp_path / "store").mkdir()
    found = launch("tests.distributed.cases", "other_bits", 2, tmp_path, str(tmp_path / "store"))
    assert found == [[], []]


def test_stages_may_pass_on_views_of_their_activations(without_shared_parameters):
    """What is sent is one piece of memory, in the order in which the next stage reads it."""
    assert [found["turned"] for found in without_shared_parameters] == [[], []]


def test_stages_under_autocast_train_as_one_process_does_where_they_pass_on_what_they_take(without_shared_parameters):
    assert [found["autocast"] for found in without_shared_parameters] == [[], []]


def test_processes_that_pass_different_batches_are_refused_before_anything_is_computed(without_shared_parameters):
    """The inputs of one were trained against the targets of another."""
    assert [found["other batches"] for found in without_shared_parameters] == [[], []]


def test_layers_may_be_frozen_and_thawed_when_they_are_in_stages(without_shared_parameters):
    """What has a gradient at a stage's end was found once, and what came ended in an error of shapes or of autograd."""
    assert [found["thawed"] for found in without_shared_parameters] == [[], []]


def test_a_stage_that_returns_another_type_under_autocast_is_refused(tmp_path):
    """The next stage waits for fp32: of bf16 gloo filled half of its memory, and the rest was what was there."""
    command = ["-m", "tests.distributed.launched", "tests.distributed.cases", "of_another_type", str(tmp_path)]
    codes, said = start(command, 2, tmp_path)
    assert 0 not in codes
    assert (
        "ParallelError: stage 0 must return what stage 1 waits for, torch.float32 of shape (2, 8) (got torch.bfloat16 "
        "of shape (2, 8)); instead of torch.autocast, which changes what stages return, pass dtype=torch.bfloat16"
    ) in said[0]


def test_a_shared_parameter_that_one_stage_freezes_is_refused_by_both_names(without_shared_parameters):
    """It stood still for 40 s, for one process took part in the sum of its gradients and the other not."""
    assert [found["frozen by one name"] for found in without_shared_parameters] == [[], []]


def test_the_window_foresees_the_order_of_the_pipeline(without_shared_parameters):
    for found in without_shared_parameters:
        assert found["foreseen"] < 0.9 * found["by itself"]


def test_what_other_processes_have_of_a_model_is_let_go(without_shared_parameters):
    assert all(found["let go"] for found in without_shared_parameters)


def test_a_stage_has_its_state_by_the_names_of_the_whole_model(without_shared_parameters):
    assert all(found["kept"] for found in without_shared_parameters)


def test_checkpoints_of_stages_with_a_tied_head_go_on_in_stages_and_in_one_process(without_shared_parameters):
    """The head was named as if it were another parameter, in the groups alone, and no layout read the checkpoint."""
    assert [found["checkpoints"] for found in without_shared_parameters] == [[], []]


def test_a_tied_head_begins_as_the_embedding_whatever_its_process_drew_or_was_given(without_shared_parameters):
    """It kept what it had, by another seed, out of a file with one of the names, or by its own module's initialiser."""
    assert [found["begins alike"] for found in without_shared_parameters] == [[], []]


def test_a_tied_head_that_is_not_updated_as_the_embedding_is_refused_by_both_names(without_shared_parameters):
    """Two matrices were trained, each with the gradients of both; nothing is updated now."""
    assert [found["other settings"] for found in without_shared_parameters] == [[], []]


def test_evaluation_keeps_no_outputs_but_those_of_a_micro_batch(without_shared_parameters):
    """Of a language model they are logits, and stayed to the next evaluation."""
    assert [found["evaluation"] for found in without_shared_parameters] == [[], []]


def test_a_model_in_stages_is_not_saved_as_the_layers_of_one_process(without_shared_parameters):
    """Its file had 3 of 6 parameters, and the rest was gone with the run."""
    for found in without_shared_parameters:
        assert "(got one in stages, of which each process has its own layers: 2" in found["saved in part"]
        assert "call stronghold.checkpoint.save(directory, model, optimizer) in all of them" in found["saved in part"]


def test_the_mean_over_the_labels_of_a_batch_is_had_as_the_docs_say(without_shared_parameters):
    """Of a loss that takes the mean itself a micro-batch whose labels are all ignored makes NaN."""
    assert [found["ignored"] for found in without_shared_parameters] == [[], []]
