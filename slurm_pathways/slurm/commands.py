"""The only module that runs Slurm's programs. Each call has a deadline and an error that says what to do.

Clients of Slurm retry for a long time when a daemon is away, so nothing here waits for one without a bound. Every call
costs slurmctld something; callers ask for what they need at once and keep it.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_pathways.slurm import accounting, hostlist, outcome, queue
from slurm_pathways.slurm.accounting import Record
from slurm_pathways.slurm.outcome import Outcome
from slurm_pathways.slurm.queue import Job, Node, Switch

#: For what slurmctld answers at once; a busy one takes seconds.
DEFAULT_TIMEOUT_S = 30.0
#: What scancel says of a step that is not there any more.
_ENDED_STEP = ("Invalid job id", "already completing or completed")
#: Of a program's stderr in a message.
_MAX_QUOTED = 2000


class CommandError(Exception):
    """A program of Slurm could not do what was asked; the message names the command, what it said, what to do."""


class CommandMissing(CommandError):
    """The program is not installed here: a container or laptop without Slurm's client commands."""


class CommandTimedOut(CommandError):
    """It did not answer by the deadline and was killed."""


class CommandFailed(CommandError):
    """It ended with an exit code other than 0.

    Attributes:
        returncode: negative for a signal.
        stderr: all of it.
    """

    def __init__(self, message: str, returncode: int, stderr: str) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.stderr = stderr


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm's commands, as one user sees them.

    Attributes:
        environ: of the programs; ``SLURM_CONF`` and ``PATH`` in it choose the cluster.
        timeout_s: deadline of each call.
    """

    environ: Mapping[str, str]
    timeout_s: float = DEFAULT_TIMEOUT_S

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run a program to its end; returns what it wrote to stdout.

        Raises:
            CommandMissing, CommandTimedOut, CommandFailed: see the classes.
        """
        # Formats and the local language are the user's to set, and would change what is parsed.
        environ = {
            name: value
            for name, value in self.environ.items()
            if not name.startswith(("SQUEUE_", "SACCT_", "SBATCH_", "SCANCEL_", "SINFO_", "LC_"))
        }
        environ |= {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
        return self._communicate(argv, stdin, environ)[0]

    def _communicate(self, argv: Sequence[str], stdin: str, environ: Mapping[str, str]) -> tuple[str, str]:
        """``run`` in an environment of its own; returns what the program wrote to stdout and to stderr."""
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                text=True,
                encoding="utf-8",
                errors="surrogateescape",
                start_new_session=True,
            )
        except FileNotFoundError as failure:
            raise CommandMissing(
                f"{argv[0]} is not found in PATH={environ.get('PATH', '')}: Slurm's client commands are not installed "
                "here. In a container, bind them and Slurm's configuration in, or start from outside of it"
            ) from failure
        except OSError as failure:
            raise CommandMissing(f"{argv[0]} cannot be executed: {failure.strerror}") from failure
        with process:
            try:
                stdout, stderr = process.communicate(stdin, timeout=self.timeout_s)
            except BaseException as failure:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(failure, subprocess.TimeoutExpired):
                    raise
                raise CommandTimedOut(
                    f"{' '.join(argv)} did not answer in {self.timeout_s:g} s: Slurm's daemons may be down or "
                    "overloaded; scontrol ping says whether slurmctld answers"
                ) from failure
        if process.returncode != 0:
            said = stderr.strip()[-_MAX_QUOTED:] or "(nothing)"
            raise CommandFailed(
                f"{' '.join(argv)} ended with exit code {process.returncode} and said: {said}",
                process.returncode,
                stderr,
            )
        return stdout, stderr

    def version(self) -> str:
        """Of the commands, as in ``22.05.8``. They read Slurm's configuration before they say it.

        Raises:
            CommandError: see the classes; also an answer without a version.
        """
        answer = self.run(["sinfo", "--version"])
        name, _, version = answer.strip().rpartition(" ")
        if not name or not version[:1].isdigit():
            raise CommandError(f"sinfo --version printed no version, but {answer!r}")
        return version

    def submit(self, script: str, options: Sequence[str] = ()) -> tuple[int, str]:
        """Submit a batch script by stdin.

        The job inherits ``environ`` as it is, and sbatch takes its SBATCH_* variables, but for SBATCH_WAIT.

        Args:
            options: of sbatch, each one word. They count more than SBATCH_* variables, and those more than the script.

        Returns:
            The job id, and what else sbatch said (warnings).

        Raises:
            CommandError: see the classes; also an answer without a job id.
        """
        environ = {name: value for name, value in self.environ.items() if name != "SBATCH_WAIT"}
        answer, warnings = self._communicate(["sbatch", "--parsable", *options], script, environ)
        # "id" or "id;cluster"
        job_id = answer.strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdigit():
            raise CommandError(f"sbatch printed no job id, but {answer!r}")
        return int(job_id), warnings

    def cancel(self, job_id: int) -> None:
        """End a job; one that has ended already is no error."""
        self.run(["scancel", str(job_id)])

    def requeue(self, job_id: int) -> None:
        """Have a running job begin anew; it must be one that may (``sbatch --requeue``)."""
        self.run(["scontrol", "requeue", str(job_id)])

    def signal_step(self, job_id: int, step_id: int, signal_name: str) -> None:
        """Send a signal (``TERM``) to the processes of a step; one that has ended already is no error."""
        try:
            self.run(["scancel", "--quiet", f"--signal={signal_name}", f"{job_id}.{step_id}"])
        except CommandFailed as failure:
            # Of a job that is being cancelled, scancel --quiet says nothing.
            if failure.stderr.strip() and not any(words in failure.stderr for words in _ENDED_STEP):
                raise

    def comment(self, job: int | str) -> str:
        """The job's comment; empty where there is none.

        Args:
            job: a task of a job array as ``9_3``: the number alone may mean the whole array.
        """
        comment = self.run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"]).rstrip("\n")
        return "" if comment == "(null)" else comment

    def set_comment(self, job: int | str, comment: str) -> None:
        """Write the job's comment, which squeue and sacct show; the job's owner may. ``job``: see ``comment``."""
        self.run(["scontrol", "update", f"jobid={job}", f"comment={comment}"])

    def job(self, job_id: int) -> Job | None:
        """The job, or None when slurmctld has forgotten it (minutes after its end).

        Slurm 22.05 answers with all jobs of the cluster, whatever was asked for: do not call this often.
        """
        try:
            jobs = queue.parse_squeue_json(self.run(["squeue", "--json", f"--jobs={job_id}"]))
        except CommandFailed as failure:
            if "Invalid job id" in failure.stderr:
                return None
            raise
        return next((job for job in jobs if job.job_id == job_id), None)

    def outcomes(self, job_id: int) -> tuple[Outcome, ...] | None:
        """How a job stands, one for each task of a job array; None when slurmctld has forgotten it.

        It costs slurmctld little, unlike ``job``.
        """
        try:
            return outcome.from_scontrol(self.run(["scontrol", "show", "job", str(job_id)]))
        except CommandFailed as failure:
            if "Invalid job id" in failure.stderr:
                return None
            raise

    def running_job(self, job_id: int) -> tuple[str, str] | None:
        """The first node of a running job, where its script or shell is, and its user; None if it does not run.

        Raises:
            CommandError: see the classes; also for an id that no job has.
        """
        lines = self.run(["squeue", "--noheader", f"--jobs={job_id}", "--states=RUNNING", "--format=%B %N %u"]).split()
        if not lines:
            return None
        host, nodes, user = lines[:3]
        # Of a job of salloc, Slurm names the machine on which salloc was called.
        of_job = hostlist.expand(nodes)
        return host if host in of_job else of_job[0], user

    def first_node(self, job_id: int) -> str | None:
        """The node of ``running_job``."""
        found = self.running_job(job_id)
        return None if found is None else found[0]

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        """The records of these nodes."""
        return queue.parse_nodes(self.run(["scontrol", "show", "node", hostlist.compress(names)]))

    def topology(self) -> tuple[Switch, ...]:
        """The switches; none where the cluster has no topology."""
        return queue.parse_topology(self.run(["scontrol", "show", "topology"]))

    def records(self, job_id: int | str) -> tuple[Record, ...]:
        """What accounting has of a job and its steps. It lags by seconds, so the last states may be missing.

        Args:
            job_id: of a job array: ``9_3`` is one task, and ``9`` are all.
        """
        return accounting.parse(self.run(["sacct", f"--jobs={job_id}", *accounting.ARGUMENTS]))
