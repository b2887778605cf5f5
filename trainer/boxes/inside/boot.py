"""Starts the far side of `boxes/remote` on another machine. The far side's files come over stdin.

For every Python 3, so that one that is too old can say so. stdin is not read further than the files
go.
"""

import io
import os
import runpy
import shutil
import sys
import tarfile
import tempfile
from typing import Any

NEEDS = "boxes behind ssh need Python 3.11 or newer with the packages psutil and pydantic"


def main(stdin: Any) -> None:
    """Unpack the files into a new folder, which is the far side's, and become the far side."""
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit("%s: %s is Python %s" % (NEEDS, sys.executable, sys.version.split()[0]))  # noqa: UP031
    left = int(stdin.readline())
    content = b""
    while len(content) < left:
        chunk = stdin.read(left - len(content))
        if not chunk:
            sys.exit("the connection ended")
        content += chunk
    folder = tempfile.mkdtemp(prefix="rolltap-ssh-")
    files = os.path.join(folder, "files")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(files)
    sys.path.insert(0, files)
    try:
        import psutil  # noqa: F401
        import pydantic  # noqa: F401
    except ImportError as error:
        shutil.rmtree(folder)
        sys.exit("%s: %s says: %s" % (NEEDS, sys.executable, error))  # noqa: UP031
    sys.argv[1:] = [folder]
    runpy.run_module("rolltap.trainer.boxes.far_side", run_name="__main__", alter_sys=True)


main(io.FileIO(0, closefd=False))
