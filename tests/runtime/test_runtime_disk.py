"""Test scratch space on a disk: the bytes, clear errors, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import stat
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.storage import disk, scratch_file
from flexhybrid.runtime.storage.disk import ALIGN, DiskError, DiskSpace
from flexhybrid.runtime.storage.host_memory import HostMemory

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def refuse(*_):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def no_unnamed_files(monkeypatch) -> None:
    """Simulate a system in which each file first has a name."""
    monkeypatch.setattr(scratch_file, "open_unnamed", refuse)


aligned_host_bytes = HostMemory(pinned=False).bytes


def of_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Return page-aligned random bytes."""
    memory = aligned_host_bytes(num_bytes)
    memory.numpy()[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    return memory


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


OF_OTHERS: set[threading.Thread] = set()  #: of disks that tests of other files have left open


def disk_threads() -> list[threading.Thread]:
    """Return the threads of disks that these tests open."""
    return [one for one in threading.enumerate() if one.name.startswith("flexhybrid-disk") and one not in OF_OTHERS]


@pytest.fixture(scope="module", autouse=True)
def disks_of_others():
    gc.collect()
    OF_OTHERS.update(disk_threads())


# --- the bytes ---------------------------------------------------------------------------------------------------

SPACE_BYTES = 40 * ALIGN + 123


@st.composite
def piece_lists(draw):
    """Draw (offset, bytes, remainder of the memory's address) of disjoint pieces in any order."""
    near_a_page = st.builds(
        lambda page, by: min(max(page * ALIGN + by, 0), SPACE_BYTES), st.integers(0, 40), st.integers(-2, 2)
    )
    on_a_page = st.integers(0, 40).map(lambda page: page * ALIGN)
    cuts = sorted(draw(st.sets(near_a_page | on_a_page | st.integers(0, SPACE_BYTES), min_size=2, max_size=12)))
    spans = [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    chosen = draw(st.permutations(draw(st.lists(st.sampled_from(spans), unique=True))))
    return [(offset, size, draw(st.sampled_from([offset % ALIGN, 0, 1]))) for offset, size in chosen]


def memory_at(remainder: int, num_bytes: int) -> torch.Tensor:
    return aligned_host_bytes(num_bytes + ALIGN)[remainder : remainder + num_bytes]


@pytest.mark.parametrize("how", ["as the system can", "page cache only", "named file"])
def test_pieces_come_back_as_a_bytearray_would_give_them(tmp_path, monkeypatch, how):
    """Writes and reads have any cuts and alignment; a plain bytearray takes the same writes. Requests are so small here
    that every piece is cut and joined."""
    monkeypatch.setattr(disk, "REQUEST_BYTES", 3 * ALIGN)
    monkeypatch.setattr(disk, "MOST_BUFFERS", 3)
    if how == "named file":
        no_unnamed_files(monkeypatch)
    model = bytearray(SPACE_BYTES)
    with DiskSpace(tmp_path, SPACE_BYTES) as space:
        if how == "page cache only":
            space.direct = False

        @given(st.lists(st.tuples(st.booleans(), piece_lists()), max_size=6), st.integers(0, 2**32))
        def check(steps, seed):
            generator = np.random.default_rng(seed)
            for writes, pieces in steps:
                memories = [(offset, memory_at(remainder, size)) for offset, size, remainder in pieces]
                if not writes:
                    space.read(memories)
                    for offset, memory in memories:
                        assert memory.numpy().tobytes() == model[offset : offset + len(memory)]
                    continue
                for offset, memory in memories:
                    memory.numpy()[:] = generator.integers(0, 256, len(memory), dtype=np.uint8)
                    model[offset : offset + len(memory)] = memory.numpy().tobytes()
                space.write(memories)

        check()


def test_tensors_of_any_type(tmp_path):
    with DiskSpace(tmp_path, 4 * ALIGN) as space:
        numbers = torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100)
        space.write([(8, numbers), (ALIGN, of_bytes(b"as it came"))])
        back, text = torch.zeros_like(numbers), of_bytes(bytes(10))
        space.read([(ALIGN, text), (8, back)])
        assert torch.equal(back, numbers) and bytes(text.tolist()) == b"as it came"
        part = torch.zeros(4, 4)[:, 1]
        with pytest.raises(ValueError, match="contiguous"):
            space.read([(0, part)])
        for offset in (-1, 4 * ALIGN - 5):
            with pytest.raises(ValueError, match="outside"):
                space.write([(offset, of_bytes(b"123456"))])
        with pytest.raises(ValueError, match="overlap at byte 3"):
            space.write([(3, of_bytes(b"1")), (0, of_bytes(b"1234"))])
        space.write([])
        space.read([(5, of_bytes(b""))])


def test_requests_are_large_aligned_and_past_the_page_cache(tmp_path, monkeypatch):
    """Joined pieces become direct requests of 8 MiB; up to 8 MiB are one request on the caller's thread."""
    calls: list[tuple[int, int]] = []
    callers: set[int] = set()
    preadv = os.preadv

    def watched(fd, buffers, offset):
        calls.append((fd, sum(len(buffer) for buffer in buffers)))
        callers.add(threading.get_ident())
        return preadv(fd, buffers, offset)

    with DiskSpace(tmp_path, 40 * MIB) as space:
        if not space.direct:
            pytest.skip(space.describe())
        data, back = noise(40 * MIB), aligned_host_bytes(40 * MIB)
        space.write([(0, data)])
        monkeypatch.setattr(os, "preadv", watched)
        pieces = [(start, back[start : start + 64 * 1024]) for start in range(0, 16 * MIB, 64 * 1024)]
        space.read(pieces + [(16 * MIB, back[16 * MIB :])])
        assert torch.equal(data, back)
        assert {fd for fd, _ in calls} == {space._file.direct_fd}
        assert [size for _, size in calls] == [8 * MIB] * 5
        calls.clear()
        callers.clear()
        space.read([(0, back[: 6 * MIB])])
        assert [size for _, size in calls] == [6 * MIB] and callers == {threading.get_ident()}
        calls.clear()
        space.read([(100, back[100 : 100 + 2 * MIB])])  # ragged at both ends: only those go by the cache
        assert {size for fd, size in calls if fd == space._file.fd} == {ALIGN - 100, 100}
        calls.clear()
        space.read([(0, back[1 : 1 + MIB])])  # no address to go direct to
        assert {fd for fd, _ in calls} == {space._file.fd}


def test_threads_read_and_write_side_by_side(tmp_path, monkeypatch):
    """Four threads each use a quarter with ragged ends, and neighbours share pages: no bytes may be lost."""
    monkeypatch.setattr(disk, "REQUEST_BYTES", ALIGN)
    quarter = 10 * ALIGN + 77
    failures: list = []

    def work(space: DiskSpace, index: int) -> None:
        try:
            generator = np.random.default_rng(index)
            base, model = index * quarter, np.zeros(quarter, dtype=np.uint8)
            for _ in range(60):
                start = int(generator.integers(0, quarter))
                size = int(generator.integers(0, quarter - start + 1))
                memory = memory_at((base + start) % ALIGN, size)
                memory.numpy()[:] = generator.integers(0, 256, size, dtype=np.uint8)
                space.write([(base + start, memory)])
                model[start : start + size] = memory.numpy()
                back = memory_at(base % ALIGN, quarter)
                space.read([(base, back)])
                assert (back.numpy() == model).all()
        except BaseException as error:
            failures.append(error)

    with DiskSpace(tmp_path, 4 * quarter) as space:
        threads = [threading.Thread(target=work, args=(space, index)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_host_memory_begins_on_a_page_and_is_zero():
    memory = HostMemory(pinned=False)
    for size in (0, 1, 4095, 3 * MIB + 5):
        tensor = memory.bytes(size)
        assert tensor.shape == (size,) and tensor.dtype == torch.uint8 and not tensor.any()
        assert size == 0 or tensor.data_ptr() % ALIGN == 0
    assert memory.allocated_bytes == 1 + 4095 + 3 * MIB + 5
    assert memory.zeros((3, 5), torch.float32).shape == (3, 5)
    kept = memory.bytes(1000)[10:20]  # a view keeps its memory
    assert kept.sum() == 0


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_file_shortened_under_way_is_an_error_that_tells_where(tmp_path):
    with DiskSpace(tmp_path, 8 * MIB) as space:
        space.write([(0, noise(8 * MIB))])
        os.ftruncate(space._file.fd, 3 * MIB + 10)
        with pytest.raises(DiskError, match=rf"short read of the scratch file in {tmp_path}: .* shortened"):
            space.read([(0, aligned_host_bytes(8 * MIB))])
        with pytest.raises(DiskError, match=r"short read .* 10 of 100 bytes at offset 3,145,728"):
            space.read([(3 * MIB, aligned_host_bytes(100))])
        with pytest.raises(DiskError, match="was shortened: 3,145,738 of 8,388,608 bytes are left"):
            space.write([(0, noise(10))])
        back = aligned_host_bytes(MIB)
        space.read([(0, back)])  # what is still there can be read
        assert torch.equal(back, noise(8 * MIB)[:MIB])


def test_an_error_that_nobody_holds_is_freed_at_once(tmp_path):
    """Two lanes may fail on one shortened file; the error that is not raised holds buffers until it is freed."""

    def failed() -> weakref.ref:
        try:
            space.read(pieces)
        except DiskError as error:
            return weakref.ref(error)
        raise AssertionError("the read of a shortened file did not fail")

    with DiskSpace(tmp_path, 64 * ALIGN) as space:
        pieces = [(at * ALIGN, torch.empty(ALIGN, dtype=torch.uint8)) for at in range(0, 64, 2)]
        os.ftruncate(space._file.fd, 0)
        gc.collect()
        gc.disable()
        try:
            assert failed()() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_refusal_of_the_system_is_one_line_and_ends_only_that_call(tmp_path, monkeypatch, direction, code):
    name = {"read": "preadv", "write": "pwritev"}[direction]
    real = getattr(os, name)

    def failing(fd, buffers, offset):
        if offset >= 8 * MIB:  # a request that a worker may have taken
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    with DiskSpace(tmp_path, 16 * MIB) as space:
        memory = noise(16 * MIB)
        monkeypatch.setattr(os, name, failing)
        with pytest.raises(DiskError) as caught:
            getattr(space, direction)([(0, memory)])
        message = str(caught.value)
        assert f"cannot {direction} " in message and str(tmp_path) in message and os.strerror(code) in message
        assert "\n" not in message and ("free some space" in message) == (code == errno.ENOSPC)
        monkeypatch.undo()
        space.write([(0, memory)])
        back = aligned_host_bytes(16 * MIB)
        space.read([(0, back)])
        assert torch.equal(back, memory)


def test_a_limit_on_file_sizes_is_reported(tmp_path, monkeypatch):
    def limited(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(ValueError, match=r"larger than a file may be here \(see ulimit -f\)"):
        DiskSpace(tmp_path, 4 * MIB)


def test_memory_is_not_called_a_disk(tmp_path, monkeypatch):
    for module in (disk, scratch_file):
        monkeypatch.setattr(module, "filesystem_of", lambda folder: "tmpfs")
    with DiskSpace(tmp_path, MIB) as space:
        assert not space.direct and "memory, not a disk" in space.describe()


def test_a_system_without_preallocation_writes_zeros(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(scratch_file, "ZEROS", 1000)
    with DiskSpace(tmp_path, 3 * ALIGN) as space:
        assert os.fstat(space._file.fd).st_size == 3 * ALIGN
        space.read([(0, back := memory_at(0, 3 * ALIGN))])
        assert not back.any()


def test_no_room_names_the_folder_and_the_bytes_and_leaves_nothing(tmp_path):
    before = open_files()
    with pytest.raises(InputError, match=rf"{tmp_path}: No space left .* bytes are free there. Free some") as caught:
        DiskSpace(tmp_path, 1 << 60)
    assert f"{1 << 60:,}" in str(caught.value)
    assert open_files() == before and list(tmp_path.iterdir()) == [] and disk_threads() == []


def test_a_folder_that_cannot_be_used_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make a scratch file in .*file.*name another folder"):
        DiskSpace(tmp_path / "file", MIB)


@pytest.mark.parametrize("pace", [0, -1, 0.001, float("inf"), float("nan"), "fast", True])
def test_a_pace_that_is_no_rate_is_refused(tmp_path, pace):
    with pytest.raises(InputError, match="disk_gb_per_s is"):
        DiskSpace(tmp_path, MIB, pace)
    assert disk_threads() == []


# --- nothing left behind -----------------------------------------------------------------------------------------


def test_blocks_are_reserved_the_folder_is_private_and_the_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    old = os.umask(0)
    try:
        with DiskSpace(None, 4 * MIB) as space:
            folder = tmp_path / "cache" / "scratch"
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            state = os.fstat(space._file.fd)
            assert state.st_blocks * 512 >= 4 * MIB and stat.S_IMODE(state.st_mode) == 0o600
            assert state.st_nlink == 0 and list(folder.iterdir()) == []
            assert str(folder) in space.describe() and "0.00 GiB" in space.describe()
    finally:
        os.umask(old)


def test_closing_gives_back_threads_and_files_and_may_be_repeated(tmp_path):
    before = open_files()
    for named in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if named:
                no_unnamed_files(patch)
            space = DiskSpace(tmp_path, 16 * MIB)
            assert list(tmp_path.iterdir()) == []
            space.write([(0, noise(16 * MIB))])
            assert disk_threads() != []
            space.close()
            space.close()
            assert disk_threads() == [] and open_files() == before and list(tmp_path.iterdir()) == []
            for call in (space.read, space.write):
                with pytest.raises(DiskError, match="closed"):
                    call([(0, of_bytes(bytes(10)))])


def test_a_forgotten_space_is_released_too(tmp_path, monkeypatch):
    no_unnamed_files(monkeypatch)
    before = open_files()
    space = DiskSpace(tmp_path, 16 * MIB)
    space.write([(0, noise(16 * MIB))])
    threads = disk_threads()
    del space
    for thread in threads:
        thread.join(60)
    assert disk_threads() == [] and open_files() == before and list(tmp_path.iterdir()) == []


def test_closing_between_requests_waits_for_those_under_way(tmp_path, monkeypatch):
    """Close comes during requests: these end, no further one begins, and then the file is closed."""
    space = DiskSpace(tmp_path, 64 * MIB)
    entered, go_on, begun, outcome = threading.Semaphore(0), threading.Event(), [], []
    preadv = os.preadv

    def held(fd, buffers, offset):
        begun.append(offset)
        entered.release()
        assert go_on.wait(60)
        return preadv(fd, buffers, offset)

    def read() -> None:
        try:
            space.read([(0, aligned_host_bytes(64 * MIB))])
        except DiskError as error:
            outcome.append(str(error))

    monkeypatch.setattr(os, "preadv", held)
    reader, closer = threading.Thread(target=read), threading.Thread(target=space.close)
    reader.start()
    for _ in range(disk.NUM_WORKERS):
        assert entered.acquire(timeout=60)
    closer.start()
    while not space._closing:
        time.sleep(0.001)
    assert space._file.fd >= 0
    go_on.set()
    reader.join(60)
    closer.join(60)
    assert len(begun) == disk.NUM_WORKERS and "closed" in outcome[0] and space._file.fd == scratch_file.CLOSED


#: no_unnamed_files for another process
NAMED = """
    import errno, os, sys
    from flexhybrid.runtime.storage import scratch_file
    from flexhybrid.runtime.storage.disk import DiskSpace
    from flexhybrid.runtime.storage.host_memory import HostMemory
    aligned_host_bytes = HostMemory(pinned=False).bytes
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")
    scratch_file.open_unnamed = refuse
"""


def test_a_process_that_ends_without_closing_leaves_nothing(tmp_path):
    """It ends normally or by an error; the disk's threads do not delay that."""
    for end in ("", "    raise SystemExit(3)"):
        program = f"""{NAMED}
    space = DiskSpace({str(tmp_path)!r}, {16 * MIB})
    space.write([(0, aligned_host_bytes({16 * MIB}))])
    print(len(os.listdir({str(tmp_path)!r})))
{end}"""
        done = warm_python.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT)
        assert (done.returncode, done.stdout, done.stderr) == (3 if end else 0, "0\n", "")


# --- pace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64 * 1024, 5 * MIB])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_nothing_outruns_the_pace(tmp_path, size, direction):
    """One or two threads move small and large pieces back to back; only the ratio to the pace is checked."""
    for num_threads in (1, 2):
        with DiskSpace(tmp_path, 8 * MIB, gb_per_s=0.1) as space:
            count = max(2, 5_000_000 // size)

            def move(space=space, count=count) -> None:
                memory = aligned_host_bytes(size)
                for _ in range(count):
                    getattr(space, direction)([(0, memory)])

            threads = [threading.Thread(target=move) for _ in range(num_threads)]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate = num_threads * count * size / (time.perf_counter() - start)
            assert rate <= 1.02 * 0.1e9
            assert "paced at 0.1 GB/s" in space.describe()


def test_reads_and_writes_have_a_pace_each_and_it_can_be_lifted(tmp_path):
    with DiskSpace(tmp_path, MIB, gb_per_s=0.5) as space:
        assert space._pacers["read"][0] is not space._pacers["write"][0]
        space.set_rate(None)
        assert space.gb_per_s is None and "paced" not in space.describe()


def test_reads_are_left_out_when_not_enabled_and_writes_are_not(tmp_path):
    with DiskSpace(tmp_path, MIB) as space:
        space.enabled = False
        space.write([(0, of_bytes(b"written"))])
        back = of_bytes(bytes(7))
        space.read([(0, back)])
        assert bytes(back.tolist()) == bytes(7)
        space.enabled = True
        space.read([(0, back)])
        assert bytes(back.tolist()) == b"written"
