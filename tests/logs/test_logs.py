"""Logs: records are read back to the byte, a bad line is named by its number."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import FailedError, InputError
from worker.logs.format import NO_TIMESTAMP, BadLineError, LogReader, LogWriter, decode_line, encode_line
from worker.stream.events import MOST
from worker.stream.topology import Record

records = st.builds(
    Record,
    topic=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, MOST),
    timestamp=st.integers(-1, MOST),
    key=st.none() | st.binary() | st.text().map(str.encode),
    value=st.none() | st.binary() | st.text().map(str.encode),
)
headers = st.lists(
    st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.binary() | st.text().map(str.encode))
)
CLICK = Record("ads.clicks", 2, 17, 1_700_000_000_000, b"s", b'{"clicked":true}')


def read(path: Path, **options: Any) -> list[Record]:
    with LogReader(path, **options) as log:
        return [line.record for line in log]


@given(records, headers)
def test_a_record_is_one_line_of_json_and_is_read_back_to_the_byte(record, headers) -> None:
    text = encode_line(record, headers)
    assert text.count(b"\n") == 1
    assert json.loads(text)["offset"] == record.offset
    line = decode_line(text, 7)
    assert line.record == record
    assert list(line.headers) == headers
    assert line.number == 7


@given(st.binary(min_size=1), st.none() | st.binary(min_size=1))
def test_raw_bytes_of_kcat_are_read_and_replaced_if_they_are_not_utf_8(payload: bytes, key: bytes | None) -> None:
    """kcat escapes control characters, quotes and backslashes, and writes every other byte as it is."""

    def replaced(value: bytes) -> bytes:
        return value.decode(errors="replace").encode()

    def raw(value: bytes) -> bytes:
        out = b""
        for byte in value:
            plain = bytes([byte])
            out += b"\\" + plain if plain in b'"\\' else b"\\u%04x" % byte if byte < 32 else plain
        return b'"' + out + b'"'

    quoted = b"null" if key is None else raw(key)
    line = decode_line(
        b'{"topic":"t","partition":0,"offset":1,"tstype":"create","ts":5,"broker":0,"headers":["n",%b],'
        b'"key":%b,"payload":%b}\n' % (raw(payload), quoted, raw(payload))
    )
    assert line.record == Record("t", 0, 1, 5, None if key is None else replaced(key), replaced(payload))
    assert line.headers == [("n", replaced(payload))]


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b'{"a": 1.50}', b'{"a": 1.50}'),
        (b"[1,2]", b"[1,2]"),
        (b"null", None),
        (b'""', b""),
        ('"zoë"'.encode(), "zoë".encode()),
        (b'"\\u0000\\n"', b"\x00\n"),
    ],
)
def test_a_payload_may_be_text_or_json_itself(payload: bytes, value: bytes | None) -> None:
    line = decode_line(b'{"topic":"t","partition":0,"offset":0,"key":null,"payload":%b}' % payload)
    assert line.record.value == value
    assert line.record.timestamp == NO_TIMESTAMP


@pytest.mark.parametrize(
    ("text", "defect"),
    [
        (b"{", "not JSON"),
        (b"nonsense", "not JSON"),
        (b"[]", "Expected object, got array"),
        (b'{"partition":0,"offset":0,"payload":""}', "there is no topic"),
        (b'{"topic":"t","offset":0,"payload":""}', "there is no partition"),
        (b'{"topic":"t","partition":0,"payload":""}', "there is no offset"),
        (b'{"topic":"t","partition":0,"offset":0}', "there is no payload"),
        (b'{"topic":"t","partition":-1,"offset":0,"payload":""}', "partition"),
        (b'{"topic":"t","partition":0,"offset":"0","payload":""}', "offset"),
        (b'{"topic":"t","partition":0,"offset":0,"payload_base64":"?"}', "base64"),
        (b'{"topic":"t","partition":0,"offset":0,"headers":["a"],"payload":""}', "headers"),
        (b'{"topic":"t","partition":0,"offset":0,"headers_base64":["a"],"payload":""}', "headers"),
        (b'{"topic":"t","partition":0,"offset":0,"headers":{"a":1},"payload":""}', "Expected array, got object"),
        (b'{"topic":"t","partition":0,"offset":0,"payload":"\\ud800"}', "not JSON"),
        (b'{"topic":"t","partition":0,"offset":0,"payload":"\xff"', "not JSON"),
        (b'"\xff"', "Expected object, got str"),
        (b'{"topic":"t","x":' + b"[" * 100_000, "line 5"),
    ],
)
def test_the_error_for_a_bad_line_has_its_number_and_the_defect(text: bytes, defect: str) -> None:
    with pytest.raises(BadLineError, match=r"^line 5: ") as raised:
        decode_line(text, 5)
    assert defect in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.binary(max_size=60) | records.map(encode_line).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[:n])))
def test_no_other_error_is_raised(text: bytes) -> None:
    with suppress(BadLineError):
        decode_line(text)


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_file_is_read_back(tmp_path: Path, name: str) -> None:
    written = [CLICK._replace(offset=offset, value=bytes([offset])) for offset in range(250)]
    with LogWriter(tmp_path / name) as log:
        for record in written:
            log(record, ())
    assert log.lines == 250
    assert read(tmp_path / name) == written
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    with LogWriter(tmp_path / f"again-{name}") as log:
        for record in written:
            log(record)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


def test_gzip_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(gzip.compress(encode_line(CLICK)))
    (tmp_path / "plain.gz").write_bytes(encode_line(CLICK))
    assert read(tmp_path / "log") == read(tmp_path / "plain.gz") == [CLICK]


def test_a_log_may_go_to_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with LogWriter("-") as log:
        log(CLICK)
    assert capfdbinary.readouterr().out == encode_line(CLICK)


def test_empty_lines_are_ignored_and_a_bad_one_stops_the_reading_or_is_counted(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\n" + encode_line(CLICK) + b"  \r\noops\n" + encode_line(CLICK) + b"{}\n")
    with pytest.raises(InputError, match=r"log: line 4: not JSON .*--skip-bad"):
        read(tmp_path / "log", skip_bad=False)
    with pytest.raises(InputError, match=r"log: line 4: not JSON (?!.*--skip-bad)"):  # the command has no such option
        read(tmp_path / "log")
    with LogReader(tmp_path / "log", skip_bad=True) as log:
        assert [line.number for line in log] == [2, 5]
    assert (log.lines, log.bad) == (6, 2)
    assert log.first_bad.startswith("line 4: ")


def test_a_line_that_is_too_long_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.logs.format.MOST_LINE", 200)
    (tmp_path / "log").write_bytes(b"x" * 5000 + b"\n" + encode_line(CLICK))
    with pytest.raises(InputError, match=r"line 1: longer than 200"):
        read(tmp_path / "log")
    with LogReader(tmp_path / "log", skip_bad=True) as log:
        assert [line.number for line in log] == [2]


@pytest.mark.parametrize("damage", ["truncated", "truncated in its first line", "overwritten"])
def test_damaged_gzip_data_are_reported(tmp_path: Path, damage: str) -> None:
    lines = b"".join(encode_line(CLICK._replace(offset=n, value=b"%064x" % (n * 7919**9))) for n in range(200))
    data = gzip.compress(lines)
    damaged = {
        "truncated": data[:2000],
        "truncated in its first line": data[:40],
        "overwritten": data[:2000] + b"\xaa" * 40 + data[2040:],
    }
    (tmp_path / "log.gz").write_bytes(damaged[damage])
    with pytest.raises(InputError, match="line"):
        read(tmp_path / "log.gz")
    with LogReader(tmp_path / "log.gz", skip_bad=True) as log:
        whole = [line.record.offset for line in log]
    assert whole[:10] == list(range(200))[: min(10, len(whole))]
    assert log.bad >= 1
    assert bool(whole) == (damage != "truncated in its first line")


def test_a_file_that_cannot_be_opened_is_wrong_input(tmp_path: Path) -> None:
    for path in ("missing.jsonl", "."):
        with pytest.raises(InputError, match=path):
            LogReader(tmp_path / path)
    with pytest.raises(InputError, match="cannot be written"):
        LogWriter(tmp_path / "nowhere" / "log")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_a_failure() -> None:
    log = LogWriter("/dev/full")
    with pytest.raises(FailedError, match="No space left"):
        for _ in range(10_000):
            log(CLICK)
    with pytest.raises(FailedError, match="No space left"):
        log.close()


def test_flushed_lines_can_be_read_while_the_file_is_open(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log") as log:
        log(CLICK)
        log.flush()
        assert read(tmp_path / "log") == [CLICK]
