"""The results on plain JAX and here, compared: counts, kinds of failures, and the page of docs that shows them."""

import collections
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_conformance.journal import Outcome, Result, State
from jax_conformance.kinds import KINDS, UNSORTED, Kind, kind_of
from jax_conformance.plan import LEFT_OUT, Target, TestFile


class Verdict(enum.StrEnum):
    """A test on plain JAX and here."""

    PASSED_BOTH = "passed both"
    FAILED_HERE = "failed only here"
    FAILED_BOTH = "failed both"
    PASSED_HERE = "passed only here"
    SKIPPED_HERE = "skipped only here"
    SKIPPED = "skipped"
    NOT_RUN = "not run"


_BAD = frozenset({Outcome.FAILED, Outcome.HANG, Outcome.CRASH})


def verdict(plain: Result | None, here: Result | None) -> Verdict:
    """What two results of one test say."""
    if plain is None or here is None:
        return Verdict.NOT_RUN
    if plain.outcome is Outcome.SKIPPED:
        return Verdict.SKIPPED
    if here.outcome is Outcome.SKIPPED:
        return Verdict.SKIPPED_HERE
    if plain.outcome is Outcome.PASSED:
        return Verdict.FAILED_HERE if here.outcome in _BAD else Verdict.PASSED_BOTH
    return Verdict.FAILED_BOTH if here.outcome in _BAD else Verdict.PASSED_HERE


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that plain JAX passes and that does not pass here."""

    id: str
    result: Result
    kind: Kind


@dataclass(frozen=True, slots=True)
class Comparison:
    """One file on one target.

    Attributes:
        num_chosen, num_collected: how many of its tests were to run, of how many.
        note: why it could not run.
    """

    file: TestFile
    target: Target
    counts: Mapping[Verdict, int]
    failures: tuple[Failure, ...]
    num_chosen: int = 0
    num_collected: int = 0
    note: str = ""

    def count(self, *outcomes: Outcome) -> int:
        """How many of the failures ended so."""
        return sum(failure.result.outcome in outcomes for failure in self.failures)


def compare(file: TestFile, target: Target, plain: State, here: State) -> Comparison:
    """Every test that either side has collected."""
    ids = dict.fromkeys([*(plain.ids or ()), *(here.ids or ())])
    verdicts = {name: verdict(plain.results.get(name), here.results.get(name)) for name in ids}
    failures = tuple(
        Failure(name, here.results[name], kind_of(name, here.results[name].message))
        for name, said in verdicts.items()
        if said is Verdict.FAILED_HERE
    )
    notes = [f"{where}: {state.broken}" for where, state in (("plain", plain), ("here", here)) if state.broken]
    num_collected = max(plain.num_collected, here.num_collected)
    counts = collections.Counter(verdicts.values())
    return Comparison(file, target, counts, failures, len(ids), num_collected, "; ".join(notes))


def as_json(comparisons: Sequence[Comparison], versions: Mapping[str, str]) -> dict[str, object]:
    """All of it, for programs."""
    return {
        **versions,
        "files": [
            {
                "file": comparison.file.file_name,
                "target": comparison.target.value,
                "counts": {said.value: comparison.counts.get(said, 0) for said in Verdict},
                "note": comparison.note,
                "failed_only_here": [
                    {
                        "id": failure.id,
                        "outcome": failure.result.outcome.value,
                        "kind": failure.kind.name,
                        "message": failure.result.message,
                    }
                    for failure in comparison.failures
                ],
            }
            for comparison in comparisons
        ],
    }


_COLUMNS = (
    Verdict.PASSED_BOTH,
    Verdict.FAILED_HERE,
    Verdict.FAILED_BOTH,
    Verdict.PASSED_HERE,
    Verdict.SKIPPED,
    Verdict.SKIPPED_HERE,
    Verdict.NOT_RUN,
)

_HEAD = """# Conformance with JAX's own tests

This page is written by `python tests/conformance`, which runs files of JAX's tests on runtimes of 8 CPU devices and on
plain JAX with 8 CPU devices, and compares. *Failed only here* is what matters: plain JAX passes the test. `1x4x2` is a
runtime of 1 slice x 4 hosts x 2 devices; `2x2x2` has 2 slices, for files that make their meshes of explicit devices
(`jax.make_mesh` refuses devices of several slices). Of a file with *n of m* behind its name a sample has run, chosen by
a hash of the tests' names.

    git clone --depth 1 --branch jax-v{jax} https://github.com/jax-ml/jax jax-src
    python tests/conformance --jax-source jax-src                 # all of these files; hours on two cores
    python tests/conformance --jax-source jax-src --sample 30     # at most 30 tests of each file
    python tests/conformance --jax-source jax-src --resume        # goes on where it was interrupted
    python tests/conformance --jax-source jax-src --retry-failed  # after a change
    python tests/conformance --jax-source jax-src array pjit      # these files anew; the page keeps the others

