"""Makes one self-contained wheel of wheels that were built for different releases of torch.

Usage: wheel_repair.py WHEEL... DIST. The wheels are of one Python. The result holds the extensions
of each, and requires one of their torches. auditwheel grafts libraries that neither torch nor the
manylinux policy gives (TBB; hwloc, jemalloc and liburing are linked into the module) and sets the
platform tag. A wheel that lacks a torch of pyproject.toml's range says in its version which ones it
has, as 0.1.0+torch2.11.torch2.12.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

# torch brings these itself, libgomp among them; a grafted copy would be a second in the process.
EXCLUDED = ("libtorch*", "libc10*", "libshm*", "libgomp*", "libcu*", "libnv*", "libnccl*")
# Notices of what Debian's packages put into the wheel travel with it: the grafted TBB, the static
# liburing, and the header of xxhash.
LICENSES = {
    "onetbb.txt": Path("/usr/share/doc/libtbb12/copyright"),
    "liburing.txt": Path("/usr/share/doc/liburing-dev/copyright"),
    "xxhash.txt": Path("/usr/share/doc/libxxhash-dev/copyright"),
}


def torches_of(names: Iterable[str]) -> list[str]:
    """Minor versions of torch, such as "2.11", that a wheel with files of these names supports."""
    found = {m[1] for name in names if (m := re.match(r"castor/_extensions/torch([\d.]+)/", name))}
    return sorted(found, key=Version)


def known_torches(metadata: str) -> list[str]:
    """Minor versions in the range of torch releases that pyproject.toml names.

    Args:
        metadata: The METADATA file of a wheel.
    """
    (line,) = re.findall(r"^Requires-Dist: (torch[<>].*)$", metadata, re.MULTILINE)
    bounds = {spec.operator: Version(spec.version) for spec in Requirement(line).specifier}
    first, behind = bounds[">="], bounds["<"]
    return [f"{first.major}.{minor}" for minor in range(first.minor, behind.minor)]


def local_version(torches: list[str], known: list[str]) -> str | None:
    """The local part of a wheel's version; None for a wheel that supports every known torch."""
    return None if torches == known else ".".join(f"torch{torch}" for torch in torches)


def requirement(torches: list[str], known: list[str]) -> str:
    """The torch that a wheel with the extensions for `torches` requires, beside the known range."""
    if len(torches) == 1:
        return f"torch=={torches[0]}.*"
    lacking = [f"!={torch}.*" for torch in known if torch not in torches]
    return f"torch{','.join(lacking)}" if lacking else ""


def run(*command: str | Path) -> None:
    """Runs a module of this environment, its tools on PATH; prints its output if it fails."""
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def unpack(wheel: Path, directory: Path) -> Path:
    """Unpacks a wheel below a directory that does not exist yet; returns the folder it became."""
    run("wheel", "unpack", "--dest", directory, wheel)
    (unpacked,) = directory.iterdir()
    return unpacked


def merge(wheels: list[Path], work: Path) -> Path:
    """Writes a wheel with the extensions of all `wheels`, and else the files of the first one."""
    work.mkdir(exist_ok=True)
    merged, *others = (unpack(wheel, work / f"raw{i}") for i, wheel in enumerate(wheels))
    for other in others:
        for folder in (other / "castor" / "_extensions").iterdir():
            shutil.copytree(folder, merged / "castor" / "_extensions" / folder.name)
    (path,) = merged.glob("*.dist-info/METADATA")
    metadata = path.read_text(encoding="utf-8")
    files = (str(file.relative_to(merged)) for file in merged.rglob("*"))
    wanted = requirement(torches_of(files), known_torches(metadata))
    line = f"Requires-Dist: {wanted}\n" if wanted else ""
    path.write_text(
        re.sub(r"^Requires-Dist: torch==.*\n", line, metadata, flags=re.MULTILINE),
        encoding="utf-8",
    )
    (work / "merged").mkdir()
    run("wheel", "pack", "-d", work / "merged", merged)
    (packed,) = (work / "merged").glob("*.whl")
    return packed


def repair(wheels: list[Path], dist: Path) -> Path:
    """Merges wheels, writes the repaired one to `dist` and returns its path.

    Args:
        wheels: One for each torch, of the same Python and the same sources.
        dist: The directory for the result; made if it is not there.

    Raises:
        SystemExit: A tool failed; the message holds what it said.
    """
    for notice in LICENSES.values():
        if not notice.is_file():
            raise SystemExit(
                f"{notice} does not exist, and the wheel carries what it is for: apt-get install "
                f"{notice.parent.name}"
            )
    with tempfile.TemporaryDirectory(prefix="castor-wheel-") as directory:
        work = Path(directory)
        excludes = [f"--exclude={pattern}" for pattern in EXCLUDED]
        merged = merge(wheels, work)
        run("auditwheel", "repair", *excludes, "--wheel-dir", work / "repaired", merged)
        (repaired,) = (work / "repaired").glob("*.whl")
        unpacked = unpack(repaired, work / "unpacked")
        for name, notice in LICENSES.items():
            shutil.copy(notice, unpacked / "castor" / "licenses" / name)
        (metadata,) = unpacked.glob("*.dist-info/METADATA")
        torches = torches_of(str(file.relative_to(unpacked)) for file in unpacked.rglob("*"))
        local = local_version(torches, known_torches(metadata.read_text(encoding="utf-8")))
        version = [] if local is None else ["--local-version", local]
        (work / "packed").mkdir()
        run("wheel", "pack", *version, "-d", work / "packed", unpacked)
        (packed,) = (work / "packed").glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(packed, dist / packed.name))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(repair([Path(argument) for argument in sys.argv[1:-1]], Path(sys.argv[-1])))
