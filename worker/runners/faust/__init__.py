"""The topology on Kafka: Faust keeps the group, the assignment, the recovery and the lifecycle; the hot path is ours.

`ports` says what the processors look like from here; `app` puts everything together. The path of a record::

    broker ─▶ driver (one list per partition) ─▶ Faust stream ─▶ serving ─▶ lane ─▶ task.handle
                                                                               │
    broker ◀─ commit ◀─ acknowledged ◀─ decisions ◀─ journal, dead letters, changelog (outlets)
"""
