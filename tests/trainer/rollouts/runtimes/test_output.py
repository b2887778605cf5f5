import os
import threading

import pytest

from rolltap.trainer.rollouts.runtimes.supervised import LOG_BYTES, Output, written_to


def say(output, *texts):
    for text in texts:
        os.write(output.descriptor, text)


def test_a_file_has_all_that_was_written_when_it_is_closed(tmp_path):
    output = Output(tmp_path / "log")
    say(output, b"a", b"b" * 60_000)
    output.close()
    assert (tmp_path / "log").read_bytes() == b"a" + b"b" * 60_000


def test_output_is_cut_at_the_limit_with_a_line_that_says_so_and_the_program_goes_on(tmp_path):
    output = Output(tmp_path / "log", limit=100)
    say(output, *[b"x" * 60] * 3000)
    output.close()
    said = (tmp_path / "log").read_bytes()
    assert said == b"x" * 100 + b"\n[rolltap: the output is cut here, at 100 bytes]\n"
    assert LOG_BYTES == 64 << 20


def test_what_comes_before_the_marker_is_kept_apart(tmp_path):
    output = Output(tmp_path / "log", marker=b"now\n")
    say(output, b"a warning\nno", b"w\nthe ", b"program now\n")
    output.close()
    assert (output.marked, output.before) == (True, b"a warning\n")
    assert (tmp_path / "log").read_bytes() == b"the program now\n"


def test_without_its_marker_the_file_is_empty(tmp_path):
    output = Output(tmp_path / "log", marker=b"now\n")
    say(output, b"error: no such container\n")
    output.close()
    assert (output.marked, output.before) == (False, b"error: no such container\n")
    assert (tmp_path / "log").read_bytes() == b""


def test_a_process_that_holds_the_pipe_does_not_keep_it_open(tmp_path):
    output = Output(tmp_path / "log")
    held = os.dup(output.descriptor)
    say(output, b"said")
    output.close()
    os.close(held)
    assert (tmp_path / "log").read_bytes() == b"said"


async def test_a_file_that_cannot_be_written_is_an_error_and_the_program_goes_on(tmp_path):
    (tmp_path / "log").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        async with written_to(tmp_path / "log") as output:
            say(output, *[b"x" * 60] * 3000)


def test_no_thread_and_no_descriptor_is_left(tmp_path):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    Output(tmp_path / "log").close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