A test that is not done by its deadline is a *hang*; one during which a process of the tests or of the runtime ends is a
*crash*. After either the runtime is started anew. Logs, and the stacks of what hung, lie in the folder of `--results`.

jax {jax}, jaxlib {jaxlib}, Python {python}, {date}.
"""


def as_markdown(comparisons: Sequence[Comparison], versions: Mapping[str, str]) -> str:
    """The page. ``versions``: ``jax``, ``jaxlib``, ``python``, ``date``."""
    parts = [_HEAD.format(**versions), _counts(comparisons), _summary(comparisons), _left_out(), _kinds(comparisons)]
    return "\n".join([*parts, _failures(comparisons)])


def _counts(comparisons: Sequence[Comparison]) -> str:
    rows = [
        ["file", "devices", *(said.value for said in _COLUMNS), "of these hangs, crashes"],
        ["---", "---", *("--:" for _ in _COLUMNS), "--:"],
    ]
    for comparison in comparisons:
        name = comparison.file.name
        if comparison.num_chosen < comparison.num_collected:
            name += f" ({comparison.num_chosen} of {comparison.num_collected})"
        numbers = [str(comparison.counts.get(said, 0)) for said in _COLUMNS]
        bad = f"{comparison.count(Outcome.HANG)}, {comparison.count(Outcome.CRASH)}"
        rows.append([name, comparison.target.value, *numbers, bad])
    total = collections.Counter[Verdict]()
    for comparison in comparisons:
        total.update(comparison.counts)
    hangs, crashes = (
        sum(comparison.count(outcome) for comparison in comparisons) for outcome in (Outcome.HANG, Outcome.CRASH)
    )
    rows.append(["**all**", "", *(str(total[said]) for said in _COLUMNS), f"{hangs}, {crashes}"])
    lines = ["## Results", "", *(_row(row) for row in rows), ""]
    lines += [
        f"* {comparison.file.name} on {comparison.target.value}: {_code(comparison.note)}"
        for comparison in comparisons
        if comparison.note
    ]
    return "\n".join(lines)


def _summary(comparisons: Sequence[Comparison]) -> str:
    passed = sum(comparison.counts.get(Verdict.PASSED_BOTH, 0) for comparison in comparisons)
    failures = [failure for comparison in comparisons for failure in comparison.failures]
    ours = sum(not failure.kind.is_clients for failure in failures)
    if not passed + len(failures):
        return "Nothing that plain JAX passes has run here.\n"
    share = 100 * passed / (passed + len(failures))
    return (
        f"Of {passed + len(failures)} tests that plain JAX passes, {passed} pass here ({share:.1f} %). Of the other "
        f"{len(failures)}, {len(failures) - ours} ask for what JAX's client itself cannot do through the proxy.\n"
    )


def _left_out() -> str:
    said = (f"* `{name}` {why}." for name, why in LEFT_OUT.items())
    return "\n".join(["JAX has more files of tests than these; the others have not run. Among them:", "", *said, ""])


def _kinds(comparisons: Sequence[Comparison]) -> str:
    counts = collections.Counter(failure.kind for comparison in comparisons for failure in comparison.failures)
    rows = [["kind", "failures", "whose", "cause"], ["---", "--:", "---", "---"]]
    rows += [
        [kind.name, str(counts[kind]), "JAX's client" if kind.is_clients else "ours", kind.cause]
        for kind in sorted((*KINDS, UNSORTED), key=lambda kind: -counts[kind])
        if counts[kind]
    ]
    return "\n".join(["## Kinds of failures", "", *(_row(row) for row in rows), ""])


def _failures(comparisons: Sequence[Comparison]) -> str:
    lines = ["## Failed only here", ""]
    for comparison in comparisons:
        if not comparison.failures:
            continue
        lines += [f"### {comparison.file.name} on {comparison.target.value}", ""]
        for failure in comparison.failures:
            name = failure.id.split("::", 1)[-1].replace("::", ".")
            how = "" if failure.result.outcome is Outcome.FAILED else f"**{failure.result.outcome}**, "
            lines.append(f"* `{name}`: {how}{failure.kind.name}: {_code(failure.result.message)}")
        lines.append("")
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    """As code, whatever is in it; addresses are others in each run, and would change the page."""
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return "`" + text.replace("`", "'").replace("|", "\\|")[:160] + "`"
