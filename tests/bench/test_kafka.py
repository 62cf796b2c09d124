import asyncio
import json
import signal
import struct
import time
from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder

import worker
from tests.kafka.conftest import address  # noqa: F401 (a fixture)
from tests.programs import needs
from worker.bench.kafka import comparison, new_versions, open_sessions, soak
from worker.bench.kafka.baselines import BaselineTask, CodecBaseline, OutputSizes, WireBaseline
from worker.bench.kafka.broker import broker_script, running_broker
from worker.bench.kafka.live import LiveRun
from worker.bench.kafka.processes import ChildProcess
from worker.bench.kafka.reader import FirstDecisions
from worker.bench.kafka.recording import learned, live_arrival, live_click, record
from worker.bench.kafka.sender import LOOK, Play, Sender, SentTicks
from worker.bench.kafka.soak import Sample
from worker.bench.kafka.topics import inputs
from worker.bench.stream import DIM, HORIZON
from worker.cli.main import main
from worker.errors import FailedError, InputError
from worker.simulation.environments import seeded_environment
from worker.simulation.users import Users
from worker.stream.decoding import Limits, decode_arrival, decode_decision, decode_feedback, decode_journal
from worker.stream.serving import Serving
from worker.stream.session import decode_state
from worker.stream.topology import Record, Topics
from worker.stream.versions import Versions

START = 1_790_000_000_000
# More than a worker takes in one poll, so that there is something between the first record and the last.
SMALL = {
    "sessions": 5_000,
    "agent_sessions": 20,
    "open_sessions": 200,
    "backlog_rounds": 1,
    "rounds": 1,
    "rising_seconds": 2.0,
    "live_seconds": 1.0,
    "rate_rounds": 1,
    "rate_share": 0.05,
}


@pytest.fixture(scope="module")
def recording():
    return record(300, START)


def handled(records):
    serving = Serving(Versions(learned()), topics=Topics())
    return serving.handle([Record(f"ads.{one.topic}", 0, 0, one.time, one.key, one.value) for one in records])


# ── the traffic ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_recorded_clicks_answer_the_very_slates_that_the_published_version_plans(recording):
    emits = handled((*recording.arrivals, *recording.clicks))
    assert emits.tally.opened == 300
    assert emits.tally.applied == len(recording.clicks) > 600
    assert not emits.dead_letters
    assert set(emits.tally.decisions) <= {("explore", h) for h in range(1, 6)} | {("exploit", h) for h in range(1, 6)}


def test_records_are_in_the_order_of_their_times_and_sizes_are_those_of_the_outputs(recording):
    for records in (recording.arrivals, recording.clicks):
        assert [one.time for one in records] == sorted(one.time for one in records)
    opened = [len(value) for _, value in handled(recording.arrivals).journal]
    assert recording.sizes.opened == round(sum(opened) / len(opened))
    assert 0 < recording.decisions_per_click < 1


def test_the_part_of_the_first_sessions_has_their_clicks_and_no_others(recording):
    part = recording.first(10)
    assert len(part.arrivals) == 10
    assert {one.key for one in part.clicks} <= {one.key for one in part.arrivals}
    assert part.events < recording.events


def test_a_session_keeps_to_one_partition(recording):
    names = Topics("t")
    where = {}
    for (topic, partition), pairs in inputs(names, recording, 5).items():
        assert topic in names.inputs
        for key, _ in pairs:
            assert where.setdefault(key, partition) == partition
    assert len(set(where.values())) == 5


def test_a_script_played_live_repeats_the_recorded_session(recording):
    script, first = recording.scripts[0], recording.arrivals[0]
    arrival = decode_arrival(live_arrival(script, b"live-1", START), limits=Limits(), dim=DIM, timestamp=START)
    recorded = decode_arrival(first.value, limits=Limits(), dim=DIM, timestamp=first.time)
    assert (arrival.session_id, arrival.occurred_at, arrival.context) == ("live-1", START, recorded.context)
    click = decode_feedback(live_click(script, 0, b"live-1", START), limits=Limits(), horizon=HORIZON, timestamp=START)
    assert (click.session_id, click.position) == ("live-1", 1)


