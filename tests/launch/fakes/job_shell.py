"""The job control of a shell, and nothing else: runs a command in the foreground, and once more when it was stopped."""

import os
import signal
import sys


def main() -> int:
    # A shell takes the terminal back from the background, which would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    job = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setpgroup=0, setsigdef=[signal.SIGTTOU])
    while True:
        os.tcsetpgrp(0, job)
        os.killpg(job, signal.SIGCONT)
        _, status = os.waitpid(job, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        if not os.WIFSTOPPED(status):
            print("job ended with", os.waitstatus_to_exitcode(status))
            return 0
        print("job stopped by", signal.Signals(os.WSTOPSIG(status)).name)
        # Whatever line comes is "fg".
        sys.stdin.readline()


if __name__ == "__main__":
    sys.exit(main())
