"""The post: how the first task of a step of ``srun --pathways`` brings word to the others, and they answer.

It is a step of its own over all other nodes. Its tasks read what the first task says from their standard input and put
it into a *letter box*, a private folder of the node, which they remove when the first task is gone. When the first task
ends before it could invite the others, a post tells them that: nobody waits for a word that will not come. A task that
cannot take part, or whose worker has ended, says so into the letter box, and the post brings that back on its standard
output. At the end of the run it waits a little for that.
"""

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pathways_runtime.transport.lifeline import Child, EventWriter
from slurm_pathways.launch.client_environment import component_environment
from slurm_pathways.launch.components import Components
from slurm_pathways.launch.node_address import Place
from slurm_pathways.launch.run_folder import RunFolder, make_private, remove_abandoned
from slurm_pathways.launch.steps import STEP_PREFIX, StepOptions, srun_argv
from slurm_pathways.slurm.environment import Allocation, Step
from slurm_pathways.slurm.hostlist import compress

POST = "post"
STEP_NAME = STEP_PREFIX + POST
#: From the post: another task cannot take part; ``reason`` says which and why.
TASK_FAILED_EVENT = "task_failed"
#: The same: ``component``, which is another task's, has ended with ``returncode``.
WORKER_ENDED_EVENT = "worker_ended"
#: From the end of the first task's word to that of a worker's end; below what the first task gives the post.
OVER_TIMEOUT_S = 3.0
#: For the post to start; half of it for the other tasks to have started, and to have taken notice of the end.
DISMISS_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.02
#: In a letter box: what the first task says, and a pipe for what others say.
_LETTER, _ANSWERS = "letter", "answers"
#: Characters of a reason; the fewer, of six bytes at most, where the others are more than a pipe takes at once.
_MAX_REASON, _SURE_REASON = 3000, 600


class Invitation(msgspec.Struct, frozen=True):
    """What the first task tells all others.

    Attributes:
        workers: the nodes, by worker id. None at all: there will be no run, and every task ends.
        controller_address: where workers connect.
        credentials: of the job, as text.
        place: where the first task is.
    """

    workers: tuple[str, ...] = ()
    controller_address: str = ""
    credentials: str = ""
    place: Place | None = None


class TaskFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A task's answer: it cannot take part."""

    reason: str


class WorkerEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A task's last answer."""

    component: str
    returncode: int


Answer = TaskFailed | WorkerEnded


class Post:
    """The step that brings the other tasks word from the first."""

    def __init__(self, allocation: Allocation, step: Step, environ: Mapping[str, str]) -> None:
        assert step.nodes is not None
        self._allocation = allocation
        self._step_id = step.step_id
        self._nodes = [node for node in step.nodes if node != step.node]
        self._environ = component_environment(environ)
        self._input_fd: int | None = None
        self._has_invited = not self._nodes

    def start(self, components: Components, log_path: Path) -> Child | None:
        """Start the step, unless there is nobody else."""
        if not self._nodes:
            return None
        child, self._input_fd = components.start_step(POST, self._argv("deliver"), self._environ, log_path)
        return child

    def invite(self, invitation: Invitation) -> None:
        """Send it to all; may be called from another thread than the rest."""
        if self._input_fd is None:
            return
        # Where the post is gone, its end is reported where all ends are.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._input_fd, msgspec.json.encode(invitation) + b"\n")
            self._has_invited = True

    def close(self) -> None:
        """End the step."""
        if self._input_fd is not None:
            os.close(self._input_fd)
            self._input_fd = None

    def dismiss_uninvited(self) -> None:
        """If nobody has been invited, nobody will be: a step of its own tells all to end."""
        if self._has_invited:
            return
        try:
            subprocess.run(
                self._argv("dismiss"),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                timeout=DISMISS_TIMEOUT_S,
            )
        except subprocess.SubprocessError as failure:
            said = getattr(failure, "stderr", None) or failure
            print(
                f"slurm-pathways: the tasks on {compress(self._nodes)} could not be told to end, and wait until their "
                f"startup timeout: {said}",
                file=sys.stderr,
            )

    def _argv(self, what: str) -> list[str]:
        options = StepOptions(STEP_NAME, ",".join(self._nodes), num_nodes=len(self._nodes))
        module = [sys.executable, "-m", "slurm_pathways.launch.post"]
        return srun_argv(self._allocation, options, [*module, what, str(self._allocation.job_id), str(self._step_id)])


