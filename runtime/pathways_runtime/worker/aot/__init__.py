"""A runtime that only compiles: one process in the place of a controller and its workers, without their devices."""
