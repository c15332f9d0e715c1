"""The process of the allocation: connections around ``core.controller``, and coordination services beside it."""
