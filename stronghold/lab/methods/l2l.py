"""Layer-to-Layer: Pudipeddi et al., Training Large Neural Networks with Constant Memory (2020, arXiv 2002.05645).

The device has one layer at a time, and runs it over all micro-batches before the next comes. Everything else is in the
paper's eager parameter server, which is the host here: it updates a layer as soon as that layer's gradient is there,
while the device is at the layer below.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stronghold.lab.methods import Prepared, decay_groups
from stronghold.lab.methods.ordinary import measure, reference_model
from stronghold.lab.models.gpt import GPT, rotary
from stronghold.lab.settings import TrainSettings
from stronghold.weights import Weights, fill


class L2L:
    """The paper's L2L-p: without clipping updates run beside the backward pass.

    Clipping by the norm of all gradients needs the last before the first update: then updates run after it.
    """

    name = "l2l"

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model``, which stays on the host, and its optimizer."""
        gpt = reference_model(model, settings, self.name, activations=("recompute", "host"), keeps=("micro_batch",))
        if gpt.config.dropout:
            raise ValueError(
                f"{self.name} draws no random numbers twice, as recomputing dropout would need (got "
                f"dropout={gpt.config.dropout}); pass dropout=0"
            )
        fill(gpt, weights)
        server = Server(gpt, settings)
        return Relay(
            model=gpt,
            optimizer=server.optimizer,
            report=lambda: measure(settings, gpt.config.parameters, held_device_bytes=server.most_on_device_bytes),
            device=server.device,
            max_grad_norm=settings.optimizer.max_grad_norm,
            server=server,
            micro_batch=settings.offload.micro_batch_samples or settings.batch,
            stash=torch.device("cpu") if settings.offload.activations == "host" else server.device,
        )