def test_open_sessions_have_just_begun(recording):
    sessions = list(open_sessions.open_sessions(recording.states, 700, START))
    assert len(sessions) == 700
    assert all(session.is_open and session.arrived_at == START for session in sessions)


# ── the children ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Builder:
    def __init__(self):
        self.values = []

    def append(self, *, timestamp, key, value):
        if len(self.values) == 4:
            return None
        self.values.append((key, value))
        return True


class Producer:
    def __init__(self):
        self.sent = []

    def create_batch(self):
        return Builder()

    async def send_batch(self, builder, topic, *, partition):
        self.sent.append((topic, partition, builder.values))

    def records(self, topic):
        return [pair for name, _, pairs in self.sent if name == topic for pair in pairs]


def task(**changes):
    given = {"kind": "wire", "broker": "", "inputs": "i", "outputs": "o", "partitions": 1, "state": b""}
    sizes = OutputSizes(opened=50, feedback=30, changelog=20, decision=40)
    return BaselineTask(**{**given, "sizes": sizes, "changes": (1.0, 0.5), "decisions": (1.0, 0.25), **changes})


def fetched(records):
    """Return records as aiokafka gives them, by partition."""
    parts = {}
    for one in records:
        record = ConsumerRecord(one.topic, 0, 0, START, 0, one.key, one.value, None, 0, 0, ())
        parts.setdefault(TopicPartition(f"i.{one.topic}", 0), []).append(record)
    return parts


def test_the_wire_writes_the_given_numbers_and_sizes_of_records(recording):
    producer = Producer()
    wire = WireBaseline(task(), producer)
    for _ in range(2):
        asyncio.run(wire.handle(fetched([*recording.arrivals[:3], *recording.clicks[:9]])))
    assert [len(value) for _, value in producer.records("o.journal")] == [50] * 3 + [30] * 9 + [50] * 3 + [30] * 9
    assert [len(value) for _, value in producer.records("o.sessions-changelog")] == [20] * (6 + 9)
    decisions = producer.records("o.decisions")
    assert len(decisions) == 6 + 4
    first = [key for key, value in decisions if b'"position":1,' in value]
    assert first == [one.key for one in recording.arrivals[:3]] * 2


def test_with_the_codec_the_records_can_be_decoded(recording):
    producer = Producer()
    coded = CodecBaseline(task(kind="raw", state=recording.states[0]), producer)
    asyncio.run(coded.handle(fetched([*recording.arrivals[:3], *recording.clicks[:8]])))
    facts = [decode_journal(value) for _, value in producer.records("o.journal")]
    assert [fact.session_id for fact in facts[:3]] == [one.key.decode() for one in recording.arrivals[:3]]
    assert len(facts) == 11
    assert {decode_state(value).slate for _, value in producer.records("o.sessions-changelog")} == {facts[0].slate}
    decisions = [decode_decision(value) for _, value in producer.records("o.decisions")]
    assert [decision.position for decision in decisions] == [1, 1, 1, 2, 2]


def test_the_sender_plays_arrivals_and_then_their_clicks_one_look_apart(recording):
    script = max(recording.scripts, key=lambda one: len(one.clicks))
    names = Topics("t")
    play = Play(broker="", prefix="t", partitions=5, scripts="", first=1, last=1, seconds=1, tick=0.02)
    sender, look = Sender(play, [script]), round(LOOK / play.tick)
    first = sender.due(0, 2, START)
    assert {topic for topic, _ in first} == {names.arrivals}
    assert not sender.due(look - 1, 2, START)
    for index in range(len(script.clicks)):
        due = sender.due(look * (index + 1), 2, START)
        assert [key[0] for key in due] == [names.clicks] * 2
        assert all(script.clicks[index] in value for pairs in due.values() for _, value in pairs)
    assert not sender.due(look * 10, 2, START)


class Answers:
    """A broker that has these batches, and then no more."""

    def __init__(self, batches, error=0):
        self.cluster = self
        self.asked = []
        self._batches = batches
        self._error = error

    def leader_for_partition(self, _):
        return 7

    async def send(self, leader, request):
        assert leader == 7
        if not self._batches:
            await asyncio.Event().wait()
        self.asked.append(request._topics)
        parts = [(partition, self._error, 0, b"", packed) for partition, packed in self._batches.pop(0)]
        return SimpleNamespace(topics=[("d", parts)])


