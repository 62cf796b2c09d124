"""compose.yaml: valid, confined, pinned, and consistent with the code in names, ports and settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for
from prometheus_client import CollectorRegistry

from tests.deploy.files import (
    DEPLOY,
    ROOT,
    compose,
    dockerfile,
    documents,
    environment_of,
    environment_of_the_image,
    package_folder,
    settings_of,
)
from tests.programs import needs
from worker.cli.options.catalog import read_arms
from worker.cli.options.parser import filled
from worker.cli.options.times import duration
from worker.http.pages import operations
from worker.kafka.app import STOP_TIMEOUT
from worker.kafka.connection import Connection
from worker.simulation.traffic.generator import TrafficSettings

SERVICES: dict[str, Any] = compose()["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
SERVE = OURS["serve"]
ON_KAFKA = {name: service for name, service in OURS.items() if service is not SERVE}
WORKERS = {name: service for name, service in OURS.items() if service["command"] == ["worker"]}


def worker_settings() -> Any:
    (environment, *others) = (environment_of(service) for service in WORKERS.values())
    assert all(other == environment for other in others)
    return settings_of(["worker"], environment)


def test_it_follows_the_compose_specification() -> None:
    schema = json.loads(
        (package_folder("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text(encoding="utf-8")
    )
    assert [error.message for error in validator_for(schema)(schema).iter_errors(compose())] == []


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "kafka")
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "user", "extra_hosts"} & service.keys()
    for mount in service.get("volumes", ()):
        assert "docker.sock" not in mount
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), "pinned"


def test_kafka_is_the_release_of_the_tests() -> None:
    (version,) = re.findall(r"<kafka\.version>(.+)</", (DEPLOY / "kafka/pom.xml").read_text(encoding="utf-8"))
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{version}"


def test_ports_are_published_on_loopback_only() -> None:
    published = {name: port for name, service in SERVICES.items() for port in service.get("ports", ())}
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published.values())
    assert len({port.split(":")[1] for port in published.values()}) == len(published)
    assert compose()["networks"]["inside"]["internal"] is True


# ── adcascade ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ON_KAFKA)
def test_every_command_accepts_its_variables(name: str) -> None:
    service = ON_KAFKA[name]
    options = settings_of(service["command"], environment_of(service))
    Connection(servers=tuple(options.broker.split(",")))
    listeners = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
    assert f"INSIDE://{options.broker}" in listeners
    assert {name for name, value in service["environment"].items() if value is None} <= {"ADCASCADE_TOKEN_SECRET"}


def test_serve_accepts_its_variables_and_keeps_its_state_in_a_volume() -> None:
    options = settings_of(SERVE["command"], environment_of(SERVE))
    assert f"served:{options.state}" in SERVE["volumes"]
    assert f"./arms.json:{options.catalog}:ro" in SERVE["volumes"]
    (state,) = (each.text.split()[-1] for each in dockerfile() if each.name == "COPY" and "--chown" in each.text)
    assert options.state == state, "a new volume takes the owner of this folder"
    assert (SERVE["profiles"], "depends_on" in SERVE) == (["serve"], False), "it starts alone, and only when asked for"


@pytest.mark.parametrize("name", ["gateway", "serve", *WORKERS])
def test_http_is_checked_for_readiness_and_published_on_its_port(name: str) -> None:
    service = SERVICES[name]
    options = settings_of(service["command"], environment_of(service))
    host, port = (options.web_host, options.web_port) if name in WORKERS else (options.host, options.port)
    assert host == "0.0.0.0"
    assert f'"http://127.0.0.1:{port}/readyz"' in service["healthcheck"]["test"][-1]
    assert "/readyz" in operations(CollectorRegistry(), lambda: None)
    assert service["ports"][0].endswith(f":{port}")


def test_the_traffic_uses_the_health_check_of_the_image() -> None:
    traffic = settings_of(["traffic"], environment_of(SERVICES["traffic"]))
    assert str(traffic.metrics_port) == environment_of_the_image()["ADCASCADE_WEB_PORT"]


@pytest.mark.parametrize("name", ["gateway", "serve"])
def test_the_example_of_a_request_is_for_the_published_address(name: str) -> None:
    published = SERVICES[name]["ports"][0].rpartition(":")[0]
    assert f"http://{published}/v1/" in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")


def test_traffic_and_workers_agree_on_arms_and_settings() -> None:
    worker = worker_settings()
    settings = filled(TrafficSettings, settings_of(["traffic"], environment_of(SERVICES["traffic"])))
    assert (settings.dim, settings.horizon, settings.repeats) == (worker.dim, worker.horizon, worker.repeats)
    assert settings.patience <= worker.session_timeout
    served = read_arms(str(DEPLOY / "arms.json"))
    assert [(arm.arm, arm.reward) for arm in served] == [(arm.arm, arm.reward) for arm in settings.world().catalogue()]


def test_a_worker_has_its_catalog_and_time_to_shut_down() -> None:
    for service in WORKERS.values():
        assert f"./arms.json:{worker_settings().catalog}:ro" in service["volumes"]
        assert duration(service["stop_grace_period"]) > 1000 * STOP_TIMEOUT


@pytest.mark.parametrize("name", SERVICES)
def test_every_dependency_can_be_met(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        if how["condition"] == "service_healthy":
            assert "test" in SERVICES[needed]["healthcheck"]
        else:
            assert (SERVICES[needed]["restart"], SERVICES[needed]["healthcheck"]) == ("no", {"disable": True})


# ── monitoring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_mount_exists() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source, _, rest = mount.partition(":")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                assert rest.endswith(":ro")
            else:
                assert source in compose()["volumes"]
    for service in OURS.values():
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_prometheus_scrapes_every_worker_the_gateway_and_the_simulated_traffic() -> None:
    (config,) = documents(DEPLOY / "compose.prometheus.yml")
    (job,) = config["scrape_configs"]
    (lookup, gateways), (static,) = job["dns_sd_configs"], job["static_configs"]
    assert lookup["port"] == worker_settings().web_port
    for service in WORKERS.values():
        assert service["networks"]["inside"]["aliases"] == lookup["names"]
    gateway = SERVICES["gateway"]
    assert gateways["names"] == ["gateway"]
    assert str(gateways["port"]) == gateway["environment"]["ADCASCADE_PORT"]
    assert "inside" in gateway["networks"]
    traffic = SERVICES["traffic"]
    assert traffic["network_mode"] == "service:prometheus"
    assert static["targets"] == [f"127.0.0.1:{traffic['environment']['ADCASCADE_METRICS_PORT']}"]
    (plain,) = documents(DEPLOY / "prometheus/prometheus.yml")
    assert (job["job_name"], config["global"]) == (plain["scrape_configs"][0]["job_name"], plain["global"])


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    promtool = needs("promtool", package="prometheus")
    service = SERVICES["prometheus"]
    volumes = [mount.split(":") for mount in service["volumes"]]
    mounts = {inside: DEPLOY / source for source, inside, *_ in volumes}
    (flag,) = (word for word in service["command"] if word.startswith("--config.file="))
    text = mounts[flag.removeprefix("--config.file=")].read_text(encoding="utf-8")
    (rules,) = re.findall(r"^  - (/.*)$", text, flags=re.MULTILINE)
    here = mounts[str(Path(rules).parent)] / Path(rules).name
    (tmp_path / "prometheus.yml").write_text(text.replace(rules, str(here)), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


def test_grafana_shows_the_dashboard_without_a_login() -> None:
    grafana = SERVICES["grafana"]
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")
    (providers,) = documents(DEPLOY / "grafana/provisioning/dashboards/adcascade.yml")
    for provider in providers["providers"]:
        assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
