"""The files of deploy/ as the tests read them, and the settings that the code makes of them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.programs import lacking
from worker.cli.main import COMMANDS, load
from worker.cli.options.parser import CONFIG, build_parser
from worker.cli.options.places import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def documents(path: Path) -> list[Any]:
    """Return the YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@cache
def compose() -> Any:
    return documents(DEPLOY / "compose.yaml")[0]


@cache
def kustomization() -> Any:
    return documents(KUBERNETES / "kustomization.yaml")[0]


@cache
def manifests() -> tuple[Any, ...]:
    """Return all objects that kustomize would apply, with the labels that it adds."""
    (pairs,) = (entry["pairs"] for entry in kustomization()["labels"])
    found = [document for name in kustomization()["resources"] for document in documents(KUBERNETES / name)]
    for document in found:
        document["metadata"].setdefault("labels", {}).update(pairs)
    return tuple(found)


def manifest(kind: str, name: str = "adcascade") -> Any:
    (found,) = (each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def mounted_files(pod: Any) -> dict[str, tuple[str, str]]:
    """Return the files of a pod's container from secrets and config maps, with the object and the key of each."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    generated = {each["name"]: each["files"] for each in kustomization()["configMapGenerator"]}
    files = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "secret" in volume:
            for item in volume["secret"]["items"]:
                files[f"{mount['mountPath']}/{item['path']}"] = (volume["secret"]["secretName"], item["key"])
        elif "configMap" in volume:
            name = volume["configMap"]["name"]
            files |= {f"{mount['mountPath']}/{file}": (name, file) for file in generated[name]}
    return files


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value with the keys that lead to it; items of a list have the path of the list."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from leaves(value, path)
    else:
        yield path, node


class Instruction(NamedTuple):
    """An instruction of a Dockerfile; `stage` counts the FROMs."""

    stage: int
    name: str
    text: str


@cache
def dockerfile() -> tuple[Instruction, ...]:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    joined = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    found: list[Instruction] = []
    for line in filter(str.strip, joined.splitlines()):
        name, _, text = line.strip().partition(" ")
        stage = (found[-1].stage if found else 0) + (name == "FROM")
        found.append(Instruction(stage, name, " ".join(text.split())))
    return tuple(found)


def environment_of_the_image() -> dict[str, str]:
    """Return the variables that the last stage of the Dockerfile sets."""
    last = dockerfile()[-1].stage
    texts = [each.text for each in dockerfile() if (each.stage, each.name) == (last, "ENV")]
    return dict(pair.split("=", 1) for text in texts for pair in shlex.split(text))


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings_of(words: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """Return the settings of a command line in an environment; fail on variables that this command does not know."""
    parsed = build_parser(load(words[0]), "adcascade").parse_args(words[1:])
    known = {option.variable for option in parsed.command_spec.options} | {CONFIG.variable}
    assert {name for name in environment if name.startswith("ADCASCADE_")} <= known
    return resolve(parsed, environment)


#: The options of each command and action.
OPTIONS = [each.options for command in map(load, COMMANDS) for each in command.actions or (command,)]


def environment_of(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a compose service, without those inherited from the shell."""
    return {name: value for name, value in service.get("environment", {}).items() if value is not None}


def package_folder(name: str) -> Path:
    """Return the folder of an optional package; without it skip the test, or fail it under CI=true."""
    found = find_spec(name)
    if found is None or found.origin is None:
        lacking(f"{name} is not installed (pip install 'adcascade[test]')")
    return Path(found.origin).parent
