"""The loop: it trains as one written by hand, and every way it may end is tidy."""

import dataclasses
import io
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stronghold.checkpoint.pretrained import save
from stronghold.lab import methods, training
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import read_documents
from stronghold.lab.data.tokens import ByteTokenizer, tokenize
from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.stronghold import Stronghold
from stronghold.lab.models.files import load_model
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import read_records
from stronghold.lab.records.runs import read_run
from stronghold.lab.settings import DataSettings, ModelSettings, OptimizerSettings, TrainSettings
from stronghold.lab.training import TrainingError, learning_rate_factor, train
from stronghold.settings import OffloadSettings
from stronghold.weights import fill

SHAPE = {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 256}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(400)))
    return path


@pytest.fixture
def settings(tmp_path, text):
    return TrainSettings(
        out=str(tmp_path / "run"),
        model=ModelSettings(**SHAPE),
        data=DataSettings(source=str(text)),
        optimizer=OptimizerSettings(lr=1e-2, warmup_steps=3, max_grad_norm=0.5, weight_decay=0.3),
        batch=3,
        sequence=32,
        steps=10,
        seed=5,
    )


def run(settings):
    """Trains, and returns the outcome and what was shown."""
    file = io.StringIO()
    return train(settings, console=Console(file=file, width=200)), file.getvalue()


