"""The schema of messages that are lists of records."""

from __future__ import annotations

from typing import Any

from faust.serializers.schemas import Schema


class ListSchema(Schema):  # type: ignore[type-arg]
    """Pass the list through: nothing is decoded here, so nothing can fail here.

    A decode error inside Faust would ack the message, that is lose the whole list.
    """

    def compile(self, app: Any, **_: Any) -> Any:
        """Return Faust's decode function."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:
            return create_event(None, message.value, None, message)

        return decode
