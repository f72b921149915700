"""Whether 8-bit states train as well as fp32 ones: two models on real text, from the same weights, batch for batch.

    python benchmarks/states.py [--steps 600] [--quick] [--draw-only] [--out results]

Trains the reference GPT (in bf16) and a Llama (in fp32) on the source of Python's standard library, each with beta2 of
0.95 and of 0.999, four times: with fp32 states; with 8-bit ones; and with both once more from weights that are each
0.1 % off, at random. Training is chaotic: the losses of single steps of any two runs part, and say nothing. So what is
compared is the mean loss of every 50 steps in a row, and the loss on text held out of training. The goal: each of these
means, and each held-out loss, within 0.5 % of that of fp32 states.

The second run with fp32 states is the control: how far it is from the first is chance, and a difference of its size
says nothing. In the steps in which the Llama's loss falls fast it reaches the goal itself. Chance is smaller in the
mean of both pairs of runs, and that is what is held against the goal.

Appends one JSON line per run to states.jsonl, with the loss of every step, and draws states.png and states.svg from
those lines alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import stronghold
from stronghold.engine.find_layers import find_layers
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import standard_library
from stronghold.lab.data.tokens import BYTES, ByteTokenizer, tokenize
from stronghold.lab.methods import decay_groups
from stronghold.lab.models.files import inputs_of
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import Record, append_record, describe_machine, read_records
from stronghold.lab.training import learning_rate_factor
from stronghold.units import format_count, format_seconds

ROOT = Path(__file__).parent.parent
GOAL = 0.005
"""The largest relative difference from fp32 states, of any mean and of any held-out loss."""
AVERAGED_STEPS = 50
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = {
    "fp32": "fp32 states",
    "8bit": "8-bit states",
    "control": "fp32 states, weights 0.1 % off",
    "8bit-control": "8-bit states, weights 0.1 % off",
}
REFERENCES = {"8bit": "fp32", "control": "fp32", "8bit-control": "control"}
"""What each variant is compared with."""
PERTURBATION = 1e-3
"""How far the controls' weights begin from the others', relative to each: the deviation of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runs that are compared have in common. The rate warms up over a tenth of the steps."""

    model: str
    dtype: str
    betas: tuple[float, float]
    layers: int = 7
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    steps: int = 600
    held_out: int = 128  # samples
    held_out_every: int = 50  # steps
    lr: float = 3e-4
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    window: int = 2
    seed: int = 0

    @property
    def title(self) -> str:
        name = {"gpt": "reference GPT", "llama": "Llama"}[self.model]
        return f"{name}, {self.dtype}, β₂ = {self.betas[1]:g}"


CASES = tuple(
    Settings(model=model, dtype=dtype, betas=(0.9, beta2))
    for model, dtype in (("gpt", "bf16"), ("llama", "fp32"))
    for beta2 in (0.95, 0.999)
)
QUICK = {"layers": 3, "hidden": 32, "heads": 2, "sequence": 32, "batch": 4, "steps": 12}
QUICK |= {"held_out": 8, "held_out_every": 4}


# ---- the runs ----


def build(settings: Settings) -> nn.Module:
    """Returns the model, with the weights that the seed gives."""
    torch.manual_seed(settings.seed)
    if settings.model == "gpt":
        return GPT(
            GPTConfig(
                layers=settings.layers,
                hidden=settings.hidden,
                heads=settings.heads,
                sequence=settings.sequence,
                vocabulary=BYTES,
            )
        )
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=settings.layers,
            hidden_size=settings.hidden,
            intermediate_size=11 * settings.hidden // 4,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads // 2,
            vocab_size=BYTES + 1,
            max_position_embeddings=settings.sequence,
        )
    )


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Multiplies every weight by a number of its own close to one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))


def run(settings: Settings, variant: str, batches: Batches, say: Callable[[str], None]) -> Record:
    """Trains once, and returns the run's record."""
    model = build(settings)
    if variant in ("control", "8bit-control"):
        perturb(model, settings.seed + 1)
    dtype = DTYPES[settings.dtype]
    stronghold.offload(model, device="cpu", window=settings.window, dtype=dtype, activations="keep")
    before = stronghold.report(model)
    optimizer = stronghold.AdamW(
        decay_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        max_grad_norm=settings.max_grad_norm,
        states="8bit" if variant.startswith("8bit") else "fp32",
    )
    after = stronghold.report(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(step, steps=settings.steps, warmup_steps=settings.steps // 10),
    )
    begin_s = time.perf_counter()
    losses, held_out = [], []
    for step in range(1, settings.steps + 1):
        loss = model(**inputs_of(model, batches[step - 1])).loss
        loss.backward()
        losses.append(round(loss.item(), 7))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % settings.held_out_every == 0 or step == settings.steps:
            held_out.append({"step": step, "loss": round(held_out_loss(model, batches), 7)})
        say(f"{settings.title}, {VARIANTS[variant]}: step {step} of {settings.steps}, loss {losses[-1]:.4f}")
    optimizer.wait()
    in_layers = [p for layer in find_layers(model) for p in layer.module.parameters()]
    gradient_bytes = dtype.itemsize * sum(p.numel() for p in in_layers)  # a root parameter's is autograd's own
    return {
        "benchmark": "states",
        "variant": variant,
        "states": after.states,
        "settings": asdict(settings),
        "parameters": after.parameters,
        "losses": losses,
        "held_out": held_out,
        # What making the optimizer takes: states, and gradients in the compute type.
        "states_bytes_per_parameter": (after.host_bytes - before.host_bytes - gradient_bytes) / after.parameters,
        "host_bytes_per_parameter": after.host_bytes / after.parameters,
        "training_s": time.perf_counter() - begin_s,
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Batches) -> float:
    """Returns the mean loss over the samples that are never trained on."""
    model.eval()
    total = sum(model(**inputs_of(model, batch)).loss.item() * len(batch) for batch in batches.held_out())
    model.train()
    return total / batches.held_out_samples


# ---- what the records say ----


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run's losses are from another's, relative to these. ``means[i]`` is of the steps from i + 1 on."""

    width: int
    means: list[float]
    held_out: list[float]

    @property
    def largest_mean(self) -> float:
        return max(self.means, key=abs)

    @property
    def largest_mean_steps(self) -> tuple[int, int]:
        """The first and the last step of the mean that differs most."""
        first = self.means.index(self.largest_mean) + 1
        return first, first + self.width - 1

    @property
    def largest_held_out(self) -> float:
        return max(self.held_out, key=abs)

    @property
    def kept(self) -> bool:
        return max(abs(self.largest_mean), abs(self.largest_held_out)) <= GOAL


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of one case, the last of each variant, and how far each is from the one that it is compared with."""

    settings: Settings
    runs: dict[str, Record]
    differences: dict[str, Difference]

    @property
    def pairs(self) -> list[Difference]:
        """How far each run with 8-bit states is from the one with fp32 states and the same weights."""
        return [self.differences[variant] for variant in ("8bit", "8bit-control") if variant in self.differences]

    @property
    def mean(self) -> Difference:
        """The mean of the pairs: what is held against the goal."""
        return Difference(
            width=self.pairs[0].width,
            means=[sum(values) / len(values) for values in zip(*(pair.means for pair in self.pairs), strict=True)],
            held_out=[
                sum(values) / len(values) for values in zip(*(pair.held_out for pair in self.pairs), strict=True)
            ],
        )


def averaged_steps(steps: int) -> int:
    """Returns how many steps a mean is over: 50, fewer in runs too short for that."""
    return min(AVERAGED_STEPS, max(1, steps // 3))


def means(losses: Sequence[float], width: int) -> list[float]:
    """Returns the mean of every ``width`` losses in a row."""
    return [sum(losses[first : first + width]) / width for first in range(len(losses) - width + 1)]


def difference(record: Record, reference: Record) -> Difference:
    """Returns how far the run of ``record`` is from that of ``reference``, which has the same settings."""
    width = averaged_steps(len(reference["losses"]))
    pairs = zip(means(record["losses"], width), means(reference["losses"], width), strict=True)
    evaluations = zip(record["held_out"], reference["held_out"], strict=True)
    return Difference(
        width=width,
        means=[ours / theirs - 1 for ours, theirs in pairs],
        held_out=[ours["loss"] / theirs["loss"] - 1 for ours, theirs in evaluations],
    )


def compare(records: Sequence[Record], wanted: Iterable[Settings]) -> list[Comparison]:
    """Returns the ``wanted`` cases; of runs with the same settings and variant, the last one counts.

    Cases that lack a run with fp32 or with 8-bit states are left out. Raises ValueError where none is left.
    """
    found: dict[Settings, dict[str, Record]] = {settings: {} for settings in wanted}
    for record in records:
        settings = Settings(**{**record["settings"], "betas": tuple(record["settings"]["betas"])})
        if settings in found:
            found[settings][record["variant"]] = record
    complete = [(settings, runs) for settings, runs in found.items() if runs.keys() >= {"fp32", "8bit"}]
    if not complete:
        raise ValueError(
            "the records must hold one of the cases with runs of fp32 and of 8-bit states (got "
            f"{len(records)} records and no such case); run without --draw-only, or pass the --steps and --lr of those"
        )
    return [
        Comparison(
            settings=settings,
            runs=runs,
            differences={
                name: difference(runs[name], runs[other])
                for name, other in REFERENCES.items()
                if {name, other} <= set(runs)
            },
        )
        for settings, runs in complete
    ]


def table(comparisons: Sequence[Comparison]) -> Table:
    """Returns a row per run, and one per case for the mean of its pairs."""
    width = comparisons[0].mean.width
    drawn = Table(title=f"Losses beside those of fp32 states; means of {width} steps, goal {GOAL:.1%}")
    for column in ("case", "run", "bytes", "held out, end", "largest of means", "in steps", "held out, largest", ""):
        drawn.add_column(column, justify="left" if column in ("case", "run", "") else "right")
    for comparison in comparisons:
        for variant, record in comparison.runs.items():
            drawn.add_row(
                comparison.settings.title if variant == "fp32" else "",
                VARIANTS[variant],
                f"{record['states_bytes_per_parameter']:.2f}",
                f"{record['held_out'][-1]['loss']:.4f}",
                *(_cells(comparison.differences[variant]) if variant in comparison.differences else ()),
            )
        pairs = len(comparison.pairs)
        name = "8-bit states, mean of both pairs" if pairs > 1 else "8-bit states, a single pair"
        verdict = "kept" if comparison.mean.kept else "NOT KEPT"
        drawn.add_row("", name, "", "", *_cells(comparison.mean), verdict, end_section=True)
    return drawn


def _cells(found: Difference) -> tuple[str, str, str]:
    steps = "{} to {}".format(*found.largest_mean_steps)
    return f"{found.largest_mean:+.3%}", steps, f"{found.largest_held_out:+.3%}"


# ---- the figure ----

# Okabe and Ito's palette: told apart by people of every colour vision.
_COLOURS = {"fp32": "#0072B2", "8bit": "#D55E00", "control": "#7F7F7F"}


def draw(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Draws states.png and states.svg into ``folder``: losses above, differences below, a column per case."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "states"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.4 * len(comparisons) + 0.8, 6.6), dpi=150, layout="constrained")
        rows = figure.subplots(2, len(comparisons), sharex="col", sharey="row", squeeze=False, height_ratios=(6, 5))
        for losses, differences, comparison in zip(*rows, comparisons, strict=True):
            _draw_losses(losses, comparison)
            _draw_differences(differences, comparison)
            for axes in (losses, differences):
                axes.grid(alpha=0.25, linewidth=0.6)
                axes.set_axisbelow(True)
                axes.set_xlim(0, comparison.settings.steps * 1.01)
        width = comparisons[0].mean.width
        rows[0][0].set_ylabel("loss (nats per byte)")
        rows[1][0].set_ylabel("loss beside fp32 states' (%)")
        rows[0][-1].legend(loc="upper right", frameon=False)
        handles = rows[1][0].get_legend_handles_labels()[0]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * len(comparisons)), frameon=False
        )
        figure.suptitle(f"AdamW's states in 8 bits and in fp32 (lines: means of {width} steps; faint: single steps)")
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "states.png", folder / "states.svg"]
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_losses(axes: Any, comparison: Comparison) -> None:
    width = comparison.mean.width
    for variant, line in (("fp32", {"linewidth": 3.2, "alpha": 0.75}), ("8bit", {"linewidth": 1.3})):
        losses, colour = comparison.runs[variant]["losses"], _COLOURS[variant]
        axes.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(*_centred(means(losses, width), width), color=colour, label=VARIANTS[variant], **line)
    parameters = format_count(comparison.runs["fp32"]["parameters"])
    axes.set_title(f"{comparison.settings.title}\n{parameters} parameters", fontsize=10)


def _draw_differences(axes: Any, comparison: Comparison) -> None:
    axes.axhspan(-100 * GOAL, 100 * GOAL, color="#009E73", alpha=0.12, linewidth=0, label=f"goal: ±{GOAL:.1%}")
    axes.axhline(0, color="black", linewidth=0.8)
    if "control" in comparison.differences:
        _draw_difference(axes, comparison, comparison.differences["control"], "control", "fp32, weights 0.1 % off")
    if len(comparison.pairs) > 1:
        for number, pair in enumerate(comparison.pairs):
            steps, values = _centred(pair.means, pair.width)
            percent, label = [100 * value for value in values], "8-bit, each pair" if number == 0 else None
            axes.plot(steps, percent, color=_COLOURS["8bit"], linewidth=0.8, alpha=0.5, label=label)
    name = "8-bit, mean of pairs" if len(comparison.pairs) > 1 else "8-bit"
    _draw_difference(axes, comparison, comparison.mean, "8bit", name)
    axes.set_xlabel("step")


def _draw_difference(axes: Any, comparison: Comparison, found: Difference, variant: str, name: str) -> None:
    colour = _COLOURS[variant]
    steps, values = _centred(found.means, found.width)
    axes.plot(steps, [100 * value for value in values], color=colour, linewidth=1.5, label=f"{name}, training")
    axes.plot(
        [evaluation["step"] for evaluation in comparison.runs["fp32"]["held_out"]],
        [100 * value for value in found.held_out],
        color=colour,
        linestyle="none",
        marker="o" if variant == "8bit" else "D",
        markersize=4.5,
        markerfacecolor=colour if variant == "8bit" else "white",
        label=f"{name}, held out",
    )


def _centred(values: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """Returns where to draw means of ``width`` steps, in the middle of these, and the means."""
    return [first + (width + 1) / 2 for first in range(len(values))], list(values)


# ---- the command line ----


def cases(arguments: argparse.Namespace) -> Iterator[Settings]:
    for case in CASES:
        changes = QUICK if arguments.quick else {"steps": arguments.steps}
        yield replace(case, lr=arguments.lr, **changes)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="steps of each run (default: 600)")
    parser.add_argument(
        "--lr", type=float, default=Settings.lr, metavar="X", help=f"highest learning rate (default: {Settings.lr:g})"
    )
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        choices=range(len(CASES)),
        default=list(range(len(CASES))),
        help=f"which to train (default: all): {', '.join(f'{i} {case.title}' for i, case in enumerate(CASES))}",
    )
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS), help="runs of each (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny models, to try it out")
    parser.add_argument("--draw-only", action="store_true", help="train nothing; draw what was recorded")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where records and figures are (default: results, with --quick runs/states-quick)",
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 10:
        parser.error(f"--steps must be at least 10, for a rate that rises and falls (got {arguments.steps})")
    if arguments.out is None:
        arguments.out = ROOT / ("runs/states-quick" if arguments.quick else "results")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(width=160)
    file = arguments.out / "states.jsonl"
    if not arguments.draw_only:
        tokens = tokenize(standard_library(), ByteTokenizer())
        with console.status("reading text") as status:
            for number, settings in enumerate(cases(arguments)):
                if number not in arguments.cases:
                    continue
                batches = Batches(
                    tokens,
                    batch=settings.batch,
                    sequence=settings.sequence,
                    seed=settings.seed,
                    held_out=settings.held_out,
                )
                for variant in arguments.variants:
                    record = run(settings, variant, batches, status.update)
                    append_record(file, {**record, **describe_machine()})
                    console.print(
                        f"{settings.title}, {VARIANTS[variant]}: held-out loss {record['held_out'][-1]['loss']:.4f} "
                        f"after {format_seconds(record['training_s'])}"
                    )
    comparisons = compare(read_records(file).records, cases(arguments))
    console.print(table(comparisons))
    paths = draw(comparisons, arguments.out)
    console.print(f"Recorded in {file}; drawn: {', '.join(map(str, paths))}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
