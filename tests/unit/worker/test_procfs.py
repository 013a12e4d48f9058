"""The parser of ``/proc/PID/stat``, fed with lines and with this process under hostile names."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool_worker import procfs

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="/proc exists on Linux only")
NO_PROCESS = 2**22 + 5
"""More than the largest pid that Linux gives out."""

HOSTILE = ["two words", ") R 1 1 1 (", "((((", "))))", ") Z 0 0", "new\nline", "tab\tbed", "\\ \\n", "\xff\xfe", "S"]


def line_of(name: bytes, fields: list[bytes]) -> bytes:
    return b"4242 (" + name + b") " + b" ".join(fields) + b"\n"


FIELDS = [b"S", *(str(number).encode() for number in range(100, 149))]


@given(st.binary(max_size=64), st.integers(0, len(FIELDS) - 1))
def test_the_name_may_hold_anything(name: bytes, last: int) -> None:
    fields = procfs.parse_stat(line_of(name, FIELDS), last)
    assert fields is not None
    assert fields[: last + 1] == FIELDS[: last + 1]


def test_without_a_wish_it_returns_what_identifies_a_process() -> None:
    fields = procfs.parse_stat(line_of(b"sh", FIELDS))
    assert fields is not None
    assert (fields[procfs.STATE], fields[procfs.PARENT], fields[procfs.BEGAN]) == (b"S", b"100", b"118")


def test_all_fields_have_the_place_that_proc_5_gives_them() -> None:
    # proc(5) counts from 1, and begins with the pid and the name.
    numbers = {"STATE": 3, "PARENT": 4, "GROUP": 5, "SESSION": 6, "USER_TICKS": 14, "SYSTEM_TICKS": 15}
    numbers |= {"THREADS": 20, "BEGAN": 22, "RSS_PAGES": 24, "EXIT_STATUS": 52}
    assert {name: getattr(procfs, name) + 3 for name in numbers} == numbers


@pytest.mark.parametrize("data", [b"", b"\n", b"4242", b"4242 (sh", b"4242 (sh)", b"4242 (sh) S", b"1 2 3 4 5 6 7 8"])
def test_what_is_no_whole_line_is_no_process(data: bytes) -> None:
    assert procfs.parse_stat(data) is None


@given(st.binary(max_size=200), st.integers(0, 60))
def test_no_bytes_can_raise(data: bytes, last: int) -> None:
    fields = procfs.parse_stat(data, last)
    assert fields is None or len(fields) > last


@pytest.fixture
def rename() -> Iterator[Callable[[bytes], object]]:
    """Give this process another name, as any process may do to itself."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes().rstrip(b"\n")
    yield comm.write_bytes
    comm.write_bytes(before)


@needs_proc
@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_this_process_is_read_right_whatever_its_name(name: str, rename: Callable[[bytes], object]) -> None:
    rename(name.encode("latin-1"))
    fields = procfs.stat(os.getpid(), procfs.EXIT_STATUS)
    assert fields is not None
    assert fields[procfs.STATE] in (b"R", b"S")
    ids = [int(fields[place]) for place in (procfs.PARENT, procfs.GROUP, procfs.SESSION)]
    assert ids == [os.getppid(), os.getpgrp(), os.getsid(0)]
    assert int(fields[procfs.THREADS]) == psutil.Process().num_threads()
    ticks = os.sysconf("SC_CLK_TCK")
    age_s = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[procfs.BEGAN]) / ticks
    assert 0 < age_s < 24 * 3600
    assert int(fields[procfs.USER_TICKS]) / ticks <= psutil.Process().cpu_times().user
    assert int(fields[procfs.RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE") > 2**20


@needs_proc
def test_the_state_alone_can_be_asked_for() -> None:
    fields = procfs.stat(os.getpid(), procfs.STATE)
    assert fields is not None
    assert fields[procfs.STATE] in (b"R", b"S")


@needs_proc
def test_who_is_not_there_is_none() -> None:
    assert procfs.stat(NO_PROCESS) is None
    assert procfs.environment(NO_PROCESS) == []
    assert procfs.read_small(f"/proc/{NO_PROCESS}/stat") is None


@needs_proc
def test_pids_are_those_of_processes_and_not_of_threads() -> None:
    ours = procfs.pids()
    assert os.getpid() in ours
    assert 1 in ours
    # A thread has a folder as well, but is never listed.
    alive = threading.Event()
    thread = threading.Thread(target=alive.wait, daemon=True)
    thread.start()
    try:
        assert thread.native_id not in procfs.pids()
    finally:
        alive.set()
        thread.join()


@needs_proc
def test_the_environment_is_whole_and_the_one_that_the_program_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_LATER", "yes")
    entries = procfs.environment(os.getpid())
    assert b"\0".join(entries) == Path("/proc/self/environ").read_bytes()
    assert b"SET_LATER=yes" not in entries


def test_a_small_file_is_read_and_an_empty_one_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert procfs.read_small(str(file)) is None
    file.write_bytes(b"x" * procfs.SMALL_BYTES_MAX)
    assert procfs.read_small(str(file)) == file.read_bytes()
    assert procfs.read_small(str(tmp_path)) is None
    assert procfs.read_small(str(tmp_path / "missing")) is None
