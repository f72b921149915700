"""What the disk's threads write and read, element by element, whatever goes wrong on the way."""

import errno
import gc
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stronghold.errors import CorruptionError, DiskError, StrongholdError
from stronghold.native import (
    PIECE_BYTES,
    SUM_BYTES,
    BufferedDiskWarning,
    Disk,
    Fault,
    Priority,
    checksums,
    crc32c,
    disk_errors,
)
from tests.test_native_threads import in_a_process

SMALL = 8192  # pieces, so that little data makes many


def numbers(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def askew(length: int, by: int) -> torch.Tensor:
    """Memory that begins ``by`` bytes behind a page, filled with 0xEE."""
    memory = torch.full((length + 8192,), 0xEE, dtype=torch.uint8)
    begin = -memory.data_ptr() % 4096 + by
    return memory[begin : begin + length]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "layers"


# ---- what goes through comes back ----


@given(
    length=st.one_of(st.integers(0, 3 * SMALL), st.sampled_from([4095, 4096, 4097, SMALL, SMALL + 1, 5 * SMALL])),
    blocks=st.integers(0, 5),
    write_askew=st.sampled_from([0, 1, 8, 64, 512, 4095]),
    read_askew=st.sampled_from([0, 1, 8, 64, 512, 4095]),
    threads=st.integers(1, 4),
)
@settings(max_examples=60)
def test_every_alignment_of_memory_offset_and_length(
    tmp_path_factory, length, blocks, write_askew, read_askew, threads
):
    path = tmp_path_factory.getbasetemp() / "alignments"
    path.write_bytes(b"\xcc" * (20 * SMALL))
    data, back = askew(length, write_askew), askew(length + 2, read_askew)
    data.copy_(numbers(length, seed=length))
    sums = torch.zeros(-(-length // SUM_BYTES), dtype=torch.int32)
    offset = 4096 * blocks
    with Disk(threads=threads, piece_bytes=SMALL) as disk:
        file = disk.open(path)
        assert disk.write(file, data, offset=offset, sums=sums).wait()
        assert disk.read(file, back[1:-1], offset=offset, sums=sums, verify=True).wait()
    assert torch.equal(back[1:-1], data)
    assert back[0] == back[-1] == 0xEE  # its neighbours
    end = -(-length // 4096) * 4096
    content = path.read_bytes()  # as everybody else reads it
    assert content[offset : offset + end] == bytes(data.tolist()) + bytes(end - length)
    assert content[:offset] + content[offset + end :] == b"\xcc" * (20 * SMALL - end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8])
def test_tensors_of_any_type_and_shape(path, dtype):
    data = torch.randn(37, 411).mul(100).to(dtype)
    with Disk() as disk:
        file = disk.open(path, create=True)
        disk.write(file, data).wait()
        back = torch.zeros_like(data)
        disk.read(file, back).wait()
        assert torch.equal(back, data)
        assert file.size_bytes == -(-data.nbytes // 4096) * 4096


def test_a_transfer_of_many_pieces_of_the_usual_size(path):
    data = numbers(2 * PIECE_BYTES + 12345)
    with Disk() as disk:
        file = disk.open(path, create=True)
        assert disk.threads == 4 and disk.pieces(data.nbytes) == 3
        disk.write(file, data).wait()
        back = torch.zeros_like(data)
        disk.read(file, back).wait()
        assert torch.equal(back, data)
        counters = disk.counters()
        assert counters.read_bytes == counters.written_bytes == file.size_bytes
        assert 0 < counters.busy_s < 250


def test_sums_are_the_crc32c_of_each_page(path):
    data = numbers(2 * SMALL + 100)
    parts = [data[i : i + SUM_BYTES] for i in range(0, len(data), SUM_BYTES)]
    assert crc32c(numbers(0)) == 0
    assert crc32c(torch.tensor(list(b"123456789"), dtype=torch.uint8)) == 0xE3069283
    with Disk(piece_bytes=SMALL) as disk:
        file = disk.open(path, create=True)
        written, read = torch.zeros(5, dtype=torch.uint32), torch.zeros(5, dtype=torch.int32)
        disk.write(file, data, sums=written).wait()
        disk.read(file, torch.empty_like(data), sums=read).wait()
    assert written.tolist() == [crc32c(part) for part in parts]
    assert torch.equal(read, written.view(torch.int32))
    assert crc32c(parts[1], crc=crc32c(parts[0])) == crc32c(data[: 2 * SUM_BYTES])
    summed = torch.zeros(5, dtype=torch.int32)
    checksums(data, summed)
    assert torch.equal(summed, read)


def test_a_sum_of_zero_is_one_that_is_not_known(path):
    data, sums = numbers(3 * SUM_BYTES), torch.zeros(3, dtype=torch.int32)
    with Disk() as disk:
        file = disk.open(path, create=True)
        disk.write(file, data, sums=sums).wait()
        path.write_bytes(bytes(data[:SUM_BYTES].tolist()) + bytes(2 * SUM_BYTES))
        sums[1] = 0
        with pytest.raises(CorruptionError) as caught:
            disk.read(file, torch.empty_like(data), sums=sums, verify=True).wait()
        assert caught.value.offset == 2 * SUM_BYTES
        sums[2] = 0
        disk.read(file, torch.empty_like(data), sums=sums, verify=True).wait()
    assert sums[1:].tolist() == [0, 0]


def test_checksums_that_are_forgotten_while_they_are_compared_are_no_damage(path):
    data = numbers(64 * SUM_BYTES)
    with Disk(threads=2) as disk:
        file, sums = disk.open(path, create=True), torch.zeros(64, dtype=torch.int32)
        disk.write(file, data, sums=sums).wait()
        known, ended = sums.clone(), threading.Event()

        def forget_and_recall() -> None:
            while not ended.is_set():
                sums.zero_()
                sums.copy_(known)

        thread = threading.Thread(target=forget_and_recall)
        thread.start()
        try:
            for _ in range(2000):
                disk.read(file, torch.empty_like(data), sums=sums, verify=True).wait()
        finally:
            ended.set()
            thread.join()


def test_many_threads_at_once(path):
    right = []

    def work(caller: int) -> None:
        for round_ in range(10):
            data, back = numbers(3 * SMALL, seed=100 * caller + round_), torch.zeros(3 * SMALL, dtype=torch.uint8)
            disk.write(file, data, offset=caller * 4 * SMALL, priority=caller % 3).wait()
            disk.read(file, back, offset=caller * 4 * SMALL, priority=round_ % 3).wait()
            right.append(torch.equal(back, data))

    with Disk(piece_bytes=SMALL) as disk:
        file = disk.open(path, create=True)
        threads = [threading.Thread(target=work, args=(caller,)) for caller in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert right == [True] * 60


# ---- order ----


def test_urgent_transfers_overtake_those_that_have_not_begun(path):
    memory = torch.zeros(2 * SMALL, dtype=torch.uint8)
    with Disk(threads=1, piece_bytes=SMALL, faults=[Fault(kind="write", what="delay", delay_s=1.0)]) as disk:
        file = disk.open(path, create=True)
        file.reserve(16 * SMALL)
        first = disk.write(file, memory)
        while len(disk.calls()) < 3:  # open, reserve, and its first piece
            time.sleep(0.001)
        others = [
            disk.write(file, memory, offset=4 * SMALL),
            disk.read(file, memory.clone(), offset=8 * SMALL, priority=Priority.PREFETCH),
            disk.read(file, memory.clone(), offset=12 * SMALL),
        ]
        assert not first.done() and not any(transfer.done() for transfer in others)
        disk.drain()
        calls = [(kind, offset // SMALL) for kind, _, offset, _ in disk.calls()[2:]]
    assert calls == [
        *[("write", 0), ("read", 12), ("read", 13), ("read", 8), ("read", 9)],
        *[("write", 1), ("write", 4), ("write", 5)],
    ]


def test_waiting_can_end_before_the_transfer(path):
    with Disk(faults=[Fault(kind="write", what="delay", delay_s=1.5)]) as disk:
        file, begin = disk.open(path, create=True), time.perf_counter()
        transfer = disk.write(file, numbers(SMALL))
        assert transfer.wait(timeout_s=0) is False and transfer.wait(timeout_s=0.15) is False
        assert time.perf_counter() - begin > 0.14
        assert transfer.wait() is True and transfer.wait(timeout_s=0) is True
        assert time.perf_counter() - begin > 1.49


def test_the_interpreter_runs_while_a_thread_waits(path):
    with Disk(faults=[Fault(kind="write", what="delay", delay_s=0.5)]) as disk:
        transfer = disk.write(disk.open(path, create=True), numbers(SMALL))
        waiter = threading.Thread(target=transfer.wait)
        waiter.start()
        ticks = 0
        while waiter.is_alive():
            time.sleep(0.01)
            ticks += 1
    assert ticks > 10


@pytest.fixture
def interruptible():
    """Ctrl-C as Python has it: a script's process in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_waiting_and_not_the_transfer(path, interruptible):
    data = numbers(3 * SMALL)
    with Disk(faults=[Fault(kind="write", what="delay", delay_s=3.0)]) as disk:
        file = disk.open(path, create=True)
        transfer = disk.write(file, data)
        timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        assert not transfer.done()
        transfer.wait()
    assert path.read_bytes() == bytes(data.tolist())


# ---- what goes wrong ----


@pytest.mark.parametrize("what", ["short", "EINTR"])
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("at_byte", [None, 1, 4095, 4096, 5000])
def test_what_is_broken_off_is_resumed(path, kind, what, at_byte):
    data, back = numbers(5 * SMALL + 99), torch.zeros(5 * SMALL + 99, dtype=torch.uint8)
    faults = [Fault(kind=kind, what=what, nth=nth, times=2, at_byte=at_byte) for nth in (1, 4)]
    with Disk(threads=2, piece_bytes=SMALL, faults=faults) as disk:
        file = disk.open(path, create=True)
        disk.write(file, data).wait()
        disk.read(file, back).wait()
        kinds = [called for called, *_ in disk.calls()]
    assert torch.equal(back, data)
    assert path.read_bytes() == bytes(data.tolist()) + bytes(-len(data) % 4096)
    assert kinds.count(kind) > 7  # five pieces, and the last in two


@pytest.mark.parametrize(
    ("kind", "what"), [("read", "EIO"), ("write", "EIO"), ("write", "ENOSPC"), ("write", "EDQUOT")]
)
def test_an_error_of_the_system_says_everything(path, kind, what):
    data = numbers(4 * SMALL)
    with Disk(threads=1, piece_bytes=SMALL, faults=[Fault(kind=kind, what=what, nth=3)]) as disk:
        file = disk.open(path, create=True)
        if kind == "read":
            disk.write(file, data).wait()
        transfer = (disk.read if kind == "read" else disk.write)(file, data, offset=0)
        for _ in range(2):
            with pytest.raises(DiskError) as caught:
                transfer.wait()
            error = caught.value
            assert (error.operation, error.path, error.offset, error.length) == (kind, str(path), 2 * SMALL, SMALL)
            assert error.errno == getattr(errno, what)
            assert isinstance(error, OSError) and isinstance(error, StrongholdError)
            for part in (f"{SMALL} bytes", f"byte {2 * SMALL}", str(path), f"errno {error.errno}"):
                assert part in str(error)
        assert transfer.done()
        assert [called for called, *_ in disk.calls()].count(kind) == 3  # the fourth piece was dropped
        disk.drain()  # it has been told
        disk.read(file, data[:SMALL]).wait()  # and the disk goes on
        copy = pickle.loads(pickle.dumps(error))
        assert vars(copy) == vars(error) and str(copy) == str(error) and copy.errno == error.errno


def test_an_error_that_nobody_waits_for_is_raised_when_the_disk_is_drained(path):
    with Disk(faults=[Fault(kind="write", what="EIO", nth=2)]) as disk:
        file = disk.open(path, create=True)
        for index in range(5):
            transfer = disk.write(file, numbers(SMALL), offset=index * SMALL)
            while not transfer.done():
                time.sleep(0.001)
            del transfer
        with pytest.raises(DiskError, match="errno 5"):
            disk.drain()
        disk.drain()


def test_a_file_that_ends_before_the_data_does(path):
    data = numbers(SMALL)
    with Disk() as disk:
        file = disk.open(path, create=True)
        disk.write(file, data).wait()
        for transfer in (disk.read(file, numbers(SMALL + 1)), disk.read(file, numbers(1), offset=1 << 20)):
            with pytest.raises(DiskError, match=r"the file ends at byte 8192, and \d+ are needed") as caught:
                transfer.wait()
            assert caught.value.errno is None
    with Disk(faults=[Fault(kind="read", what="eof")]) as disk, pytest.raises(DiskError, match="the file ends"):
        disk.read(disk.open(path), data).wait()


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("at_byte", [None, 0, 99])
def test_one_flipped_bit_is_found(path, kind, at_byte):
    data, sums = numbers(3 * SMALL), torch.zeros(6, dtype=torch.int32)
    before = data.clone()
    fault = Fault(kind=kind, what="flip", nth=2, at_byte=at_byte)
    with Disk(threads=1, piece_bytes=SMALL, faults=[fault]) as disk:
        file = disk.open(path, create=True)
        disk.write(file, data, sums=sums).wait()
        assert torch.equal(data, before)
        back = torch.zeros_like(data)
        with pytest.raises(CorruptionError, match="the data on disk was altered") as caught:
            disk.read(file, back, sums=sums, verify=True).wait()
        error = caught.value
        page = 3 if at_byte is None else 2  # of the second piece the first, or the one in its middle
        assert (error.path, error.offset, error.length) == (str(path), page * SUM_BYTES, SUM_BYTES)
        altered = slice(page * SUM_BYTES, (page + 1) * SUM_BYTES)
        assert error.expected == sums[page].item() & 0xFFFFFFFF == crc32c(data[altered])
        assert error.found == crc32c(back[altered])
        assert f"{error.expected:#010x}" in str(error) and f"{error.found:#010x}" in str(error)
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_a_full_disk_says_how_much_is_missing(path):
    with Disk(faults=[]) as disk:
        file = disk.open(path, create=True)
        assert file.reserve(10 * SMALL) is True and file.size_bytes == 10 * SMALL
        assert path.stat().st_blocks * 512 >= 10 * SMALL
        with pytest.raises(
            DiskError, match=r"the disk is full: .* are needed and .* are free: free .* there"
        ) as caught:
            file.reserve(1 << 50)
        assert caught.value.errno == errno.ENOSPC and caught.value.length == 1 << 50
        assert [call for call, *_ in disk.calls()].count("reserve") == 1  # it was not tried: others write here, too
        assert file.size_bytes == 10 * SMALL
    faults = [Fault(kind="reserve", what="ENOSPC"), Fault(kind="reserve", what="EOPNOTSUPP", nth=2)]
    with Disk(faults=[*faults, Fault(kind="sync", what="EIO")]) as disk:
        file = disk.open(path)
        with pytest.raises(DiskError, match="the disk is full"):
            file.reserve(20 * SMALL)
        assert file.size_bytes == 10 * SMALL
        assert file.reserve(20 * SMALL) is False and file.size_bytes == 20 * SMALL
        with pytest.raises(DiskError, match=r"cannot sync .*errno 5.*dmesg") as caught:
            file.sync()
        assert (caught.value.operation, caught.value.errno) == ("sync", errno.EIO)
        file.sync()


def test_a_file_that_cannot_be_opened(tmp_path):
    with Disk(faults=[Fault(kind="open", what="EMFILE", nth=3)]) as disk:
        with pytest.raises(DiskError, match=r"cannot open .*absent.*; check the path") as caught:
            disk.open(tmp_path / "absent")
        assert caught.value.errno == errno.ENOENT
        with pytest.raises(DiskError, match="cannot open"):
            disk.open(tmp_path)
        with pytest.raises(DiskError, match="ulimit -n"):
            disk.open(tmp_path / "file", create=True)


# ---- buffered ----


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(disk_errors, "_warned", set())


def test_a_file_system_without_direct_io_is_buffered_and_said_once(tmp_path, not_warned):
    data, back = numbers(3 * SMALL + 7), torch.zeros(3 * SMALL + 7, dtype=torch.uint8)
    refused = Fault(kind="open", what="EINVAL", path_ends="a")
    with Disk(piece_bytes=SMALL, faults=[refused, Fault(kind="open", what="EINVAL", path_ends="b")]) as disk:
        with pytest.warns(BufferedDiskWarning, match=r"refuses direct I/O") as caught:
            file = disk.open(tmp_path / "a", create=True)
        assert len(caught) == 1 and caught[0].filename == __file__
        assert str(tmp_path / "a") in str(caught[0].message)
        assert not file.direct and file.memory_alignment == 1 and file.alignment == 4096
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not disk.open(tmp_path / "b", create=True).direct
        disk.write(file, data).wait()
        disk.read(file, back).wait()
    assert torch.equal(back, data)
    assert (tmp_path / "a").read_bytes() == bytes(data.tolist()) + bytes(-len(data) % 4096)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs at /dev/shm")
@pytest.mark.filterwarnings("ignore::stronghold.native.BufferedDiskWarning")
def test_tmpfs_direct_or_buffered(tmp_path):
    path = Path(f"/dev/shm/stronghold-{os.getpid()}")  # its kernel may take O_DIRECT there, or not
    data, back = numbers(5 * SMALL + 7), torch.zeros(5 * SMALL + 7, dtype=torch.uint8)
    try:
        with Disk(piece_bytes=SMALL) as disk:
            file = disk.open(path, create=True)
            assert file.reserve(len(data))
            disk.write(file, data).wait()
            file.sync()
            disk.read(file, back).wait()
        assert torch.equal(back, data)
        assert disk_errors.file_system(str(path)) == "tmpfs at '/dev/shm'"
    finally:
        path.unlink(missing_ok=True)


def test_the_file_system_is_that_of_the_longest_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 254:0 / / rw - ext4 /dev/vda rw\n"
        "2 1 0:5 / /mnt/a rw shared:2 - xfs /dev/vdb rw\n"
        "3 1 0:6 / /mnt/a\\040b rw - tmpfs none rw\n"
    )
    assert disk_errors.file_system("/mnt/a/c", mounts) == "xfs at '/mnt/a'"
    assert disk_errors.file_system("/mnt/a b/c", mounts) == "tmpfs at '/mnt/a b'"
    assert disk_errors.file_system("/mnt/ab/c", mounts) == "ext4 at '/'"
    assert disk_errors.file_system("/mnt/ab/c", tmp_path / "absent") == "a file system"


# ---- ends ----


def test_memory_and_file_live_until_the_transfer_is_done(path):
    with Disk(faults=[Fault(kind="write", what="delay", delay_s=2.0)]) as disk:
        data = numbers(SMALL)
        expected = bytes(data.tolist())
        watched = weakref.ref(data)
        transfer = disk.write(disk.open(path, create=True), data)
        del data  # no cycle refers to it; to collect garbage may take longer than the write
        assert watched() is not None and not transfer.done()
        del transfer  # who waits for it does not matter
        assert watched() is not None
        disk.drain()
        gc.collect()
        assert watched() is None and disk._unsettled == {}
        assert path.read_bytes() == expected


def test_closing_drops_what_has_not_begun(path):
    memory = [numbers(4 * SMALL, seed=i) for i in range(6)]
    disk = Disk(threads=1, piece_bytes=SMALL, faults=[Fault(kind="write", what="delay", times=None, delay_s=0.05)])
    file = disk.open(path, create=True)
    transfers = [disk.write(file, m, offset=i * 4 * SMALL) for i, m in enumerate(memory)]
    transfers[0].wait()
    disk.close()
    assert all(transfer.done() for transfer in transfers)
    assert [call for call, *_ in disk.calls()].count("write") < 4 * 6
    transfers[0].wait()
    with pytest.raises(DiskError, match=r"the disk was closed before; .*drain"):
        transfers[-1].wait()
    with pytest.raises(DiskError, match="the disk was closed before"):
        disk.write(file, memory[0])
    disk.close()


def test_a_disk_that_nobody_refers_to_ends_its_threads(path):
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    before = tasks()
    for _ in range(3):
        disk = Disk(threads=3, faults=[Fault(kind="write", what="delay", times=None, delay_s=0.02)])
        file = disk.open(path, create=True)
        for _ in range(20):
            disk.write(file, numbers(SMALL))
        assert tasks() == before + 3
        del disk
        gc.collect()
        assert tasks() == before


def test_a_program_may_end_with_transfers_under_way(path):
    in_a_process(
        f"""
        import threading, torch
        from stronghold.native import Disk, Fault
        disk = Disk(faults=[Fault(kind="write", what="delay", times=None, delay_s=0.05)])
        file = disk.open({str(path)!r}, create=True)
        transfers = [disk.write(file, torch.zeros(1 << 20)) for _ in range(100)]
        def wait():
            try:
                transfers[-1].wait()
            except Exception:
                pass
        threading.Thread(target=wait, daemon=True).start()
        """
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_may_open_a_disk_of_its_own(path):
    assert "status 0" in in_a_process(
        f"""
        import os, threading, torch
        from stronghold.errors import DiskError
        from stronghold.native import Disk, Fault
        disk = Disk(faults=[Fault(kind="write", what="delay", delay_s=0.5)])
        file = disk.open({str(path)!r}, create=True)
        data = torch.arange(5000, dtype=torch.uint8)
        transfer = disk.write(file, data)
        threading.Thread(target=transfer.wait).start()  # the child inherits a condition with a waiter
        child = os.fork()
        if child == 0:
            for use in (lambda: disk.write(file, data), disk.drain, transfer.wait):
                try:
                    use()
                except DiskError as error:
                    assert "forked" in str(error) and error.errno is None
                else:
                    os._exit(3)
            disk.counters()
            disk.close()
            del disk, transfer
            with Disk() as own:
                back = torch.zeros_like(data)
                file = own.open({str(path)!r} + "-child", create=True)
                own.write(file, data).wait()
                own.read(file, back).wait()
                assert torch.equal(back, data)
            os._exit(0)
        print("status", os.waitpid(child, 0)[1])
        transfer.wait()
        """
    )


def test_kill_ends_the_process_in_the_middle_of_a_transfer(path):
    child = os.fork()
    if child == 0:
        with Disk(threads=1, piece_bytes=SMALL, faults=[Fault(kind="write", what="kill", nth=2)]) as disk:
            disk.write(disk.open(path, create=True), numbers(3 * SMALL)).wait(timeout_s=20)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == bytes(numbers(3 * SMALL)[: SMALL + SMALL // 2].tolist())


# ---- what is refused ----


def test_arguments_are_checked(path):
    with pytest.raises(ValueError, match="threads must be an integer of 1 or more"):
        Disk(threads=0)
    with pytest.raises(ValueError, match="piece_bytes must be a multiple of 4096"):
        Disk(piece_bytes=5000)
    with pytest.raises(ValueError, match="kind must be one of"):
        Fault(kind="close", what="EIO")
    with pytest.raises(ValueError, match="what must be one of"):
        Fault(kind="read", what="ENONSENSE")
    path.write_bytes(bytes(4 * SMALL))
    with Disk(piece_bytes=SMALL) as disk:
        file, read_only = disk.open(path), disk.open(path, read_only=True)
        memory = numbers(2 * SMALL)
        for offset in (-4096, 1, 512, 4095):
            with pytest.raises(ValueError, match="offset must be a multiple of the file's alignment, 4096"):
                disk.read(file, memory, offset=offset)
        with pytest.raises(ValueError, match="opened read-only"):
            disk.write(read_only, memory)
        with pytest.raises(ValueError, match="memory must be contiguous"):
            disk.read(file, memory[::2])
        with pytest.raises(ValueError, match="memory must be on the CPU"):
            disk.read(file, memory.to("meta"))
        with pytest.raises(ValueError, match="verify needs the checksums"):
            disk.read(file, memory, verify=True)
        for sums in (torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
            with pytest.raises(ValueError, match="sums must be int32 or uint32 and hold 4 elements"):
                disk.read(file, memory, sums=sums)
        with pytest.raises(ValueError, match="length_bytes must be 0 or more"):
            file.reserve(-1)
        disk.read(read_only, memory).wait()
        assert torch.equal(memory, torch.zeros_like(memory))
        empty = disk.write(file, numbers(0), sums=torch.zeros(0, dtype=torch.int32))
        assert empty.wait() and empty.done()
        assert disk.read(file, numbers(0), sums=torch.zeros(0, dtype=torch.int32), verify=True).wait()
        assert disk._unsettled == {}
