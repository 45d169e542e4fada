"""Makes a wheel self-contained and marks it with the torch it was built for.

Usage: wheel_repair.py WHEEL DIST. auditwheel grafts the libraries that neither torch nor the
manylinux policy gives (TBB; hwloc, jemalloc and liburing are linked into the module) and sets the
platform tag. The version becomes 0.1.0+torch2.11: wheels for several torches lie side by side in
one index, and pip takes the one whose requirement the torch in the environment meets.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# torch brings these itself, libgomp among them; a grafted copy would be a second in the process.
EXCLUDED = ("libtorch*", "libc10*", "libshm*", "libgomp*", "libcu*", "libnv*", "libnccl*")
# Notices of what Debian's packages put into the wheel travel with it: the grafted TBB, the static
# liburing, and the header of xxhash.
LICENSES = {
    "onetbb.txt": Path("/usr/share/doc/libtbb12/copyright"),
    "liburing.txt": Path("/usr/share/doc/liburing-dev/copyright"),
    "xxhash.txt": Path("/usr/share/doc/libxxhash-dev/copyright"),
}


def torch_of_record(unpacked: Path) -> str:
    """Major and minor version of the torch that an unpacked wheel was built for."""
    record = json.loads((unpacked / "castor" / "_build_info.json").read_text(encoding="utf-8"))
    return ".".join(record["torch"].split(".")[:2])


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


def repair(wheel: Path, dist: Path) -> Path:
    """Writes the repaired wheel to `dist` and returns its path.

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
        run("auditwheel", "repair", *excludes, "--wheel-dir", work / "repaired", wheel)
        (repaired,) = (work / "repaired").glob("*.whl")
        run("wheel", "unpack", "--dest", work / "unpacked", repaired)
        (unpacked,) = (work / "unpacked").iterdir()
        for name, notice in LICENSES.items():
            shutil.copy(notice, unpacked / "castor" / "licenses" / name)
        local_version = f"torch{torch_of_record(unpacked)}"
        (work / "packed").mkdir()
        run("wheel", "pack", "--local-version", local_version, "-d", work / "packed", unpacked)
        (packed,) = (work / "packed").glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(packed, dist / packed.name))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
