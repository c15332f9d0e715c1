"""Calls a training function until it has come to its end, whatever is lost meanwhile."""

import contextlib
import dataclasses
import enum
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from slurm_pathways.elastic import disk, snapshots
from slurm_pathways.elastic.losses import loss_of
from slurm_pathways.elastic.policy import Policy, Snapshots
from slurm_pathways.elastic.preemption import Preempted, Preemption, Warnings
from slurm_pathways.elastic.recovery import GiveUp, LookAgain, Recovery, Train
from slurm_pathways.elastic.slices import Slices
from slurm_pathways.elastic.snapshots import HostSnapshots, SnapshotFailed
from slurm_pathways.elastic.watch import Watch

__all__ = ["Attempt", "Event", "EventKind", "GaveUp", "SnapshotFailed", "run"]

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_State = TypeVar("_State")


class EventKind(enum.Enum):
    """What can happen to a training."""

    #: It has its state and goes on from there, or begins.
    STARTED = "started"
    #: It met a loss.
    LOST = "lost"
    #: It is interrupted for slices that are there again.
    GROWS = "grows"
    #: The warning came, and its state is on disk.
    PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        step: the number of steps that are done; of LOST, those that the function has reported.
        slices: that take part; of GROWS, those that will.
        message: for people.
        took_s: of STARTED, the time since what interrupted it; else 0.
    """

    kind: EventKind
    step: int
    slices: tuple[int, ...]
    message: str
    took_s: float = 0.0


class GaveUp(Exception):
    """Training was lost and does not go on; the message says why. The loss, if there was one, is its cause."""


class _Interrupted(Exception):
    """Raised in the training function to have it called again with more slices."""


class Attempt:
    """One call of the training function.

    Attributes:
        mesh: over the slices that take part: the axis ``slice``, then the axes within a slice.
        slices: their indices.
        number: 0 in the first call.
    """

    def __init__(self, training: "_Training[Any]", slices: tuple[int, ...], number: int) -> None:
        self._training = training
        self._step: int | None = None
        self.slices = slices
        self.number = number
        self.mesh = training.slices.mesh(slices)

    @property
    def step(self) -> int:
        """How many steps are done: what ``start`` gave, then what ``done`` was told.

        Raises:
            RuntimeError: before ``start``.
        """
        if self._step is None:
            raise RuntimeError("call attempt.start(init) first: it finds the step to go on from")
        return self._step

    @property
    def newest_snapshot(self) -> int | None:
        """The step of the newest complete snapshot in host memory: what a loss now would lead back to, or None."""
        return self._training.newest_snapshot()

    def start(self, init: Callable[[Any], _State]) -> _State:
        """The state to go on from, on ``mesh``: the newest there is in host memory, then on disk, else ``init(mesh)``.

        It has the partition that it had, over the axes of the new mesh; what ``init`` does not place is put on all
        devices.

        Raises:
            jax.errors.JaxRuntimeError: a loss, which ``run`` handles. OSError, ValueError: see ``Preemption.folder``.
        """
        self._step, state = self._training.state_for(self, init)
        return state  # type: ignore[no-any-return]

    def done(self, step: int, state: Any) -> None:
        """``step`` steps are done, and have made ``state``, which may still be computed. Call it after each step.

        Begins a snapshot when one is due. To interrupt training it raises an exception, which the function must let
        pass.

        Raises:
            ValueError: an array of the state is not partitioned over the axes of ``mesh``.
            SnapshotFailed, Preempted, jax.errors.JaxRuntimeError.
        """
        self._step = step
        self._training.done(self, step, state)


def run(
    train: Callable[[Attempt], _Result],
    *,
    policy: Policy | None = None,
    snapshots: Snapshots | None = None,
    axes: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
    preemption: Preemption | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> _Result:
    """Call ``train`` until it returns, again after each loss; what it returned.

    Args:
        axes: names and sizes of the mesh's axes within a slice; default: one, ``device``.
        devices: what to use; default: ``jax.devices()``.
        preemption: what to do on the warning that the job ends; with it, only from the main thread.
        on_event: is told what happens, on the calling thread.

    Raises:
        GaveUp: as the policy says. Preempted: the warning came. SnapshotFailed: host memory does not do.
        Exception: whatever else ``train`` raises.
    """
    training: _Training[_Result] = _Training(
        policy or Policy(), snapshots or Snapshots(), Slices(devices, axes), preemption, on_event
    )
    with training:
        return training.run(train)


class _Training(Generic[_Result]):
    def __init__(
        self,
        policy: Policy,
        settings: Snapshots,
        slices: Slices,
        preemption: Preemption | None,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.slices = slices
        self._every_steps = settings.every_steps
        self._settings = settings
        self._preemption = preemption
        self._tell = on_event
        self._recovery = Recovery(policy, slices.all, time.monotonic())
        self._warnings = Warnings(preemption.signals if preemption is not None else ())
        self._watch = Watch(slices, policy.look_every_s)
        #: A snapshot is to be begun after the next step after which none is under way.
        self._is_due = False
        #: When what interrupted training happened.
        self._interrupted_s = time.monotonic()
        #: Step and state of a function that was interrupted between two steps.
        self._carried: tuple[int, Any] | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "_Training[_Result]":
        with contextlib.ExitStack() as opening:
            opening.enter_context(self._warnings)
            opening.enter_context(self._watch)
            self._snapshots = HostSnapshots(self._settings, self.slices)
            opening.callback(self._snapshots.close)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.close()

    def run(self, train: Callable[[Attempt], _Result]) -> _Result:
        import jax

        number = 0
        cause: BaseException | None = None
        while True:
            attempt = Attempt(self, self._wait_for_slices(cause), number)
            number += 1
            cause = None
            self._watch.look_for(self._recovery.missing)
            try:
                result = train(attempt)
                # What was dispatched last may still be lost.
                jax.block_until_ready(result)
            except _Interrupted:
                self._interrupted_s = time.monotonic()
                self._recovery.grow(self._interrupted_s)
            except Exception as error:
                if (loss := loss_of(error)) is None:
                    raise
                self._lose(attempt, loss, error)
                cause = error
                # Its frames hold the arrays of the attempt, which the next one needs the room of.
                traceback.clear_frames(error.__traceback__)
            else:
                if self._preemption is not None:
                    disk.remove(self._preemption.folder)
                return result
            finally:
                self._watch.look_for(frozenset())

    def state_for(self, attempt: Attempt, init: Callable[[Any], Any]) -> tuple[int, Any]:
        import jax

        step, state = self._find_state(attempt.mesh, init)
        jax.block_until_ready(state)
        self._recovery.begin(step)
        # So that it is again on as many slices as asked for.
        self._is_due = not self._snapshots.take(step, state, attempt.slices)
        took_s = time.monotonic() - self._interrupted_s
        self._say(
            EventKind.STARTED, step, attempt.slices, f"from step {step} on slices {_names(attempt.slices)}", took_s
        )
        return step, state

    def _find_state(self, mesh: Any, init: Callable[[Any], Any]) -> tuple[int, Any]:
        carried, self._carried = self._carried, None
        if carried is not None:
            return carried[0], snapshots.move(carried[1], mesh)
        if (found := self._snapshots.newest(mesh)) is not None:
            return found
        state = _place(init(mesh), mesh)
        if self._preemption is None:
            return 0, state
        disk.check(self._preemption.folder, mesh)
        step = disk.newest_step(self._preemption.folder)
        if step is None:
            return 0, state
        return step, disk.load(self._preemption.folder, step, state, mesh)

    def newest_snapshot(self) -> int | None:
        return self._snapshots.newest_step()

    def done(self, attempt: Attempt, step: int, state: Any) -> None:
        if self._warnings.is_due:
            self._preempt(step, attempt.slices, state)
        self._is_due = self._is_due or step % self._every_steps == 0
        has_snapshot = self._is_due and self._snapshots.take(step, state, attempt.slices)
        self._is_due = self._is_due and not has_snapshot
        found = self._watch.found()
        if self._recovery.should_grow(found, has_snapshot):
            slices = tuple(sorted({*attempt.slices, *found}))
            self._say(EventKind.GROWS, step, slices, f"to slices {_names(slices)} after step {step}")
            self._carried = step, state
            raise _Interrupted

    def _wait_for_slices(self, cause: BaseException | None) -> tuple[int, ...]:
        while True:
            seen = self.slices.look(self.slices.all)
            if self._warnings.is_due:
                try:
                    self._preempt_while_waiting(seen.live)
                except Exception as error:
                    if loss_of(error) is None:
                        raise  # Preempted, as a rule; a loss is looked into by the next look
            decision = self._recovery.look(seen.live, time.monotonic(), seen.absent)
            if isinstance(decision, Train) and not self.slices.work_together(decision.slices):
                decision = self._recovery.look(frozenset(), time.monotonic())
            match decision:
                case Train(slices):
                    return slices
                case LookAgain(after_s):
                    self._warnings.wait(after_s)
                case GiveUp(reason):
                    raise GaveUp(reason) from cause

    def _lose(self, attempt: Attempt, loss: str, error: Exception) -> None:
        self._interrupted_s = time.monotonic()
        self._carried = None
        step = attempt._step or 0
        self._say(EventKind.LOST, step, attempt.slices, loss)
        if (decision := self._recovery.lose(loss, self._interrupted_s)) is not None:
            raise GaveUp(decision.reason) from error

    def _preempt_while_waiting(self, live: frozenset[int]) -> NoReturn:
        found = None
        if self._carried is not None:
            found = self._carried
        elif live:
            found = self._snapshots.newest(self.slices.mesh(live))
        if found is not None:
            step, state = found
            self._preempt(step, tuple(sorted(live)), state)
        assert self._preemption is not None
        on_disk = disk.newest_step(self._preemption.folder)
        raise Preempted(on_disk or 0, None)

    def _preempt(self, step: int, slices: tuple[int, ...], state: Any) -> NoReturn:
        assert self._preemption is not None
        if self._preemption.on_warning is not None:
            self._preemption.on_warning(step)
        path = disk.save(self._preemption.folder, step, state)
        self._say(EventKind.PREEMPTED, step, slices, f"after step {step}, saved in {path}")
        raise Preempted(step, path)

    def _say(self, kind: EventKind, step: int, slices: tuple[int, ...], message: str, took_s: float = 0.0) -> None:
        _logger.info("event=%s step=%d slices=%s took_s=%.3f %s", kind.value, step, _names(slices), took_s, message)
        if self._tell is not None:
            self._tell(Event(kind, step, slices, message, took_s))


def _place(state: Any, mesh: Any) -> Any:
    """The state with everything that is not on the mesh on all its devices; plain Python values stay."""
    import jax
    import numpy as np

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    there = frozenset(mesh.devices.flat)

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return leaf if leaf.sharding.device_set == there else jax.device_put(leaf, everywhere)
        return jax.device_put(leaf, everywhere) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree_util.tree_map(placed, state)


def _names(slices: tuple[int, ...]) -> str:
    return ",".join(map(str, slices))
