"""The fields of the operators' objects that deploy/kubernetes uses, and what each may hold.

The operators publish no schema that a test could install. Before adding a field here, look it up in the documentation
of its operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.files import leaves

TEXT = r"(?s).+"
COUNT = range(1, 1_000_000)
DURATION = r"\d+[smhd]"
_METADATA = {"kind": TEXT, "metadata.name": r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "metadata.labels.[a-z./-]+": TEXT}
_PACE = "spec.advanced.horizontalPodAutoscalerConfig.behavior.(scaleUp|scaleDown)"
_ACL = "spec.authorization.acls"
_CREDENTIALS = "spec.endpoints.authorization.credentials.(name|key)"

#: Fields that not every object of a kind has.
OPTIONAL = {_CREDENTIALS}

#: By kind: pattern of the field → pattern of its text, or range of its number, or None for any value.
FIELDS: dict[str, dict[str, str | range | None]] = {
    "KafkaTopic": {
        "apiVersion": "kafka.strimzi.io/v1",
        "spec.partitions": COUNT,
        "spec.replicas": range(1, 32_768),
        "spec.config.cleanup.policy": "delete|compact",
        "spec.config.(?!cleanup)[a-z.]+": None,
    },
    "KafkaUser": {
        "apiVersion": "kafka.strimzi.io/v1",
        "spec.authentication.type": "scram-sha-512|tls|tls-external",
        "spec.authorization.type": "simple",
        f"{_ACL}.resource.type": "topic|group|cluster|transactionalId",
        f"{_ACL}.resource.name": TEXT,
        f"{_ACL}.resource.patternType": "literal|prefix",
        f"{_ACL}.operations": "(All|Alter|ClusterAction|Create|Delete|Describe|IdempotentWrite|Read|Write)"
        "|(Alter|Describe)Configs",
    },
    "ScaledObject": {
        "apiVersion": "keda.sh/v1alpha1",
        "spec.scaleTargetRef.(apiVersion|kind|name)": "apps/v1|StatefulSet|adcascade",
        "spec.pollingInterval": COUNT,
        "spec.(min|max)ReplicaCount": COUNT,
        f"{_PACE}.stabilizationWindowSeconds": range(3_601),
        f"{_PACE}.policies.type": "Pods|Percent",
        f"{_PACE}.policies.(value|periodSeconds)": COUNT,
        "spec.triggers.type": "kafka",
        "spec.triggers.metadata.(bootstrapServers|consumerGroup|topic)": TEXT,
        "spec.triggers.metadata.lagThreshold": r"\d+",  # KEDA rejects bare numbers
        "spec.triggers.metadata.offsetResetPolicy": "latest|earliest",
        "spec.triggers.metadata.sasl": "none|plaintext|scram_sha256|scram_sha512|oauthbearer",
        "spec.triggers.metadata.tls": "enable|disable",
        "spec.triggers.authenticationRef.name": TEXT,
    },
    "TriggerAuthentication": {
        "apiVersion": "keda.sh/v1alpha1",
        "spec.env.(parameter|name|containerName)": TEXT,
        "spec.secretTargetRef.(parameter|name|key)": TEXT,
    },
    "ServiceMonitor": {
        "apiVersion": "monitoring.coreos.com/v1",
        "spec.jobLabel": TEXT,
        "spec.selector.matchLabels.[a-z./-]+": TEXT,
        "spec.endpoints.port": TEXT,
        "spec.endpoints.path": "/.*",
        "spec.endpoints.(interval|scrapeTimeout)": DURATION,
        _CREDENTIALS: TEXT,
    },
    "PrometheusRule": {
        "apiVersion": "monitoring.coreos.com/v1",
        "spec.groups.name": TEXT,
        "spec.groups.rules.(alert|expr|labels.severity|annotations.(summary|description))": TEXT,
        "spec.groups.rules.for": DURATION,
    },
}


def errors(document: Any) -> Iterator[str]:
    """Yield the fields that the object must not have, the values that a field must not hold, and the missing fields."""
    known: dict[str, str | range | None] = {**_METADATA, **FIELDS[document["kind"]]}
    used = set()
    for path, value in leaves(document):
        field = ".".join(path)
        pattern = next((pattern for pattern in known if re.fullmatch(pattern, field)), None)
        used.add(pattern)
        if pattern is None:
            yield f"unknown field {field}"
        elif not _fits(value, known[pattern]):
            yield f"{field} cannot be {value!r}"
    yield from (f"no field {pattern}" for pattern in known.keys() - used - OPTIONAL)


def _fits(value: Any, wanted: str | range | None) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, range):
        return type(value) is int and value in wanted
    return isinstance(value, str) and re.fullmatch(wanted, value) is not None
