"""The topology on Kafka: Faust keeps the group, the assignment, the recovery and the lifecycle; the hot path is ours.

`ports` says what the processors look like from here; `app` puts everything together. The path of a record::

    broker ─▶ driver (one message per poll) ─▶ Faust stream ─▶ serving ─▶ the tasks of its partitions
                                                                               │
    broker ◀─ commit ◀─ acknowledged ◀─ decisions ◀─ journal, dead letters, changelog (lanes, outlets)

The journal is folded by a process beside it: `seat` starts it, `learner` is what runs there.
"""
