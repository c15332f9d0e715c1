"""Runtimes that outlive programs: ``up`` keeps one, programs are let in and leave, ``down`` ends it."""
