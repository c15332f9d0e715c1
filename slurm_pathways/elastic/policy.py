"""What the user decides."""

import dataclasses
import enum


class Grow(enum.Enum):
    """When slices that are there again take part."""

    #: After the step in which they are found.
    AT_ONCE = "at once"
    #: After the next step with a snapshot.
    AT_SNAPSHOT = "at snapshot"
    #: Only after another loss.
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What to do when slices are lost and when they come back.

    Attributes:
        wait_s: after a loss, how long to wait for all slices before training goes on with those that are there. 0
            shrinks at once. A spare, or a host's next executor, takes about a second.
        min_slices: with fewer, training waits beyond ``wait_s``.
        give_up_after_s: how long it waits for ``min_slices``.
        grow: when slices that come back take part.
        look_every_s: how often to look for them.
        max_losses_at_one_step: how often in a row training may be lost without getting beyond the snapshot that it
            began from. More is no chance, but what the program does to its hosts.
    """

    wait_s: float = 30.0
    min_slices: int = 1
    give_up_after_s: float = 600.0
    grow: Grow = Grow.AT_SNAPSHOT
    look_every_s: float = 0.5
    max_losses_at_one_step: int = 10

    def __post_init__(self) -> None:
        _check("wait_s", self.wait_s, 0)
        _check("min_slices", self.min_slices, 1)
        _check("give_up_after_s", self.give_up_after_s, 0)
        _check("look_every_s", self.look_every_s, 0.01)
        _check("max_losses_at_one_step", self.max_losses_at_one_step, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshots:
    """Copies of the state in the memory of hosts.

    Attributes:
        every_steps: how often one is begun. One that is due while another is under way is begun after that.
        replicas: in how many places each is kept. A slice holds the whole state, and replicas are on so many slices:
            any slice may be lost with 2, any two with 3. Where fewer slices take part, the next hosts of a slice hold
            what each of its hosts holds: any host may be lost with 2.
        keep: how many complete ones are kept. While another is under way, slices hold up to ``keep + 1``.
    """

    every_steps: int = 20
    replicas: int = 2
    keep: int = 2

    def __post_init__(self) -> None:
        _check("every_steps", self.every_steps, 1)
        _check("replicas", self.replicas, 1)
        _check("keep", self.keep, 1)


def _check(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