def by_hand(settings, text):
    """Returns losses, rates and model of the same training in plain PyTorch."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(sequence=32, **SHAPE))
    batches = Batches(tokenize(read_documents(text), ByteTokenizer(256)), batch=3, sequence=32, seed=5)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.3), lr=1e-2, betas=(0.9, 0.95))
    losses, rates = [], []
    for step in range(10):
        rate = 1e-2 * ((step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 6)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(batches[step], labels=batches[step]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(rate)
    return losses, rates, model


def test_it_trains_as_a_loop_written_by_hand(settings, text):
    outcome, shown = run(dataclasses.replace(settings, save=settings.out + "/kept"))
    losses, rates, model = by_hand(settings, text)
    steps = read_run(settings.out).steps
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)
    assert [step["lr"] for step in steps] == pytest.approx(rates, rel=1e-12)
    assert [step["step"] for step in steps] == list(range(1, 11))
    saved, with_weights = load_model(outcome.saved)
    assert with_weights
    for (name, mine), theirs in zip(saved.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4, msg=name)
    assert outcome.interrupted is False
    assert outcome.summary.first_loss == steps[0]["loss"]
    assert "step    10/10  loss" in shown
    assert "waiting for an update" in shown
    assert "TFLOPS with recomputation" in shown


@pytest.mark.parametrize(
    ("save", "others", "told"),
    [
        ("run", {}, r"out='.*/run', which is the same"),
        ("", {}, r"out='.*/run', which is in it"),
        ("kept", {"log": "kept/log.txt"}, r"log='.*/kept/log.txt', which is in it"),
        ("kept", {"record": "kept"}, r"record='.*/kept', which is the same"),
        ("kept", {"store": "kept"}, r"store='.*/kept', which is the same"),
        (None, {"log": "run/model/log.txt"}, r"log='.*/run/model/log.txt', which is in it"),
    ],
)
def test_a_model_that_could_not_be_saved_beside_the_runs_outputs_is_refused_first(
    settings, tmp_path, save, others, told
):
    """The run wrote into its folder, trained, and lost the model in the end."""
    places = {name: str(tmp_path / path) for name, path in others.items()}
    offload = OffloadSettings(store=places.pop("store", "ram"))
    save = save if save is None else str(tmp_path / save)
    wanted = dataclasses.replace(settings, save=save, offload=offload, **places)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"save must be .* none of the run's other outputs .*{told}\); pass another"):
        run(wanted)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ({"log": "text.txt"}, "log .* data='.*', which is read, and would be lost"),
        ({"log": "run/log.jsonl"}, "log .* the run's log"),
        ({"log": "run/timeline.json"}, "log .* the run's timeline"),
        ({"log": "run/checkpoints"}, "log .* the run's checkpoints"),
        ({"log": "store"}, "log .* store="),
        ({"log": "one", "record": "one"}, "record .* log="),
        ({"record": "run/log.jsonl"}, "record .* the run's log"),
        ({"save": "run/checkpoints"}, "save .* the run's checkpoints"),
        ({"save": "run/checkpoints/step-000006"}, "save .* the run's checkpoint="),
    ],
)
def test_an_output_that_would_overwrite_something_is_refused_first(settings, tmp_path, places, told):
    """Text to learn, records and checkpoints were lost, and some runs failed in their end."""
    data = tmp_path / "text.txt"
    data.write_text("to learn " * 1000)
    wanted = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, source=str(data)),
        offload=OffloadSettings(store=str(tmp_path / "store")),
        **{name: str(tmp_path / path) for name, path in places.items()},
    )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"{told}.*pass another path"):
        run(wanted)
    assert sorted(tmp_path.rglob("*")) == before
    assert data.read_text() == "to learn " * 1000


def test_compiled_layers_train_as_a_loop_written_by_hand(settings, text):
    _, shown = run(dataclasses.replace(settings, offload=OffloadSettings(window=1, compile="aot_eager")))
    losses, _, _ = by_hand(settings, text)
    assert [step["loss"] for step in read_run(settings.out).steps] == pytest.approx(losses, rel=1e-5)
    assert re.search(rf"compiled layers\W+{SHAPE['layers']} in their last call [^;]", shown)


def test_the_logs_hold_settings_machine_and_summary(settings, tmp_path):
    wanted = dataclasses.replace(settings, steps=3, log=str(tmp_path / "log.txt"), record=str(tmp_path / "runs.jsonl"))
    outcome, _ = run(wanted)
    logged = read_run(settings.out)
    assert logged.start["settings"]["lr"] == 1e-2
    assert logged.start["parameters"] == GPTConfig(**SHAPE).parameters
    assert logged.start["machine"]["versions"]["torch"] == torch.__version__
    assert logged.end["summary"] == outcome.summary.record()
    (record,) = read_records(tmp_path / "runs.jsonl").records
    assert record["summary"] == outcome.summary.record()
    assert record["settings"] == logged.start["settings"]
    assert record["losses"] == [step["loss"] for step in logged.steps]
    assert [step["iteration_s"] for step in record["steps"]] == [step["iteration_s"] for step in logged.steps]
    split = {"compute_s", "fetch_wait_s", "update_wait_s", "disk_wait_s", "outside_s"}
    assert {*split, "disk_written_bytes"} < record["steps"][0].keys()
    placement = record["placement"]
    assert (placement["window"], placement["resident"]) == (0, 2)  # what "auto" came to
    assert placement["device_bytes"] == logged.steps[-1]["device_bytes"]
    assert (tmp_path / "log.txt").read_text().count("\nstep ") == 3
    step = logged.steps[-1]
    assert step["tokens_per_s"] == pytest.approx(96 / step["iteration_s"])
    assert step["peak_host_bytes"] > 2**27
    assert step["host_bytes"] + step["device_bytes"] > 4 * 4 * GPTConfig(**SHAPE).parameters * 0.9


def test_the_same_seed_gives_the_same_losses(settings, tmp_path):
    losses = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        run(dataclasses.replace(settings, steps=3, seed=seed, out=str(tmp_path / name)))
        losses.append([step["loss"] for step in read_run(tmp_path / name).steps])
    assert losses[0] == losses[1] != losses[2]


def test_weights_and_losses_are_the_same_wherever_the_layers_are(settings, tmp_path):
    losses = []
    for name, store in (("a", "ram"), ("b", str(tmp_path / "store"))):
        wanted = dataclasses.replace(settings, steps=3, out=str(tmp_path / name), offload=OffloadSettings(store=store))
        run(dataclasses.replace(wanted, save=str(tmp_path / f"{name}-saved")))
        losses.append([step["loss"] for step in read_run(tmp_path / name).steps])
    assert losses[0] == losses[1]
    assert not (tmp_path / "store").exists(), "it was memory, and went with the model"
    states = [load_model(tmp_path / f"{name}-saved")[0].state_dict() for name in "ab"]
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def test_the_model_is_on_the_meta_device_until_its_method_places_it(settings, monkeypatch):
    class Looking(Stronghold):
        def prepare(self, model, settings, weights=None):
            assert all(parameter.is_meta for parameter in model.parameters())
            return super().prepare(model, settings, weights)

    monkeypatch.setattr(training, "find_method", lambda name: Looking())
    run(dataclasses.replace(settings, steps=1))


@pytest.mark.parametrize("limit", [None, "1KiB"])
def test_a_limit_of_device_memory_is_set_before_anything_is_built(settings, monkeypatch, limit):
    done = []

    def build(*_):
        raise ValueError("the model would be built now")

    monkeypatch.setattr(training, "limit_memory", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(training, "_build_model", build)
    with pytest.raises(ValueError, match="would be built"):
        run(dataclasses.replace(settings, device="cuda:1", device_limit=limit))
    assert done == ([] if limit is None else [("cuda:1", 1024)])


def test_held_out_text_is_scored_at_the_end(settings, text):
    outcome, shown = run(
        dataclasses.replace(settings, data=DataSettings(source=str(text), held_out=7), save=settings.out + "/kept")
    )
    model = load_model(outcome.saved)[0].eval()
    batches = Batches(tokenize(read_documents(text), ByteTokenizer(256)), batch=7, sequence=32, seed=5, held_out=7)
    (batch,) = batches.held_out()
    assert outcome.summary.held_out_loss == pytest.approx(model(batch, labels=batch).loss.item(), rel=1e-5)
    assert "on held-out text" in shown


def test_the_learning_rate_rises_to_its_height_and_falls_to_a_tenth():
    factors = [learning_rate_factor(step, steps=9, warmup_steps=4) for step in range(9)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, *(0.1 + 0.45 * c for c in COSINES)])
    assert learning_rate_factor(0, steps=1, warmup_steps=0) == 1.0
    assert learning_rate_factor(20, steps=9, warmup_steps=4) == pytest.approx(0.1)


COSINES = (1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0)


def test_a_saved_gpt_and_a_transformers_config_are_trained(settings, tmp_path):
    save(GPT(GPTConfig(sequence=32, **SHAPE)), tmp_path / "gpt")
    from transformers import LlamaConfig

    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=32,
    ).save_pretrained(tmp_path / "llama")
    for name in ("gpt", "llama"):
        model = ModelSettings(path=str(tmp_path / name))
        data = dataclasses.replace(settings.data, tokenizer=None if name == "gpt" else "bytes")
        wanted = dataclasses.replace(
            settings, model=model, data=data, out=str(tmp_path / f"{name}-run"), save=str(tmp_path / f"{name}-saved")
        )
        outcome, shown = run(wanted)
        assert outcome.summary.last_loss < outcome.summary.first_loss - 0.5, name
        assert ("its weights" if name == "gpt" else "initialised anew") in shown
        saved, with_weights = load_model(tmp_path / f"{name}-saved")
        assert with_weights
        assert saved.config.to_dict()["use_cache"] if name == "llama" else saved.config.layers == 2
    with pytest.raises(ValueError, match=r"got sequence=64, the model of .*llama' takes 32"):
        run(dataclasses.replace(wanted, sequence=64, out=str(tmp_path / "new")))


@pytest.fixture
def llama(tmp_path):
    """The folder of a Llama with a tokenizer of words, and a text of those."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *map(str, range(90))]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "llama")
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=92, max_position_embeddings=32)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "words.txt").write_text(" ".join(str(number % 90) for number in range(2000)))
    return tmp_path / "llama"


