"""A pipeline-parallel engine whose schedules are data.

`planning` makes, checks and times schedules and needs no torch; `runtime` executes one on real ranks.
Nothing is imported here, so that the planner stays usable where torch is not installed.
"""
