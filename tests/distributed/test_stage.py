"""What a stage does otherwise than the oldest PyTorch has it, whichever is installed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from stronghold.distributed.stage import Stage


def in_torch_2_9(stage):
    """Returns what PyTorch 2.9 has each stage receive and send: one tensor of 4 bytes, and one of 8."""
    received, sent = torch.zeros(1), torch.tensor(stage.stage_index)
    return [SimpleNamespace(op=dist.irecv, tensor=received), SimpleNamespace(op=dist.isend, tensor=sent)]


def test_what_a_stage_sends_to_connect_is_as_long_as_what_the_other_receives(monkeypatch):
    """gloo ends a process that is sent more than it waits for (pytorch/pytorch#165539).

    PyTorch 2.15 connects stages by an all-reduce, and has no such method.
    """
    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", in_torch_2_9, raising=False)
    stage = Stage.__new__(Stage)
    stage.stage_index = 3
    received, sent = stage._get_init_p2p_neighbors_ops()
    assert (received.op, sent.op) == (dist.irecv, dist.isend)
    assert received.tensor.dtype == sent.tensor.dtype == torch.float32
    assert received.tensor.nbytes == sent.tensor.nbytes == 4
    assert sent.tensor.item() == 3


def test_the_last_stage_keeps_no_outputs_to_the_end_of_a_step(monkeypatch):
    """Of a language model they are its logits, those of all micro-batches."""

    def forward_one_chunk(stage, number):
        output = torch.full((2, 3), float(number), dtype=torch.bfloat16)
        stage.output_chunks.append(output)
        stage.fwd_cache[number] = (output,), [output]
        return output

    monkeypatch.setattr(PipelineStage, "forward_one_chunk", forward_one_chunk)
    stage = Stage.__new__(Stage)
    stage.output_chunks, stage.fwd_cache, stage._working, stage._training = [], {}, nullcontext, True
    outputs = [stage.forward_one_chunk(number) for number in range(3)]
    assert [output[1, 2].item() for output in outputs] == [0.0, 1.0, 2.0]
    assert len(stage.output_chunks) == 3, "each is joined to the others at the end"
    assert sum(kept.untyped_storage().nbytes() for kept in stage.output_chunks) == 0
    assert torch.cat(stage.output_chunks).dtype == torch.bfloat16