def test_a_model_is_trained_on_its_own_tokenizer_which_goes_where_it_goes(settings, llama, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "saved").mkdir()  # which holds another model with another tokenizer
    for name in ("config.json", "vocab.txt", "notes.txt"):
        (tmp_path / "saved" / name).write_text("{}")
    ids = AutoTokenizer.from_pretrained(llama).encode("7 8 89 elephants")
    assert ids == [9, 10, 91, 0]
    data = DataSettings(source=str(tmp_path / "words.txt"))
    wanted = dataclasses.replace(settings, model=ModelSettings(path=str(llama)), data=data, steps=2)
    _, shown = run(dataclasses.replace(wanted, save=str(tmp_path / "saved")))
    assert f"words.txt, {llama}: 62 samples of 32 tokens" in shown
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("7 8 89 elephants") == ids
    assert (tmp_path / "saved" / "notes.txt").exists() and not (tmp_path / "saved" / "vocab.txt").exists()

    again = dataclasses.replace(wanted, model=ModelSettings(path=str(tmp_path / "saved")), out=settings.out + "-2")
    _, shown = run(dataclasses.replace(again, save=str(tmp_path / "again")))
    assert "62 samples of 32 tokens" in shown
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode("7 8 89 elephants") == ids
    (llama / "config.json").rename(llama / "begin.json")
    _, shown = run(
        dataclasses.replace(wanted, model=ModelSettings(path=str(llama / "begin.json")), out=wanted.out + "3")
    )
    assert "initialised anew" in shown and "62 samples of 32 tokens" in shown


