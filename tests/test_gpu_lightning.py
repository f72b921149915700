"""Lightning's Trainer with an offloaded model on a GPU, or on the accelerator in software."""

from __future__ import annotations

import warnings

import pytest
import torch

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.native import Blocks
from tests.gpu import DEVICE, SOFT, needs_device

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install lightning")

from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_device]

SEQUENCE = 8
SMALL = GPTConfig(layers=4, hidden=32, heads=4, sequence=SEQUENCE, vocabulary=97)


class SoftAccelerator(CPUAccelerator):
    """Lightning's of the CPU, that lets the tensors be elsewhere."""

    def setup_device(self, device):
        assert device.type == DEVICE

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(DEVICE, 0)]


class Module(lightning.LightningModule):
    def __init__(self, model, **settings):
        super().__init__()
        self.model = model
        self.optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, **settings)
        self.losses = []

    def configure_optimizers(self):
        return self.optimizer

    def training_step(self, tokens, number):
        loss = self.model(tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SMALL.vocabulary, (2, SEQUENCE), generator=generator) for _ in range(3)]


def fit(module, directory):
    accelerator = "gpu" if SOFT is None else SoftAccelerator()
    trainer = lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy="auto" if SOFT is None else SingleDeviceStrategy(torch.device(DEVICE, 0)),
        default_root_dir=directory,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))


def offloaded():
    torch.manual_seed(0)
    return stronghold.offload(GPT(SMALL), device=DEVICE, window=1, resident=1)


def moments(optimizer):
    found = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [t for m in found for t in ((m.codes, m.exponents) if isinstance(m, Blocks) else (m,))]


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_fits_one_after_the_other_train_as_the_ordinary_loop_does(tmp_path, states):
    module = Module(offloaded(), states=states)
    fit(module, tmp_path)
    held = moments(module.optimizer)
    assert {tensor.device.type for tensor in held} == {"cpu", DEVICE}
    fit(module, tmp_path)
    assert all(one is other for one, other in zip(held, moments(module.optimizer), strict=True))

    model = offloaded()
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, states=states)
    losses = []
    for tokens in (tokens.to(DEVICE) for _ in range(2) for tokens in batches()):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert module.losses == losses
    for (name, parameter), other in zip(module.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_a_move_to_the_host_leaves_everything_where_it_is():
    model = offloaded()
    model.register_buffer("scale", torch.ones(3, device=DEVICE))
    places = {name: (t.device, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    assert {device.type for device, _ in places.values()} == {"cpu", DEVICE}
    said: list[int] = []
    for move in (model.cpu, lambda: model.to("cpu"), model.layers[0].cpu, lambda: model.to(DEVICE)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            move()
        said.append(sum("nothing was copied to the host" in str(one.message) for one in told))
        assert {n: (t.device, t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()} == places
    assert said == [1, 1, 1, 0]
    for move in (lambda: model.to("cpu", torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(OffloadedModelError, match=r"stays on .* build it anew and pass device="):
            move()
