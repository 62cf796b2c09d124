"""Schemas of the operators' objects, of the fields that deploy/kubernetes uses and no others.

The operators' own schemas come with the operators, not as something that a test could install. A field that is not
here is an error: look it up in the operator's documentation, then add it.
"""

from __future__ import annotations

from typing import Any

STRING = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
TEXTS = {"type": "object", "additionalProperties": STRING, "minProperties": 1}


def closed(**fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def several(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


def custom(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = closed(name={"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}, labels=TEXTS)
    return closed(apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, spec=spec)


_PACE = closed(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=several(closed(type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT)),
)
_RULE = {
    **closed(alert=STRING, expr=STRING, labels=TEXTS, annotations=TEXTS),
    "properties": {
        "alert": STRING,
        "expr": STRING,
        "for": {"type": "string", "pattern": r"^\d+[smhd]$"},
        "labels": TEXTS,
        "annotations": TEXTS,
    },
}

SCHEMAS = {
    "KafkaTopic": custom(
        "kafka.strimzi.io/v1",
        "KafkaTopic",
        closed(
            partitions=COUNT,
            replicas={"type": "integer", "minimum": 1, "maximum": 32767},
            config={
                "type": "object",
                "propertyNames": {"pattern": r"^[a-z.]+$"},
                "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
            },
        ),
    ),
    "KafkaUser": custom(
        "kafka.strimzi.io/v1",
        "KafkaUser",
        closed(
            authentication=closed(type={"enum": ["scram-sha-512", "tls", "tls-external"]}),
            authorization=closed(
                type={"const": "simple"},
                acls=several(
                    closed(
                        resource=closed(
                            type={"enum": ["topic", "group", "cluster", "transactionalId"]},
                            name=STRING,
                            patternType={"enum": ["literal", "prefix"]},
                        ),
                        operations=several(
                            {
                                "enum": [
                                    *("All", "Alter", "AlterConfigs", "ClusterAction", "Create", "Delete", "Describe"),
                                    *("DescribeConfigs", "IdempotentWrite", "Read", "Write"),
                                ]
                            }
                        ),
                    )
                ),
            ),
        ),
    ),
    "ScaledObject": custom(
        "keda.sh/v1alpha1",
        "ScaledObject",
        closed(
            scaleTargetRef=closed(apiVersion={"const": "apps/v1"}, kind={"const": "StatefulSet"}, name=STRING),
            pollingInterval=COUNT,
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=closed(scaleUp=_PACE, scaleDown=_PACE))),
            triggers=several(
                closed(
                    type={"const": "kafka"},
                    # KEDA takes texts only: a bare number is refused when it is applied.
                    metadata=closed(
                        bootstrapServers=STRING,
                        consumerGroup=STRING,
                        topic=STRING,
                        lagThreshold={"type": "string", "pattern": r"^\d+$"},
                        offsetResetPolicy={"enum": ["latest", "earliest"]},
                        sasl={"enum": ["none", "plaintext", "scram_sha256", "scram_sha512", "oauthbearer"]},
                        tls={"enum": ["enable", "disable"]},
                    ),
                    authenticationRef=closed(name=STRING),
                )
            ),
        ),
    ),
    "TriggerAuthentication": custom(
        "keda.sh/v1alpha1",
        "TriggerAuthentication",
        closed(
            env=several(closed(parameter=STRING, name=STRING, containerName=STRING)),
            secretTargetRef=several(closed(parameter=STRING, name=STRING, key=STRING)),
        ),
    ),
    "ServiceMonitor": custom(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        closed(
            selector=closed(matchLabels=TEXTS),
            endpoints=several(
                closed(
                    port=STRING,
                    path={"type": "string", "pattern": "^/"},
                    interval={"type": "string", "pattern": r"^\d+s$"},
                    scrapeTimeout={"type": "string", "pattern": r"^\d+s$"},
                )
            ),
        ),
    ),
    "PrometheusRule": custom(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        closed(groups=several(closed(name=STRING, rules=several(_RULE)))),
    ),
}