def test_bytes_are_asked_for_and_leave_no_tokenizer_beside_the_model(settings, llama, tmp_path):
    wide = str(tmp_path / "wide")
    fitting = GPT(GPTConfig(sequence=32, **SHAPE))
    save(fitting, wide)
    (Path(wide) / "tokenizer.json").write_bytes((llama / "tokenizer.json").read_bytes())
    saved = shutil.copytree(wide, tmp_path / "saved")  # another model with a tokenizer, which is replaced
    wanted = dataclasses.replace(settings, model=ModelSettings(path=wide), steps=1, save=str(saved))
    _, shown = run(dataclasses.replace(wanted, data=dataclasses.replace(settings.data, tokenizer="bytes")))
    assert "text.txt, bytes: " in shown
    assert not (saved / "tokenizer.json").exists() and (Path(wide) / "tokenizer.json").exists()
    again = dataclasses.replace(wanted, model=ModelSettings(path=str(saved)), out=settings.out + "-2", save=None)
    _, shown = run(again)
    assert "text.txt, bytes: " in shown


def test_the_reference_gpt_takes_a_tokenizers_file_and_keeps_it(settings, llama, tmp_path):
    data = DataSettings(source=str(tmp_path / "words.txt"), tokenizer=str(llama / "tokenizer.json"))
    run(dataclasses.replace(settings, data=data, steps=1, save=str(tmp_path / "saved")))
    again = ModelSettings(path=str(tmp_path / "saved"))
    data = dataclasses.replace(data, tokenizer=None)
    _, shown = run(dataclasses.replace(settings, model=again, data=data, steps=1, out=settings.out + "-2"))
    assert f"words.txt, {tmp_path / 'saved'}: 62 samples" in shown


def test_a_model_without_a_tokenizer_or_with_a_larger_one_is_refused(settings, llama):
    wanted = dataclasses.replace(settings, model=ModelSettings(path=str(llama)))
    with pytest.raises(ValueError, match=r"model's vocabulary.*ids up to 256 from 'bytes'"):
        run(dataclasses.replace(wanted, data=dataclasses.replace(settings.data, tokenizer="bytes")))
    for file in llama.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"its own tokenizer \(got none in '.*llama'\); pass tokenizer.*or 'bytes'"):
        run(wanted)
    assert not os.path.exists(settings.out)


def test_a_tokenizer_that_the_model_has_no_rows_for_is_refused_before_anything_is_written(settings):
    small = dataclasses.replace(settings.model, vocabulary=128)
    with pytest.raises(ValueError, match=r"which a model must take to be trained on them \(got vocabulary=128\)"):
        run(dataclasses.replace(settings, model=small))
    assert not os.path.exists(settings.out)


