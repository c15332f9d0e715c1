"""Batch scripts: a frozen description in, the script's text out.

Two grammars meet in a script. Commands are the shell's: ``shlex`` quotes them. ``#SBATCH`` lines are read by sbatch
with rules of its own, in which a backslash escapes also inside single quotes, so that the shell's quoting is wrong
there.
"""

import re
import shlex
from dataclasses import dataclass

#: Where a line of ``#SBATCH`` would end, or sbatch would read past what is shown.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?|-[A-Za-z].*", re.DOTALL)


class SbatchError(ValueError):
    """A value cannot stand in a batch script; the message names the field, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class SbatchSpec:
    """One job to submit. What is None or empty is left to the site's defaults.

    Attributes:
        command: the line that does the work, as an argument vector; its exit code is the job's.
        job_name: shown by squeue and sacct.
        num_nodes: at least 1, spares included.
        time_limit_min: minutes, rounded up to Slurm's resolution by the caller.
        cpus_per_task, memory_mib_per_node: of each node's one task; memory 0 means all of the node.
        gres: as Slurm writes it, ``tpu:v5p:4``, per node.
        output, error: patterns of Slurm, ``%x-%j.out``; relative to the folder that the job is submitted from.
        signal: name without SIG, and how many seconds before the time limit it comes to the batch script.
        keep_on_node_loss: ``--no-kill``: the job goes on without a node that fails, which is what spares are for.
        is_requeued: whether Slurm may start the job anew; None for the site's default.
        pathways: the value of ``--pathways`` for the SPANK plugin; None where the command starts the runtime itself.
        extra: further sbatch options, each one word like ``--reservation=maintenance``; they come last, and so win.
        prologue: shell lines that the site or the user wants before the command (modules, environments), verbatim.
    """

    command: tuple[str, ...]
    job_name: str = "pathways"
    num_nodes: int = 1
    time_limit_min: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    memory_mib_per_node: int | None = None
    gres: str | None = None
    is_exclusive: bool = True
    output: str | None = "%x-%j.out"
    error: str | None = None
    work_dir: str | None = None
    signal: tuple[str, int] | None = None
    keep_on_node_loss: bool = True
    is_requeued: bool | None = None
    comment: str | None = None
    dependency: str | None = None
    array: str | None = None
    export: str | None = None
    pathways: str | None = None
    extra: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()


def render(spec: SbatchSpec) -> str:
    """The script, ending with a newline.

    Raises:
        SbatchError: a value cannot be written, or is out of its bounds.
    """
    if not spec.command or not spec.command[0]:
        raise SbatchError("command: there is nothing to run; give a program and its arguments")
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in _directives(spec)), ""]
    if spec.prologue:
        for line in spec.prologue:
            if "\0" in line:
                raise SbatchError(f"prologue: {line!r} has a zero byte")
            lines.append(line)
        lines.append("")
    for argument in spec.command:
        if "\0" in argument:
            raise SbatchError(f"command: {argument!r} has a zero byte")
    # exec: signals and the exit code are the command's, with no shell between.
    lines.append("exec " + shlex.join(spec.command))
    return "\n".join(lines) + "\n"


def quote_directive(field: str, value: str) -> str:
    """``value`` as one word of an ``#SBATCH`` line.

    Raises:
        SbatchError: it has a control character, which no quoting carries.
    """
    if _CONTROL.search(value):
        raise SbatchError(
            f"{field}: {value!r} has a control character (a line break?), which #SBATCH lines cannot hold"
        )
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _directives(spec: SbatchSpec) -> list[str]:
    signal = None
    if spec.signal is not None:
        name, before_s = spec.signal
        # B: only the batch script gets it; steps are the command's to signal.
        signal = f"B:{name}@{_at_least(before_s, 0, 'signal')}"
    memory = spec.memory_mib_per_node
    options: list[tuple[str, str | None]] = [
        ("job-name", spec.job_name),
        ("nodes", str(_at_least(spec.num_nodes, 1, "num_nodes"))),
        # One task per node is the unit in which CPUs are asked for; the command makes its own steps.
        ("ntasks-per-node", "1"),
        ("cpus-per-task", _number(spec.cpus_per_task, 1, "cpus_per_task")),
        # Without a unit: MiB.
        ("mem", _number(memory, 0, "memory_mib_per_node")),
        ("gres", spec.gres),
        ("time", _number(spec.time_limit_min, 1, "time_limit_min")),
        ("partition", spec.partition),
        ("account", spec.account),
        ("qos", spec.qos),
        ("constraint", spec.constraint),
        ("output", spec.output),
        ("error", spec.error),
        ("chdir", spec.work_dir),
        ("signal", signal),
        ("comment", spec.comment),
        ("dependency", spec.dependency),
        ("array", spec.array),
        ("export", spec.export),
        ("pathways", spec.pathways or None),
    ]
    lines = [f"--{name}={quote_directive(name, value)}" for name, value in options if value is not None]
    if spec.pathways == "":
        lines.append("--pathways")
    if spec.is_exclusive:
        lines.append("--exclusive")
    if spec.keep_on_node_loss:
        lines.append("--no-kill")
    if spec.is_requeued is not None:
        lines.append("--requeue" if spec.is_requeued else "--no-requeue")
    for option in spec.extra:
        if not _OPTION.fullmatch(option):
            raise SbatchError(
                f"extra: {option!r} is no sbatch option; write each as one word, like --qos=high or -C v5p"
            )
        lines.append(_quote_option(option))
    return lines


def _quote_option(option: str) -> str:
    """A whole option; of a short one with its value in the same text (``-C v5p``) the value is its own word."""
    if option.startswith("--"):
        name, equals, value = option.partition("=")
        return name + equals + (quote_directive(name, value) if value else "")
    letter, value = option[:2], option[2:].strip()
    return f"{letter} {quote_directive(letter, value)}" if value else letter


def _number(value: int | None, minimum: int, field: str) -> str | None:
    return None if value is None else str(_at_least(value, minimum, field))


def _at_least(value: int, minimum: int, field: str) -> int:
    if value < minimum:
        raise SbatchError(f"{field}={value}: it must be at least {minimum}")
    return value
