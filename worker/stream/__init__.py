"""The stream logic: events and their codec, sessions, serving, the journal's fold into versions.

Functions from records to records, the same in every runner. No I/O, no clock, no Kafka.
"""
