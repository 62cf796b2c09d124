"""Reports equal a count of the raw records, from a log and from a state folder, and say in words what is wrong."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.counting import Counted, count_ads
from tests.replay.logs import Document, lines_of, of, write
from tests.report.shop import DAY, HOUR, START, run
from worker.cli.main import main
from worker.stream.events import ArmChange, Command
from worker.stream.parameters import decode_parameters

#: The third day is reported on.
ORDERS = {
    50: ArmChange(arm="hat", reward=0.65, active=True),
    55: ArmChange(arm="gl<o>ves", reward=0.9, active=True),
    60: ArmChange(arm="scarf", reward=0.3, active=False),
    62: Command(action="rollback", version=60),
    64: Command(action="freeze"),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the log and the state of three days."""
    folder = tmp_path_factory.mktemp("shop")
    run(folder / "log.jsonl", hours=73, per_hour=25, orders=ORDERS, silent={"coat": 52}, state=folder / "state")
    return folder


def report(*arguments: Any) -> Document:
    """Run the command; return its JSON."""
    path = Path(arguments[0] if Path(str(arguments[0])).is_file() else arguments[1]).parent / "report.json"
    assert main(["report", *map(str, arguments), "--json", str(path)]) == 0
    document: Document = orjson.loads(path.read_bytes())
    return document


def raw(log: Path) -> dict[str, list[Document]]:
    records = defaultdict(list)
    for line in lines_of(log):
        records[line["topic"]].append(orjson.loads(line["payload"] or "null"))
    return records


def counted(records: dict[str, list[Document]], day: int) -> Counted:
    return count_ads(records, timeout=600_000, start=START + (day - 1) * DAY, until=START + day * DAY)


def assert_equal(figures: Document, ads: list[list[float]]) -> None:
    for name, sums in zip(("displays", "clicks", "revenue"), zip(*ads, strict=True), strict=False):
        assert figures[name] == pytest.approx(sum(sums), rel=1e-12)
    answered = sum(sums[3] for sums in ads)
    assert (figures["answer_rate"] or 0.0) * figures["displays"] == pytest.approx(answered, rel=1e-12)


@pytest.mark.parametrize("source", ["log", "state"])
def test_the_last_whole_day_equals_a_count_of_the_raw_records(shop: Path, source: str) -> None:
    found = report(shop / "log.jsonl") if source == "log" else report("--state", shop / "state")
    assert (found["since"], found["until"]) == (START + 2 * DAY, START + 3 * DAY)
    records = raw(shop / "log.jsonl")
    now, before = counted(records, 3), counted(records, 2)
    for figures, counts in ((found["total"], now), (found["total"]["before"], before)):
        assert figures["sessions"] == len(counts.sessions)
        assert_equal(figures, list(counts.ads.values()))
    for ad in found["ads"]:
        assert_equal(ad, [now.ads[ad["name"]]])
        assert_equal(ad["before"], [before.ads[ad["name"]]])
        assert ad["revenue_per_thousand"] == pytest.approx(1000 * ad["revenue"] / len(now.sessions))
    for rows in (found["course"], *(feature["groups"] for feature in found["features"])):
        for name in ("sessions", "displays", "clicks", "revenue"):
            assert sum(row[name] for row in rows) == pytest.approx(found["total"][name], rel=1e-12)
            assert sum(row["before"][name] for row in rows) == pytest.approx(found["total"]["before"][name], rel=1e-12)


def test_users_are_grouped_by_what_they_sent(shop: Path) -> None:
    found = report(shop / "log.jsonl", "--by", "age", "--by", "device", "--by", "member")
    records = raw(shop / "log.jsonl")
    names = counted(records, 3).sessions
    contexts = [one["context"] for one in records["ads.arrivals"] if one["session_id"] in names]
    age, device, member = ({one["name"]: one["sessions"] for one in feature["groups"]} for feature in found["features"])
    assert member == {"no": sum(not one["member"] for one in contexts), "yes": sum(one["member"] for one in contexts)}
    assert device == {
        name: sum(one["device"] == value for one in contexts)
        for name, value in (("mobile", "mobile"), ("desktop", "desktop"), ("other", "watch"))
    }
    edges = [float(name.split()[0]) for name in list(age)[1:-1]]
    bounds = [(low, high) for low, high in zip([0.0, *edges], [*edges, 1000.0], strict=True)]
    ages = [one["age"] for one in contexts if "age" in one]
    assert list(age.values()) == [
        *(sum(low <= one < high for one in ages) for low, high in bounds),
        len(contexts) - len(ages),
    ]
    assert len(edges) == 3