def batch(first, records):
    producer = {"producer_id": -1, "producer_epoch": -1, "base_sequence": 0, "is_transactional": 0}
    builder = DefaultRecordBatchBuilder(magic=2, compression_type=0, batch_size=9999, **producer)
    for offset, (key, value) in enumerate(records):
        builder.append(offset, timestamp=None, key=key, value=value, headers=[])
    packed = builder.build()
    return struct.pack(">q", first) + bytes(packed[8:])


def decisions_of(recording, kind):
    """Return decisions as each of the three writes them, for sessions 0, 1, … and positions 1, 2, 1, 2, …"""
    session = decode_state(recording.states[0])
    for number in range(6):
        key, session.passed = b"live-%d" % number, number % 2
        if kind == "agent":
            yield key, json.dumps({"position": session.passed + 1, "rest": "x" * 90}, separators=(",", ":")).encode()
        elif kind == "wire":
            yield key, (b'{"position":%d,' % (session.passed + 1)).ljust(300)
        else:
            yield key, orjson.dumps(session.decision(key.decode(), None))


@pytest.mark.parametrize("kind", ["worker", "wire", "agent"])
def test_the_reader_finds_first_decisions_in_packed_batches_and_goes_on_behind_them(recording, kind):
    records = list(decisions_of(recording, kind))
    whole, rest = batch(10, records[:4]), batch(14, records[4:])
    answers = Answers([[(0, whole + rest[:50]), (1, b"")], [(0, rest), (1, None)], [(0, b"")]])
    reader = FirstDecisions(SimpleNamespace(_client=answers), {TopicPartition("d", 0): 10, TopicPartition("d", 1): 3})
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(reader.read(), 0.05))
    assert reader.sessions == [0, 2, 4]
    assert len(reader.times) == 3
    positions = [{partition: position for partition, position, _ in parts} for [(_, parts)] in answers.asked]
    assert positions == [{0: 10, 1: 3}, {0: 14, 1: 3}, {0: 16, 1: 3}]


def test_a_refused_reader_fails():
    reader = FirstDecisions(SimpleNamespace(_client=Answers([[(0, b"")]], error=3)), {TopicPartition("d", 0): 0})
    with pytest.raises(FailedError, match="error 3"):
        asyncio.run(reader.read())


