"""Keeps the record of a run on disk, and the job's comment, while the run goes on. Neither can harm the run.

What must be done on time the launcher does itself: it asks the controller when the program has ended, before the
runtime ends too. Everything else (files, Slurm's commands) is done on a thread of its own.
"""

import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_pathways.config import RECORDS_VARIABLE, RuntimeSpec
from slurm_pathways.launch import event_log, records
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent
from slurm_pathways.launch.controller_status import NoAnswer, Report
from slurm_pathways.launch.history import History
from slurm_pathways.launch.news import HOST_BACK_EVENT
from slurm_pathways.launch.records import RUN, RUNTIME, Record, SlurmPlace
from slurm_pathways.slurm import job_comment
from slurm_pathways.slurm.environment import EnvironmentProblem, is_in_job, read_allocation

logger = logging.getLogger(__name__)

#: Between two writes while the run goes on: what a launcher that is killed may leave unsaid. The first come sooner.
WRITE_INTERVAL_S = 30.0
_FIRST_WRITES_AFTER_S = (5.0, 10.0)
COMMENT_INTERVAL_S = 600.0
#: A run that is over by then has one comment, that of its end, and starts without a process beside it.
FIRST_COMMENT_AFTER_S = 2.0
#: The controller gives executors 2 s.
ANSWER_TIMEOUT_S = 3.0
#: For launches that are over to be counted, once the program has ended.
_SETTLE_S = 1.0
_FIRST_PAUSE_S = 0.02

#: Asks the controller, with a time limit in seconds. Raises NoAnswer.
Ask = Callable[[float], Report]