class Part(nn.Module):
    """What is on the device at a time: a layer, or the model's way into the first one or out of the last.

    ``method`` of ``module`` runs with the parameters of ``owners``.
    """

    def __init__(self, module: nn.Module, method: str, *owners: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.method = method
        own = {id(p) for owner in owners for p in owner.parameters()}
        self.hosted = {name: p for name, p in self.named_parameters() if id(p) in own}

    def forward(self, *arguments: Any) -> Any:
        return getattr(self.module, self.method)(*arguments)


class Server:
    """The eager parameter server: masters, gradients and states on the host, and the AdamW that updates them there."""

    def __init__(self, gpt: GPT, settings: TrainSettings) -> None:
        wanted = settings.optimizer
        self.device = torch.device(settings.device)
        self.most_on_device_bytes = 0
        """The most that parameters and gradients took at a time."""
        self.into = Part(gpt, "embed", gpt.embedding)
        self.layers = [Part(layer, "forward", layer) for layer in gpt.layers]
        self.out_of = Part(gpt, "score", gpt.norm, gpt.embedding)
        self.optimizer = torch.optim.AdamW(
            decay_groups(gpt, wanted.weight_decay), lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True
        )
        self._eager = wanted.max_grad_norm is None
        self._dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        self._sent = {parameter: self._to_send(parameter) for parameter in gpt.parameters()}
        """What is copied to the device: the masters' own memory, or copies of them in the compute type."""
        parts = (self.into, *self.layers, self.out_of)
        self._uses = Counter(parameter for part in parts for parameter in part.hosted.values())
        self._awaited = self._uses.copy()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._worker = ThreadPoolExecutor(1, "l2l-update")
        self._updates: list[Future[None]] = []

    def _to_send(self, parameter: nn.Parameter) -> Tensor:
        sent = parameter.detach().to(self._dtype)
        if self.device.type != "cpu":
            sent = sent.pin_memory()
            if self._dtype == torch.float32:
                parameter.data = sent
        return sent

    def fetch(self, part: Part) -> dict[str, Tensor]:
        """Returns the parameters of ``part`` on the device. Those of another part are given up."""
        learning = torch.is_grad_enabled()
        fetched = {
            name: torch.empty(p.shape, dtype=self._dtype, device=self.device)
            .copy_(self._sent[p], non_blocking=True)
            .requires_grad_(learning)
            for name, p in part.hosted.items()
        }
        taken = sum(tensor.nbytes for tensor in fetched.values()) * (2 if learning else 1)
        self.most_on_device_bytes = max(self.most_on_device_bytes, taken)
        return fetched

    def push(self, part: Part, fetched: dict[str, Tensor]) -> None:
        """Takes the gradients of ``part`` to the host, and has updated what is complete unless all are to be clipped.

        The tied embedding is used by two parts, and complete with its second gradient.
        """
        complete = []
        for name, parameter in part.hosted.items():
            gradient = fetched[name].grad
            assert gradient is not None
            on_host = gradient.to("cpu", torch.float32, copy=True)
            if (first := self._gradients.get(parameter)) is not None:
                on_host += first
            self._gradients[parameter] = on_host
            self._awaited[parameter] -= 1
            if not self._awaited[parameter]:
                complete.append(parameter)
        if self._eager:
            gradients = {parameter: self._gradients.pop(parameter) for parameter in complete}
            self._updates.append(self._worker.submit(self._update, gradients))

    def step(self, max_grad_norm: float | None) -> None:
        """Waits for the updates; clips and updates what was left for the norm of all gradients."""
        if self._gradients:
            self._update(self._gradients, max_grad_norm)
        for update in self._updates:
            update.result()
        self._gradients, self._updates, self._awaited = {}, [], self._uses.copy()

    @torch.no_grad()
    def _update(self, gradients: dict[nn.Parameter, Tensor], max_grad_norm: float | None = None) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(list(gradients), max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()  # of those that have a gradient: AdamW passes over all others
        for parameter in gradients:
            parameter.grad = None
            if self._dtype != torch.float32:
                self._sent[parameter].copy_(parameter)


@dataclass(frozen=True, kw_only=True)
class Relay(Prepared):
    """One part after another on the device, each over all micro-batches. ``stash`` is where layers' inputs wait."""

    server: Server
    micro_batch: int
    stash: torch.device
    _pass: dict[str, Any] = field(default_factory=dict)
    """What the backward pass needs of the forward one."""

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean loss. The last part computes its gradients here, where it is on the device."""
        ids = batch.to(self.device).split(self.micro_batch)
        positions = self._positions(batch.shape[1])
        with torch.no_grad():
            inputs = [self._run(self.server.into, [(one,) for one in ids])]
            for layer in self.server.layers:
                inputs.append(self._run(layer, [(x.to(self.device), *positions) for x in inputs[-1]]))
        xs = [x.to(self.device).requires_grad_(torch.is_grad_enabled()) for x in inputs.pop()]
        fetched = self.server.fetch(self.server.out_of)
        total = torch.zeros((), device=self.device)
        for x, labels in zip(xs, ids, strict=True):
            part = functional_call(self.server.out_of, fetched, (x, labels)).loss * (len(labels) / len(batch))
            if part.requires_grad:
                part.backward()
            total += part.detach()
        if torch.is_grad_enabled():
            self.server.push(self.server.out_of, fetched)
            self._pass.update(ids=ids, inputs=inputs, gradients=[x.grad for x in xs], positions=positions)
        return total

    def backward(self, loss: Tensor) -> None:
        """Runs the layers again, from the last to the first, and through each the gradient of its output."""
        inputs, gradients, positions = self._pass["inputs"], self._pass["gradients"], self._pass["positions"]
        for layer in reversed(self.server.layers):
            gradients = self._run_back(layer, [(x, *positions) for x in inputs.pop()], gradients)
        self._run_back(self.server.into, [(one,) for one in self._pass["ids"]], gradients)
        self._pass.clear()

    def step(self) -> None:
        """Waits until every parameter is updated."""
        self.server.step(self.max_grad_norm)

    def _positions(self, sequence: int) -> tuple[Tensor, Tensor]:
        config: Any = self.model.config
        return rotary(sequence, config.hidden // config.heads, self.device)

    def _run(self, part: Part, calls: list[tuple[Tensor, ...]]) -> list[Tensor]:
        fetched = self.server.fetch(part)
        return [functional_call(part, fetched, call).to(self.stash) for call in calls]

    def _run_back(self, part: Part, calls: list[tuple[Tensor, ...]], gradients: list[Any]) -> list[Any]:
        """Returns the gradients of the first argument of each of ``calls``, and sends those of the parameters off."""
        fetched = self.server.fetch(part)
        passed = []
        for (first, *others), gradient in zip(calls, gradients, strict=True):
            x = first.to(self.device).detach().requires_grad_(first.is_floating_point())
            functional_call(part, fetched, (x, *others)).backward(gradient)
            passed.append(x.grad)
        self.server.push(part, fetched)
        return passed
