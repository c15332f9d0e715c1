import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.sbatch import SbatchError, SbatchSpec, quote_directive, render

GOLDEN = Path(__file__).parent / "golden"

SPECS = {
    "least": SbatchSpec(("slurm-pathways", "run", "--", "python", "train.py")),
    "everything": SbatchSpec(
        (
            "slurm-pathways",
            "run",
            "--slices",
            "2",
            "--",
            "python",
            "train.py",
            "--name",
            'it\'s $HOME `x` "q" \\ #1',
            "",
        ),
        job_name='it\'s "a" job \\ #1',
        num_nodes=5,
        time_limit_min=90,
        partition="tpu,big",
        account="lab",
        qos="high",
        constraint="v5p&rack[1-2]",
        cpus_per_task=8,
        memory_mib_per_node=0,
        gres="tpu:v5p:4",
        output="logs of %u/%x-%j.out",
        error="%x-%j.err",
        work_dir="/home/ada/my work",
        signal=("USR2", 90),
        is_requeued=True,
        comment="first try; è",
        dependency="singleton",
        array="0-3%2",
        export="ALL,A=b c",
        pathways="slices=2,spares=1",
        extra=("--reservation=next week", "--contiguous", "-M cluster1", "-H"),
        prologue=("module load python/3.11", 'source "$HOME/my env/bin/activate"'),
    ),
    "shared_node": SbatchSpec(
        ("true",), is_exclusive=False, keep_on_node_loss=False, is_requeued=False, output=None, pathways=""
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_golden(name: str) -> None:
    assert render(SPECS[name]) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", SPECS)
def test_the_shell_takes_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=render(SPECS[name]), text=True, check=True, timeout=20)


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
    assert read_directive("--comment=" + quote_directive("comment", value)) == [f"--comment={value}"]


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")), min_size=1))
def test_the_shell_reads_what_was_meant(arguments: list[str]) -> None:
    script = render(SbatchSpec(("program", *arguments)))
    assert shlex.split(script.partition("\nexec ")[2]) == ["program", *arguments]


def test_bash_gives_the_program_its_arguments(tmp_path: Path) -> None:
    arguments = ["it's", '"', "\\", "$HOME", "`id`", "a\nb", "", "*", "~", "!x", "é", "#"]
    script = render(SbatchSpec(("printf", "<%s>", *arguments)))
    ran = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True, cwd=tmp_path, timeout=20)
    assert ran.stdout == "".join(f"<{argument}>" for argument in arguments)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"command": ()}, "command: there is nothing to run"),
        ({"command": ("",)}, "command: there is nothing to run"),
        ({"command": ("a", "b\0")}, "zero byte"),
        ({"job_name": "a\n#SBATCH --uid=0"}, "job-name: .* control character"),
        ({"output": "a\rb"}, "output: .* control character"),
        ({"extra": ("--comment=a\nrm -rf /",)}, "control character"),
        ({"extra": ("rm",)}, "'rm' is no sbatch option"),
        ({"extra": ("--Qos=high",)}, "is no sbatch option"),
        ({"num_nodes": 0}, "num_nodes=0: it must be at least 1"),
        ({"time_limit_min": 0}, "time_limit_min=0: it must be at least 1"),
        ({"signal": ("USR1", -1)}, "signal=-1: it must be at least 0"),
    ],
)
def test_what_cannot_be_written(changed: dict[str, object], words: str) -> None:
    with pytest.raises(SbatchError, match=words):
        render(SbatchSpec(**{"command": ("true",), **changed}))  # type: ignore[arg-type]
