"""The file without a name, in the supervisor, which keeps its descriptor and passes it to its executors in turn.

It is as long as the machine's memory, of which half may be in it; a page takes memory once it is written, and until it
is given back.
"""

import os


def make() -> int:
    """A new file; the caller closes the descriptor.

    Raises:
        OSError: the system gives none.
    """
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fd = os.memfd_create("pathways-retained", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, memory_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
