"""The formats that a run can be exported to, one module each.

`export(run, out, advance)` of each module writes the sessions of a run into `out`, an empty folder that exists. It
reports its progress in sessions to `advance`, and returns the number of records written: rows, trajectories or
conversations. The caller makes `out` atomic: it stages the folder and renames it when `export` returns.
"""
