"""torch.distributed.pipelining's own schedules, over stages that compute nothing: what they hold, and what they do."""

import re
from collections import Counter

from stronghold.distributed import schedules


class IdleStage:
    """A stage without a module or neighbours, which writes down what its schedule has it do."""

    def __init__(self, index, stages, devices):
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = devices, index % devices
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = None
        self.done = []

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        self.done.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch, **kwargs):
        self.done.append(f"{self.stage_index}B{micro_batch}")

    def perform_reduce_grad(self, scale):
        pass

    def scale_grads(self, grad_scale_factor):
        """What torch 2.9 calls instead."""

    def _no_ops(self, micro_batch):
        return []

    def release_fwd_send_outputs(self, micro_batch):
        """What torch 2.15 calls once a micro-batch has been sent."""

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_ops


def schedule_of(name, devices, micro_batches, stages_per_device=1, device=0):
    """Returns torch's schedule of that name, as the process of ``device`` makes it; what it refuses is raised."""
    count = devices * stages_per_device
    stages = [IdleStage(stage, count, devices) for stage in range(device, count, devices)]
    return schedules.schedule_of(name, stages, micro_batches)


def held_order(*pipeline):
    """Returns the passes that torch's schedule holds for each device, printed, without idle steps."""
    order = schedule_of(*pipeline).pipeline_order
    return [" ".join(str(x) for x in order[device] if x is not None and x.is_compute_op) for device in sorted(order)]


def executed_order(name, devices, micro_batches):
    """Returns the passes that torch's GPipe or 1F1B has each device run, printed."""
    found = []
    for device in range(devices):
        schedule = schedule_of(name, devices, micro_batches, device=device)
        schedule._initialize_stage = lambda *args, **kwargs: None  # which would look for neighbours
        schedule._maybe_get_loss = lambda stage, micro_batch: None
        schedule._step_microbatches()
        found.append(" ".join(schedule._stage.done))
    return found


def parts_of(action):
    """Returns the stage, what it does, and the micro-batch if there is one: of ``2SEND_F0`` 2, ``SEND_F`` and 0."""
    stage, kind, micro_batch = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", str(action)).groups()
    return int(stage), kind, int(micro_batch) if micro_batch else None


def sends(*pipeline):
    """Returns how often an interleaved schedule of torch's sends: (sender, receiver) to transfers of a step."""
    schedule = schedule_of(*pipeline)
    found = Counter()
    for device, actions in schedule.pipeline_order_with_comms.items():
        for action in actions:
            stage, kind, _ = parts_of(action)
            way = {"SEND_F": 1, "SEND_B": -1}.get(kind)
            if way is not None:
                found[device, schedule.stage_index_to_group_rank[stage + way]] += 1
    return dict(found)
