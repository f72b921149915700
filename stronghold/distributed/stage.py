"""A stage of torch.distributed.pipelining that tells when it computes, and counts what it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from stronghold.distributed.stage_clock import StageClock
from stronghold.distributed.watch import Watch
from stronghold.errors import ParallelError


class Stage(PipelineStage):
    """In ``sent`` it counts the bytes that go to other stages, activations and gradients, by the other's number.

    Before each backward pass it calls ``begin_pass`` with the number of its micro-batch, and ``micro_batches``. Unless
    it is of a schedule for ``training`` no micro-batch's inputs and outputs are kept for one.
    """

    def __init__(
        self,
        watch: Watch,
        clock: StageClock,
        sent: Counter[int],
        begin_pass: Callable[[int, int], None],
        micro_batches: int,
        *arguments: Any,
        training: bool,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._announced = options["output_args"]
        self._watch, self._clock = watch, clock
        self._sent = sent
        self._begin_pass = begin_pass
        self._micro_batches = micro_batches
        self._training = training

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        with self._working():
            output = super().forward_one_chunk(fwd_chunk_id, *arguments, **options)
        if not self._training:  # PyTorch keeps it for a backward pass, until the next step
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = () if self.is_last else outputs, []  # what is to be sent
        if self.output_chunks:  # PyTorch 2.9 keeps all of the last stage, and joins them at the end of the step
            self.output_chunks[-1] = output.new_empty(0)
        return output

    def forward_maybe_with_nosync(self, *arguments: Any, **options: Any) -> Any:
        """Returns what is sent on in one piece: of a view with gaps, or in another order, the memory would be sent.

        Raises ParallelError where it is not what the next stage waits for, whose memory it would fill in part.
        """
        output = super().forward_maybe_with_nosync(*arguments, **options)
        if self.is_last:
            return output
        kind, announced = (output.dtype, tuple(output.shape)), (self._announced.dtype, tuple(self._announced.shape))
        if kind != announced:
            raise ParallelError(
                f"stage {self.stage_index} must return what stage {self.stage_index + 1} waits for, {announced[0]} of "
                f"shape {announced[1]} (got {kind[0]} of shape {kind[1]}); instead of torch.autocast, which changes "
                "what stages return, pass dtype=torch.bfloat16 to stronghold.pipeline; a hook must not change it either"
            )
        return output.contiguous()

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self._begin_pass(bwd_chunk_id, self._micro_batches)
        with self._working():
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        operations = self._counted(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1)
        if not self._training:
            self.fwd_cache.pop(fwd_chunk_id, None)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), self.stage_index - 1)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Called before the first batch, to connect stages; PyTorch from 2.13 on connects them in other ways.

        PyTorch 2.9 sends an int64 to a stage that receives a float32.
        """
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        for operation in operations:
            operation.tensor = operation.tensor.to(torch.float32)
        return operations

    @contextmanager
    def _working(self) -> Iterator[None]:
        try:
            with self._watch.working(), self._clock.computing(self.stage_index):
                yield
        except RuntimeError as error:
            # The library's own error describes the stage's tensors at length; what happened is its cause.
            raise error.__cause__ or error from None

    def _counted(self, operations: list[dist.P2POp], other: int) -> list[dist.P2POp]:
        for operation in operations:
            self._sent[other] += operation.tensor.nbytes
        return operations
