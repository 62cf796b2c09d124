"""deploy/kubernetes: valid, confined, and consistent with the code in topics, ports, settings and rights."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.deploy.files import (
    DEPLOY,
    KUBERNETES,
    container,
    dockerfile,
    documents,
    kustomization,
    manifest,
    manifests,
    mounted_files,
    package_folder,
    pod,
    settings_of,
)
from worker.cli.options.catalog import read_arms
from worker.http.pages import HEALTH, operations
from worker.kafka import topics as kafka_topics
from worker.kafka.app import STOP_TIMEOUT
from worker.kafka.connection import Connection
from worker.stream.topology import Topics

STATEFUL_SET = manifest("StatefulSet")
POD = pod()
GATEWAY = manifest("Deployment", "adcascade-gateway")
GATEWAY_POD = pod("Deployment", "adcascade-gateway")
PODS = {"worker": POD, "gateway": GATEWAY_POD}
POD_LABELS = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
TOML = KUBERNETES / "worker.toml"
GATEWAY_TOML = KUBERNETES / "gateway.toml"
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


def settings() -> Any:
    environment = {entry["name"]: entry["value"] for entry in container()["env"]}
    return settings_of(container()["args"], environment, "--config", str(TOML))


def gateway_settings() -> Any:
    return settings_of(container(GATEWAY_POD)["args"], {}, "--config", str(GATEWAY_TOML))


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
    assert {container(each)["image"] for each in PODS.values()} == {image["name"]}
    assert image["newTag"][0].isdigit()


def test_every_selector_matches_its_pods_only() -> None:
    gateways = GATEWAY["spec"]["template"]["metadata"]["labels"]
    for owner, own, others in ((STATEFUL_SET, POD_LABELS, gateways), (GATEWAY, gateways, POD_LABELS)):
        name = owner["metadata"]["name"]
        for selector in (
            owner["spec"]["selector"]["matchLabels"],
            manifest("Service", name)["spec"]["selector"],
            manifest("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
            manifest("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
        ):
            assert matches(selector, own)
            assert not matches(selector, others)
        assert matches(manifest("NetworkPolicy", "adcascade-deny")["spec"]["podSelector"]["matchLabels"], own)


# ── workers and gateways ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "toml", "secret", "key"),
    [
        ("adcascade", TOML, "adcascade-token", "secret"),
        ("adcascade-gateway", GATEWAY_TOML, "adcascade-api-keys", "keys"),
    ],
)
def test_every_setting_is_accepted_and_every_file_is_mounted(name: str, toml: Path, secret: str, key: str) -> None:
    of = POD if toml is TOML else GATEWAY_POD
    options, files = settings() if toml is TOML else gateway_settings(), mounted_files(of)
    assert tomllib.loads(toml.read_text(encoding="utf-8")).keys() <= vars(options).keys()
    Connection(servers=tuple(options.broker.split(",")))
    assert (options.broker, options.prefix) == (settings().broker, settings().prefix)
    user = manifest("KafkaUser", name)
    assert options.sasl_username == user["metadata"]["name"]
    assert options.sasl_mechanism.lower() == user["spec"]["authentication"]["type"]
    assert (options.tls, options.allow_plaintext_credentials) == (True, False)
    assert files[options.tls_ca] == (f"{cluster()}-cluster-ca-cert", "ca.crt")
    assert files[options.sasl_password_file] == (name, "password")
    assert files[options.token_secret_file if toml is TOML else options.api_keys] == (secret, key)
    (config,) = (entry["value"] for entry in container(of)["env"] if entry["name"] == "ADCASCADE_CONFIG")
    assert files[config][1] == toml.name
    text = (KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"create secret generic {secret} --from-file={key}" in text
    assert all(mount.get("readOnly") or mount["name"] == "tmp" for mount in container(of)["volumeMounts"])


def test_a_worker_has_its_catalog_and_time_to_shut_down() -> None:
    assert settings().catalog in mounted_files(POD)
    assert read_arms(str(KUBERNETES / "arms.json"))
    assert POD["terminationGracePeriodSeconds"] > STOP_TIMEOUT


def test_probes_and_ports_match_the_web_server() -> None:
    probes = {probe: container()[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert [get["path"] for get in probes.values()] == ["/livez", "/readyz", "/livez"]
    (port,) = container()["ports"]
    assert port["containerPort"] == settings().web_port
    (endpoint,) = manifest("ServiceMonitor")["spec"]["endpoints"]
    assert {"/livez", "/readyz", endpoint["path"]} <= operations(CollectorRegistry(), lambda: None).keys()
    (service_port,) = manifest("Service")["spec"]["ports"]
    assert {get["port"] for get in probes.values()} == {port["name"]} == {service_port["targetPort"]}
    assert endpoint["port"] == service_port["name"]
    assert settings().web_host == "0.0.0.0"


@pytest.mark.parametrize("name", PODS)
def test_the_pods_are_confined(name: str) -> None:
    of = PODS[name]
    assert of["automountServiceAccountToken"] is False
    assert of["securityContext"]["runAsNonRoot"] is True
    assert of["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & of.keys()
    assert container(of)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container(of)["resources"]["limits"]
    user = f"{of['securityContext']['runAsUser']}:{of['securityContext']['runAsGroup']}"
    assert [each.text for each in dockerfile() if each.name == "USER"] == [user]


def test_the_network_allows_only_kafka_dns_and_prometheus() -> None:
    denied = manifest("NetworkPolicy", "adcascade-deny")["spec"]
    assert denied["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & denied.keys()
    allowed = manifest("NetworkPolicy")["spec"]
    broker_port = int(settings().broker.rpartition(":")[2])
    out = {(port["protocol"], port["port"]) for rule in allowed["egress"] for port in rule["ports"]}
    assert out == {("TCP", broker_port), ("UDP", 53), ("TCP", 53)}
    assert all(rule["to"] for rule in allowed["egress"])
    (rule,) = allowed["ingress"]
    assert [port["port"] for port in rule["ports"]] == [container()["ports"][0]["name"]]
    assert all({"namespaceSelector", "podSelector"} <= peer.keys() for peer in rule["from"])
    kafka = allowed["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    assert kafka["strimzi.io/cluster"] == cluster()
    assert settings().broker.startswith(f"{cluster()}-kafka-bootstrap:")


def test_a_gateway_takes_requests_when_it_is_ready_and_keeps_answering_without_kafka() -> None:
    gateway = container(GATEWAY_POD)
    probes = {probe: gateway[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert [get["path"] for get in probes.values()] == ["/readyz", "/livez", "/livez"]
    assert {get["path"] for get in probes.values()} <= set(HEALTH), "the kubelet has no key"
    (port,) = gateway["ports"]
    (service_port,) = manifest("Service", "adcascade-gateway")["spec"]["ports"]
    assert port["containerPort"] == gateway_settings().port
    assert {get["port"] for get in probes.values()} == {port["name"]} == {service_port["targetPort"]}
    assert gateway_settings().host == "0.0.0.0"
    assert GATEWAY["spec"]["replicas"] >= 2
    patience = gateway["lifecycle"]["preStop"]["sleep"]["seconds"] + 5 + 30
    assert patience < GATEWAY_POD["terminationGracePeriodSeconds"]


def test_clients_and_prometheus_reach_the_gateways_and_nobody_else() -> None:
    workers = manifest("NetworkPolicy")["spec"]
    gateways = manifest("NetworkPolicy", "adcascade-gateway")["spec"]
    assert gateways["egress"] == workers["egress"]
    (rule,), (scrapes,) = gateways["ingress"], workers["ingress"]
    clients, prometheus = rule["from"]
    assert [prometheus] == scrapes["from"]
    assert clients["podSelector"]["matchLabels"] == {"adcascade-client": "true"}
    assert [port["port"] for port in rule["ports"]] == [container(GATEWAY_POD)["ports"][0]["name"]]


def test_the_user_of_the_gateways_has_the_rights_of_the_security_page() -> None:
    names = Topics(gateway_settings().prefix)
    rights = {
        acl["resource"]["name"]: acl["operations"]
        for acl in manifest("KafkaUser", "adcascade-gateway")["spec"]["authorization"]["acls"]
        if (acl["resource"]["type"], acl["resource"]["patternType"]) == ("topic", "literal")
    }
    assert rights == {
        names.arrivals: ["Describe", "Write"],
        names.clicks: ["Describe", "Write"],
        names.decisions: ["Describe", "Read"],
        names.parameters: ["Describe", "Read"],
    }


# ── Kafka ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_topics_match_those_of_topics_create() -> None:
    declared = {each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "KafkaTopic"}
    names = Topics(settings().prefix)
    partitions = declared[names.arrivals]["partitions"]
    (replicas,) = {spec["replicas"] for spec in declared.values()}
    plan = kafka_topics.TopicLayout(partitions=partitions, replication=replicas)
    created = {
        topic.topic: (topic.num_partitions, topic.replication_factor, topic.config)
        for topic in kafka_topics.new_topics(plan.topics(names, partitions), replicas)
    }
    assert created == {
        name: (spec["partitions"], spec["replicas"], {key: str(value) for key, value in spec["config"].items()})
        for name, spec in declared.items()
    }


def test_the_user_has_rights_on_the_topics_and_the_group_only() -> None:
    topics, group = manifest("KafkaUser")["spec"]["authorization"]["acls"]
    assert topics["resource"] == {"type": "topic", "name": f"{settings().prefix}.", "patternType": "prefix"}
    assert group["resource"] == {"type": "group", "name": settings().group, "patternType": "literal"}
    allowed = {*topics["operations"], *group["operations"]}
    assert not {"All", "Create", "Delete", "Alter", "AlterConfigs", "ClusterAction"} & allowed


def test_scaling_stays_within_the_partitions_and_uses_the_settings_of_the_workers() -> None:
    scaled = manifest("ScaledObject")["spec"]
    names, options = Topics(settings().prefix), settings()
    (arrivals,) = (each for each in manifests() if each["metadata"]["name"] == names.arrivals)
    assert 2 <= scaled["minReplicaCount"] <= scaled["maxReplicaCount"] == arrivals["spec"]["partitions"]
    assert scaled["scaleTargetRef"]["name"] == STATEFUL_SET["metadata"]["name"]
    assert "replicas" not in STATEFUL_SET["spec"], "an apply would undo the scaling"
    for trigger in scaled["triggers"]:
        assert all(type(value) is str for value in trigger["metadata"].values()), "KEDA rejects bare numbers"
        assert trigger["metadata"]["bootstrapServers"] == options.broker
        assert trigger["metadata"]["consumerGroup"] == options.group
        assert trigger["authenticationRef"]["name"] == manifest("TriggerAuthentication")["metadata"]["name"]
    assert {trigger["metadata"]["topic"] for trigger in scaled["triggers"]} == names.inputs
    login = manifest("TriggerAuthentication")["spec"]
    (user,) = login["env"]
    assert user["containerName"] == container()["name"]
    assert user["name"] in {entry["name"] for entry in container()["env"]}
    mounted = {
        (volume["secret"]["secretName"], item["key"])
        for volume in POD["volumes"]
        if "secret" in volume
        for item in volume["secret"]["items"]
    }
    assert {(entry["name"], entry["key"]) for entry in login["secretTargetRef"]} <= mounted


# ── monitoring ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["adcascade", "adcascade-gateway"])
def test_prometheus_scrapes_both_services_under_the_job_name_of_the_rules(name: str) -> None:
    labels, monitor = manifest("Service", name)["metadata"]["labels"], manifest("ServiceMonitor", name)["spec"]
    assert matches(monitor["selector"]["matchLabels"], labels)
    (plain,) = documents(DEPLOY / "prometheus/prometheus.yml")
    assert labels[monitor["jobLabel"]] == plain["scrape_configs"][0]["job_name"]


def test_prometheus_has_a_key_for_the_gateways_and_the_alerts_are_rendered() -> None:
    (endpoint,) = manifest("ServiceMonitor", "adcascade-gateway")["spec"]["endpoints"]
    secret, _ = mounted_files(GATEWAY_POD)[gateway_settings().api_keys]
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "prometheus"}
    (rules,) = documents(DEPLOY / "prometheus/alerts.yml")
    assert manifest("PrometheusRule")["spec"] == rules, "run deploy/kubernetes/render"