class LetterBox:
    """Where tasks of one node find what the post has brought. Nodes may share the machine and the file system."""

    def __init__(self, job_id: int, step_id: int, node: str) -> None:
        self.root = Path(f"/tmp/slurm-pathways-{os.getuid()}")
        #: No part of a node's name has a "+", so none is the beginning of another's.
        self.prefix = f"run-{job_id}.{step_id}.{node}+"

    def wait(self, timeout_s: float, is_asked: threading.Event) -> Invitation | None:
        """The invitation; None when there was none in time, or ``is_asked`` was set. The farewell has no workers."""
        deadline_s = time.monotonic() + timeout_s
        while not is_asked.is_set() and time.monotonic() < deadline_s:
            for letter in self.root.glob(f"{self.prefix}*/{_LETTER}"):
                with contextlib.suppress(FileNotFoundError):
                    invitation = msgspec.json.decode(letter.read_bytes(), type=Invitation)
                    if not invitation.workers:
                        # Whoever put it there waits for that.
                        letter.unlink(missing_ok=True)
                    return invitation
            is_asked.wait(_POLL_INTERVAL_S)
        return None

    def decline(self, reason: str) -> None:
        """Tell the first task that this one cannot take part. Nothing is told where the post has gone."""
        for limit in (_MAX_REASON, _SURE_REASON):
            if self._answer(TaskFailed(reason[:limit])):
                return

    def tell_end(self, component: str, returncode: int) -> None:
        """Tell the first task that this one's worker has ended; see ``decline``."""
        self._answer(WorkerEnded(component, returncode))

    def _answer(self, answer: Answer) -> bool:
        """False: it is too long."""
        line = msgspec.json.encode(answer) + b"\n"
        if len(line) > select.PIPE_BUF:
            return False
        for answers in self.root.glob(f"{self.prefix}*/{_ANSWERS}"):
            with contextlib.suppress(OSError):
                fd = os.open(answers, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(fd, line)
                finally:
                    os.close(fd)
        return True


_ANSWERS_DECODER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class _Carrier:
    """The post on one node."""

    def __init__(self, box: LetterBox) -> None:
        make_private(box.root)
        remove_abandoned(box.root)
        self._folder = RunFolder.create(os.environ, box.root / (box.prefix + secrets.token_hex(4)))
        self._folder.mark_in_use()
        self._letter = self._folder.path / _LETTER
        answers = self._folder.path / _ANSWERS
        os.mkfifo(answers, 0o600)
        # For writing too, so that it does not end with the first who has written.
        self._answers_fd = os.open(answers, os.O_RDWR | os.O_NONBLOCK)

    def deliver(self, input_fd: int, events: EventWriter) -> None:
        """Put what comes into the letter box, and pass on what is answered.

        Until a signal, or the end of file and the worker that is there has ended too.
        """
        wake_read, wake_write = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(wake_write, b"x"))
        poll = select.poll()
        for fd in (input_fd, wake_read, self._answers_fd):
            poll.register(fd, select.POLLIN)
        text, answered = b"", b""
        has_worker = False
        deadline_s: float | None = None
        while True:
            timeout_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
            ready = dict(poll.poll(timeout_ms))
            if not ready or wake_read in ready:
                return
            if self._answers_fd in ready:
                *whole, answered = (answered + os.read(self._answers_fd, 1 << 16)).split(b"\n")
                for answer in map(_ANSWERS_DECODER.decode, whole):
                    has_worker = False
                    match answer:
                        case TaskFailed(reason):
                            events.write(TASK_FAILED_EVENT, reason=reason)
                        case WorkerEnded(component, returncode):
                            events.write(WORKER_ENDED_EVENT, component=component, returncode=returncode)
            if input_fd in ready:
                chunk = os.read(input_fd, 1 << 16)
                text += chunk
                if not chunk:
                    poll.unregister(input_fd)
                    deadline_s = time.monotonic() + OVER_TIMEOUT_S
                elif text.endswith(b"\n"):
                    self._put(text)
                    has_worker = True
            if deadline_s is not None and not has_worker:
                return

    def dismiss(self) -> None:
        """Say farewell; returns when the task here has taken notice."""
        self._put(msgspec.json.encode(Invitation()))
        deadline_s = time.monotonic() + DISMISS_TIMEOUT_S / 2
        while self._letter.exists() and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Remove the letter box."""
        os.close(self._answers_fd)
        self._folder.remove(keep_logs=False)

    def _put(self, text: bytes) -> None:
        fresh = self._letter.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        fresh.replace(self._letter)


def main() -> None:
    """A task of the post."""
    what, job_id, step_id = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    carrier = _Carrier(LetterBox(job_id, step_id, os.environ["SLURMD_NODENAME"]))
    try:
        if what == "dismiss":
            carrier.dismiss()
        else:
            carrier.deliver(sys.stdin.fileno(), EventWriter(sys.stdout.fileno()))
    finally:
        carrier.close()


if __name__ == "__main__":
    main()
