"""Batches: every sample once an epoch, the same for the same seed, from any position."""

import numpy as np
import pytest
import torch

from stronghold.lab.data.batches import Batches

TOKENS = np.arange(103, dtype=np.uint16)  # 25 samples of 4, a rest of 3


def first_tokens(batches, positions):
    return torch.cat([batches[position][:, 0] for position in positions]).tolist()


def test_a_batch_holds_consecutive_tokens_as_int64():
    batch = Batches(TOKENS, batch=3, sequence=4)[0]
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 4)
    assert torch.equal(batch - batch[:, :1], torch.arange(4).expand(3, 4))


def test_the_fingerprint_is_of_all_tokens_whatever_is_done_with_them(monkeypatch):
    expected = Batches(TOKENS, batch=3, sequence=4).fingerprint()
    assert expected["tokens"] == 100
    assert Batches(TOKENS, batch=7, sequence=4, seed=3, held_out=5).fingerprint() == expected
    monkeypatch.setattr("stronghold.lab.data.batches._SAMPLES_AT_ONCE", 7)
    assert Batches(TOKENS, batch=3, sequence=4).fingerprint() == expected
    for place in (0, 42, 99):
        other = TOKENS.copy()
        other[place] += 1
        assert Batches(other, batch=3, sequence=4).fingerprint()["crc32c"] != expected["crc32c"]


def test_each_epoch_holds_every_sample_once_in_another_order():
    batches = Batches(TOKENS, batch=5, sequence=4, seed=1)
    epochs = [first_tokens(batches, range(5 * epoch, 5 * epoch + 5)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 100, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_batches_run_on_across_epochs():
    batches = Batches(TOKENS, batch=4, sequence=4, seed=1)
    firsts = first_tokens(batches, range(25))  # four epochs of 25 samples
    assert all(sorted(firsts[e : e + 25]) == list(range(0, 100, 4)) for e in range(0, 100, 25))


def test_any_position_gives_what_it_gives_in_order():
    in_order = Batches(TOKENS, batch=4, sequence=4, seed=2)
    expected = [in_order[position] for position in range(20)]
    jumping = Batches(TOKENS, batch=4, sequence=4, seed=2)
    for position in (19, 0, 6, 7, 5, 13, 6):
        assert torch.equal(jumping[position], expected[position])


def test_the_order_follows_the_seed():
    one, same, other = (first_tokens(Batches(TOKENS, batch=5, sequence=4, seed=seed), range(5)) for seed in (1, 1, 2))
    assert one == same != other


def test_held_out_samples_are_never_trained_on():
    batches = Batches(TOKENS, batch=2, sequence=4, seed=3, held_out=5)
    held = torch.cat([batch[:, 0] for batch in batches.held_out()]).tolist()
    trained = first_tokens(batches, range(30))
    assert (batches.samples, batches.held_out_samples) == (20, 5)
    assert len(set(held)) == 5
    assert sorted({*held, *trained}) == list(range(0, 100, 4))
    assert not set(held) & set(trained)
    assert [len(batch) for batch in batches.held_out()] == [2, 2, 1]
    assert list(Batches(TOKENS, batch=2, sequence=4).held_out()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence": 104}, "got 103 tokens, sequence=104"),
        ({"held_out": 25}, "held_out=25"),
        ({"batch": 0}, "got batch=0, sequence=4"),
        ({"sequence": 1}, "got batch=2, sequence=1"),
        ({"held_out": -1}, "got -1"),
    ],
)
def test_what_cannot_give_a_batch_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Batches(TOKENS, **({"batch": 2, "sequence": 4} | settings))


def test_a_negative_position_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        Batches(TOKENS, batch=2, sequence=4)[-1]
