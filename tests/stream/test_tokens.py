from __future__ import annotations

import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from worker.secret import Secret
from worker.stream.events import MOST
from worker.stream.feedback import check_token, make_token

SECRET = Secret(b"correct horse battery staple")
NOW = 1_700_000_000_000

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
displays = st.tuples(texts, st.integers(1, 50), texts, st.integers(0, MOST))


def token_of(display: tuple[str, int, str, int], secret: Secret = SECRET) -> str:
    session_id, position, arm, arrived_at = display
    return make_token(secret, session_id=session_id, position=position, arm=arm, arrived_at=arrived_at)


def check(token: str | None, display: tuple[str, int, str, int], secret: Secret = SECRET) -> int | None:
    return check_token(secret, token, session_id=display[0], position=display[1], arm=display[2])


@given(display=displays)
def test_a_token_proves_the_arrival_of_its_own_display(display: tuple[str, int, str, int]) -> None:
    assert check(token_of(display), display) == display[3]


@given(display=displays, other=displays)
def test_a_token_proves_no_other_display(display, other) -> None:
    assume(display[:3] != other[:3])
    assert check(token_of(display), other) is None


def test_text_moved_from_one_part_to_the_next_changes_the_token() -> None:
    split = [token_of(("ab"[:cut], 1, "ab"[cut:], NOW)) for cut in range(3)]
    assert len(set(split)) == 3
    assert token_of(("s1", 1, "a", NOW)) != token_of(("s", 11, "a", NOW))


@given(display=displays, time=st.integers(0, MOST))
def test_another_arrival_time_does_not_fit_the_signature(display: tuple[str, int, str, int], time: int) -> None:
    assume(time != display[3])
    forged = f"{time}.{token_of(display).partition('.')[2]}"
    assert check(forged, display) is None


@given(display=displays)
def test_another_secret_makes_and_accepts_other_tokens(display: tuple[str, int, str, int]) -> None:
    other = Secret(b"another secret of enough bytes")
    assert token_of(display, other) != token_of(display)
    assert check(token_of(display, other), display) is None


@given(token=st.none() | st.text() | st.from_regex(r"[0-9]{0,20}\.[A-Za-z0-9_-]{0,30}", fullmatch=True))
def test_whatever_is_sent_as_a_token_is_checked_without_an_error(token: str | None) -> None:
    assert check(token, ("s", 1, "a", NOW)) is None


@given(data=st.data())
def test_a_token_changed_anywhere_is_not_accepted(data: st.DataObject) -> None:
    display = ("s", 1, "a", NOW)
    token = token_of(display)
    at = data.draw(st.integers(0, len(token) - 1))
    character = data.draw(st.characters(exclude_categories=["Cs"]))
    assume(character != token[at])
    assert check(token[:at] + character + token[at + 1 :], display) is None
    assert check(token[:at], display) is None
    assert check(token + character, display) is None


@pytest.mark.parametrize("time", ["", "01700000000000", "+1700000000000", "-1", "1_700", "٣", "9" * 400, "1e3"])
def test_an_arrival_time_has_one_spelling(time: str) -> None:
    signature = token_of(("s", 1, "a", NOW)).partition(".")[2]
    assert check(f"{time}.{signature}", ("s", 1, "a", NOW)) is None


@pytest.mark.parametrize("position", [0, -1, 2**64, 10**30])
def test_a_position_that_cannot_be_is_not_accepted(position: int) -> None:
    assert check(token_of(("s", 1, "a", NOW)), ("s", position, "a", NOW)) is None


def test_the_tokens_of_displays_made_before_an_upgrade_stay_valid() -> None:
    token = make_token(Secret(b"0123456789abcdef"), session_id="zoë", position=2, arm="shoes", arrived_at=NOW)
    assert token == "1700000000000.vclVO-DIZq11XDr59XH_sg"


def test_a_secret_is_never_printed() -> None:
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", f"{SECRET!r:>40}", repr([SECRET]), repr({"s": SECRET})):
        assert "horse" not in text
        assert "…" in text
    assert not hasattr(SECRET, "__dict__")
    with pytest.raises(TypeError) as caught:
        pickle.dumps(SECRET)
    assert "horse" not in str(caught.value)
