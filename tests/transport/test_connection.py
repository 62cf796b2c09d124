"""Connections that make no sense are refused; passwords are not shown."""

from __future__ import annotations

import pytest

from worker.errors import InputError
from worker.kafka.connection import Connection


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"servers": ()}, "no broker"),
        ({"servers": ("kafka",)}, "not a broker address"),
        ({"servers": ("k:1",), "username": "me"}, "needs a password"),
        ({"servers": ("k:1",), "username": "me", "password": "x"}, "in clear"),
        ({"servers": ("k:1",), "mechanism": "GSSAPI"}, "unknown SASL mechanism"),
    ],
)
def test_a_connection_that_makes_no_sense_is_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Connection(**arguments)  # type: ignore[arg-type]


def test_a_password_is_never_shown() -> None:
    connection = Connection(servers=("k:1",), username="me", password="hush-hush", clear_credentials=True)
    assert "hush-hush" not in repr(connection)
    assert connection.arguments()["security_protocol"] == "SASL_PLAINTEXT"
