"""Check, before anything is started, that the installed libraries are the ones this package was written against.

The batch path overrides and calls private names of Faust, mode and aiokafka. A release that renames one would at best
crash, at worst commit records that were not processed. So the versions are pinned, and the signatures are compared as
well: a fork or a patched wheel has the same number.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata

from worker.errors import FailedError

VERSIONS = {"faust-streaming": "0.15.3", "aiokafka": "0.14.0", "mode-streaming": "0.7.1"}

_DRIVER = "faust.transport.drivers.aiokafka"
#: Every private function that is overridden or called, with the names of its parameters.
SIGNATURES = {
    f"{_DRIVER}:AIOKafkaConsumerThread._create_worker_consumer": "self transport",
    f"{_DRIVER}:AIOKafkaConsumerThread._fetch_records": "self consumer active_partitions timeout max_records",
    f"{_DRIVER}:AIOKafkaConsumerThread._ensure_consumer": "self",
    f"{_DRIVER}:AIOKafkaConsumerThread.getmany": "self active_partitions timeout",
    f"{_DRIVER}:AIOKafkaConsumerThread.on_start": "self",
    f"{_DRIVER}:AIOKafkaConsumerThread.on_thread_stop": "self",
    f"{_DRIVER}:Consumer._new_consumer_thread": "self",
    f"{_DRIVER}:Producer._settings_default": "self",
    f"{_DRIVER}:Producer._settings_auth": "self",
    f"{_DRIVER}:Producer._settings_extra": "self",
    "faust.transport.consumer:Consumer.getmany": "self timeout",
    "faust.transport.consumer:Consumer._wait_next_records": "self timeout",
    "faust.transport.consumer:Consumer._get_active_partitions": "self",
    "faust.transport.consumer:Consumer.wait_empty": "self",
    "faust.transport.consumer:Consumer.perform_seek": "self",
    "faust.transport.consumer:Consumer._should_commit": "self tp offset",
    "faust.transport.consumer:Consumer._filter_committable_offsets": "self tps",
    "faust.transport.consumer:Consumer.on_partitions_revoked": "self revoked",
    "faust.transport.consumer:Consumer.on_partitions_assigned": "self assigned generation_id",
    "faust.transport.consumer:ThreadDelegateConsumer._getmany": "self active_partitions timeout",
    "faust.transport.consumer:ThreadDelegateConsumer.seek_to_committed": "self",
    "faust.tables.recovery:Recovery._add": "self table tp offsets",
    "faust.tables.recovery:Recovery.need_recovery": "self",
    "faust.stores.memory:Store.apply_changelog_batch": "self batch to_key to_value",
    "faust.stores.memory:Store.persisted_offset": "self tp",
    "faust.stores.base:Store.on_rebalance": "self assigned revoked newly_assigned generation_id",
    "faust.app.base:App.on_rebalance_end": "self",
    "faust.app.base:App._create_directories": "self",
    "mode.worker:Worker._enter_debugger": "self",
    "mode.worker:Worker._on_sigusr1": "self",
    "mode.threads:QueueServiceThread.call_thread": "self fun args kwargs",
    "mode.threads:ServiceThread._stopped_set": "self",
    "mode.threads:ServiceThread._stop_children": "self",
    "mode.threads:ServiceThread._stop_futures": "self",
    "mode.threads:ServiceThread._stop_exit_stacks": "self",
    "aiokafka.consumer.group_coordinator:GroupCoordinator._do_heartbeat": "self",
    "aiokafka.consumer.fetcher:Fetcher.fetched_records": "self partitions timeout max_records",
    "aiokafka.consumer.fetcher:Fetcher._create_fetch_waiter": "self",
    "aiokafka.consumer.fetcher:Fetcher._get_actions_per_node": "self assignment",
    "aiokafka.consumer.fetcher:Fetcher._proc_fetch_request": "self assignment node_id request",
    "aiokafka.consumer.fetcher:Fetcher._notify": "self future",
    "aiokafka.consumer.fetcher:FetchResult": "tp assignment partition_records backoff",
    "aiokafka.consumer.fetcher:FetchResult.getall": "self max_records",
    "aiokafka.consumer.fetcher:PartitionRecords": (
        "tp records aborted_transactions fetch_offset key_deserializer value_deserializer check_crcs isolation_level"
    ),
    "aiokafka.consumer.fetcher:PartitionRecords._consumer_record": "self tp record",
    "aiokafka.consumer.fetcher:PartitionRecords._consume_aborted_up_to": "self batch_offset",
    "aiokafka.consumer.fetcher:PartitionRecords._contains_abort_marker": "self next_batch",
    "aiokafka.consumer.fetcher:PartitionRecords._unpack_records": "self",
    "aiokafka.consumer.subscription_state:Assignment.state_value": "self tp",
    "aiokafka.producer.message_accumulator:MessageAccumulator._append_batch": "self builder tp",
    "aiokafka.producer.message_accumulator:MessageAccumulator._pop_batch": "self tp",
    "aiokafka.producer.message_accumulator:MessageAccumulator._wakeup": "fut",
    "aiokafka.producer.message_accumulator:MessageBatch": "tp builder ttl linger_time",
    "aiokafka.producer.message_accumulator:MessageBatch.done": (
        "self base_offset timestamp log_start_offset _record_metadata_class"
    ),
    "aiokafka.producer.message_accumulator:MessageBatch.failure": "self exception",
    "aiokafka.producer.message_accumulator:MessageBatch.drain_ready": "self",
    "aiokafka.producer.message_accumulator:MessageBatch.reset_drain": "self",
    "aiokafka.producer.message_accumulator:BatchBuilder._build": "self",
    "aiokafka.producer.transaction_manager:TransactionManager.increment_sequence_number": "self tp increment",
    "aiokafka.protocol.fetch:FetchRequest": "max_wait_time min_bytes max_bytes isolation_level topics rack_id",
    "aiokafka.protocol.produce:ProduceRequest": "transactional_id required_acks timeout topics",
    "aiokafka.consumer.subscription_state:TopicPartitionState.consumed_to": "self position",
    "aiokafka.producer.sender:SendProduceReqHandler": "sender batches",
    "aiokafka.producer.sender:SendProduceReqHandler.create_request": "self",
    "aiokafka.producer.sender:SendProduceReqHandler.do": "self node_id",
    "aiokafka.producer.sender:SendProduceReqHandler.handle_response": "self response",
    "aiokafka.conn:AIOKafkaConnection._handle_frame": "self resp",
    "aiokafka.conn:AIOKafkaConnection._next_correlation_id": "self",
    "aiokafka.producer.message_accumulator:MessageAccumulator.create_builder": "self key_serializer value_serializer",
    "aiokafka.producer.message_accumulator:BatchBuilder.append": "self timestamp key value headers",
    "aiokafka.client:AIOKafkaClient._wait_on_metadata": "self topic",
    "aiokafka.client:AIOKafkaClient.send": "self node_id request group",
    "aiokafka.consumer.fetcher:Fetcher._proc_offset_request": "self node_id topic_data",
}


def check() -> None:
    """Raise `FailedError` if a library is not the required one."""
    for name, wanted in VERSIONS.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise FailedError(f"{name} is not installed: pip install {name}=={wanted}") from None
        if found != wanted:
            raise FailedError(
                f"{name} {found} is installed, but the Kafka worker relies on private names of {wanted}: "
                f"pip install {name}=={wanted}"
            )
    for name, wanted in SIGNATURES.items():
        found = signature(name)
        if found != wanted:
            raise FailedError(
                f"{name} takes ({found}) where ({wanted}) was expected: the installed library was modified"
            )


def signature(name: str) -> str:
    """Return the parameter names of a function.

    >>> signature("json:JSONDecoder.decode")
    'self s _w'
    """
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return " ".join(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (ImportError, AttributeError):
        return "nothing, it does not exist"
