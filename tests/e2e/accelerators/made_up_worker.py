"""A worker of accelerators that are made up; see ``made_up_executor``. The supervisor must not look for real ones."""

import sys
from pathlib import Path

PLATFORM = "cuda"
MADE_UP = "made-up"

if __name__ == "__main__":
    from pathways_runtime.worker import supervisor

    command = (sys.executable, str(Path(__file__).with_name("made_up_executor.py")))
    arguments = [MADE_UP if argument == PLATFORM else argument for argument in sys.argv[1:]]
    sys.exit(supervisor.main(arguments, command))
