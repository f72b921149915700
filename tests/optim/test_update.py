"""Updates that hide: the ordinary loop waits for none of them where it need not."""

import pytest
import torch

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.window.gradients import Gradients


@pytest.mark.parametrize("settings", [{}, {"activations": "keep"}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("clip", [False, True])
def test_in_the_ordinary_loop_a_step_waits_for_nothing_and_fetches_no_more_than_it_must(monkeypatch, settings, clip):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=6, hidden=32, heads=2, sequence=16, vocabulary=100))
    stronghold.offload(model, device="cpu", window=2, **settings)
    optimizer = stronghold.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tokens = torch.randint(0, 100, (2, 16))
    waited, added = [], []
    monkeypatch.setattr(stronghold.AdamW, "wait", lambda self: waited.append(self))
    monkeypatch.setattr(Gradients, "_add", lambda self, *rest: added.append(rest))
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert stronghold.report(model).step.fetches == 2 * 6 - 2
    assert not waited
    assert not added  # no gradient went by way of the host's addition


def test_what_somebody_holds_is_complete_when_step_returns():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, hidden=64, heads=2, sequence=16, vocabulary=100))
    stronghold.offload(model, device="cpu", window=2)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.1)
    held = [p.data for p in model.parameters()]
    tokens = torch.randint(0, 100, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    before = [one.clone() for one in held]
    optimizer.step()
    now = [one.clone() for one in held]
    optimizer.wait()
    assert all(torch.equal(one, other) for one, other in zip(now, held, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(now, before, strict=True))
