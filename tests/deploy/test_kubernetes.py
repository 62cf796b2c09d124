"""deploy/kubernetes: valid, confined, and consistent with the code in topics, ports, settings and rights."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from tests.deploy.files import (
    DEPLOY,
    KUBERNETES,
    dockerfile,
    documents,
    kustomization,
    manifest,
    manifests,
    mounted_files,
    package_folder,
    settings_of,
)
from worker.cli.options.catalog import read_arms
from worker.http.pages import HEALTH, operations
from worker.kafka import topics as kafka_topics
from worker.kafka.app import STOP_TIMEOUT
from worker.kafka.connection import Connection
from worker.stream.topology import Topics


class Part(NamedTuple):
    """Workers or gateways: the object of their pods, its name, the pod, its only container, and their settings."""

    owner: Any
    name: str
    pod: Any
    container: Any
    toml: Path
    settings: Any


def part(kind: str, name: str, toml: Path) -> Part:
    owner = manifest(kind, name)
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]} | {"ADCASCADE_CONFIG": str(toml)}
    options = settings_of(container["args"], environment)
    return Part(owner, name, owner["spec"]["template"]["spec"], container, toml, options)


WORKERS = part("StatefulSet", "adcascade", KUBERNETES / "worker.toml")
GATEWAYS = part("Deployment", "adcascade-gateway", KUBERNETES / "gateway.toml")
PARTS = pytest.mark.parametrize("part", [WORKERS, GATEWAYS], ids=["workers", "gateways"])
SETTINGS = WORKERS.settings
NAMES = Topics(SETTINGS.prefix)
#: Objects of operators, which publish no schema that a test could install; the tests below compare their content.
OPERATED = {
    "KafkaTopic": "kafka.strimzi.io/v1",
    "KafkaUser": "kafka.strimzi.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "TriggerAuthentication": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
}
IDS = [f"{each['kind']}/{each['metadata']['name']}" for each in manifests()]


def cluster() -> str:
    (name,) = {each["metadata"]["labels"]["strimzi.io/cluster"] for each in manifests() if "Kafka" in each["kind"]}
    return str(name)


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("document", manifests(), ids=IDS)
def test_every_object_is_valid(document: Any) -> None:
    if document["kind"] in OPERATED:
        assert document["apiVersion"] == OPERATED[document["kind"]]
        return
    package_folder("kubernetes_validate")
    importlib.import_module("kubernetes_validate").validate(document, "1.31", strict=True)


def test_every_file_is_listed_and_every_object_has_its_own_name() -> None:
    generated = [file for generator in kustomization()["configMapGenerator"] for file in generator["files"]]
    used = {*kustomization()["resources"], *generated, "kustomization.yaml", "render"}
    assert used == {path.name for path in KUBERNETES.iterdir()}
    assert len(set(IDS)) == len(IDS)


def test_kustomize_finds_and_pins_the_image() -> None:
    (image,) = kustomization()["images"]
    assert {each.container["image"] for each in (WORKERS, GATEWAYS)} == {image["name"]}
    assert image["newTag"][0].isdigit()


@PARTS
def test_every_selector_matches_its_pods_only(part: Part) -> None:
    labels, others = (each.owner["spec"]["template"]["metadata"]["labels"] for each in (WORKERS, GATEWAYS))
    if part is GATEWAYS:
        labels, others = others, labels
    for selector in (
        part.owner["spec"]["selector"]["matchLabels"],
        manifest("Service", part.name)["spec"]["selector"],
        manifest("PodDisruptionBudget", part.name)["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy", part.name)["spec"]["podSelector"]["matchLabels"],
    ):
        assert matches(selector, labels)
        assert not matches(selector, others)
    assert matches(manifest("NetworkPolicy", "adcascade-deny")["spec"]["podSelector"]["matchLabels"], labels)


# ── workers and gateways ─────────────────────────────────────────────────────────────────────────────────────────────


@PARTS
def test_every_setting_is_accepted_and_every_file_is_mounted(part: Part) -> None:
    options, files = part.settings, mounted_files(part.pod)
    assert tomllib.loads(part.toml.read_text(encoding="utf-8")).keys() <= vars(options).keys()
    Connection(servers=tuple(options.broker.split(",")))
    assert (options.broker, options.prefix) == (SETTINGS.broker, SETTINGS.prefix)
    user = manifest("KafkaUser", part.name)
    assert options.sasl_username == user["metadata"]["name"]
    assert user["spec"]["authentication"]["type"] == "scram-sha-512"  # the default
    assert not options.allow_plaintext_credentials
    assert files[options.kafka["ssl.ca.location"]] == (f"{cluster()}-cluster-ca-cert", "ca.crt")
    assert files[options.sasl_password_file] == (part.name, "password")
    secret, key = files[options.token_secret_file if part is WORKERS else options.api_keys]
    text = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"create secret generic {secret} --from-file={key}" in text
    (config,) = (entry["value"] for entry in part.container["env"] if entry["name"] == "ADCASCADE_CONFIG")
    assert files[config][1] == part.toml.name
    assert all(mount.get("readOnly") or mount["name"] == "tmp" for mount in part.container["volumeMounts"])


def test_a_worker_has_its_catalog_and_time_to_shut_down() -> None:
    assert SETTINGS.catalog in mounted_files(WORKERS.pod)
    assert read_arms(str(KUBERNETES / "arms.json"))
    assert WORKERS.pod["terminationGracePeriodSeconds"] > STOP_TIMEOUT


@pytest.mark.parametrize(
    ("part", "paths", "address"),
    [
        (WORKERS, ["/livez", "/readyz", "/livez"], (SETTINGS.web_host, SETTINGS.web_port)),
        # A gateway answers without Kafka, too.
        (GATEWAYS, ["/readyz", "/livez", "/livez"], (GATEWAYS.settings.host, GATEWAYS.settings.port)),
    ],
    ids=["workers", "gateways"],
)
def test_probes_ports_and_scrapes_match_the_web_server(part: Part, paths: list[str], address: tuple[str, int]) -> None:
    probes = [part.container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")]
    assert [get["path"] for get in probes] == paths
    assert set(paths) <= set(HEALTH), "the kubelet has no key"
    (port,) = part.container["ports"]
    assert ("0.0.0.0", port["containerPort"]) == address
    (service_port,) = manifest("Service", part.name)["spec"]["ports"]
    assert {get["port"] for get in probes} == {port["name"]} == {service_port["targetPort"]}
    monitor = manifest("ServiceMonitor", part.name)["spec"]
    labels = manifest("Service", part.name)["metadata"]["labels"]
    (endpoint,) = monitor["endpoints"]
    assert {*paths, endpoint["path"]} <= operations(CollectorRegistry(), lambda: None).keys()
    assert endpoint["port"] == service_port["name"]
    assert matches(monitor["selector"]["matchLabels"], labels)
    (plain,) = documents(DEPLOY / "prometheus/prometheus.yml")
    assert labels[monitor["jobLabel"]] == plain["scrape_configs"][0]["job_name"], "the job of the rules"


@PARTS
def test_the_pods_are_confined(part: Part) -> None:
    pod = part.pod
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert part.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in part.container["resources"]["limits"]
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert [each.text for each in dockerfile() if each.name == "USER"] == [user]


@PARTS
def test_the_network_allows_only_kafka_dns_prometheus_and_clients(part: Part) -> None:
    denied = manifest("NetworkPolicy", "adcascade-deny")["spec"]
    assert denied["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & denied.keys()
    allowed = manifest("NetworkPolicy", part.name)["spec"]
    broker_port = int(SETTINGS.broker.rpartition(":")[2])
    out = {(port["protocol"], port["port"]) for rule in allowed["egress"] for port in rule["ports"]}
    assert out == {("TCP", broker_port), ("UDP", 53), ("TCP", 53)}
    assert all(rule["to"] for rule in allowed["egress"])
    kafka = allowed["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    assert kafka["strimzi.io/cluster"] == cluster()
    assert SETTINGS.broker.startswith(f"{cluster()}-kafka-bootstrap:")
    (rule,) = allowed["ingress"]
    assert [port["port"] for port in rule["ports"]] == [part.container["ports"][0]["name"]]
    *clients, prometheus = rule["from"]
    assert {"namespaceSelector", "podSelector"} <= prometheus.keys()
    assert [peer["podSelector"]["matchLabels"] for peer in clients] == (
        [] if part is WORKERS else [{"adcascade-client": "true"}]
    )


def test_a_gateway_is_replicated_and_has_time_to_answer_its_last_requests() -> None:
    assert GATEWAYS.owner["spec"]["replicas"] >= 2
    patience = GATEWAYS.container["lifecycle"]["preStop"]["sleep"]["seconds"] + 5 + 30
    assert patience < GATEWAYS.pod["terminationGracePeriodSeconds"]


def test_the_user_of_the_gateways_has_the_rights_of_the_security_page() -> None:
    rights = {
        acl["resource"]["name"]: acl["operations"]
        for acl in manifest("KafkaUser", "adcascade-gateway")["spec"]["authorization"]["acls"]
        if (acl["resource"]["type"], acl["resource"]["patternType"]) == ("topic", "literal")
    }
    assert rights == {
        NAMES.arrivals: ["Describe", "Write"],
        NAMES.clicks: ["Describe", "Write"],
        NAMES.decisions: ["Describe", "Read"],
        NAMES.parameters: ["Describe", "Read"],
    }


# ── Kafka ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_topics_match_those_of_topics_create() -> None:
    declared = {each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "KafkaTopic"}
    partitions = declared[NAMES.arrivals]["partitions"]
    (replicas,) = {spec["replicas"] for spec in declared.values()}
    plan = kafka_topics.TopicLayout(partitions=partitions, replication=replicas)
    created = {
        topic.topic: (topic.num_partitions, topic.replication_factor, topic.config)
        for topic in kafka_topics.new_topics(plan.topics(NAMES, partitions), replicas)
    }
    assert created == {
        name: (spec["partitions"], spec["replicas"], {key: str(value) for key, value in spec["config"].items()})
        for name, spec in declared.items()
    }


def test_the_user_has_rights_on_the_topics_and_the_group_only() -> None:
    topics, group = manifest("KafkaUser")["spec"]["authorization"]["acls"]
    assert topics["resource"] == {"type": "topic", "name": f"{SETTINGS.prefix}.", "patternType": "prefix"}
    assert group["resource"] == {"type": "group", "name": SETTINGS.group, "patternType": "literal"}
    allowed = {*topics["operations"], *group["operations"]}
    assert not {"All", "Create", "Delete", "Alter", "AlterConfigs", "ClusterAction"} & allowed


def test_scaling_stays_within_the_partitions_and_uses_the_settings_of_the_workers() -> None:
    scaled = manifest("ScaledObject")["spec"]
    (arrivals,) = (each for each in manifests() if each["metadata"]["name"] == NAMES.arrivals)
    assert 2 <= scaled["minReplicaCount"] <= scaled["maxReplicaCount"] == arrivals["spec"]["partitions"]
    assert scaled["scaleTargetRef"]["name"] == WORKERS.name
    assert "replicas" not in WORKERS.owner["spec"], "an apply would undo the scaling"
    for trigger in scaled["triggers"]:
        assert all(type(value) is str for value in trigger["metadata"].values()), "KEDA rejects bare numbers"
        assert trigger["metadata"]["bootstrapServers"] == SETTINGS.broker
        assert trigger["metadata"]["consumerGroup"] == SETTINGS.group
        assert trigger["authenticationRef"]["name"] == manifest("TriggerAuthentication")["metadata"]["name"]
    assert {trigger["metadata"]["topic"] for trigger in scaled["triggers"]} == NAMES.inputs
    login = manifest("TriggerAuthentication")["spec"]
    (user,) = login["env"]
    assert user["containerName"] == WORKERS.container["name"]
    assert user["name"] in {entry["name"] for entry in WORKERS.container["env"]}
    mounted = set(mounted_files(WORKERS.pod).values())
    assert {(entry["name"], entry["key"]) for entry in login["secretTargetRef"]} <= mounted


# ── monitoring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prometheus_has_a_key_for_the_gateways_and_the_alerts_are_rendered() -> None:
    (endpoint,) = manifest("ServiceMonitor", "adcascade-gateway")["spec"]["endpoints"]
    secret, _ = mounted_files(GATEWAYS.pod)[GATEWAYS.settings.api_keys]
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "prometheus"}
    (rules,) = documents(DEPLOY / "prometheus/alerts.yml")
    assert manifest("PrometheusRule")["spec"] == rules, "run deploy/kubernetes/render"
