"""Run JAX's own tests on runtimes of 8 CPU devices and on plain JAX, and write docs/conformance.md.

See that page for how. FILES are names like pjit or pjit_test.py; without any, all files of the plan run.
"""

import argparse
import importlib.metadata
import json
import platform
import signal
import sys
import time
from pathlib import Path

from jax_conformance import plan, runner, table

from slurm_pathways.launch.local import StartupFailed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "conformance.md"


def main() -> None:
    """Exit code 1: a runtime did not come up; 2: a bad command line. Failing tests are results, no failure."""
    arguments = _parser().parse_args()
    # So that everything that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        files = plan.chosen(arguments.files)
    except plan.UnknownFileError as error:
        _parser().error(str(error))
    source = _tests_folder(arguments.jax_source)
    settings = runner.Settings(
        source,
        arguments.results.resolve(),
        arguments.test_deadline_s,
        arguments.sample,
        None if arguments.stop_within_min is None else time.time() + 60 * arguments.stop_within_min,
    )
    if arguments.table_only:
        steps = []
    else:
        steps = plan.steps(files, [plan.Target(name) for name in arguments.target] or list(plan.Target))
    for file, target in steps:
        if arguments.retry_failed:
            runner.forget_failures(settings.journal_of(file, target))
        elif not arguments.resume:
            settings.journal_of(file, target).unlink(missing_ok=True)
    try:
        for file, target in steps:
            if settings.is_over:
                break
            say(f"{file.name} on {target.value}")
            runner.run_file(file, target, settings, say)
            write_table(settings)
    except StartupFailed as error:
        sys.exit(str(error))
    write_table(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILES")
    parser.add_argument(
        "--jax-source", type=Path, required=True, metavar="DIR", help="checkout at the installed version"
    )
    parser.add_argument("--resume", action="store_true", help="keep results that are there, run what is missing")
    parser.add_argument("--retry-failed", action="store_true", help="like --resume, and run what failed again")
    parser.add_argument("--results", type=Path, default=ROOT / ".conformance", metavar="DIR", help="journals and logs")
    parser.add_argument(
        *("--target", "-t"), action="append", default=[], choices=[target.value for target in plan.Target]
    )
    parser.add_argument("--test-deadline-s", type=float, default=180.0, metavar="S", help="longer is a hang")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="at most so many tests of each file")
    parser.add_argument("--stop-within-min", type=float, metavar="MIN", help="end in the middle; --resume goes on")
    parser.add_argument("--table-only", action="store_true", help="write the page from the results that are there")
    return parser


def _tests_folder(source: Path) -> Path:
    """JAX's folder of tests; ends the program when it is not there or of another version."""
    installed = importlib.metadata.version("jax")
    tests = source.resolve() / "tests"
    if not (tests / "array_test.py").exists():
        sys.exit(
            f"{source} is no checkout of JAX: it has no tests/array_test.py. Check out jax-v{installed} of jax-ml/jax"
        )
    version = source / "jax" / "version.py"
    if version.exists() and f'_version = "{installed}"' not in version.read_text():
        sys.exit(f"{source} is another version of JAX than the installed {installed}: check out jax-v{installed}")
    return tests


def write_table(settings: runner.Settings) -> None:
    """The page and ``results.json`` of all results that are there, also of files that did not run now."""
    comparisons = []
    for file in plan.FILES:
        plain = runner.read_journal(settings.journal_of(file, plan.Target.PLAIN))
        for target in file.targets[1:]:
            here = runner.read_journal(settings.journal_of(file, target))
            if here.ids is not None or here.broken:
                comparisons.append(table.compare(file, target, plain, here))
    versions = {
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    settings.results.mkdir(parents=True, exist_ok=True)
    (settings.results / "results.json").write_text(json.dumps(table.as_json(comparisons, versions), indent=1) + "\n")
    PAGE.write_text(table.as_markdown(comparisons, versions))


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