def test_what_changed_and_what_is_wrong_is_said_in_words(shop: Path) -> None:
    found = report(shop / "log.jsonl")
    texts = [one["text"] for one in found["changes"]]
    assert {"new: gl<o>ves", "no longer shown: scarf", "ad hat: a click pays 0.65, it was 0.5"} < set(texts)
    assert "what was learned since version 60 was taken back (rollback)" in texts
    assert "learning was stopped (freeze)" in texts
    (coat,) = [one["text"] for one in found["warnings"] if one["arm"] == "coat"]
    assert re.fullmatch(r"ad coat: \d+ displays, no feedback at all to the last \d+, since 03 Jan .*", coat)


def test_a_change_of_the_users_is_reported_with_its_time(tmp_path: Path) -> None:
    run(tmp_path / "log.jsonl", hours=72, per_hour=60, turn=40)
    changes = report(tmp_path / "log.jsonl", "--period", "all")["changes"]
    assert changes and all(START + 40 * HOUR < change["at"] < START + 72 * HOUR for change in changes)
    known = r"users or ads changed: what was learned before counts \d+% since then|users' taste for these ads .+"
    assert all(re.fullmatch(known, change["text"]) for change in changes)


def test_the_comparison_with_the_control_group_comes_first_and_a_loss_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "log.jsonl", hours=40, per_hour=60, policy="random", control="greedy", control_share=0.5)
    found = report(tmp_path / "log.jsonl", "--period", "all")
    newest = decode_parameters(orjson.dumps(raw(tmp_path / "log.jsonl")["ads.parameters"][-1]))
    assert newest.lift is not None
    first, *others = capsys.readouterr().out.splitlines()
    assert found["lift"]["sentence"] == newest.lift.sentence == first
    assert newest.calibration.ratio is not None
    clicks = f"users clicked {newest.calibration.ratio.estimate:.2f} times as often as predicted (between "
    assert any(line.startswith(clicks) for line in others[:4])
    losses = [
        one["text"] for one in found["warnings"] if one["text"].startswith("adcascade earns less than the best ads")
    ]
    assert losses


def test_a_log_without_a_journal_is_counted_by_its_decisions_and_clicks(shop: Path, tmp_path: Path) -> None:
    lines = [line for line in lines_of(shop / "log.jsonl") if line["topic"] != "ads.journal"]
    found = report(write(tmp_path / "log.jsonl", lines))
    assert_equal(found["total"], list(counted(raw(shop / "log.jsonl"), 3).ads.values()))


class Page(HTMLParser):
    """The texts of a page, and what it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")] + [tag] * (tag == "o")

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_loads_nothing_and_shows_names_as_they_are(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(shop / "log.jsonl", "--html", shop / "report.html")
    page = Page((shop / "report.html").read_text())
    assert not page.loads
    assert "gl<o>ves" in page.texts
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"revenue per session: [\d.]+, [+-][\d.]+% on the day before \([\d.]+\)", first)
    assert {first.capitalize(), second} < set(page.texts)
    for heading in ("Ads", "Users by age", "What changed"):
        assert heading in page.texts


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "the source is missing: a log, --state DIR or --broker HOST:PORT"),
        ("LOG --state STATE", "are several sources: give one log, --state DIR or --broker HOST:PORT"),
        ("LOG --until 2026-02-01", "there are no sessions in 2026-01-31 (UTC): they are from 2026-01-01 00:"),
        ("LOG --by adge", "--by adge: users cannot be grouped by it, but by age, device, member"),
        ("LOG --by city", "--by city: users cannot be grouped by it, but by age, device, member"),
        ("LOG --period fortnight", "--period: must be day, week, all or a time such as 12h, not 'fortnight'"),
        ("LOG --period 0", "--period: must be day, week, all or a time such as 12h, not '0'"),
        ("LOG --until tomorrow", "--until: must be a time such as 2026-01-31T12:00:00Z, or how long ago"),
        ("LOG --prefix other", "it has no records of these topics, but of ads."),
        ("CLICKS", "no versions of this release, which have the prices: a report needs a log of all topics"),
        ("LOG --html nowhere/report.html", "does not exist"),
        ("LOG --html -", "--html needs the name of a file"),
        ("LOG --until 0001-01-01 --period 99999999d", "there are no sessions in 1970-01-01 (UTC)"),
        ("VERSIONS", "there are no sessions to report on"),
        ("--state nowhere", "nowhere holds no state"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    shop: Path, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "LOG": shop / "log.jsonl",
        "STATE": shop / "state",
        "CLICKS": shop / "clicks",
        "VERSIONS": shop / "versions",
    }
    for name, topic in (("CLICKS", "clicks"), ("VERSIONS", "parameters")):
        write(names[name], of(lines_of(shop / "log.jsonl"), topic))
    assert main(["report", *(str(names.get(word, word)) for word in arguments.split())]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert complaint in err
