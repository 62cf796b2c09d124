"""Events, sessions, episodes and the topology. No I/O, no clock."""
