"""The step log: whole steps or none, in their order, from any position on."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.embedded import steps as module
from worker.embedded.steps import Recorded, Step, StepReader, StepWriter, remaining
from worker.errors import FailedError


def step(number: int, size: int = 10) -> Step:
    return Step(
        time=number,
        journal_start=2 * number,
        journal=((b"s", b"x" * size), (None, b"{}")),
        sessions=((b"s", b"state"), (b"gone", None)),
        offsets={"ads.arrivals": number},
        inputs=(Recorded("ads.arrivals", number, b"s", b"\xff"),),
        outputs=(Recorded("ads.dead-letters", number, None, None, (("adcascade.reason", b"invalid"),)),),
        progress=number,
        has_orders=bool(number % 2),
    )


def write(folder: Path, *numbers: int, position: int = 0, size: int = 10) -> int:
    writer = StepWriter(folder, position)
    for number in numbers:
        writer.append_durably(writer.encode(step(number, size)))
    writer.close()
    return writer.position


def times(folder: Path, position: int = 0) -> list[int]:
    return [one.time for one in remaining(folder, position)]


def test_steps_are_read_as_they_were_written(tmp_path):
    write(tmp_path, 1, 2)
    assert list(remaining(tmp_path, 0)) == [step(1), step(2)]


def test_a_writer_continues_where_the_last_one_ended(tmp_path):
    end = write(tmp_path, 1, 2)
    assert write(tmp_path, 3) > end
    assert times(tmp_path) == [1, 2, 3]
    assert times(tmp_path, end) == [3]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_step_that_was_being_written_is_cut_off(tmp_path, cut):
    whole = write(tmp_path, 1)
    write(tmp_path, 2)
    file = next(tmp_path.glob("*.steps"))
    file.write_bytes(file.read_bytes()[:-cut])
    assert times(tmp_path) == [1]
    assert StepWriter(tmp_path, 0).position == whole
    write(tmp_path, 3)
    assert times(tmp_path) == [1, 3]


def test_a_damaged_step_is_the_end(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    file = next(tmp_path.glob("*.steps"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert times(tmp_path) == [1]


def test_steps_are_read_while_they_are_written(tmp_path):
    reader, writer = StepReader(tmp_path, 0), StepWriter(tmp_path, 0)
    assert reader.read() == []
    frame = writer.encode(step(1))
    writer.append(frame[:7])
    assert reader.read() == []
    writer.append(frame[7:])
    assert [one.time for one in reader.read()] == [1]
    assert reader.position == writer.position
    writer.close()


def test_files_are_deleted_when_all_of_them_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SEGMENT", 100)
    writer = StepWriter(tmp_path, 0)
    ends = []
    for number in range(6):
        writer.append(writer.encode(step(number, size=90)))
        ends.append(writer.position)
    assert len(list(tmp_path.glob("*.steps"))) == 6
    assert times(tmp_path) == [0, 1, 2, 3, 4, 5]
    writer.delete_before(ends[2] + 1)  # the fourth is not kept whole
    assert len(list(tmp_path.glob("*.steps"))) == 3
    assert times(tmp_path, ends[2]) == [3, 4, 5]
    writer.delete_before(writer.position)
    assert len(list(tmp_path.glob("*.steps"))) == 1  # it is written to
    writer.close()
    with pytest.raises(FailedError, match="is needed"):
        StepReader(tmp_path, 5).read()


def test_a_step_larger_than_a_piece_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)
    write(tmp_path, 1, 2, size=5_000)
    assert times(tmp_path) == [1, 2]


def test_where_the_rest_was_lost_with_the_power_writing_goes_on_behind_what_is_kept(tmp_path):
    end = write(tmp_path, 1)
    write(tmp_path, 2, position=end + 500)  # the folder has kept steps that the disk has lost
    assert times(tmp_path, end + 500) == [2]
    assert times(tmp_path) == [1, 2]