def test_the_highest_live_rate_is_the_one_before_clients_wait():
    # A tick has 100 events more than the one before; from the hundredth on the clients wait too long.
    sessions = [100 * tick * (tick + 1) // 2 for tick in range(1, 201)]
    times = [tick * 10_000_000 for tick in range(200)]
    sent = SentTicks(times=times, events=sessions, sessions=sessions)
    starts = [0, *sessions[:-1]]
    waits = [10_000_000 if tick < 100 else 400_000_000 for tick in range(200)]
    run = LiveRun(sent=sent, sessions=starts, times=[m + w for m, w in zip(times, waits, strict=True)])
    between = (sessions[100] - sessions[50]) / 0.5
    assert run.highest_rate() == pytest.approx(between)
    assert LiveRun(sent=sent, sessions=starts, times=[m + 10**9 for m in times]).highest_rate() == 0


def test_only_records_sent_after_the_warm_up_count():
    times = [0, 4_000_000_000]
    run = LiveRun(
        sent=SentTicks(times=times, events=[5, 8], sessions=[1, 2]), sessions=[1, 0], times=[4_007_000_000, 10**9]
    )
    latency = run.latency()
    assert latency.waits.tolist() == [7.0]
    assert latency.rate == 2


def test_each_open_session_is_answered_once_and_new_users_arrive_beside_them(recording):
    names = Topics("t")
    parts = open_sessions.backlog(recording, names, 500, START, partitions=5)
    serving = Serving(Versions(recording.parameters), topics=names)
    serving.restore(
        Record(topic, 0, 0, 0, key, value)
        for (topic, _), pairs in parts.items()
        if topic == names.changelog
        for key, value in pairs
    )
    records = [
        Record(topic, 0, 0, START, key, value)
        for (topic, _), pairs in parts.items()
        if topic in names.inputs
        for key, value in pairs
    ]
    emits = serving.handle(records)
    assert emits.tally.applied == 500
    assert emits.tally.opened == int(500 * len(recording.arrivals) / len(recording.clicks))
    assert len(emits.decisions) == len(emits.changelog) == len(emits.journal) == len(records)


def test_a_child_that_ends_is_an_error_with_its_last_line(tmp_path):
    with ChildProcess("a child", ["worker", "bench", "nothing"], tmp_path) as child:
        child.process.wait(60)
        with pytest.raises(FailedError, match=r"a child ended with 2: .*nothing"):
            child.check()


def test_a_running_child_is_measured(tmp_path):
    with ChildProcess("a child", ["http.server", "0"], tmp_path) as child:
        assert child.resident_memory() > 0
        assert child.processor_seconds() >= 0
        child.check()
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ([], {"PATH": "/none", "JAVA_HOME": ""}, "there is no java in PATH: install Java 17 or newer"),
        ([], {"JAVA_HOME": "/none"}, "JAVA_HOME=/none has no bin/java"),
        ([], {"PATH": "{java}", "ADCASCADE_KAFKA_CACHE": "{folder}/none"}, "no Maven to fetch them"),
        ([], {"ADCASCADE_KAFKA_CACHE": "/dev/null/none"}, "/dev/null"),
        ([], {"TMPDIR": "/none"}, "set TMPDIR"),
        (["--broker", "127.0.0.1:1"], {}, "cannot use Kafka at 127.0.0.1:1"),
        (["--broker", "kafka"], {}, "'kafka' is not a broker address"),
        (["--json", "/none/result.json"], {}, "the folder /none does not exist"),
    ],
)
@pytest.mark.parametrize("action", [[], ["--soak"]])
def test_wrong_surroundings_are_one_clear_line_before_any_work(
    action, arguments, variables, reason, monkeypatch, tmp_path, capsys
):
    def no_work(*_, **__):
        raise AssertionError("work was begun")

    (tmp_path / "java").mkdir()
    (tmp_path / "java/java").symlink_to(needs("java", package="default-jre-headless"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(java=tmp_path / "java", folder=tmp_path))
    if "TMPDIR" in variables:
        monkeypatch.setattr("tempfile.tempdir", "/none")
    monkeypatch.setattr(comparison, "record", no_work)
    monkeypatch.setattr(soak, "Soak", no_work)
    monkeypatch.setattr("worker.cli.bench.busy", lambda: None)
    assert main(["bench", "kafka", *action, *arguments]) in (1, 2)
    line = capsys.readouterr().err
    assert line.startswith("adcascade: ")
    assert reason in line
    assert line.count("\n") == 1


def test_an_installed_package_finds_its_own_script(monkeypatch, tmp_path):
    package = tmp_path / "worker"
    monkeypatch.setattr(worker, "__file__", str(package / "__init__.py"))
    assert broker_script() == tmp_path / "deploy/kafka/broker"
    with pytest.raises(InputError, match="name a running one"), running_broker(None):
        pass
    packaged = package / "deploy/kafka/broker"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    assert broker_script() == packaged


# ── the long run ─────────────────────────────────────────────────────────────────────────────────────────────────────


def samples(grown, behind_at_the_end=0):
    steps = [Sample(events=n * 10_000, behind=5_000, memory=100_000_000 + n * 10_000 * grown) for n in range(101)]
    return [*steps, Sample(events=1_000_000, behind=behind_at_the_end, memory=steps[-1].memory)]


def test_memory_that_grows_with_the_events_misses_the_target():
    flat, *_ = soak.figures(samples(0))
    growing, *_ = soak.figures(samples(20))  # bytes per event: 2 MB per 100,000
    assert (flat.value, flat.met) == (0, True)
    assert growing.value == pytest.approx(2, rel=0.02)
    assert growing.met is False


def test_a_worker_that_does_not_catch_up_misses_the_target():
    assert [one.met for one in soak.figures(samples(0, behind_at_the_end=7))] == [True, None, False]
    assert len(list(soak.figures(samples(0)))) == soak.FIGURES


# ── while versions come ──────────────────────────────────────────────────────────────────────────────────────────────


class Answering:
    """A transport to a worker that shows every user the same slate at once."""

    def __init__(self, slate):
        self.slate, self.clicks = slate, []

    async def start(self, receive):
        self.receive = receive

    async def stop(self):
        pass

    def send_all(self, records):
        self.clicks += [json.loads(one.value) for one in records if one.topic == "clicks"]
        arrivals = [one for one in records if one.topic == "arrivals"]
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self.receive([Record("t", 0, 0, 0, one.key, self.decision(one)) for one in arrivals]))

    def decision(self, arrival):
        fields = json.loads(arrival.value)
        shown = {"position": 1, "arm": self.slate[0], "slate": self.slate, "mode": "exploit", "propensity": 1.0}
        known = {"session_id": fields["session_id"], "arrived_at": fields["occurred_at"]}
        return orjson.dumps({**known, **shown, "parameters_version": 1, "value": 0.5})


