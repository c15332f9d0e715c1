"""When training goes on, on which slices, and when it is given up. Pure: time comes in, decisions go out."""

import dataclasses

from slurm_pathways.elastic.policy import Grow, Policy

#: What is left of an attempt may tell of the loss once more.
_AFTERMATH_PAUSE_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Train:
    """Call the training function with these slices."""

    slices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LookAgain:
    """Look at the slices again after so long."""

    after_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """End, and say why."""

    reason: str


Decision = Train | LookAgain | GiveUp


class Recovery:
    """Between a loss and the next call of the training function, and while that runs.

    Args:
        all_slices: those that there are when nothing is lost.
    """

    def __init__(self, policy: Policy, all_slices: frozenset[int], now_s: float) -> None:
        if policy.min_slices > len(all_slices):
            raise ValueError(f"min_slices is {policy.min_slices}, but there are {len(all_slices)} slices")
        self._policy = policy
        self._all = all_slices
        self._waiting_since_s = now_s
        #: Those that the training function has; empty while it does not run.
        self._slices: frozenset[int] = frozenset()
        self._began_at: int | None = None
        self._losses_at_one_step = 0
        #: The loss that was met last, when it was met first, and until when not to try again.
        self._loss = ""
        self._loss_since_s = self._pause_until_s = now_s

    @property
    def missing(self) -> frozenset[int]:
        """The slices that the training function does not have."""
        return self._all - self._slices

    def look(self, live: frozenset[int], now_s: float, absent: frozenset[int] = frozenset()) -> Decision:
        """What to do when these slices are there and the training function does not run.

        Args:
            absent: slices that have not been there yet, which nobody waits for.
        """
        policy = self._policy
        waited_s = now_s - self._waiting_since_s
        if now_s < self._pause_until_s:
            return LookAgain(self._pause_until_s - now_s)
        enough = len(live) >= policy.min_slices
        if live == self._all or (enough and live >= self._all - absent) or (enough and waited_s >= policy.wait_s):
            self._slices = live
            return Train(tuple(sorted(live)))
        limit_s = policy.wait_s if enough else max(policy.wait_s, policy.give_up_after_s)
        if waited_s >= limit_s:
            return GiveUp(
                f"{len(live)} of {len(self._all)} slices are there after {waited_s:.0f} s; training needs "
                f"{policy.min_slices} (min_slices), and waits {limit_s:g} s for them (give_up_after_s)"
            )
        return LookAgain(min(policy.look_every_s, limit_s - waited_s))

    def begin(self, step: int) -> None:
        """The training function has its state, of this step."""
        if step != self._began_at:
            self._losses_at_one_step = 0
        self._began_at = step

    def lose(self, loss: str, now_s: float) -> GiveUp | None:
        """The training function has met a loss; met once more, it is no new one."""
        self._end(now_s)
        if loss == self._loss:
            self._pause_until_s = now_s + _AFTERMATH_PAUSE_S
            lasted_s = now_s - self._loss_since_s
            if lasted_s < self._policy.give_up_after_s:
                return None
            return GiveUp(f"all slices needed are there, and still training is lost after {lasted_s:.0f} s: {loss}")
        self._loss, self._loss_since_s = loss, now_s
        self._losses_at_one_step += 1
        if self._losses_at_one_step < self._policy.max_losses_at_one_step:
            return None
        return GiveUp(
            f"training was lost {self._losses_at_one_step} times in a row after step {self._began_at or 0} "
            "(max_losses_at_one_step): it may be what the program does there"
        )

    def should_grow(self, found: frozenset[int], has_snapshot: bool) -> bool:
        """Whether training is to be interrupted after a step, as missing slices were found.

        Args:
            has_snapshot: a snapshot was begun after this step.
        """
        match self._policy.grow:
            case Grow.NEVER:
                return False
            case Grow.AT_SNAPSHOT if not has_snapshot:
                return False
            case _:
                return bool(found & self.missing)

    def grow(self, now_s: float) -> None:
        """Training was interrupted for slices that are there again; nobody waits for those that are still missing."""
        self._end(now_s - self._policy.wait_s)

    def _end(self, since_s: float) -> None:
        self._waiting_since_s = since_s
        self._slices = frozenset()
