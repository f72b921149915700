"""The command line: arguments to settings, nothing else."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from stronghold.config import DataSettings, ModelSettings, OffloadSettings, OptimizerSettings, TrainSettings
from stronghold.errors import StrongholdError
from stronghold.methods import METHODS

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
ALL = "all"
"""What --method takes besides the methods' names: each of them, one after another."""

_SHAPE = {"layers": 16, "hidden": 2048, "heads": 16, "vocabulary": 51200, "dropout": 0.0}

_TRAIN_EXAMPLES = """\
examples:
  stronghold train -l 8 --hidden 256 --seq 256 --window 2 --steps 60
      a small reference GPT on the source of the Python standard library
  stronghold train --data 'books/**/*.txt' --device cuda --dtype bf16 -l 100 --window 8 --out runs/books
      a 5 billion parameter GPT on text files, on a GPU
  stronghold train --model Qwen3-8B/ --tokenizer Qwen3-8B/ --data pairs.jsonl --save Qwen3-8B-tuned/
      fine-tunes a transformers model from a local folder
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"stronghold: error: {message}; see {self.prog} --help\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name (default: the process's own) and returns its exit code."""
    options = _parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if options.traceback:
            raise
        print(f"stronghold: error: {_in_one_line(error)}", file=sys.stderr)
        wrong = isinstance(error, ValueError | StrongholdError) and not _is_failure(error)
        return WRONG_USAGE if wrong else FAILED


def _train(options: argparse.Namespace) -> int:
    settings = _train_settings(options)
    if settings.method == ALL:
        from stronghold.comparison import compare

        compare(settings, options.arguments)
        return 0
    from stronghold.training import train

    outcome = train(settings)
    return INTERRUPTED if outcome.interrupted else 0


def _plot(options: argparse.Namespace) -> int:
    from stronghold.evaluation.figures import draw_runs
    from stronghold.evaluation.runs import read_run

    runs = [read_run(path) for path in options.runs]
    for run in runs:
        if run.truncated:
            print(f"stronghold: note: {run.truncated}", file=sys.stderr)
    print(draw_runs(runs, options.output))
    return 0


def _report(options: argparse.Namespace) -> int:
    from stronghold.evaluation.page.cases import case_figures
    from stronghold.evaluation.page.page import write_page

    figures, notes = case_figures(options.results)
    for note in write_page(options.results, options.output, run=options.timeline_of, figures=figures, notes=notes):
        print(f"stronghold: note: {note}", file=sys.stderr)
    print(options.output)
    return 0


def _trace(options: argparse.Namespace) -> int:
    from stronghold.evaluation.trace import write_trace

    name, notes = write_trace(options.folder, options.output)
    for note in notes:
        print(f"stronghold: note: {note}", file=sys.stderr)
    print(f"{options.output}: a step of {name}")
    return 0


