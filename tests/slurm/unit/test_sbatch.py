import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.sbatch import Option, SbatchError, Template, quote_directive, render

GOLDEN = Path(__file__).parent / "golden"
TEXT = (GOLDEN / "template.sbatch").read_text()
TEMPLATE = Template.parse(TEXT)
LEAST = Template.parse('#!/bin/bash\nslurm-pathways run -- "$@"\n')

ASKED: Mapping[str, Mapping[str, Any]] = {
    "program": {"program": ("python", "train.py")},
    "everything": {
        "executable": "/home/ada/it's $HOME/bin/slurm-pathways",
        "options": (
            Option("--qos", "high"),
            Option("--job-name", 'it\'s "a" job \\ #1'),
            Option("--exclusive", "user"),
            Option("--nodes", "4"),
            Option("-C", "v5p&rack[1-2]"),
            Option("--reservation", "next week"),
            Option("--contiguous"),
            Option("-H"),
            Option("--nodes", "6"),
        ),
        "settings": {"--slices": "3", "--compile-cache": "/home/ada/my cache", "--no-keep-logs": None},
        "program": ("python", "train.py", "--name", 'it\'s $HOME `x` "q" \\ #1', "", "--", "$@"),
    },
}


def test_what_a_template_says() -> None:
    assert TEMPLATE.directives == {"--job-name": "two", "--nodes": "5", "--exclusive": None, "--signal": "B:USR1@120"}
    assert TEMPLATE.settings == {
        "--slices": "2",
        "--keep-logs": None,
        "--compile-cache": "$HOME/a cache",
        "--spares": "1",
    }
    assert TEMPLATE.takes_program
    assert (LEAST.directives, LEAST.settings, LEAST.takes_program) == ({}, {}, True)


@pytest.mark.parametrize("name", ASKED)
def test_golden(name: str) -> None:
    assert render(TEMPLATE, **ASKED[name]) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", ASKED)
def test_the_shell_takes_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=render(TEMPLATE, **ASKED[name]), text=True, check=True, timeout=20)


def test_a_template_without_directives_and_without_a_program() -> None:
    template = Template.parse("#!/bin/bash\nexec slurm-pathways up --foreground\n")
    assert render(template, options=[Option("--nodes", "2")], settings={"--slices": "2"}) == (
        "#!/bin/bash\n#SBATCH --nodes=2\nexec slurm-pathways up --foreground --slices 2\n"
    )
    with pytest.raises(SbatchError, match="runs no program, and python 'a b' was given"):
        render(template, program=["python", "a b"])


@pytest.mark.parametrize(
    ("text", "option", "word", "line"),
    [
        ("--qos=high", Option("--qos", "high"), "--qos=high", "#SBATCH --qos=high"),
        ("--comment=a = b", Option("--comment", "a = b"), "--comment=a = b", '#SBATCH --comment="a = b"'),
        ("--comment=", Option("--comment", ""), "--comment=", '#SBATCH --comment=""'),
        ("--hold", Option("--hold"), "--hold", "#SBATCH --hold"),
        ("-H", Option("-H"), "-H", "#SBATCH -H"),
        ("-Cv5p", Option("-C", "v5p"), "-Cv5p", "#SBATCH -C v5p"),
        ("-C v5p", Option("-C", "v5p"), "-Cv5p", "#SBATCH -C v5p"),
    ],
)
def test_options(text: str, option: Option, word: str, line: str) -> None:
    assert Option.parse(text) == option
    assert (option.word, option.line) == (word, line)


@pytest.mark.parametrize("text", ["rm", "--Qos=high", "-C=v5p", "-", "--", "", "--qos high"])
def test_what_is_no_option(text: str) -> None:
    with pytest.raises(SbatchError, match="is no sbatch option; write each as one word, like --qos=high or -Cv5p"):
        Option.parse(text)


def read_directive(line: str) -> list[str]:
    """The words of an ``#SBATCH`` line as sbatch reads them: after its get_argument, in 22.05 to 25.11."""
    words = []
    place = 0
    while True:
        while place < len(line) and line[place].isspace():
            place += 1
        if place == len(line) or line[place] == "#":
            return words
        word, quote = "", ""
        while place < len(line) and (quote or not line[place].isspace()):
            character = line[place]
            if character == "\\":
                place += 1
                word += line[place]
            elif quote and character == quote:
                quote = ""
            elif not quote and character in "\"'":
                quote = character
            elif not quote and character == "#":
                break
            else:
                word += character
            place += 1
        words.append(word)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp")) | st.just(" "), min_size=1))
def test_sbatch_reads_what_was_meant(value: str) -> None:
    assert read_directive("--comment=" + quote_directive("--comment", value)) == [f"--comment={value}"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")), min_size=1))
def test_the_shell_reads_what_was_meant(arguments: list[str]) -> None:
    script = render(LEAST, executable=arguments[0] or "x", program=["program", *arguments])
    words = shlex.split(script.partition("\n")[2])
    assert words == [arguments[0] or "x", "run", "--", "program", *arguments]


def test_bash_gives_the_program_its_arguments(tmp_path: Path) -> None:
    arguments = ["it's", '"', "\\", "$HOME", "`id`", "a\nb", "", "*", "~", "!x", "é", "#"]
    executable = tmp_path / "it's $HOME" / "slurm-pathways"
    executable.parent.mkdir()
    executable.write_text('#!/bin/sh\n[ "$1 $2" = "run --" ] && shift 2 && exec "$@"\n')
    executable.chmod(0o755)
    script = render(LEAST, executable=str(executable), program=["printf", "<%s>", *arguments])
    ran = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True, timeout=20)
    assert ran.stdout == "".join(f"<{argument}>" for argument in arguments)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"program": ()}, "there is nothing to run; give a program"),
        ({"program": ("",)}, "there is nothing to run; give a program"),
        ({"program": ("a", "b\0")}, "zero byte"),
        ({"executable": "a\0"}, "zero byte"),
        ({"options": [Option("--job-name", "a\n#SBATCH --uid=0")]}, "--job-name: .* control character"),
        ({"options": [Option("-C", "a\rb")]}, "-C: .* control character"),
    ],
)
def test_what_cannot_be_written(asked: Mapping[str, Any], words: str) -> None:
    with pytest.raises(SbatchError, match=words):
        render(TEMPLATE, **{"program": ("true",), **asked})


@pytest.mark.parametrize(
    ("text", "number"), [("#!/bin/bash\npython train.py\n", 0), ('slurm-pathways run -- "$@"\n' * 2, 2)]
)
def test_what_is_no_template(text: str, number: int) -> None:
    with pytest.raises(SbatchError, match=f'like exec slurm-pathways run -- "\\$@"; here are {number}'):
        Template.parse(text)
