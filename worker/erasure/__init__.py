"""What is kept of a person: in a log, a state folder or the topics of Kafka; how long, and what can be deleted.

`person` says which records are those of a person, `folder` and `topics` find them and delete. Nothing here changes what
others have sent, or what the learner still needs.
"""
