"""compose.yaml: valid, confined, pinned, and in agreement with the code about every name, port and setting."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from jsonschema.validators import validator_for
from prometheus_client import CollectorRegistry

from tests.deploy.files import (
    DEPLOY,
    ROOT,
    command_of,
    compose,
    documents,
    environment_of,
    environment_of_the_image,
    milliseconds,
    package_folder,
    settings_of,
)
from tests.programs import needs
from worker.cli.options.learning import read_arms
from worker.cli.traffic import _settings as traffic_settings
from worker.kafka.connection import Connection
from worker.kafka.faust.app import Options
from worker.web.server import operations

SERVICES: dict[str, Any] = compose()["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
WORKERS = {name: service for name, service in OURS.items() if service["command"] == ["worker"]}
ROUTES = operations(CollectorRegistry(), lambda: None)


def worker_settings() -> Any:
    (environment, *others) = (environment_of(service) for service in WORKERS.values())
    assert all(other == environment for other in others), "the workers of a group have the same settings"
    return settings_of(["worker"], environment)


def test_it_is_valid_by_the_schema_of_the_compose_specification() -> None:
    schema = json.loads(
        (package_folder("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text(encoding="utf-8")
    )
    assert [error.message for error in validator_for(schema)(schema).iter_errors(compose())] == []


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "kafka"), "only the start script of Kafka writes into its image"
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "user", "extra_hosts"} & service.keys()
    for mount in service.get("volumes", ()):
        assert "docker.sock" not in mount


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned(name: str) -> None:
    repository, colon, tag = SERVICES[name]["image"].partition(":")
    assert (bool(repository), colon) == (True, ":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


def test_kafka_is_the_release_that_the_tests_run_on() -> None:
    (version,) = re.findall(r"<kafka\.version>(.+)</", (DEPLOY / "kafka/pom.xml").read_text(encoding="utf-8"))
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{version}"


def test_published_ports_are_on_this_machine_only_and_the_others_have_no_way_out() -> None:
    published = {name: port for name, service in SERVICES.items() for port in service.get("ports", ())}
    assert published.keys() == {"kafka", "worker-1", "worker-2", "prometheus", "grafana"}
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published.values())
    assert len({port.split(":")[1] for port in published.values()}) == len(published)
    assert compose()["networks"]["inside"]["internal"] is True
    assert SERVICES["topics"]["networks"] == ["inside"]


# ── our own commands ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_known_to_its_command_and_makes_sense_to_it(name: str) -> None:
    service = OURS[name]
    assert command_of(service["command"]).run is not None
    options = settings_of(service["command"], environment_of(service))
    Connection(servers=tuple(options.broker.split(",")))
    listeners = SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")
    assert f"INSIDE://{options.broker}" in listeners
    assert {name for name, value in service["environment"].items() if value is None} <= {"ADCASCADE_TOKEN_SECRET"}


def test_the_traffic_is_of_the_world_that_the_workers_serve() -> None:
    worker = worker_settings()
    settings = traffic_settings(settings_of(["traffic"], environment_of(SERVICES["traffic"])))
    assert (settings.dim, settings.horizon, settings.repeats) == (worker.dim, worker.horizon, worker.repeats)
    assert settings.patience <= worker.session_timeout, "feedback after that trains nothing"
    served = read_arms(str(DEPLOY / "arms.json"))
    assert [(arm.arm, arm.reward) for arm in served] == [(arm.arm, arm.reward) for arm in settings.world().catalogue()]


def test_a_worker_reads_its_arms_from_a_file_that_is_mounted() -> None:
    for service in WORKERS.values():
        assert f"./arms.json:{worker_settings().catalog}:ro" in service["volumes"]


def test_a_worker_may_take_the_time_that_it_needs_to_stop() -> None:
    patience = 1000 * Options(connection=Connection(servers=("kafka:9092",)), learner=("true",)).stop_patience
    for service in WORKERS.values():
        assert patience < milliseconds(service["stop_grace_period"]) < 3 * patience


def test_health_is_asked_where_it_is_answered() -> None:
    port = worker_settings().web_port
    for service in WORKERS.values():
        (url,) = re.findall(r"http://[^\"]+", " ".join(service["healthcheck"]["test"]))
        address, _, path = url.removeprefix("http://").partition("/")
        assert address == f"127.0.0.1:{port}"
        assert f"/{path}" == "/readyz"
        assert f"/{path}" in ROUTES
        assert service["ports"][0].endswith(f":{port}")
    # The simulated users are asked by the image's own check, at the port of the image.
    traffic = settings_of(["traffic"], environment_of(SERVICES["traffic"]))
    assert "healthcheck" not in SERVICES["traffic"]
    assert str(traffic.metrics_port) == environment_of_the_image()["ADCASCADE_WEB_PORT"]


def test_nothing_starts_before_what_it_needs() -> None:
    needed = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    assert needed["topics"] == {"kafka": {"condition": "service_healthy"}}
    for worker in WORKERS:
        assert needed[worker] == {"topics": {"condition": "service_completed_successfully"}}
    assert needed["traffic"].keys() == {*WORKERS, "prometheus"}
    for wants in needed.values():
        for name, how in wants.items():
            if how["condition"] == "service_healthy":
                assert "test" in SERVICES[name]["healthcheck"]
            else:
                assert (SERVICES[name]["restart"], SERVICES[name]["healthcheck"]) == ("no", {"disable": True})


# ── what is watched ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_that_is_mounted_exists_and_every_volume_is_declared() -> None:
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


def test_prometheus_finds_every_worker_and_the_simulated_users() -> None:
    (config,) = documents(DEPLOY / "compose.prometheus.yml")
    (job,) = config["scrape_configs"]
    (lookup,), (static,) = job["dns_sd_configs"], job["static_configs"]
    assert lookup["port"] == worker_settings().web_port
    for service in WORKERS.values():
        assert service["networks"]["inside"]["aliases"] == lookup["names"]
    assert worker_settings().web_host == "0.0.0.0"
    traffic = SERVICES["traffic"]
    assert traffic["network_mode"] == "service:prometheus", "their loopback is one"
    assert static["targets"] == [f"127.0.0.1:{traffic['environment']['ADCASCADE_METRICS_PORT']}"]
    (plain,) = documents(DEPLOY / "prometheus/prometheus.yml")
    assert job["job_name"] == plain["scrape_configs"][0]["job_name"], "rules and dashboard speak of this job"
    assert config["global"] == plain["global"]


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    promtool = needs("promtool", package="prometheus")
    service = SERVICES["prometheus"]
    mounts = {rest.removesuffix(":ro"): DEPLOY / source for source, _, rest in map(_split, service["volumes"])}
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


def _split(mount: str) -> tuple[str, str, str]:
    return mount.partition(":")


def test_grafana_shows_the_dashboard_without_a_password() -> None:
    grafana = SERVICES["grafana"]
    (sources,) = documents(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
    assert SERVICES["prometheus"]["ports"][0].endswith(":9090")
    (providers,) = documents(DEPLOY / "grafana/provisioning/dashboards/adcascade.yml")
    for provider in providers["providers"]:
        assert f"./grafana/dashboards:{provider['options']['path']}:ro" in grafana["volumes"]
    dashboard = orjson.loads((DEPLOY / "grafana/dashboards/adcascade.json").read_bytes())
    head = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert f"http://127.0.0.1:3000/d/{dashboard['uid']} " in head
    environment = grafana["environment"]
    assert (environment["GF_AUTH_ANONYMOUS_ORG_ROLE"], environment["GF_AUTH_BASIC_ENABLED"]) == ("Viewer", "false")
    assert not [name for name in environment if "PASSWORD" in name]
