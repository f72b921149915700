"""How fast the store's threads read and write layers, beside fio with the same pattern on the same file.

    python benchmarks/disk.py [--path FOLDER] [--size 64MiB]... [--total 512MiB] [--rounds 9] [--quick]

Layers go one after the other, two of them under way at a time, as a store fetches and writes them back: reads, writes,
and both at once. fio has as many jobs as the store has threads, each with pread or pwrite of a piece, direct, the jobs'
pieces interleaved; as extras, one job of io_uring with 16 such pieces in flight, and plain threads with os.preadv and
os.pwritev whose memory lies in huge pages, as the store's does and fio's does not. Where fio is not installed (Debian's
package `fio`), these threads take its place.

Every round calls each contender once, in rotated order: a disk that is shared swings by a factor of two from minute to
minute, so only the ratio of two calls of one round says anything; the table shows medians and quartiles. What the store
moves is compared with the file's content in every round. Appends one JSON line per contender, mode and size to
results/disk.jsonl. Wrong data end the run with WRONG and exit code 1, and record nothing; a missed target is only said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stronghold.device.memory import HostBuffer
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.native import PIECE_BYTES, SUM_BYTES, Disk, DiskFile, Priority, Transfer
from stronghold.native.disk_errors import file_system
from stronghold.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent.parent / "results" / "disk.jsonl"
SIZES = ("1MiB", "4MiB", "16MiB", "64MiB", "400MiB")
MODES = ("read", "write", "mixed")
LOOKAHEAD = 2  # layers under way at a time
TARGET = 0.95  # of the reference's bytes per second
SAMPLE_BYTES = 64 * 1024
NAMES = {
    "store": "stronghold",
    "store_sums": "stronghold, checksums",
    "fio": "fio, pread and pwrite",
    "fio_uring": "fio, io_uring, depth 16",
    "loop": "preadv, huge pages",
}


class WrongData(Exception):
    """What the store has read or written is not what the file holds."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """``count`` layers of ``layer_bytes`` each, cut into pieces; with mode "mixed" every second one is written."""

    mode: str
    layer_bytes: int
    count: int
    piece_bytes: int
    threads: int
    path: Path

    @property
    def total_bytes(self) -> int:
        return self.layer_bytes * self.count

    @property
    def step_bytes(self) -> int:  # of one call to the system
        return min(self.piece_bytes, self.layer_bytes)


# ---- the contenders: each carries a pattern out once, and returns bytes per second ----


class Store:
    """The disk's threads, with checksums or without."""

    cores = 0.0

    def __init__(self, pattern: Pattern, memory: Tensor, *, checksums: bool) -> None:
        self.pattern, self.checksums = pattern, checksums
        self.disk = Disk(threads=pattern.threads, piece_bytes=pattern.piece_bytes)
        self.file = self.disk.open(pattern.path)
        self.read_into, self.written_from = list(memory[:LOOKAHEAD]), list(memory[LOOKAHEAD:])
        self.sums = torch.zeros(2 * LOOKAHEAD, -(-pattern.layer_bytes // SUM_BYTES), dtype=torch.int32)

    def run(self) -> float:
        pattern, begin_s, begin_processor_s = self.pattern, time.perf_counter(), time.process_time()
        queues: dict[str, deque[Transfer]] = {"read": deque(), "write": deque()}
        for index in range(pattern.count):
            kind = pattern.mode if pattern.mode != "mixed" else MODES[index % 2]
            slot = (index if pattern.mode != "mixed" else index // 2) % LOOKAHEAD
            queue = queues[kind]
            if len(queue) == LOOKAHEAD:
                queue.popleft().wait()
            queue.append(self._submit(kind, slot, index * pattern.layer_bytes))
        self.disk.drain()
        wall_s = time.perf_counter() - begin_s
        self.cores = (time.process_time() - begin_processor_s) / wall_s
        return pattern.total_bytes / wall_s

    def _submit(self, kind: str, slot: int, offset: int) -> Transfer:
        sums = self.sums[slot + LOOKAHEAD * (kind == "write")] if self.checksums else None
        if kind == "read":
            return self.disk.read(self.file, self.read_into[slot], offset=offset, sums=sums)
        return self.disk.write(
            self.file, self.written_from[slot], offset=offset, sums=sums, priority=Priority.WRITE_BACK
        )

    def check(self) -> None:
        """Raises WrongData unless the last layers in memory are what the file holds, read in the ordinary way."""
        pattern = self.pattern
        with pattern.path.open("rb") as file:
            for index in range(max(0, pattern.count - 2 * LOOKAHEAD), pattern.count):
                mixed = pattern.mode == "mixed"
                kind = MODES[index % 2] if mixed else pattern.mode
                if not mixed and index < pattern.count - LOOKAHEAD:
                    continue
                slot = (index // 2 if mixed else index) % LOOKAHEAD
                memory = (self.read_into if kind == "read" else self.written_from)[slot]
                for begin, end in samples(pattern.layer_bytes):
                    file.seek(index * pattern.layer_bytes + begin)
                    if not torch.equal(as_tensor(file.read(end - begin)), memory[begin:end]):
                        raise WrongData(f"layer {index} of {pattern.path}, byte {begin}, {kind}")

    def close(self) -> None:
        self.disk.close()


class Fio:
    """fio, whose own clock counts from its jobs' first transfer to their last."""

    cores = 0.0

    def __init__(self, pattern: Pattern, *, uring: bool) -> None:
        jobs = 1 if uring else pattern.threads
        step, share = pattern.step_bytes, pattern.total_bytes // jobs
        rw = {"read": "read", "write": "write", "mixed": "rw"}[pattern.mode]
        self.total_bytes = pattern.total_bytes
        self.command = [
            *["fio", "--name=layers", "--thread", "--direct=1", "--group_reporting", "--output-format=json"],
            *[f"--filename={pattern.path}", f"--bs={step}", f"--numjobs={jobs}", f"--io_size={share}"],
            *["--overwrite=1", "--fallocate=none", "--randrepeat=0"],
        ]
        if uring:
            self.command += [f"--rw={rw}", "--ioengine=io_uring", "--iodepth=16", f"--size={pattern.total_bytes}"]
        else:  # job k begins at piece k and leaves out the other jobs' pieces, as the store's threads share them
            others = (jobs - 1) * step
            self.command += [f"--rw={rw}:{others}", "--ioengine=psync", f"--offset_increment={step}"]
            self.command += [f"--size={pattern.total_bytes - others}"]

    def run(self) -> float:
        done = subprocess.run(self.command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
        if done.returncode != 0:
            raise OSError(f"fio has failed: {(done.stderr or done.stdout).strip()[-500:]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = sum(job[kind]["io_bytes"] for kind in ("read", "write"))
        if moved != self.total_bytes:
            raise OSError(f"fio has moved {moved} bytes of {self.total_bytes}: {' '.join(self.command)}")
        return moved / max(job[kind]["runtime"] for kind in ("read", "write")) * 1e3

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class Loop:
    """Threads that call os.preadv and os.pwritev on pieces in turn, in memory like the store's."""

    cores = 0.0

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        length = max(pattern.step_bytes, 2 * 2**20)  # a huge page
        buffers = [HostBuffer(length, private=True).flat.fill_(1) for _ in range(pattern.threads)]
        self.memory = [memoryview(buffer.numpy())[: pattern.step_bytes] for buffer in buffers]

    def run(self) -> float:
        pattern, step = self.pattern, self.pattern.step_bytes
        fd = os.open(pattern.path, os.O_RDWR | os.O_DIRECT)

        def work(thread: int) -> None:
            for number, offset in enumerate(range(thread * step, pattern.total_bytes, pattern.threads * step)):
                write = pattern.mode == "write" or (pattern.mode == "mixed" and number % 2)
                (os.pwritev if write else os.preadv)(fd, [self.memory[thread]], offset)

        try:
            threads = [threading.Thread(target=work, args=(index,)) for index in range(pattern.threads)]
            begin_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return pattern.total_bytes / (time.perf_counter() - begin_s)
        finally:
            os.close(fd)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def contenders(pattern: Pattern, *, fio: bool) -> dict[str, Store | Fio | Loop]:
    """Returns the contenders by key; fio is the reference, or the loop where there is none."""
    memory = HostBuffer(2 * LOOKAHEAD * pattern.layer_bytes, private=True).flat.view(2 * LOOKAHEAD, -1)
    memory.view(torch.int64).random_()
    ours = {name: Store(pattern, memory, checksums=name == "store_sums") for name in ("store", "store_sums")}
    others = {"fio": Fio(pattern, uring=False), "fio_uring": Fio(pattern, uring=True)} if fio else {}
    return {**ours, **others, "loop": Loop(pattern)}


def samples(length: int) -> Iterator[tuple[int, int]]:
    """Yields where the parts of a layer begin and end that are compared: its two ends and its middle."""
    part = min(SAMPLE_BYTES, length)
    yield from ((begin, begin + part) for begin in sorted({0, (length - part) // 2, length - part}))


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# ---- the measurement ----


def measure(
    pattern: Pattern, *, rounds: int, fio: bool, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns bytes per second and cores used, by contender and round, after a round that is not counted."""
    all_of_them = contenders(pattern, fio=fio)
    rates: dict[str, list[float]] = {key: [] for key in all_of_them}
    cores: dict[str, list[float]] = {key: [] for key in all_of_them}
    failed: dict[str, str] = {}
    try:
        for number in range(rounds + 1):
            turn = number % len(all_of_them)
            keys = [*all_of_them][turn:] + [*all_of_them][:turn]
            for key in keys:
                if key in failed:
                    continue
                say(f"{format_bytes(pattern.layer_bytes)}, {pattern.mode}, round {number} of {rounds}: {NAMES[key]}")
                try:
                    rate = all_of_them[key].run()
                except OSError as error:
                    if key != "fio_uring":
                        raise
                    failed[key] = str(error)  # containers often deny io_uring
                    continue
                all_of_them[key].check()
                if number:
                    rates[key].append(rate)
                    cores[key].append(all_of_them[key].cores)
    finally:
        for contender in all_of_them.values():
            contender.close()
    return {key: found for key, found in rates.items() if len(found) == rounds}, cores


def spread(values: Iterable[float]) -> dict[str, float]:
    low, median, high = quantiles(values, n=4, method="inclusive")
    return {"low": low, "median": median, "high": high}


def to_records(pattern: Pattern, rates: dict[str, list[float]], cores: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns one record per contender; each ratio is of two calls of one round."""
    reference = next(key for key in ("fio", "loop") if key in rates)
    records = []
    for key, found in rates.items():
        over = {
            other: spread(ours / theirs for ours, theirs in zip(found, rates[other], strict=True)) for other in rates
        }
        records.append(
            {
                "benchmark": "disk",
                "contender": key,
                "name": NAMES[key],
                "mode": pattern.mode,
                "layer_bytes": pattern.layer_bytes,
                "layers": pattern.count,
                "piece_bytes": pattern.piece_bytes,
                "disk_threads": pattern.threads,
                "lookahead": LOOKAHEAD,
                "reference": reference,
                "bytes_s": found,
                "gb_s": spread(rate / 1e9 for rate in found),
                "rate_over": over,
                "cores": spread(cores[key])["median"],
                "target": TARGET if key.startswith("store") else None,
                "met": over[reference]["median"] >= TARGET if key.startswith("store") else None,
            }
        )
    return records


def to_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("layer", "mode", "", "GB/s", "of the reference", "of stronghold's", "cores", "target 0.95"):
        table.add_column(column, justify="right" if column in ("layer", "GB/s", "cores") else "left")
    before = None
    for record in records:
        group = (record["layer_bytes"], record["mode"])
        if before not in (None, group):
            table.add_section()
        gb_s, of_reference = record["gb_s"], record["rate_over"][record["reference"]]
        table.add_row(
            *((format_bytes(group[0]), group[1]) if before != group else ("", "")),
            record["name"],
            f"{gb_s['median']:.2f} ({gb_s['low']:.2f} to {gb_s['high']:.2f})",
            f"{of_reference['median']:.3f} ({of_reference['low']:.3f} to {of_reference['high']:.3f})",
            f"{record['rate_over']['store']['median']:.3f}",
            f"{record['cores']:.2f}" if record["target"] else "",
            {True: "met", False: "not met", None: ""}[record["met"]],
        )
        before = group
    return table


# ---- the command line ----


@contextmanager
def scratch_file(folder: Path, length: int) -> Iterator[tuple[Path, DiskFile]]:
    """A file of ``length`` bytes, all written once: a file system writes reserved space differently the first time."""
    handle, name = tempfile.mkstemp(prefix="stronghold-disk-", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        with Disk() as disk:
            file = disk.open(path)
            file.reserve(length)
            block = HostBuffer(min(length, 64 << 20)).flat
            for offset in range(0, length, len(block)):
                disk.write(file, block[: min(len(block), length - offset)], offset=offset)
            disk.drain()
            file.sync()
        yield path, file
    finally:
        path.unlink(missing_ok=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def size(text: str) -> int:
        try:
            count = parse_bytes(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if count < 4096 or count % 4096:
            raise argparse.ArgumentTypeError(f"must be a multiple of 4096 bytes (got {text!r}); write 4KiB or 64MiB")
        return count

    parser.add_argument(
        "--path", type=Path, default=Path(tempfile.gettempdir()), metavar="FOLDER", help="where the file lies"
    )
    parser.add_argument(
        "--size", type=size, action="append", metavar="BYTES", help=f"of a layer, repeatable ({' '.join(SIZES)})"
    )
    parser.add_argument("--mode", choices=MODES, action="append", help="repeatable (all)")
    parser.add_argument(
        "--total", type=size, metavar="BYTES", help="moved by a call, at least 4 layers (512MiB; 16MiB if quick)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each contender; seven or more (9)")
    parser.add_argument("--threads", type=int, default=4, help="of the disk, and fio's jobs (4)")
    parser.add_argument("--piece", type=size, default=PIECE_BYTES, metavar="BYTES", help="of one call (4MiB)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, of layers of 1 and 4 MiB: no result")
    parser.add_argument("--without-fio", action="store_true", help="measure against plain threads though fio is there")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FILE", help=f"JSON lines to append to ({RESULTS})"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2 or arguments.threads < 1:
        parser.error(
            f"--rounds must be 2 or more and --threads 1 or more (got {arguments.rounds}, {arguments.threads})"
        )
    if arguments.quick:
        arguments.rounds = 2
    arguments.total = arguments.total or parse_bytes("16MiB" if arguments.quick else "512MiB")
    arguments.size = arguments.size or [parse_bytes(text) for text in (SIZES[:2] if arguments.quick else SIZES)]
    arguments.mode = arguments.mode or list(MODES)
    if not arguments.path.is_dir():
        parser.error(f"--path must name a folder (got {arguments.path}); pass one on the disk to be measured")
    needed, free = file_bytes(arguments), shutil.disk_usage(arguments.path).free
    if needed > 0.9 * free:
        parser.error(
            f"--path must have {format_bytes(needed)} free with a tenth to spare (got {format_bytes(free)} in "
            f"{arguments.path}); pass a smaller --size and --total, or another folder"
        )
    return arguments


def layers(arguments: argparse.Namespace, layer_bytes: int) -> int:
    """Returns how many layers a call moves: a multiple of four, so that fio's jobs and modes share them evenly."""
    return max(4, arguments.total // layer_bytes // 4 * 4)


def file_bytes(arguments: argparse.Namespace) -> int:
    return max(size * layers(arguments, size) for size in arguments.size)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(width=max(Console().width, 140))
    fio = shutil.which("fio") is not None and not arguments.without_fio
    if not fio:
        console.print("fio: left out; threads with os.preadv and os.pwritev take its place")
    records: list[dict[str, Any]] = []
    try:
        with (
            console.status("writing the file") as status,
            scratch_file(arguments.path, file_bytes(arguments)) as (path, file),
        ):
            place, direct = file_system(str(path)), file.direct
            for layer_bytes in arguments.size:
                for mode in arguments.mode:
                    pattern = Pattern(
                        mode=mode,
                        layer_bytes=layer_bytes,
                        count=layers(arguments, layer_bytes),
                        piece_bytes=arguments.piece,
                        threads=arguments.threads,
                        path=path,
                    )
                    rates, cores = measure(pattern, rounds=arguments.rounds, fio=fio, say=status.update)
                    records += to_records(pattern, rates, cores)
    except WrongData as error:
        console.print(f"WRONG: {error}\nNothing was recorded.", style="bold red", soft_wrap=True, markup=False)
        return 1
    except OSError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted. What was measured is discarded; nothing was recorded.")
        return 130
    machine = describe_machine()
    machine["versions"]["fio"] = (
        subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip() if fio else None
    )
    for record in records:
        append_record(
            arguments.out,
            {**record, "rounds": arguments.rounds, "file_system": place, "direct": direct, **machine},
        )
    title = f"Layers on {place}, {arguments.threads} threads, pieces of {format_bytes(arguments.piece)}"
    console.print(to_table(records, title))
    console.print(
        f"Medians and quartiles of {arguments.rounds} rounds; ratios are of two calls of one round. "
        f"Recorded in {arguments.out}.",
        markup=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
