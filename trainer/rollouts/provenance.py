"""Provenance of a session: which program ran, in which version, described by which preset, in which
image.

The harness's version is what the program itself reports. It is asked once for each image of a
rollout, in a box without network. The digest of the program is that of the file that PATH names,
through symbolic links, and of the files that the preset names: of a script that loads a package, it
tells the script and not the package, which the version tells.
"""

import asyncio
import hashlib
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.boxes.environment import clean_environment
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import BoxSpec, Runtime
from rolltap.trainer.concurrency import Once, run_blocking
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.mitmdump import workplace

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"\bv?(\d+(?:\.\d+)+(?:[-+][0-9A-Za-z.+-]*[0-9A-Za-z])?)")
_ENDS_A_LINE = re.compile(_VERSION.pattern + r"$", re.MULTILINE)
_VERSION_SECONDS = 60.0
_MOST_OUTPUT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Fields of a session's row, as `Session` describes them."""

    harness_version: str
    program_digest: str
    preset_digest: str
    image_digest: str

    def set_in(self, session: Session) -> None:
        """Set the fields in a session's row."""
        for name, value in asdict(self).items():
            setattr(session, name, value)


class Provenances:
    """The provenance of a harness in a runtime: one for each image. `work` is a folder for its
    boxes."""

    def __init__(self, harness: Harness, runtime: Runtime, work: Path) -> None:
        self._harness, self._runtime, self._work = harness, runtime, work
        self._known: Once[str | None, Provenance] = Once()

    async def of(self, image: str | None) -> Provenance:
        """Return the provenance of sessions in an image, or in none.

        Warns when the program's version is not the preset's. A program that does not tell its
        version has an empty one. Raises `InputError` for an image that cannot be had.
        """
        return await self._known.get(image, lambda: self._find(image))

    async def _find(self, image: str | None) -> Provenance:
        image_digest = (
            await asyncio.to_thread(self._runtime.image_digest, image) if image is not None else ""
        )
        version = await reported_version(self._harness, self._runtime, self._work, image)
        harness = self._harness
        is_here = image is None and self._runtime.programs_here
        if version and harness.version and version != harness.version:
            how = f": install it with `{harness.install}`, or" if harness.install else ":"
            what = (
                f"has the version {version}, and its preset was tested with {harness.version}{how}"
            )
            why = "expect other prompts and tools; sessions of both versions are no fair comparison"
            logger.warning("the harness %s %s %s", harness.name, what, why)
        return Provenance(
            harness_version=version,
            program_digest=await asyncio.to_thread(_program_digest, harness, is_here),
            preset_digest=self._harness.digest(),
            image_digest=image_digest,
        )


async def reported_version(
    harness: Harness, runtime: Runtime, work: Path, image: str | None = None
) -> str:
    """Return the version that a program prints, asked in a box below `work`; empty when it cannot
    be asked."""
    with TemporaryDirectory(dir=work, prefix="version-", ignore_cleanup_errors=True) as folder:
        workspace, home, log = Path(folder, "workspace"), Path(folder, "home"), Path(folder, "log")
        workspace.mkdir()
        home.mkdir()
        spec = BoxSpec(
            name=f"rolltap-{Path(folder).name}",
            workspace=workspace,
            workdir="/workspace",
            home=home,
            image=image,
        )
        try:
            async with runtime.box(spec) as box:
                command = [harness.program, *harness.version_arguments]
                env = {
                    **clean_environment(Path(box.home), isolated=runtime.isolated),
                    **harness.env,
                }
                ended = await box.run(command, env=env, timeout=_VERSION_SECONDS, log=log)
                await box.settle()
            return (
                find_version(await asyncio.to_thread(_beginning, log)) if ended.status == 0 else ""
            )
        except (OSError, RolltapError) as error:
            logger.info("%s does not tell its version: %s", harness.program, error)
            return ""


def _beginning(log: Path) -> str:
    with log.open(errors="replace") as output:
        return output.read(_MOST_OUTPUT)


def find_version(output: str) -> str:
    """Return the first version number that ends a line of a program's output, else the first; empty
    without one.

    A program may print warnings of its libraries before its version, with other numbers in their
    sentences.
    """
    found = _ENDS_A_LINE.search(output) or _VERSION.search(output)
    return found[1] if found else ""


def _program_digest(harness: Harness, is_here: bool) -> str:
    """Return the SHA-256 of a program's file, and of the files that its preset names; empty without
    any.

    Of a folder its Python files count. A program of an image or of another machine, and absolute
    paths there, have no digest here.
    """
    files: list[Path] = []
    if is_here:
        program = os.path.abspath(shutil.which(harness.program) or "/")
        words = [program, *harness.arguments, *harness.headless]
        files += [Path(word) for word in words if os.path.isabs(word) and os.path.isfile(word)]
    for path in harness.files:
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digests = [_digest(path) for path in dict.fromkeys(files)]
    if len(digests) < 2:
        return "".join(digests)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def set_provenance(session: Session, harness: Harness) -> None:
    """Set the provenance of a program that runs outside of a box in a session's row. Warns as
    `Provenances.of`."""
    with workplace() as work:
        run_blocking(Provenances(harness, ProcessRuntime(), work).of(None)).set_in(session)
