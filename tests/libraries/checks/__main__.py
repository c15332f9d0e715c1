"""See the package."""

import importlib
import json
import sys
import time
import traceback
from typing import Any

import jax
import numpy as np


def plain(value: Any) -> Any:
    """Values as JSON: arrays as nested lists."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return (array.astype(np.float64) if array.dtype.kind not in "biu" else array).tolist()
    return value


def main() -> None:
    """Run the checks of the modules that are named."""
    outcomes: dict[str, Any] = {}
    for name in sys.argv[1:]:
        started_s = time.monotonic()
        try:
            module = importlib.import_module(f"checks.{name}")
        except Exception:
            outcomes[name] = {"import": {"failed": traceback.format_exc()}}
            continue
        outcomes[name] = {}
        for check in module.CHECKS:
            try:
                outcomes[name][check.__name__] = {"values": plain(check())}
            except Exception:
                outcomes[name][check.__name__] = {"failed": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - started_s:.1f} s", file=sys.stderr)
    print(json.dumps(outcomes))


main()
