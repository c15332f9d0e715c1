"""Run the checks and write what they return."""

import argparse
import json
import sys
import time
from pathlib import Path

import jax

from value_checks import CHECKS
from value_checks.registry import run_check


def main() -> None:
    """Run the chosen checks; one that raises does not stop the others."""
    parser = argparse.ArgumentParser(prog="python -m value_checks", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--x64", action="store_true", help="with 64-bit types")
    parser.add_argument("--only", nargs="*", default=list(CHECKS), metavar="NAME")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.x64)
    results = {}
    for name in args.only:
        if CHECKS[name].needs_x64 and not args.x64:
            continue
        start = time.perf_counter()
        results[name] = run_check(CHECKS[name])
        state = results[name].get("error", "ran")
        print(f"{time.perf_counter() - start:6.2f} s  {name}: {state}", file=sys.stderr, flush=True)
    args.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
