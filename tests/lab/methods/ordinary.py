"""What the methods to compare with are themselves compared with: PyTorch's own loop on the same batches."""

import torch
from torch import nn

from stronghold.lab.methods import decay_groups, find_method
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.settings import OptimizerSettings, TrainSettings
from stronghold.settings import OffloadSettings
from stronghold.weights import fill

CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=300)
STEPS = 12


def settings_of(*, lr=1e-2, clip=0.7, **others):
    offload = OffloadSettings(
        **{name: others.pop(name) for name in list(others) if name in OffloadSettings.__annotations__}
    )
    wanted = OptimizerSettings(lr=lr, weight_decay=0.5, max_grad_norm=clip)
    return TrainSettings(
        **{"out": "unused", "sequence": 16, "batch": 4, "optimizer": wanted, "offload": offload} | others
    )


def empty_model():
    with torch.device("meta"):
        return GPT(CONFIG)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 300, (4, 16), generator=generator) for _ in range(STEPS)]


def plain_losses(settings, device="cpu"):
    """Returns the losses of the loop as a book has it, with the rate falling as a line, and the model."""
    torch.manual_seed(0)
    model = empty_model()
    fill(model, model.initialize_module)
    model.to(device)
    wanted = settings.optimizer
    optimizer = torch.optim.AdamW(decay_groups(model, 0.5), lr=wanted.lr, betas=wanted.betas)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    losses = []
    for ids in batches():
        ids = ids.to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        if wanted.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), wanted.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def prepare(method, settings):
    torch.manual_seed(0)
    model = empty_model()
    return find_method(method).prepare(model, settings, model.initialize_module)


def losses_of(prepared):
    scheduler = torch.optim.lr_scheduler.LinearLR(prepared.optimizer, 1.0, 0.1, STEPS)
    losses = []
    for ids in batches():
        loss = prepared.loss(ids)
        prepared.backward(loss)
        losses.append(loss.item())
        prepared.step()
        scheduler.step()
    return losses