def _train_settings(options: argparse.Namespace) -> TrainSettings:
    given = {name: getattr(options, name) for name in _SHAPE if getattr(options, name) is not None}
    if options.model is not None and given:
        raise ValueError(
            f"a model from files has its own shape (got --model with {', '.join('--' + name for name in given)}); "
            "leave out one or the other"
        )
    if options.resume and options.out is None:
        raise ValueError("--resume goes on with the run in a folder (got none); pass --out with that folder")
    update, clip = options.update, options.clip
    if update is None:  # on disk, gradients of the whole model in memory are what one wants to do without
        update = "deferred" if options.store == "ram" or clip else "in_backward"
    if clip is None:
        clip = 0.0 if update == "in_backward" else 1.0
    warmup = min(100, options.steps // 10) if options.warmup is None else options.warmup
    device = options.device
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    out = options.out or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    return TrainSettings(
        method=options.method,
        model=ModelSettings(path=options.model, **(_SHAPE | given)),
        data=DataSettings(source=options.data, tokenizer=options.tokenizer, held_out=options.held_out),
        optimizer=OptimizerSettings(
            lr=options.lr,
            warmup_steps=warmup,
            weight_decay=options.weight_decay,
            max_grad_norm=clip or None,
            states=options.states,
            update=update,
            nonfinite=options.nonfinite,
        ),
        offload=OffloadSettings(
            window=options.window,
            store=os.path.join(out, "store") if options.store == "disk" else options.store,
            micro_batch=options.micro_batch,
            activations=options.activations,
            resident=options.resident,
            device_memory=options.device_memory,
            host_memory=options.host_memory,
        ),
        device=device,
        device_limit=options.device_limit,
        dtype=options.dtype,
        batch=options.batch,
        sequence=options.seq,
        steps=options.steps,
        seed=options.seed,
        out=out,
        save=options.save,
        log=options.log,
        record=options.record,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
        resume=options.resume,
        keep_store=options.store not in ("ram", "disk"),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stronghold",
        description="Trains models that are larger than the device: a window of layers on it, the rest in RAM.",
        formatter_class=_Help,
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        help="train a model on text",
        usage="stronghold train [options]",
        description="Trains the reference GPT, or a transformers model from local files, on text.",
        epilog=_TRAIN_EXAMPLES,
        formatter_class=_Help,
    )
    train.set_defaults(run=_train)
    _add_train_arguments(train)
    plot = commands.add_parser(
        "plot",
        help="draw loss and throughput of runs",
        description="Draws loss and throughput of one or several runs into one PNG.",
        epilog="example:\n  stronghold plot runs/* -o comparison.png\n",
        formatter_class=_Help,
    )
    plot.set_defaults(run=_plot)
    plot.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its log.jsonl")
    plot.add_argument("-o", "--output", default="runs.png", metavar="FILE", help="the PNG to write (default: runs.png)")
    _add_page_commands(commands)
    return parser


def _add_page_commands(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write results as one page",
        description="Writes the runs of a folder as one HTML page that needs no network: machines, a table of\n"
        "methods and runs, loss, memory, and a timeline of one step to zoom into.",
        epilog="example:\n  stronghold report results/ -o report.html\n",
        formatter_class=_Help,
    )
    report.set_defaults(run=_report)
    report.add_argument("results", metavar="RESULTS", help="a folder with runs.jsonl, runs' folders, or both")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="(default: report.html)")
    report.add_argument(
        "--run",
        dest="timeline_of",
        metavar="NAME",
        help="the run whose timeline is shown (default: the newest that has one)",
    )
    trace = commands.add_parser(
        "trace",
        help="write a step's timeline for Perfetto",
        description="Writes the timeline of one step as a trace for https://ui.perfetto.dev and chrome://tracing.",
        epilog="example:\n  stronghold trace runs/books -o trace.json\n",
        formatter_class=_Help,
    )
    trace.set_defaults(run=_trace)
    trace.add_argument(
        "folder", metavar="RUN", help="a run's folder, or a folder of results: its newest run that has a timeline"
    )
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="(default: trace.json)")


