"""An executor of accelerators that are made up: CPU devices under another platform's name, CPUs beside them."""

import sys
from typing import Any

from made_up_worker import MADE_UP, PLATFORM

from pathways_runtime.worker import environment, executor


def _pretend(prepare: Any, *arguments: Any) -> None:
    prepare(*arguments)
    # What imports jaxlib comes after the environment is prepared.
    from pathways_runtime.worker import pjrt

    num_devices = arguments[0]
    pjrt.make_plugin_client = lambda platform, membership, *_: pjrt.make_cpu_client(num_devices, membership)
    pjrt.describe_platform = lambda platform: ("made up", "made up chip")


if __name__ == "__main__":
    original = environment.prepare
    environment.prepare = lambda *arguments: _pretend(original, *arguments)
    sys.argv[:] = [PLATFORM if argument == MADE_UP else argument for argument in sys.argv]
    executor.main()
