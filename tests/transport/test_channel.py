"""Messages over a socket: whole lines, in order, each with its file."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from tests.transport.fake import in_loop
from worker.kafka.channel import Channel


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def nameless(content: bytes) -> int:
    file = os.memfd_create("test")
    os.write(file, content)
    return file


@in_loop
async def test_lines_come_whole_and_in_order_also_long_ones() -> None:
    here, there = pair()
    lines = [b"short", b"x" * (1 << 20), b"", b"last"]

    async def send() -> None:
        for line in lines:
            await here.send(line)
        here.close()

    sending = asyncio.ensure_future(send())
    assert [await there.receive() for _ in lines] == lines
    assert await there.receive() is None
    await sending
    there.close()


@in_loop
async def test_messages_of_two_tasks_do_not_mix() -> None:
    here, there = pair()
    sending = asyncio.gather(here.send(b"a" * (1 << 20)), here.send(b"b" * (1 << 20)))
    assert [set(await there.receive() or b"") for _ in range(2)] == [{ord("a")}, {ord("b")}]
    await sending
    here.close()
    there.close()


@in_loop
async def test_a_file_is_there_when_its_line_is_and_belongs_to_the_receiver() -> None:
    here, there = pair()
    for number in range(3):
        file = nameless(b"content %d" % number)
        await here.send(b"line %d" % number, file)
        os.close(file)
    await here.send(b"without")
    for number in range(3):
        assert await there.receive() == b"line %d" % number
        taken = there.take_file()
        assert taken is not None
        assert os.pread(taken, 100, 0) == b"content %d" % number
        os.close(taken)
    assert await there.receive() == b"without"
    assert there.take_file() is None
    here.close()
    there.close()


@in_loop
async def test_files_that_nobody_took_are_closed() -> None:
    before = open_files()
    here, there = pair()
    file = nameless(b"x")
    await here.send(b"line", file)
    os.close(file)
    assert await there.receive() == b"line"
    here.close()
    there.close()
    assert open_files() == before
