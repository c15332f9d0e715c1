"""``python -m pathways_runtime.worker``: the supervisor of one host."""

import sys

from pathways_runtime.worker.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
