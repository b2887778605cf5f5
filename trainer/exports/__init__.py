"""What a run can be exported to, one module a format.

Each module has `export(run, out, advance)`: it writes the sessions of the run into the folder `out`, which exists and
is empty, calls `advance` with numbers of sessions, and returns how many records it wrote: rows,
trajectories, conversations. The caller sees to it that `out` is complete or absent.
"""
