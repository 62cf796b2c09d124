"""A versions process on a topic that is a folder: `python -m tests.transport.versions_child FOLDER`.

The files `0`, `1`, … are the records; they must appear in this order, each at once. `prepared` lists the versions that
were prepared. While there is a file `full`, there is no memory to share.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from aiokafka.structs import TopicPartition

from worker.kafka import versions
from worker.kafka.channel import Channel
from worker.kafka.versions import run_reader
from worker.stream.parameters import Parameters
from worker.stream.slates import SlatePlanner
from worker.stream.topology import Record

TP = TopicPartition("t.parameters", 0)


class FolderConsumer:
    """Reads the folder as aiokafka's consumer reads a topic."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._position = 0

    def assign(self, _: Any) -> None: ...

    async def seek_to_beginning(self, _: Any) -> None: ...

    async def position(self, _: Any) -> int:
        return self._position

    async def end_offsets(self, tps: list[Any]) -> dict[Any, int]:
        return dict.fromkeys(tps, sum(path.name.isdecimal() for path in self._folder.iterdir()))

    async def getmany(self, tp: Any, timeout_ms: int) -> dict[Any, list[Record]]:
        for _ in range(timeout_ms // 10):
            if (path := self._folder / str(self._position)).exists():
                self._position += 1
                return {tp: [Record(tp.topic, 0, self._position - 1, 0, b"", path.read_bytes())]}
            await asyncio.sleep(0.01)
        return {}


def main(folder: Path) -> int:
    prepare, create = versions.prepared, os.memfd_create

    def noted(parameters: Parameters) -> SlatePlanner:
        with (folder / "prepared").open("a", encoding="ascii") as notes:
            notes.write(f"{parameters.version} ")
        return prepare(parameters)

    def limited(name: str, flags: int) -> int:
        if (folder / "full").exists():
            raise OSError(28, "No space left on device")
        return create(name, flags)

    versions.prepared = noted  # type: ignore[assignment]
    os.memfd_create = limited  # type: ignore[assignment]

    async def read(channel: Channel) -> None:
        await versions.VersionsReader(FolderConsumer(folder), TP, channel).run()

    return asyncio.run(run_reader(read))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
