"""Tokens: proof that feedback answers a real display.

A token is ``<arrived_at>.<signature>``. The signature is HMAC-SHA256, cut to 128 bits, in base64url without padding,
over session, position, arm and arrival time. Each part is preceded by its length (or has a fixed width), so that no
two displays share a message.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from struct import pack
from typing import Final

from worker.errors import InputError
from worker.secret import Secret
from worker.stream.events import MOST

#: Shortest secret that is accepted, in bytes.
LEAST: Final = 16

# Keeps these signatures apart from any other use of the same secret.
_PURPOSE: Final = b"adcascade token 1\x00"
_SIGNATURE_BYTES: Final = 16


def token_secret(value: Secret | bytes) -> Secret:
    """Return `value` as a secret that can sign tokens; raise `InputError` if it is too short."""
    secret = value if isinstance(value, Secret) else Secret(value)
    if len(secret.reveal()) < LEAST:
        raise InputError(f"the token secret must have at least {LEAST} bytes, not {len(secret.reveal())}")
    return secret


def make_token(secret: Secret | bytes, *, session_id: str, position: int, arm: str, arrived_at: int) -> str:
    """Return the token of one display.

    >>> make_token(Secret(b"0123456789abcdef"), session_id="s", position=1, arm="a", arrived_at=1700000000000)[:14]
    '1700000000000.'
    """
    return f"{arrived_at}.{_signature(_key(secret), session_id, position, arm, arrived_at)}"


def slate_tokens(
    secret: Secret | bytes, *, session_id: str, slate: Sequence[str], arrived_at: int, first: int = 1
) -> tuple[str, ...]:
    """Return one token per arm of a slate that starts at position `first`."""
    key = _key(secret)
    return tuple(
        f"{arrived_at}.{_signature(key, session_id, position, arm, arrived_at)}"
        for position, arm in enumerate(slate, start=first)
    )


def check_token(secret: Secret | bytes, token: str | None, *, session_id: str, position: int, arm: str) -> int | None:
    """Return the arrival time that a token vouches for, or None if it is missing, malformed, or not of this display.

    >>> secret = Secret(b"0123456789abcdef")
    >>> token = make_token(secret, session_id="s", position=1, arm="a", arrived_at=1700000000000)
    >>> check_token(secret, token, session_id="s", position=1, arm="a")
    1700000000000
    >>> check_token(secret, token, session_id="s", position=2, arm="a") is None
    True
    """
    if token is None or not token.isascii():
        return None
    time, _, signature = token.partition(".")
    # One spelling per time: no sign, no leading zero, no more digits than the largest time has.
    if not time.isdigit() or len(time) > len(str(MOST)) or (time[0] == "0" and time != "0"):
        return None
    arrived_at = int(time)
    if arrived_at > MOST or not 0 < position <= MOST:
        return None
    expected = _signature(_key(secret), session_id, position, arm, arrived_at)
    return arrived_at if hmac.compare_digest(signature, expected) else None


def _key(secret: Secret | bytes) -> bytes:
    return token_secret(secret).reveal()


def _signature(key: bytes, session_id: str, position: int, arm: str, arrived_at: int) -> str:
    session, ad = session_id.encode(), arm.encode()
    message = _PURPOSE + pack(">QQII", arrived_at, position, len(session), len(ad)) + session + ad
    return urlsafe_b64encode(hmac.digest(key, message, "sha256")[:_SIGNATURE_BYTES])[:-2].decode("ascii")
