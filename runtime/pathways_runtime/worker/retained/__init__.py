"""Host memory that outlives executors.

Copies of arrays in a host's memory (``pinned_host``) lie in a file without a name that the supervisor holds open
(``file``). An executor writes into it and keeps a journal there (``journal``) of what is whole; when it ends, however
it ends, the next executor of the same worker has the arrays again (``arrays``). With the supervisor the memory goes:
the kernel frees it.
"""
