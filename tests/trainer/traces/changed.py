"""Rows that somebody changed after they were written."""

import pyarrow as pa

from rolltap.addons.store.tables import TABLES, run_files


def change_rows(run, table, which, **values):
    """Change rows of a table after they were written, and leave their digests as they are."""
    for path in run_files(run, table):
        rows = pa.ipc.open_stream(path.read_bytes()).read_all().to_pylist()
        for row in rows:
            if which(row):
                row.update(values)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, TABLES[table]) as writer:
            writer.write_table(pa.Table.from_pylist(rows, TABLES[table]))