class RunRecorder:
    """Feed it with what happens; the order is that of the methods here. ``note`` is for any thread, others for one.

    Args:
        environ: of the launcher; says where records go, and which job this is.
        spec: of the runtime.
        argv: the program's; empty for the life of a runtime that outlives programs.
        is_warm: the runtime is there already, and has a record of its own.
        warn: told once, in words for the user, when records cannot be written.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        spec: RuntimeSpec,
        argv: Sequence[str],
        *,
        is_warm: bool = False,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._spec = spec
        self._argv = tuple(argv)
        self._warn: Callable[[str], None] | None = warn
        place = slurm_place(environ)
        self._id = secrets.token_hex(4)
        self._started_s = time.time()
        self._history = History(
            record_id=self._id,
            kind=RUN if argv else RUNTIME,
            spec=spec,
            argv=argv,
            launcher_host=socket.gethostname(),
            launcher_pid=os.getpid(),
            slurm=place,
            is_warm=is_warm,
            started_at_unix_s=self._started_s,
        )
        try:
            self._folder = records.records_folder(environ)
        except OSError as failure:
            self._folder = None
            self._complain(str(failure))
        #: None where none is wanted.
        self._comment = None
        if place is not None and spec.job_comment:
            # What talks to Slurm is not loaded outside of it: each start would pay for that.
            from slurm_pathways.launch.comment import JobComment

            self._comment = JobComment(environ, place.label)
        self._ask: Ask | None = None
        #: Held while the controller is asked, so that a later answer is never followed by an earlier one.
        self._asking = threading.Lock()
        self._comment_due_s: float | None = None
        #: Guards ``_history`` and what follows; notified when there is something to do.
        self._changed = threading.Condition()
        self._is_write_due = False
        #: Lines for the event log that are not written yet.
        self._lines: list[dict[str, Any]] = []
        self._final_comment: str | None = None
        self._is_over = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anything is recorded at all."""
        return self._folder is not None or self._comment is not None

    def note(self, event: RuntimeEvent) -> None:
        """The runtime said something. Does not block."""
        try:
            with self._changed:
                now_s = time.time()
                self._history.note(event, now_s)
                line = event_log.entry(event, self._id, now_s, now_s - self._started_s)
                # Once the program is over, all are on their way out.
                if line is not None and not self._is_over:
                    self._lines.append(line)
                    self._changed.notify_all()
                has_ended = isinstance(event, ComponentEnded) and not event.was_asked
                if has_ended or (isinstance(event, ComponentEvent) and event.name == HOST_BACK_EVENT):
                    self._is_write_due = True
                    self._changed.notify_all()
        except (KeyError, TypeError, ValueError):
            # Who tells us has other things to do with this event.
            logger.exception("%s cannot be recorded", event)

    def begin(self, runtime_id: str, ask: Ask) -> None:
        """The runtime has been started.

        Args:
            runtime_id: the name of the run folder.
            ask: used until ``program_ended``; on another thread too.
        """
        self._ask = ask
        with self._changed:
            self._history.runtime_id = runtime_id
            self._note_run("run_started")
            self._is_write_due = True
        if self.is_wanted:
            self._thread = threading.Thread(target=self._work, name="recorder")
            self._thread.start()

    def ready(self) -> None:
        """The program is started now. Of a warm runtime, this asks what it has used before."""
        if self._history.is_warm:
            self._fetch()
        with self._changed:
            self._history.ready(time.time())
            self._is_write_due = True
            if self._comment is not None:
                self._comment_due_s = time.monotonic() + FIRST_COMMENT_AFTER_S
            self._changed.notify_all()

    def program_ended(self, exit_code: int) -> None:
        """The program has ended, and the runtime is still there: asks the controller for the last time.

        Takes milliseconds, and ``ANSWER_TIMEOUT_S`` at most where hosts do not answer any more.
        """
        with self._changed:
            self._history.program_ended(exit_code, time.time())
            self._note_run("program_ended")
        deadline_s, pause_s = time.monotonic() + _SETTLE_S, _FIRST_PAUSE_S
        while self._fetch() and time.monotonic() < deadline_s:
            time.sleep(pause_s)
            pause_s *= 2
        self._ask = None
        self._finish_comment(exit_code)

    def close(self, exit_code: int, problem: str | None = None) -> None:
        """The runtime has ended, or there was none. Writes the last state.

        Args:
            exit_code: of the command.
            problem: why the program was not run.
        """
        self._ask = None
        self._finish_comment(exit_code)
        with self._changed:
            self._history.ended(exit_code, problem, time.time())
            self._note_run("run_ended")
            self._is_write_due = True
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _finish_comment(self, exit_code: int) -> None:
        with self._changed:
            if self._comment is not None and not self._is_over:
                self._final_comment = self._summary_at_end(exit_code)
            self._comment_due_s = None
            self._is_over = True
            self._changed.notify_all()

    def _note_run(self, what: str) -> None:
        now_s = time.time()
        self._lines.append(event_log.of_run(self._history.record(now_s), what, now_s))

    # What is known

    def _fetch(self) -> bool:
        """Ask the controller; whether launches are still in flight, so that asking again gives more."""
        with self._asking:
            ask = self._ask
            if ask is None or not self.is_wanted:
                return False
            try:
                report = ask(ANSWER_TIMEOUT_S)
            except NoAnswer as failure:
                with self._changed:
                    self._history.not_answered(f"the controller {failure}")
                return False
            with self._changed:
                self._history.answered(report, time.time())
        lost = {failure["host"] for failure in report.get("failures", ())}
        return any(queue["launches_in_flight"] and queue["host"] not in lost for queue in report.get("queues", ()))

    def _busy(self, record: Record) -> str | None:
        slices = record.usage.slices
        if not slices:
            return None
        busy_s, device_s = sum(part.busy_s for part in slices), sum(part.device_s for part in slices)
        return job_comment.busy_words(busy_s, device_s, len(record.failures))

    def _summary(self) -> str:
        record = self._history.record(time.time())
        return job_comment.while_running(self._spec.num_devices, self._spec.num_slices, self._argv, self._busy(record))

    def _summary_at_end(self, exit_code: int) -> str:
        record = self._history.record(time.time())
        return job_comment.at_end(
            exit_code,
            self._busy(record),
            has_started=record.ready_at_unix_s is not None,
            is_runtime=record.kind == RUNTIME,
        )

    # The thread

    def _work(self) -> None:
        intervals_s = itertools.chain(_FIRST_WRITES_AFTER_S, itertools.repeat(WRITE_INTERVAL_S))
        write_due_s = time.monotonic() + next(intervals_s)
        while True:
            with self._changed:
                due_s = min(write_due_s, self._comment_due_s or write_due_s)
                self._changed.wait_for(
                    lambda: self._is_write_due or self._lines or self._final_comment is not None or self._is_closing,
                    max(0.0, due_s - time.monotonic()),
                )
                is_closing, is_write_due, self._is_write_due = self._is_closing, self._is_write_due, False
                final, self._final_comment = self._final_comment, None
                is_comment_due = self._comment_due_s is not None and time.monotonic() >= self._comment_due_s
            if not is_closing and time.monotonic() >= write_due_s:
                self._fetch()
                is_write_due = True
                write_due_s = time.monotonic() + next(intervals_s)
            self._write_lines()
            if is_write_due:
                self._write()
            if is_comment_due and final is None:
                with self._changed:
                    summary = self._summary()
                    if self._comment_due_s is not None:
                        self._comment_due_s = time.monotonic() + COMMENT_INTERVAL_S
                self._set_comment(summary)
            if final is not None:
                self._set_comment(final)
            if is_closing:
                return

    def _write_lines(self) -> None:
        with self._changed:
            lines, self._lines = self._lines, []
            record = self._history.record(time.time()) if lines else None
        if self._folder is None or record is None:
            return
        try:
            records.make_folder(self._folder)
            event_log.append(self._folder, record, lines)
        except OSError as failure:
            self._complain(f"{failure.strerror or failure}: {self._folder}")

    def _write(self) -> None:
        if self._folder is None:
            return
        with self._changed:
            record = self._history.record(time.time())
        try:
            records.write(self._folder, record)
        except OSError as failure:
            self._complain(f"{failure.strerror or failure}: {self._folder}")

    def _complain(self, reason: str) -> None:
        warn, self._warn = self._warn, None
        if warn is not None:
            warn(f"no record of this run can be kept ({reason}); {RECORDS_VARIABLE} names another folder, or none")

    def _set_comment(self, summary: str) -> None:
        assert self._comment is not None, "a comment is due where none is wanted"
        self._comment.set(summary)


def slurm_place(environ: Mapping[str, str]) -> SlurmPlace | None:
    """The job that this process is in; None if it is in none that can be told."""
    if not is_in_job(environ):
        return None
    try:
        allocation = read_allocation(environ)
    except EnvironmentProblem as failure:
        logger.info("the record does not name the job: %s", failure)
        return None
    step = allocation.step
    return SlurmPlace(
        job_id=allocation.job_id,
        nodes=allocation.nodes,
        cluster=allocation.cluster,
        job_name=allocation.job_name,
        array_job_id=allocation.array_job_id,
        array_task_id=allocation.array_task_id,
        restart_count=allocation.restart_count,
        step_id=step.step_id if step is not None else None,
    )