def test_clients_show_the_whole_slate_report_once_and_measure_every_wait():
    world = seeded_environment("tastes", dim=2, arms=3, seed=1)
    names = [arm.arm for arm in world.catalogue()]
    habits = replace(new_versions.HABITS, look=(1, 2))
    start = time.time_ns() // 1_000_000
    users = Users(world, names, horizon=2, rate=200, period=1_000, start=start, habits=habits)
    transport = Answering(names[:2])
    clients = new_versions.Clients(transport, users, 1)
    asyncio.run(clients.play(SimpleNamespace(check=lambda: None)))
    waits = clients.waits(0)
    assert len(waits) == len(users.cohort(0)) > 100
    assert (waits >= 0).all()
    assert len({click["session_id"] for click in transport.clicks}) == len(transport.clicks) > 100
    assert all(click["clicked"] or click["position"] == 2 for click in transport.clicks)
    clients._answered.popitem()
    with pytest.raises(FailedError, match=r"1 of \d+ arrivals were not answered"):
        clients.waits(0)


def test_the_figure_of_new_versions_compares_round_by_round():
    waits = {"without": [10.0, 20.0, 10.0], "with": [12.0, 25.0, 30.0]}
    figures = list(new_versions._figures(new_versions.Scale(), waits, waits, 6_500_000))
    assert len(figures) == new_versions.FIGURES
    assert (figures[-1].value, figures[-1].met) == (1.25, True)


# ── on a real broker ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_bench_kafka_measures_every_figure(monkeypatch, address, tmp_path, capsys):  # noqa: F811
    # Here other tests run beside it, so nobody keeps up.
    for module in ("live", "rates"):
        monkeypatch.setattr(f"worker.bench.kafka.{module}.LONG", 60_000.0)
    monkeypatch.setattr("worker.bench.kafka.rates.WARM", 0.2)
    measure = comparison.measure
    monkeypatch.setattr(comparison, "measure", lambda given, scale: measure(given, replace(scale, **SMALL)))
    flags = ["--broker", address, "--partitions", "3", "--json", str(tmp_path / "kafka.json")]
    assert main(["bench", "kafka", *flags]) == 0
    figures = json.loads((tmp_path / "kafka.json").read_text())["figures"]
    assert len(figures) == comparison.FIGURES
    assert all(figure["value"] > 0 for figure in figures)
    targets = {one["name"]: one["least"] or one["most"] for one in figures if one["met"] is not None}
    assert targets == {
        "(c) / (b)": 20,
        "(c) / (a)": 0.5,
        "(c), personal / additive": 0.85,
        "(c) adcascade worker, live": 25,
        "(c) / (a), live p99": 5,
        "recovery of 200 open sessions": 15,
        **{f"(c) / (a) at {rate} arrivals/s, p50": bar for rate, bar in (("20", 1.5), ("200", 1.7), ("1,000", 2))},
        **{f"(c) / (a) at {rate} arrivals/s, p99": 2 for rate in ("20", "200", "1,000")},
        **{f"(c) / (b) at {rate} arrivals/s, p50": 1.1 for rate in ("20", "200", "1,000")},
        "(c) at 5,000 arrivals/s": 15,
        "(c) at 5,000 arrivals/s, p99": 60,
    }
    out = capsys.readouterr().out
    assert all(figure["name"] in out for figure in figures)
