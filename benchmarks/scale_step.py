"""What one step of benchmarks/scale.py comes to: its assumptions are told there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.records.json_lines import Record
from stronghold.planner.link_bytes import (
    all_gather_bytes,
    boundary_bytes,
    fetches,
    host_bytes,
    reduce_scatter_bytes,
    share,
)
from stronghold.planner.partition import StagePlan, partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.simulate import simulate
from stronghold.planner.stage_costs import LayerCost

WEIGHT_BYTES = 2  # bf16, on every link
KEPT_BYTES = {"micro-batch": 16, "step": 14}  # weight 2, remainder 2, moments 8, gradient 2; low half of its sum 2
UPDATE_BYTES = {"micro-batch": 28, "step": 26}  # read and written by an update; the sum's low half is read too
ADD_BYTES = 10  # read and written to add a gradient to a sum: 2 and 4, and 4


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What each device sustains, in FLOP/s and in bytes per second each way.

    ``node_link`` is to devices of its node, ``network`` to others, ``host_link`` to its host; ``host_memory`` is what
    all devices of a node share.
    """

    flops: float
    devices_per_node: int
    node_link: int
    network: int
    host_link: int
    host_memory: int

    def link(self, first: int, last: int) -> int:
        """Returns the bandwidth between neighbours of a row of devices."""
        return self.node_link if first // self.devices_per_node == last // self.devices_per_node else self.network


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how: ``batch`` samples per step over all replicas, ``micro_batch`` at a time on each.

    ``reduce`` says after which backward passes replicas sum their gradients: each micro-batch's, which leaves none on
    the device, or the step's last, for which the device keeps those of its layers.
    """

    model: GPTConfig
    pipeline: Pipeline
    replicas: int
    batch: int
    micro_batch: int
    window: int
    reduce: str

    @property
    def layer_parameters(self) -> int:
        return 12 * self.model.hidden**2 + 13 * self.model.hidden

    def root_parameters(self, stage: StagePlan) -> int:
        """Returns the embedding's, which the head shares, for the first stage and for the last."""
        at_an_end = stage.first == 0 or stage.first + stage.layers == self.model.layers
        return self.model.rows * self.model.hidden if at_an_end else 0

    def parameters(self, stage: StagePlan) -> int:
        """Returns those of the stage's layers and root parameter."""
        return self.layer_parameters * stage.layers + self.root_parameters(stage)

    @property
    def activation_bytes(self) -> int:
        """What one micro-batch hands from layer to layer."""
        return self.micro_batch * self.model.sequence * self.model.hidden * WEIGHT_BYTES

    @property
    def reductions(self) -> int:
        """How often in a step gradients are summed over the replicas."""
        return self.pipeline.micro_batches if self.reduce == "micro-batch" else 1

    def fetches(self, stage: StagePlan) -> int:
        """Returns the layers that a stage fetches in a step; stages of one device share its window."""
        return fetches(stage.layers, self.window // self.pipeline.stages_per_device, self.pipeline.micro_batches)

    def forward_flops(self) -> tuple[int, int]:
        """Returns the forward FLOPs of one micro-batch in a layer, 24bsh² + 4bs²h, and in the head, 2bshV.

        After Narayanan et al. 2021; a backward pass takes twice as much.
        """
        tokens, hidden = self.micro_batch * self.model.sequence, self.model.hidden
        layer = 24 * tokens * hidden**2 + 4 * tokens * self.model.sequence * hidden
        return layer, 2 * tokens * hidden * self.model.rows

    def layer_costs(self, flops: float) -> list[LayerCost]:
        """Returns the layers' costs, the last one's with the head; bytes are of activations alone.

        A layer makes 34 bytes of them for each token and unit of width (Korthikanti et al. 2022, without the scores).
        """
        layer, head = self.forward_flops()
        return [
            LayerCost(
                forward_s=each / flops,
                backward_s=2 * each / flops,
                weight_bytes=0,
                activation_bytes=17 * self.activation_bytes,
                input_bytes=self.activation_bytes,
            )
            for each in [layer] * (self.model.layers - 1) + [layer + head]
        ]


def pass_s(run: Run, machine: Machine, stage: StagePlan) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of each resource in a forward and in a backward pass of one micro-batch through a stage.

    Fetches are the mean over a step's passes: the first one fetches all layers, the others what the window lacks.
    """
    micro_batches, replicas = run.pipeline.micro_batches, run.replicas
    parameters = run.parameters(stage)
    ring = machine.link(0, replicas - 1)
    layers = run.fetches(stage) / (2 * micro_batches)
    up_s = layers * share(run.layer_parameters, replicas) * WEIGHT_BYTES / machine.host_link
    gather_s = layers * all_gather_bytes(run.layer_parameters, WEIGHT_BYTES, replicas) / ring
    reductions = run.reductions / micro_batches
    reduce_s = reductions * reduce_scatter_bytes(parameters, WEIGHT_BYTES, replicas) / ring
    down_s = reductions * share(parameters, replicas) * WEIGHT_BYTES / machine.host_link
    added = share(parameters, replicas) if run.reductions > 1 else 0
    add_s = added * ADD_BYTES * machine.devices_per_node / machine.host_memory
    return (
        {"compute": stage.forward_s, "host link": up_s, "replicas": gather_s},
        {
            "compute": stage.backward_s,
            "host link": max(up_s, down_s),  # each way is one of its own
            "replicas": gather_s + reduce_s,
            "host memory": add_s,
        },
    )


def play(run: Run, machine: Machine) -> Record:
    """Returns a step in numbers: seconds, shares, and the bytes of the device, link or node that has most."""
    pipeline, replicas = run.pipeline, run.replicas
    stages = partition(run.layer_costs(machine.flops), pipeline, recompute_ratio=1).stages
    passes = [pass_s(run, machine, stage) for stage in stages]
    forward_s = [max(forward.values()) for forward, _ in passes]
    backward_s = [max(backward.values()) for _, backward in passes]
    places = [pipeline.device_of(stage) * replicas for stage in range(pipeline.stages)]  # the first replica's device
    link_s = [run.activation_bytes / machine.link(min(a, b), max(a, b) + replicas - 1) for a, b in pairwise(places)]
    played = simulate(pipeline, forward_s, backward_s, link_s)

    on_device = [[stages[stage] for stage in pipeline.stages_of(device)] for device in range(pipeline.devices)]
    held = [sum(run.parameters(stage) for stage in own) for own in on_device]
    root = [sum(run.root_parameters(stage) for stage in own) for own in on_device]
    fetched = [sum(run.fetches(stage) for stage in own) for own in on_device]
    update = UPDATE_BYTES[run.reduce] * machine.devices_per_node / machine.host_memory  # seconds per parameter
    ends_s = [
        end + max(0.0, share(count, replicas) * update - first)
        for end, count, first in zip(played.ends_s, held, forward_s, strict=False)
    ]
    step_s = max(ends_s)
    slowest = max(range(pipeline.stages), key=lambda stage: forward_s[stage] + backward_s[stage])
    resources = passes[slowest][1]
    layer_flops, head_flops = run.forward_flops()
    useful_flops = 3 * pipeline.micro_batches * (run.model.layers * layer_flops + head_flops)
    return {
        "step_s": step_s,
        "update_s": step_s - played.step_s,
        "bubble": played.bubble,
        "longest": max(resources, key=lambda name: resources[name]),
        "of_flops": useful_flops / (pipeline.devices * machine.flops * step_s),
        "tokens_per_s": run.batch * run.model.sequence / step_s,
        "stage_link_bytes": max(boundary_bytes(pipeline, run.activation_bytes).values(), default=0),
        "replica_link_bytes": max(
            layers * all_gather_bytes(run.layer_parameters, WEIGHT_BYTES, replicas)
            + all_gather_bytes(root, WEIGHT_BYTES, replicas)
            + run.reductions * reduce_scatter_bytes(count, WEIGHT_BYTES, replicas)
            for layers, root, count in zip(fetched, root, held, strict=True)
        ),
        "host_up_bytes": max(
            (layers * share(run.layer_parameters, replicas) + share(root, replicas)) * WEIGHT_BYTES
            for layers, root in zip(fetched, root, strict=True)
        ),
        "host_down_bytes": run.reductions * share(max(held), replicas) * WEIGHT_BYTES,
        "host_bytes": max(host_bytes(held, replicas, machine.devices_per_node, KEPT_BYTES[run.reduce])),
        "activation_bytes": max(sum(stage.memory_bytes for stage in own) for own in on_device),
        "partition": [stage.layers for stage in stages],
    }
