"""Batch scripts: a template and what the user asks for in, the script's text out.

A template is a whole script, which sbatch takes as it stands: ``#SBATCH`` lines, and one line that does the work::

    exec slurm-pathways run --slices 2 -- "$@"

A script made of it is the same with other directives, the program in the place of ``"$@"``, and more settings on that
line.

Two grammars meet in a script. Commands are the shell's: ``shlex`` quotes them. ``#SBATCH`` lines are read by sbatch
with rules of its own, in which a backslash escapes also inside single quotes, so that the shell's quoting is wrong
there.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Where a line of ``#SBATCH`` would end, or sbatch would read past what is shown.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_LONG = re.compile(r"--(?P<name>[a-z][a-z-]*)(=(?P<value>.*))?", re.DOTALL)
_SHORT = re.compile(r"-(?P<name>[A-Za-z])\s*(?P<value>.*)", re.DOTALL)
#: A directive alone on its line; what follows is a comment.
_DIRECTIVE = re.compile(r"#SBATCH\s+--(?P<name>[a-z][a-z-]*)(=(?P<value>\S+))?\s*(#.*)?")
_WORK = re.compile(
    r"(?P<before>exec )?slurm-pathways (?P<command>[a-z]+\b)(?P<settings>.*?)(?P<program> -- \"\$@\")?(?P<after> &)?"
)
#: A setting of the line that does the work, with its value: a word, or one in double quotes.
_SETTING = re.compile(r" (--[a-z-]+)(?: (\"[^\"]*\"|[^-\s]\S*))?")


class SbatchError(ValueError):
    """A value cannot stand in a batch script, or a text is no template; the message says what and what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of sbatch.

    Attributes:
        name: with its dashes: ``--partition``, ``-C``.
        value: None for one that has none.
    """

    name: str
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Option":
        """From one word, as in ``--qos=high`` or ``-Cv5p``, also ``-C v5p``.

        Raises:
            SbatchError: it is of no such form.
        """
        if match := _LONG.fullmatch(text):
            return cls("--" + match["name"], match["value"])
        if (match := _SHORT.fullmatch(text)) and not match["value"].startswith("="):
            return cls("-" + match["name"], match["value"] or None)
        raise SbatchError(f"{text!r} is no sbatch option; write each as one word, like --qos=high or -Cv5p")

    @property
    def word(self) -> str:
        """As an argument of sbatch."""
        equals = "=" if self.name.startswith("--") else ""
        return self.name if self.value is None else f"{self.name}{equals}{self.value}"

    @property
    def line(self) -> str:
        """As a line of a script.

        Raises:
            SbatchError: its value has a control character, which no quoting carries.
        """
        if self.value is None:
            return f"#SBATCH {self.name}"
        equals = "=" if self.name.startswith("--") else " "
        return f"#SBATCH {self.name}{equals}{quote_directive(self.name, self.value)}"


@dataclass(frozen=True, slots=True)
class Template:
    """A script that sbatch takes as it stands.

    Attributes:
        lines: its text.
        directives: the values of its ``#SBATCH --name`` lines by name, with the dashes; None where there is none.
        settings: those of the line that does the work, by option: ``{"--slices": "2"}``; None for flags.
        takes_program: whether ``"$@"`` is on that line.
    """

    lines: tuple[str, ...]
    directives: Mapping[str, str | None]
    settings: Mapping[str, str | None]
    takes_program: bool

    @classmethod
    def parse(cls, text: str) -> "Template":
        """From a script.

        Raises:
            SbatchError: it has not one line that does the work, but none or several.
        """
        lines = tuple(text.splitlines())
        work = [match for line in lines if (match := _WORK.fullmatch(line))]
        if len(work) != 1:
            raise SbatchError(
                f'a template has one line that does the work, like exec slurm-pathways run -- "$@"; here are '
                f"{len(work)}"
            )
        directives = [match for line in lines if (match := _DIRECTIVE.fullmatch(line))]
        settings = _SETTING.findall(work[0]["settings"])
        return cls(
            lines,
            {f"--{match['name']}": match["value"] for match in directives},
            {name: value.strip('"') or None for name, value in settings},
            work[0]["program"] is not None,
        )


def render(
    template: Template,
    *,
    options: Sequence[Option] = (),
    executable: str = "slurm-pathways",
    settings: Mapping[str, str | None] | None = None,
    program: Sequence[str] = (),
) -> str:
    """The script, ending with a newline.

    Args:
        options: of sbatch. One that the template has takes its place; others follow it, in this order, and so win.
        executable: what stands in the script for ``slurm-pathways``.
        settings: for the line that does the work, values by option, None for flags; instead of the template's.
        program: instead of ``"$@"``.

    Raises:
        SbatchError: a value cannot be written; or there is a program and no place for it, or a place and none.
    """
    if template.takes_program and not (program and program[0]):
        raise SbatchError("there is nothing to run; give a program and its arguments after --")
    if program and not template.takes_program:
        raise SbatchError(f"this template runs no program, and {shlex.join(program)} was given: leave it out")
    settings = settings or {}
    for word in (executable, *(value or "" for value in settings.values()), *program):
        if "\0" in word:
            raise SbatchError(f"{word!r} has a zero byte")
    replaced = {option.name: option for option in options if option.name in template.directives}
    added = [option.line for option in options if option.name not in replaced]
    lines = []
    for line in template.lines:
        if match := _DIRECTIVE.fullmatch(line):
            option = replaced.get(f"--{match['name']}")
            lines.append(line if option is None else option.line)
        elif match := _WORK.fullmatch(line):
            lines.append(_work(match, executable, settings, program))
        else:
            lines.append(line)
    place = _end_of_directives(lines)
    return "\n".join([*lines[:place], *added, *lines[place:]]) + "\n"


def _work(match: re.Match[str], executable: str, settings: Mapping[str, str | None], program: Sequence[str]) -> str:
    given = {_positive(option) for option in settings}
    kept = _SETTING.sub(lambda found: "" if _positive(found[1]) in given else found[0], match["settings"])
    words = [shlex.quote(executable), match["command"] + kept]
    for option, value in settings.items():
        words += [option] if value is None else [option, shlex.quote(value)]
    if program:
        words += ["--", shlex.join(program)]
    return (match["before"] or "") + " ".join(words) + (match["after"] or "")


def _positive(option: str) -> str:
    """A flag and its opposite are one setting."""
    return option.replace("--no-", "--", 1)


def _end_of_directives(lines: Sequence[str]) -> int:
    """Behind the last line that sbatch reads; it stops at the first that is neither empty nor a comment."""
    end = 1
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            end = number + 1
        elif line.strip() and not line.startswith("#"):
            break
    return end


def quote_directive(name: str, value: str) -> str:
    """``value`` as one word of an ``#SBATCH`` line.

    Raises:
        SbatchError: it has a control character, which no quoting carries.
    """
    if _CONTROL.search(value):
        raise SbatchError(f"{name}: {value!r} has a control character (a line break?), which #SBATCH lines cannot hold")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
