"""Write `schemas/`: a JSON Schema (2020-12) per kind of record, from the types that decode it.

`python schemas/make.py` writes the files; a test compares them with the code. The AsyncAPI document,
which describes the topics, and the OpenAPI document are written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final

import msgspec

from worker.stream.events import Arrival, Decision, Episode, Feedback, JournalEvent
from worker.stream.version_records import VersionRecord

#: The types of the records, by the name of their schema.
RECORDS: Final[Mapping[str, Any]] = {
    "arrival": Arrival,
    "click": Feedback,
    "decision": Decision,
    "episode": Episode,
    "journal": JournalEvent,
    "parameters": VersionRecord,
}

JOURNAL: Final = {
    "title": "Journal record",
    "description": (
        "Input of the learner. Topic: journal, one partition. Key: session_id for opened and feedback, otherwise none. "
        "Unknown fields are ignored."
    ),
}


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by name."""
    return {name: _schema(name, kind) for name, kind in RECORDS.items()}


def _schema(name: str, kind: Any) -> dict[str, Any]:
    (whole,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for part, definition in parts.items():
        if "description" in definition:
            definition["description"] = _flowing(definition["description"])
        if part in _WIDENED:
            _WIDENED[part](definition)
    # A record of one kind stands at the top.
    whole = parts.pop(whole["$ref"].removeprefix("#/$defs/")) if "$ref" in whole else JOURNAL | whole
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:adcascade:schema:{name}"}
    return {**head, **whole, **({"$defs": parts} if parts else {})}


def _flowing(docstring: str) -> str:
    """Return a docstring as running text, without its examples."""
    paragraphs = cleandoc(docstring).split("\n\n")
    return " ".join(" ".join(text.split()) for text in paragraphs if not text.startswith(">>>"))


# ── what the types do not say ────────────────────────────────────────────────────────────────────────────────────────


def _arrival(definition: dict[str, Any]) -> None:
    """Allow an object for a context, as with declared features."""
    context = definition["properties"]["context"]
    number = context.pop("items")
    del context["type"]
    values = {"anyOf": [number, {"type": ["string", "boolean"]}]}
    context["anyOf"] = [{"type": "array", "items": number}, {"type": "object", "additionalProperties": values}]


def _opened(definition: dict[str, Any]) -> None:
    """Allow null for a number that is missing."""
    definition["properties"]["context"]["items"]["type"] = ["number", "null"]


def _command(definition: dict[str, Any]) -> None:
    """Demand a version of a rollback, and of nothing else."""
    definition["if"] = {"properties": {"action": {"const": "rollback"}}}
    definition["then"] = {"required": ["version"], "properties": {"version": {"type": "integer"}}}
    definition["else"] = {"properties": {"version": {"type": "null"}}}


def _version(definition: dict[str, Any]) -> None:
    """Demand the arrays of the model."""
    definition["if"] = {"required": ["model"], "properties": {"model": {"const": "personal"}}}
    definition["then"] = _arrays(
        ["shared", "positions", "own", "context_groups", "ad_groups"],
        ["features", "prior", "information", "crossing", "inherited"],
    )
    definition["else"] = _arrays(["theta_context", "theta_arms"], ["context", "cross", "arms", "prior"])


def _arrays(estimate: list[str], precision: list[str]) -> dict[str, Any]:
    return {"required": [*estimate, "precision"], "properties": {"precision": {"required": precision}}}


_WIDENED: Final = {"Arrival": _arrival, "Opened": _opened, "Command": _command, "VersionRecord": _version}


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def files() -> dict[str, str]:
    """Return the content of the files by name."""
    return {f"{name}.json": json.dumps(one, indent=2, ensure_ascii=False) + "\n" for name, one in schemas().items()}


if __name__ == "__main__":
    for file, text in files().items():
        Path(__file__).with_name(file).write_text(text, encoding="utf-8")
