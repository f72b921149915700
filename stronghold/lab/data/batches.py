"""Tokens to batches, in an order that a seed and a position alone decide."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stronghold.native import crc32c

_SAMPLES_AT_ONCE = 4096


class Batches:
    """The batches of a run: ``batches[position]`` is int64 (batch, sequence), whichever came before it.

    The tokens are cut into samples of ``sequence``; a rest is dropped. Each epoch is a permutation of all
    samples, drawn from ``seed`` and the epoch's number; batches run on across epochs, so none is short.
    ``held_out`` samples are kept for validation, chosen by the seed, and never trained on.
    A run resumes by going on at its position.
    """

    def __init__(self, tokens: np.ndarray, *, batch: int, sequence: int, seed: int = 0, held_out: int = 0) -> None:
        if batch < 1 or sequence < 2:
            raise ValueError(
                "batch must be at least 1, and sequence at least 2 because a token is learned from the one "
                f"before it (got batch={batch}, sequence={sequence}); pass larger ones"
            )
        if held_out < 0:
            raise ValueError(f"held_out must be a number of samples, 0 or more (got {held_out}); pass such")
        samples = len(tokens) // sequence
        if samples - held_out < 1:
            raise ValueError(
                f"data must hold at least one sequence to train on, beside those held out (got {len(tokens):,} "
                f"tokens, sequence={sequence:,}, held_out={held_out:,}); pass more text or a shorter sequence"
            )
        self.batch = batch
        self.sequence = sequence
        self.seed = seed
        self._samples = tokens[: samples * sequence].reshape(samples, sequence)
        order = np.random.default_rng([seed, 0]).permutation(samples) if held_out else np.arange(samples)
        self._held = np.sort(order[:held_out])
        self._trained = np.sort(order[held_out:])
        self._epoch: tuple[int, np.ndarray] = (-1, self._trained)

    @property
    def samples(self) -> int:
        """How many samples an epoch has."""
        return len(self._trained)

    @property
    def held_out_samples(self) -> int:
        """How many samples are kept for validation."""
        return len(self._held)

    def fingerprint(self) -> dict[str, int]:
        """Returns what tells whether these are the same tokens as another time: their number and CRC-32C."""
        crc = 0
        for begin in range(0, len(self._samples), _SAMPLES_AT_ONCE):
            part = np.array(self._samples[begin : begin + _SAMPLES_AT_ONCE])
            crc = crc32c(torch.from_numpy(part.reshape(-1).view(np.uint8)), crc)
        return {"tokens": int(self._samples.size), "crc32c": crc}

    def __getitem__(self, position: int) -> Tensor:
        if position < 0:
            raise ValueError(f"a position must not be negative (got {position}); the first batch is 0")
        first = position * self.batch
        return self._gather([self._sample(index) for index in range(first, first + self.batch)])

    def held_out(self) -> Iterator[Tensor]:
        """Yields the held-out samples in order, at most ``batch`` at a time."""
        for begin in range(0, len(self._held), self.batch):
            yield self._gather(self._held[begin : begin + self.batch])

    def _sample(self, index: int) -> int:
        epoch, within = divmod(index, self.samples)
        if self._epoch[0] != epoch:  # one epoch's order is kept: positions mostly go up by one
            generator = np.random.default_rng([self.seed, 1 + epoch])
            self._epoch = (epoch, generator.permutation(self._trained))
        return int(self._epoch[1][within])

    def _gather(self, samples: list[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(self._samples[np.asarray(samples)].astype(np.int64))
