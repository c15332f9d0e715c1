"""The engine of Slurm Pathways: one Python program drives every accelerator of an allocation.

Layers, lowest first; a layer imports only those before it: ``core`` (pure state machines: events in, instructions out),
``wire`` (messages and conversions), ``transport`` (sockets, shared memory), then the processes ``proxy``,
``controller`` and ``worker``, which do not import one another. The engine knows JAX and its own protocol; it knows
nothing of Slurm.
"""