def _add_train_arguments(train: argparse.ArgumentParser) -> None:
    data = train.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="PATH",
        help='text files, or .jsonl files with a "text" in each line: a file, a folder or a quoted glob (default: '
        "the source of the Python standard library)",
    )
    data.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, or a folder with a tokenizer (default: bytes)"
    )
    data.add_argument(
        "--held-out", type=int, default=0, metavar="N", help="samples kept for a loss at the end (default: 0)"
    )

    model = train.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="PATH",
        help="a model's folder, or a config.json to begin anew from; of transformers, or as --save writes it "
        "(default: the reference GPT, of this shape:)",
    )
    model.add_argument("-l", "--layers", type=int, metavar="N", help="layers (default: 16)")
    model.add_argument("--hidden", type=int, metavar="N", help="width of a layer (default: 2048)")
    model.add_argument("--heads", type=int, metavar="N", help="attention heads (default: 16)")
    model.add_argument("--vocabulary", type=int, metavar="N", help="token ids (default: 51200)")
    model.add_argument("--dropout", type=float, metavar="P", help="dropout probability (default: 0)")

    course = train.add_argument_group("training")
    course.add_argument("--batch", type=int, default=4, metavar="N", help="samples in a step (default: 4)")
    course.add_argument("--seq", type=int, default=1024, metavar="N", help="tokens in a sample (default: 1024)")
    course.add_argument("--steps", type=int, default=100, metavar="N", help="steps (default: 100)")
    course.add_argument("--lr", type=float, default=3e-4, metavar="X", help="highest learning rate (default: 3e-4)")
    course.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="steps until it is reached, before a cosine to a tenth (default: a tenth of all, at most 100)",
    )
    course.add_argument("--weight-decay", type=float, default=0.1, metavar="X", help="on matrices (default: 0.1)")
    course.add_argument(
        "--clip",
        type=float,
        metavar="X",
        help="largest norm of all gradients, 0 for any (default: 1; with updates in the backward pass 0)",
    )
    course.add_argument(
        "--nonfinite",
        choices=("raise", "skip"),
        default="raise",
        help="end at a gradient of NaN or infinity, or skip and count its step (default: raise)",
    )
    course.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and order (default: 0)")

    place = train.add_argument_group("placement")
    place.add_argument(
        "--method",
        choices=(*METHODS, ALL),
        default="stronghold",
        metavar="NAME",
        help=f"what trains: {', '.join(METHODS)}, or all of them in turn (default: stronghold)",
    )
    place.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one, else cpu)")
    place.add_argument(
        "--device-limit",
        metavar="SIZE",
        help="what the process may take of a GPU, whatever trains: more is out of memory (default: all of it)",
    )
    place.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="compute type; masters are fp32 (default: fp32)"
    )
    place.add_argument(
        "--window",
        type=_layers,
        default="auto",
        metavar="N|auto",
        help="layers on the device at a time (default: auto)",
    )
    place.add_argument(
        "--resident",
        type=_layers,
        default=0,
        metavar="N|auto",
        help="layers that stay on the device and are updated there; auto fills --device-memory (default: 0)",
    )
    place.add_argument(
        "--store",
        default="ram",
        metavar="ram|disk|DIR",
        help="where the other layers, and all states, are: in memory, in OUT/store, or in that folder, which "
        "keeps the run when it ends, for --resume (default: ram)",
    )
    place.add_argument(
        "--micro-batch", type=int, metavar="N", help="samples a layer computes at a time (default: the batch)"
    )
    place.add_argument(
        "--activations",
        choices=("recompute", "keep", "host"),
        default="recompute",
        help="what the backward pass needs: computed again, kept, or computed again from inputs kept in host "
        "memory (default: recompute)",
    )
    place.add_argument(
        "--update",
        choices=("deferred", "in_backward"),
        help="update layers behind the step, or as soon as each has its gradient (default: deferred; with --store on "
        "disk and without --clip in_backward)",
    )
    place.add_argument(
        "--states",
        choices=("fp32", "8bit"),
        default="fp32",
        help="AdamW's moments: 8 bytes a parameter, or 2 (default: fp32)",
    )
    place.add_argument("--device-memory", metavar="SIZE", help="budget, such as 24GiB (default: what is free)")
    place.add_argument("--host-memory", metavar="SIZE", help="budget, such as 64GiB (default: none)")

    output = train.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="DIR",
        help="the run's folder: log.jsonl and TensorBoard events (default: runs/ and the time)",
    )
    output.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="save all that the run needs to go on, every N steps and at its end, in OUT/checkpoints (default: never)",
    )
    output.add_argument(
        "--keep-checkpoints", type=int, default=2, metavar="N", help="how many of them stay (default: 2)"
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest intact checkpoint in OUT, or the run that --store DIR has kept, to the bit as if "
        "never stopped; begin if there is none yet",
    )
    output.add_argument("--save", metavar="DIR", help="save the model there; on Ctrl-C without it: OUT/model")
    output.add_argument("--log", metavar="FILE", help="also write a log to read")
    output.add_argument("--record", metavar="FILE", help="append the run's summary there, as a JSON line")


def _layers(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of layers or auto (got {text!r})") from None


def _is_failure(error: Exception) -> bool:
    """Tells errors of a training under way from those of its settings."""
    from stronghold.training import TrainingError

    return isinstance(error, TrainingError)


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    else:
        text = str(error) or type(error).__name__
    text = " ".join(text.split())
    return text if isinstance(error, ValueError | StrongholdError | OSError) else f"{type(error).__name__}: {text}"