def test_gradients_that_are_not_finite_end_the_run_with_remedies_that_the_command_has(settings, monkeypatch):
    """It said to pass nonfinite='skip', which the command has as --nonfinite skip."""
    loss = Prepared.loss
    monkeypatch.setattr(Prepared, "loss", lambda self, batch: loss(self, batch) * math.inf)
    monkeypatch.setattr(training, "_check_loss", lambda *_: None)  # a loss may be finite whose gradients are not
    with pytest.raises(TrainingError) as told:
        run(settings)
    assert re.fullmatch(
        r"step 1 failed: the gradients' norm must be finite \(got (nan|inf)\); nothing was updated; lower --lr, warm "
        r"up longer \(--warmup\), or pass --nonfinite skip to go on without such steps",
        str(told.value),
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before")
def test_what_the_engine_notes_beside_a_models_error_is_told(settings, monkeypatch):
    """Of BLOOM under --micro-batch the command told 'The expanded size of the tensor (8) must match' alone."""

    def fails(self, batch):
        error = RuntimeError("the sizes must match")
        error.add_note("layers.0 ran for one of 2 micro-batches")
        raise error

    monkeypatch.setattr(Prepared, "loss", fails)
    with pytest.raises(TrainingError) as told:
        run(settings)
    assert str(told.value) == "step 1 failed: the sizes must match; layers.0 ran for one of 2 micro-batches"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_the_model_saved(settings, monkeypatch, number):
    before = signal.getsignal(number)
    inputs_of, calls = methods.inputs_of, []

    def interrupt(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            os.kill(os.getpid(), number)
        return inputs_of(model, batch)

    monkeypatch.setattr(methods, "inputs_of", interrupt)
    outcome, shown = run(settings)
    assert outcome.interrupted
    logged = read_run(settings.out)
    assert len(logged.steps) == outcome.summary.steps == 4
    assert logged.end["interrupted"] is True
    assert outcome.saved == os.path.join(settings.out, "model")
    assert "interrupted after step 4 of 10" in shown
    assert signal.getsignal(number) is before
    loss = load_model(outcome.saved)[0](calls[0], labels=calls[0]).loss.item()
    assert loss < logged.steps[0]["loss"] - 0.3  # what four steps have taught is there


def test_a_method_to_compare_with_is_trained_alike_and_saves_nothing(settings, text, monkeypatch):
    outcome, shown = run(dataclasses.replace(settings, method="megatron-lm", record=settings.out + ".jsonl"))
    (record,) = read_records(Path(settings.out + ".jsonl")).records
    assert record["steps"][0].keys() == {"step", "iteration_s", "disk_read_bytes", "disk_written_bytes"}
    losses, rates, _ = by_hand(settings, text)
    steps = read_run(settings.out).steps
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-6)
    assert [step["lr"] for step in steps] == pytest.approx(rates, rel=1e-12)
    assert "not counted" in shown
    assert outcome.summary.device_bytes == pytest.approx(16 * GPTConfig(**SHAPE).parameters, rel=0.01)
    backward = Prepared.backward

    def interrupt(prepared, loss):
        os.kill(os.getpid(), signal.SIGINT)
        backward(prepared, loss)

    monkeypatch.setattr(Prepared, "backward", interrupt)
    outcome, shown = run(dataclasses.replace(settings, method="megatron-lm", out=settings.out + "-interrupted"))
    assert outcome.interrupted
    assert outcome.saved is None
    assert "not saved: megatron-lm is there to be compared with" in shown


class Plain:
    """A method of this test only: PyTorch alone, with a loss or gradient spoilt on demand."""

    name = "plain"

    def __init__(self, spoil):
        self.spoil = spoil

    def prepare(self, model, settings, weights=None):
        from stronghold.reports import Report

        fill(model, weights)
        forward, calls = model.forward, []

        def spoilt(*arguments, **keywords):
            calls.append(1)
            output = forward(*arguments, **keywords)
            if len(calls) == 3:
                return self.spoil(output)
            return output

        model.forward = spoilt
        report = Report(**{field.name: 0 for field in dataclasses.fields(Report)} | {"step": None})
        return Prepared(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            report=lambda: report,
            device=torch.device("cpu"),
        )


def test_a_loss_of_nan_ends_the_run_and_says_where(settings, monkeypatch):
    monkeypatch.setattr(training, "find_method", lambda name: Plain(lambda out: out._replace(loss=out.loss * math.nan)))
    with pytest.raises(TrainingError, match=r"got nan in step 3 at lr=0\.001.*those after step 2"):
        run(settings)
    assert len(read_run(settings.out).steps) == 2


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("out of memory"), "out of memory"), (AssertionError(), "AssertionError")]
)
def test_a_step_that_fails_is_named_with_its_reason(settings, monkeypatch, error, reason):
    def fail(output):
        raise error

    monkeypatch.setattr(training, "find_method", lambda name: Plain(fail))
    with pytest.raises(TrainingError, match=f"step 3 failed: {reason}$"):
        run(settings)
    assert len(read_run(settings.out).steps) == 2


def test_a_full_disk_ends_the_run_with_the_files_name(settings):
    with pytest.raises(OSError, match=r"cannot write the log \(No space left on device\).*/dev/full"):
        run(dataclasses.replace(settings, log="/dev/full"))


@pytest.mark.parametrize("target", ["out", "save"])
def test_a_folder_in_use_is_refused_before_anything_is_built(settings, tmp_path, target, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "log.jsonl").write_text("mine")
    monkeypatch.setattr(training, "_build_model", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match="used"):
        run(dataclasses.replace(settings, **{target: str(tmp_path / "used")}))
    assert (tmp_path / "used" / "log.jsonl").read_text() == "mine"
