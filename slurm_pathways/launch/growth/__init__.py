"""Runs that grow: nodes of another job, the run's *companion*, become workers of the run and leave with that job."""
