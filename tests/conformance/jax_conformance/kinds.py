"""Kinds of failures that plain JAX does not have, recognised by their first line, and what causes each."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures of one cause.

    Attributes:
        pattern: found in the first line of such a failure, or in the test's id with ``in_id``.
        is_clients: whether JAX's client itself cannot do it, whatever the server does.
    """

    name: str
    pattern: str
    cause: str
    is_clients: bool
    in_id: bool = False

    def matches(self, test_id: str, message: str) -> bool:
        """Whether a failure is of this kind."""
        return re.search(self.pattern, test_id if self.in_id else message) is not None


UNSORTED = Kind("not sorted yet", "", "Not looked into.", is_clients=False)

#: The first that matches counts.
KINDS: tuple[Kind, ...] = (
    Kind(
        "host callbacks",
        "host callback|host_callback|HostCallback|Host callback",
        "JAX's client refuses host callbacks through the proxy.",
        is_clients=True,
    ),
)


def kind_of(test_id: str, message: str) -> Kind:
    """The first kind that a failure is of; ``UNSORTED`` when it is of none."""
    return next((kind for kind in KINDS if kind.matches(test_id, message)), UNSORTED)
