"""The description of the interface, OpenAPI 3.1, and the page to try it out, which loads nothing from elsewhere.

`schemas/openapi.json` is this description; a test keeps the two the same, and the routes too.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from worker import __version__
from worker.http.pages import BROWSER_HEADERS, Page, Route, page_of_file
from worker.http.problems import CONTENT_TYPE, PROBLEMS
from worker.http.requests import MOST_BATCH
from worker.stream.events import MODES, MOST
from worker.stream.session import ENDINGS

PATH: Final = "/v1/openapi.json"
FILES: Final = {
    "/v1/": ("try.html", "text/html; charset=utf-8"),
    "/v1/try.css": ("try.css", "text/css; charset=utf-8"),
    "/v1/try.js": ("try.js", "text/javascript; charset=utf-8"),
}

_TIME: Final = {
    "type": "integer",
    "minimum": 0,
    "maximum": MOST,
    "description": "Milliseconds since the epoch (UTC). The time of the server where it is left out.",
}
_ID: Final = {"type": "string", "minLength": 1, "maxLength": 128}


def description_routes() -> dict[str, Route]:
    """Return the routes of the description and of the page."""
    described = Page(body=orjson.dumps(openapi()), kind="application/json", headers=BROWSER_HEADERS)
    pages = {path: page_of_file("worker.http", *found) for path, found in FILES.items()}
    return {PATH: lambda _: described, **pages}


def openapi() -> dict[str, Any]:
    """Return the description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "adcascade",
            "version": __version__,
            "summary": "The next ad of a session, and what became of it.",
            "description": "A user arrives, and the answer is the ad to show. Send back whether it was clicked or "
            "passed over; the answer is the next ad, until there is a click or nothing left. Every request may be sent "
            "again, with the same answer. If there is none before the deadline of the server, fallback ads are "
            "answered, marked with `fallback`; feedback for them does not count.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "The key is the password."},
            },
            "parameters": {"session_id": {"name": "session_id", "in": "path", "required": True, "schema": _ID}},
            "schemas": _schemas(),
            "responses": {
                "Answer": _json("The current decision, or how the session ended.", "Answer"),
                "Answers": _json("One answer or problem for each request, in their order.", "Answers"),
                "Problem": _json("What is wrong, with a reason from a closed list.", "Problem", CONTENT_TYPE),
            },
        },
    }


def _paths() -> dict[str, Any]:
    named = {"$ref": "#/components/parameters/session_id"}
    return {
        "/v1/sessions": {"post": _operation("arrive", "A user arrives.", "Arrive", "Answer")},
        "/v1/sessions/{session_id}": {
            "get": _operation("session", "The current decision of a session.", None, "Answer"),
            "parameters": [named],
        },
        "/v1/sessions/{session_id}/feedback": {
            "post": _operation("feedback", "An ad was clicked or passed over.", "Feedback", "Answer"),
            "parameters": [named],
        },
        "/v1/batch/sessions": {"post": _operation("arriveBatch", "Several users arrive.", "ArriveBatch", "Answers")},
        "/v1/batch/feedback": {
            "post": _operation("feedbackBatch", "Feedback of several sessions.", "FeedbackBatch", "Answers")
        },
        PATH: {"get": _page("description", "This description.", "application/json")},
        "/metrics": {"get": _page("metrics", "Metrics for Prometheus.", "text/plain")},
        "/livez": {"get": _page("livez", "Whether the process answers.", "text/plain")},
        "/readyz": {"get": _page("readyz", "Whether it can take requests, and what is wrong.", "text/plain", 503)},
    }


def _operation(name: str, summary: str, body: str | None, answer: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": name, "summary": summary}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    operation["responses"] = {
        "200": {"$ref": f"#/components/responses/{answer}"},
        "default": {"$ref": "#/components/responses/Problem"},
    }
    return operation


def _page(name: str, summary: str, kind: str, other: int | None = None) -> dict[str, Any]:
    content = {"description": summary, "content": {kind: {}}}
    responses = {"200": content, **({str(other): content} if other else {})}
    return {"operationId": name, "summary": summary, "security": [], "responses": responses}


def _json(description: str, schema: str, kind: str = "application/json") -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _schemas() -> dict[str, Any]:
    arrive = _object(
        ["context"],
        session_id={**_ID, "description": "Unique for each session; the server makes one where it is left out."},
        context={
            "description": "The features of the user, in their order, or by their names.",
            "oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "object"}],
        },
        exclude={"type": "array", "items": _ID, "description": "Ads that must not be shown in this session."},
        occurred_at=_TIME,
    )
    feedback = _object(
        ["position", "arm", "clicked"],
        position={"type": "integer", "minimum": 1, "description": "The position of the decision."},
        arm={**_ID, "description": "The ad that was shown there."},
        clicked={"type": "boolean", "description": "false: seen and passed over."},
        token={"type": ["string", "null"], "description": "The token of the display, if decisions carry tokens."},
        occurred_at=_TIME,
    )
    named = {**feedback, "required": ["session_id", *feedback["required"]]}
    named["properties"] = {"session_id": _ID, **feedback["properties"]}
    return {
        "Arrive": arrive,
        "Feedback": feedback,
        "ArriveBatch": _batch(arrive),
        "FeedbackBatch": _batch(named),
        "Decision": _decision(),
        "Ended": _object(
            ["session_id", "ended"], session_id=_ID, ended={"enum": list(ENDINGS)}, fallback={"const": True}
        ),
        "Answer": {"oneOf": [_ref("Decision"), _ref("Ended")]},
        "Answers": _object(
            ["answers"], answers={"type": "array", "items": {"anyOf": [_ref("Answer"), _ref("Problem")]}}
        ),
        "Problem": _object(
            ["type", "title", "status", "reason"],
            type={"type": "string", "format": "uri"},
            title={"type": "string"},
            status={"type": "integer"},
            detail={"type": "string"},
            reason={"enum": sorted(PROBLEMS)},
        ),
    }


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _batch(request: dict[str, Any]) -> dict[str, Any]:
    return _object(["requests"], requests={"type": "array", "maxItems": MOST_BATCH, "items": request})


def _decision() -> dict[str, Any]:
    fields = {
        "session_id": _ID,
        "arrived_at": _TIME,
        "position": {"type": "integer", "minimum": 1},
        "arm": {"type": ["string", "null"], "description": "The ad to show now; null if none is eligible."},
        "slate": {"type": "array", "items": _ID, "description": "The ads of this and every later position."},
        "mode": {"enum": list(MODES), "description": "How the ad was chosen."},
        "propensity": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "parameters_version": {"type": "integer", "minimum": 0},
        "value": {"type": "number", "description": "The expected revenue from here on."},
    }
    tokens = {"type": "array", "items": {"type": "string"}, "description": "One for each ad of the slate."}
    marked = {"const": True, "description": "The deadline had come: feedback for these ads does not count."}
    return _object(list(fields), **fields, tokens=tokens, fallback=marked)
