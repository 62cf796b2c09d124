"""The acts: each is one way in which machines, operators or clients make trouble."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, Producer

from tests.kafka.fleet import Running
from tests.kafka.hostile.bad_records import Bad, arrival, far_future, garbage, wrong_units
from tests.kafka.hostile.driver import ADS, Driver, reaction
from tests.kafka.hostile.fleet import MEMBER_TIMEOUT, HostileFleet
from tests.kafka.hostile.ledger import Sent, now_ms
from tests.kafka.hostile.plan import Act

BOMB: Final = 70_000_000
HOUR: Final = 3_600_000


class Hostilities:
    """Carries out acts. What an act has to undo later (a pause, a wrong clock) is done by `tend`."""

    def __init__(self, fleet: HostileFleet, driver: Driver) -> None:
        self._fleet, self._driver = fleet, driver
        self._note = fleet.timeline.note
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._bombs = 0
        self._has_ended = False
        self._threads: list[threading.Thread] = []

    def commit(self, act: Act) -> None:
        """Carry out an act."""
        getattr(self, "_" + act.kind.replace("-", "_"))(random.Random(act.seed))

    def tend(self) -> None:
        """Undo what is due, and keep the workers running."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        if self._fleet.broker_up_since is not None:
            self._fleet.keep()

    def end(self) -> None:
        """Undo everything that is still to be undone."""
        for thread in self._threads:
            thread.join()
        self._has_ended = True
        while self._later:
            heapq.heappop(self._later)[2]()

    def _after(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), undo))

    def _beside(self, work: Callable[[], None]) -> None:
        """Do something that takes long in a thread of its own."""
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _victim(self, chance: random.Random) -> Running | None:
        """Return one of the workers that run."""
        return chance.choice(self._fleet.running) if self._fleet.running else None

    def _send(self, bad: Bad) -> None:
        self._driver.send(bad.topic, bad.key, bad.value, what=bad.what, reasons=bad.reasons, timestamp=bad.timestamp)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _kill(self, chance: random.Random) -> None:
        alone, everywhere = chance.random() < 0.5, chance.random() < 0.15
        for worker in self._fleet.running if everywhere else [one for one in (self._victim(chance),) if one]:
            self._note(f"kill -9 of {self._fleet.name(worker)}{' without its learner' if alone else ''}")
            worker.kill(alone=alone)

    def _kill_learner(self, chance: random.Random) -> None:
        for worker in self._fleet.running:
            if (learner := worker.learner) is not None:
                self._note(f"kill -9 of the learner of {self._fleet.name(worker)}")
                os.kill(learner, signal.SIGKILL)

    def _pause(self, chance: random.Random) -> None:
        seconds = chance.choice((0.5, 1.5, MEMBER_TIMEOUT + 2, MEMBER_TIMEOUT + 6))
        worker = self._victim(chance)
        if worker is None:
            return
        self._note(f"SIGSTOP of {self._fleet.name(worker)} for {seconds:g} s")
        self._fleet.disturbed.add(worker)
        worker.pause()

        def resume() -> None:
            if worker.running:
                self._note(f"SIGCONT of {self._fleet.name(worker)}")
                worker.resume()

        self._after(seconds, resume)

    def _clock(self, chance: random.Random) -> None:
        step, seconds = chance.choice((HOUR, 24 * HOUR, -30_000, -HOUR)), chance.uniform(2, 6)
        if (worker := self._victim(chance)) is not None:
            self._note(f"the clock of {self._fleet.name(worker)} is set by {step / 1000:+g} s for {seconds:.1f} s")
            self._fleet.set_step(worker, step)
            self._after(seconds, lambda: self._fleet.set_step(worker, 0))

    def _joiner(self, chance: random.Random) -> None:
        self._visit(chance.uniform(6, 15))

    def _other_settings(self, chance: random.Random) -> None:
        self._visit(chance.uniform(8, 20), *chance.choice(self._fleet.other_settings))

    def _other_dimension(self, chance: random.Random) -> None:
        """A worker that cannot take part has to end, and to leave the others alone."""
        worker = self._fleet.start("--dim", "5")

        def check() -> None:
            if not worker.running:
                return
            if worker.ready:
                self._fleet.deaths.append(f"{self._fleet.name(worker)} serves with another dimension")
                worker.kill()
            elif self._has_ended:
                worker.kill()  # it had no processor time to find out
            else:
                self._after(5, check)

        self._after(15, check)

    def _visit(self, seconds: float, *arguments: str) -> None:
        """Let a worker come, and leave as it should."""
        worker = self._fleet.start(*arguments)
        name = self._fleet.name(worker)

        def leave() -> None:
            if worker.running:
                self._note(f"SIGTERM to {name}")
                worker.resume()
                worker.process.send_signal(signal.SIGTERM)
            else:
                self._fleet.inspect(worker)

        self._after(seconds, leave)

    def _broker(self, chance: random.Random) -> None:
        seconds, how = chance.uniform(0.2, 3), chance.choice((["--kill"], ["--kill"], []))
        if self._fleet.broker_up_since is None:
            return
        self._note(f"{'kill -9' if how else 'stop'} of the broker; it starts again after {seconds:.1f} s")
        self._fleet.stop_broker(*how)

        def start() -> None:
            time.sleep(seconds)
            self._fleet.start_broker()
            self._note("the broker is up")

        self._beside(start)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _garbage(self, chance: random.Random) -> None:
        made = garbage(chance)
        self._note(f"{len(made)} records of garbage")
        for bad in made:
            self._send(bad)

    def _units(self, chance: random.Random) -> None:
        self._note("times in seconds, microseconds and nanoseconds")
        for bad in wrong_units(chance):
            self._send(bad)
        # A user whose app reports seconds: the arrival was right, the feedback is not.
        for decision in list(self._driver.decisions)[-5:]:
            if decision["slate"]:
                body = {**reaction(decision, 0, clicked=True), "occurred_at": now_ms() // 1_000}
                value = json.dumps(body).encode()
                self._send(Bad("clicks", decision["session_id"].encode(), value, frozenset({"past"}), "a wrong unit"))

    def _far_future(self, chance: random.Random) -> None:
        self._note("arrivals and feedback of the year 2100")
        for bad in far_future(chance):
            self._send(bad)

    def _forged(self, chance: random.Random) -> None:
        """Feedback for displays of others, and arrivals under their ids."""
        decisions = [decision for decision in list(self._driver.decisions)[-20:] if decision["slate"]]
        self._note(f"forged feedback and arrivals for {len(decisions)} sessions")
        for number, decision in enumerate(decisions):
            session, right = decision["session_id"], reaction(decision, 0, clicked=True)
            wrong: dict[str, Any] = chance.choice(
                (
                    {"arm": chance.choice([ad for ad in ADS if ad != right["arm"]])},
                    {"session_id": f"forged-{number}"},
                    {"token": chance.choice(decisions)["tokens"][0][:-1] + "!"},
                    {"token": ""},
                )
            )
            value = json.dumps({**right, **wrong, "n": chance.randrange(10**9)}).encode()
            self._send(Bad("clicks", session.encode(), value, frozenset({"token"}), "forged feedback"))
            # Only the partition of a session can recognise its id.
            if now_ms() - decision["arrived_at"] < 2_000 and session.startswith("user-"):
                body = arrival(session, context=[chance.random(), 0.5, 0.5])
                one = frozenset({"session-reused"})
                self._send(Bad("arrivals", session.encode(), json.dumps(body).encode(), one, "an id again"))

    def _odd_keys(self, chance: random.Random) -> None:
        """Valid records without a key, or under another: they are answered and learned from like all others."""
        self._note("arrivals and feedback without a key or under a wrong one")
        for _ in range(5):
            name = f"odd-{chance.randrange(10**9)}"
            self._driver.arrive(chance.choice((None, b"another key")), arrival(name), "arrival under an odd key")
        for decision in list(self._driver.decisions)[-5:]:
            if decision["slate"]:
                key = chance.choice((None, b"another key"))
                self._driver.answer(key, reaction(decision, 0, clicked=False), what="feedback under an odd key")

    def _duplicates(self, chance: random.Random) -> None:
        count = 0
        for topic, recent in self._driver.recent.items():
            for key, value in chance.sample(list(recent), min(40, len(recent))):
                self._driver.send(topic, key, value, what="again")
                count += 1
        self._note(f"{count} records again")

    def _bomb(self, chance: random.Random) -> None:
        """Records that compression makes small: the broker unpacks them, and refuses them."""
        self._bombs += 1
        topic, key = chance.choice(("arrivals", "clicks")), b"bomb-%d" % self._bombs
        self._beside(partial(self._send_bomb, topic, key, chance.choice(("gzip", "snappy", "lz4", "zstd"))))

    def _send_bomb(self, topic: str, key: bytes, codec: str) -> None:
        self._note(f"a bomb of {BOMB:,} bytes in {topic}, compressed by {codec}")
        value = b'{"session_id":"%s","context":[' % key + b"0," * (BOMB // 2) + b"0]}"
        sent = self._driver.ledger.add(topic, key, value, Sent(topic, frozenset({"too-large"}), "bomb"))
        error = send_compressed(self._fleet.address, f"hostile.{topic}", key, value, codec)
        if error is None:
            sent.acknowledged = now_ms()
            self._fleet.deaths.append(f"the broker took a bomb, compressed by {codec}")
        else:
            self._note(f"a bomb was refused: {error.name()}")


def send_compressed(address: str, topic: str, key: bytes, value: bytes, codec: str) -> KafkaError | None:
    """Send a large record in a compressed batch; return why the broker does not take it."""
    settings = {"compression.type": codec, "message.max.bytes": 2 * BOMB, "message.timeout.ms": 20_000, "log_level": 2}
    producer = Producer({"bootstrap.servers": address, **settings})
    errors: list[KafkaError | None] = []
    producer.produce(topic, value, key, on_delivery=lambda error, _: errors.append(error))
    producer.flush()
    return errors[0]
