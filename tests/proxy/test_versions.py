"""Which versions are agreed on."""

import pytest

from pathways_runtime.core.status import StatusError
from pathways_runtime.proxy.versions import NEWEST, OLDEST, Versions, negotiate


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [
        # jaxlib 0.10 asks so.
        ((16, 0), (25, 3), (25, 3)),
        # jaxlib 0.12.
        ((16, 2), (25, 6), (25, 6)),
        # Newer clients that still speak ours.
        ((20, 1), (31, 8), (25, 6)),
        ((25, 3), (25, 3), (25, 3)),
        # Older clients within what we speak.
        ((16, 0), (24, 2), (24, 2)),
        ((16, 0), (24, 9), (24, 6)),
    ],
)
def test_the_newest_that_both_speak(oldest: tuple[int, int], newest: tuple[int, int], chosen: tuple[int, int]) -> None:
    assert negotiate(Versions(*oldest), Versions(*newest)) == Versions(*chosen)


@pytest.mark.parametrize(
    ("oldest", "newest", "what"),
    [
        ((16, 0), (OLDEST.protocol - 1, 3), "IFRT proxy protocol: the client's jaxlib speaks versions 16 to 23"),
        ((NEWEST.protocol + 1, 0), (30, 3), "IFRT proxy protocol: the client's jaxlib speaks versions 26 to 30"),
        ((16, 0), (25, OLDEST.serdes - 1), "IFRT SerDes: the client's jaxlib speaks versions 0 to 1"),
        ((16, NEWEST.serdes + 1), (25, 9), "IFRT SerDes: the client's jaxlib speaks versions 7 to 9"),
    ],
)
def test_a_client_too_old_or_too_new_is_told_what_either_speaks(
    oldest: tuple[int, int], newest: tuple[int, int], what: str
) -> None:
    with pytest.raises(StatusError, match=f"FAILED_PRECONDITION: {what}"):
        negotiate(Versions(*oldest), Versions(*newest))
