"""Layer-to-Layer: one layer on the device at a time, whatever the micro-batches, and nothing is lost on the way."""

import weakref

import pytest
import torch

from stronghold.lab.methods.l2l import Server
from tests.lab.methods.ordinary import CONFIG, batches, losses_of, plain_losses, prepare, settings_of


@pytest.mark.parametrize("clip", [0.7, None])
@pytest.mark.parametrize("change", [{"micro_batch": 1}, {"micro_batch": 3}, {"activations": "host"}])
def test_it_trains_as_pytorch_does_however_the_batch_is_cut(clip, change):
    settings = settings_of(clip=clip, **change)
    expected, plain = plain_losses(settings)
    prepared = prepare("l2l", settings)
    assert losses_of(prepared) == pytest.approx(expected, rel=2e-6)
    for mine, theirs in zip(prepared.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("clip", [0.7, None])
def test_one_part_is_on_the_device_at_a_time(monkeypatch, clip):
    fetch, alive, fetches = Server.fetch, [], []

    def watched(server, part):
        assert [one for one in alive if one() is not None] == []  # neither a parameter nor its gradient
        fetched = fetch(server, part)
        alive[:] = [weakref.ref(tensor) for tensor in fetched.values()]
        fetches.append(part)
        return fetched

    monkeypatch.setattr(Server, "fetch", watched)
    prepared = prepare("l2l", settings_of(clip=clip, micro_batch=2))
    losses_of(prepared)
    # Forward: the embedding, each layer, the head; backward: each layer, the embedding.
    assert len(fetches) == len(batches()) * (2 * CONFIG.layers + 3)
    # A layer has 12 h² + 13 h parameters, and as many gradients. The head has the whole table.
    head = CONFIG.rows * CONFIG.hidden + 2 * CONFIG.hidden
    layer = 12 * CONFIG.hidden**2 + 13 * CONFIG.hidden
    assert prepared.report().device_bytes == 2 * 4 * max(head, layer)


def test_without_clipping_updates_run_in_the_backward_pass():
    updated = {}
    for clip in (None, 0.7):
        prepared = prepare("l2l", settings_of(clip=clip))
        before = [p.detach().clone() for p in prepared.model.parameters()]
        prepared.backward(prepared.loss(batches()[0]))
        for update in prepared.server._updates:
            update.result()
        after = list(prepared.model.parameters())
        updated[clip] = sum(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert updated[0.7] == 0
    assert updated[None] == len(before)


def test_a_loss_without_gradients_changes_nothing():
    prepared = prepare("l2l", settings_of())
    with torch.no_grad():
        alone = prepared.loss(batches()[0])
    assert alone.item() == prepared.loss(batches()[0]).item()
    assert alone.requires_grad is False


def test_dropout_is_refused():
    from stronghold.lab.methods import find_method
    from stronghold.lab.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(layers=1, hidden=32, heads=2, sequence=16, vocabulary=300, dropout=0.1))
    with pytest.raises(ValueError, match=r"dropout=0.1\); pass dropout=0"):
        find_method("l2l").prepare(model, settings_of())
