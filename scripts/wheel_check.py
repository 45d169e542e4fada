"""Checks what a wheel holds, and what an installed one loads.

Usage: wheel_check.py WHEEL...; exits 1 and names what is wrong.
"""

import io
import json
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename

from wheel_repair import known_torches, local_version, requirement, torches_of

# What castor._C may ask of the machine (glibc and GCC's runtime), and of torch: none of its CUDA
# libraries, so that a torch without CUDA serves, and no OpenMP runtime beside torch's.
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so"}
# castor._cuda, and nothing else, asks for torch's CUDA libraries; castor imports it on demand.
TORCH_CUDA = re.compile(r"libc10_cuda\.so|libcudart\.so\.\d+")
# What castor._cuda holds of each kernel: machine code for these architectures, and the PTX of the
# last one for later GPUs. The kinds are those of the entries of CUDA's fat binaries.
PTX, MACHINE_CODE = 1, 2
KERNELS = {(MACHINE_CODE, arch) for arch in (80, 86, 89, 90, 100, 120)} | {(PTX, 120)}
FATBIN_MAGIC = 0xBA55ED50
# The glibc of Debian 12, on which wheels are built.
NEWEST_GLIBC = 36
LICENSES = ("hwloc.txt", "jemalloc.txt", "liburing.txt", "onetbb.txt", "xxhash.txt")

# How the environments' Python is called: alone, and warnings are errors. torch does not require
# numpy, but warns at import where there is none.
STRICT = ("-I", "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")

# Runs in the environment to be checked, once with castor and once without: the shared libraries
# that are mapped after torch, and then the selftest, did their work.
MAPPED = """
import json, re, sys, torch
model = torch.nn.Linear(64, 64)
model(torch.randn(8, 64)).sum().backward()
torch.optim.AdamW(model.parameters()).step()
if sys.argv[1] == "castor":
    import castor.selftest
    if castor.selftest.main() != 0:
        sys.exit(1)
maps = open("/proc/self/maps").read()
print(json.dumps(sorted(set(re.findall(r"(/\\S+\\.so[\\w.]*)$", maps, re.MULTILINE)))))
"""


def dynamic_entries(library: bytes, tag: str) -> list[str]:
    """The NEEDED, or RPATH or RUNPATH, entries of a shared library."""
    attribute = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}[tag]
    found = []
    for section in ELFFile(io.BytesIO(library)).iter_sections():
        if isinstance(section, DynamicSection):
            found += [
                str(getattr(e, attribute)) for e in section.iter_tags() if e.entry.d_tag == tag
            ]
    return found


def problems_of_libraries(wheel: zipfile.ZipFile) -> list[str]:
    """Carried libraries, and what each shared library asks for and where it looks."""
    found = []
    libraries = {n: wheel.read(n) for n in wheel.namelist() if re.search(r"\.so(\.|$)", n)}
    carried = {Path(n).name for n in libraries if n.startswith("castor_torch.libs/")}
    if [re.split(r"[-.]", name)[0] for name in carried] != ["libtbb"]:
        found.append(f"it carries {sorted(carried)}, not libtbb alone")
    for name, content in libraries.items():
        needed = set(dynamic_entries(content, "DT_NEEDED"))
        foreign = needed - SYSTEM - TORCH - carried
        if Path(name).name.startswith("_cuda."):
            foreign = {library for library in foreign if not TORCH_CUDA.fullmatch(library)}
        if foreign:
            found.append(f"{name} needs {sorted(foreign)}, which nothing brings")
        paths = dynamic_entries(content, "DT_RPATH") + dynamic_entries(content, "DT_RUNPATH")
        outside = [p for entry in paths for p in entry.split(":") if not p.startswith("$ORIGIN")]
        if outside:
            found.append(f"{name} looks for libraries in {outside}")
    return found


def kernels_of(library: bytes) -> list[set[tuple[int, int]]]:
    """(kind, architecture) of what each fat binary of a shared library holds."""
    section = ELFFile(io.BytesIO(library)).get_section_by_name(".nv_fatbin")
    data = b"" if section is None else section.data()
    found, at = [], 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:  # padding between two
            at += 8
            continue
        end, at, entries = at + header + size, at + header, set()
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            entries.add((kind, struct.unpack_from("<I", data, at + 28)[0]))
            at += header + size
        found.append(entries)
    return found


def problems_of_kernels(library: bytes) -> list[str]:
    """GPUs that castor._cuda would not run on."""
    binaries = kernels_of(library)
    lacking = {lack for entries in binaries for lack in KERNELS - entries}
    found = [] if binaries else ["castor._cuda holds no kernels"]
    for kind, arch in sorted(lacking):
        what = "machine code" if kind == MACHINE_CODE else "PTX"
        found.append(f"castor._cuda has kernels without {what} for sm_{arch}")
    return found


def problems_of_extensions(wheel: zipfile.ZipFile, torch: str, interpreters: set[str]) -> list[str]:
    """Compares the extensions for one torch with the record of their build.

    Args:
        wheel: The open wheel.
        torch: Minor version of torch, such as "2.11".
        interpreters: Python tags of the wheel, such as "cp311".
    """
    folder, found = f"castor/_extensions/torch{torch}", []
    info = json.loads(wheel.read(f"{folder}/_build_info.json"))
    if not info["torch"].startswith(f"{torch}."):
        found.append(f"{folder} was built for torch {info['torch']}")
    names = wheel.namelist()
    cuda = [name for name in names if name.startswith(f"{folder}/_cuda.") and ".so" in name]
    if bool(cuda) != (info["cuda"] != "none"):
        found.append(f"its record says CUDA {info['cuda']}, and it holds {cuda or 'no _cuda'}")
    for name in cuda:
        found += problems_of_kernels(wheel.read(name))
    for interpreter in interpreters - {"cp" + info["python"].replace(".", "")}:
        found.append(f"it is for {interpreter}, built with Python {info['python']}")
    found += [
        f"it was built without {name}"
        for name in ("jemalloc", "hwloc", "liburing")
        if info[name] == "none"
    ]
    return found


def problems_of_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel file, one line each."""
    found = []
    _, version, _, tags = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        (metadata_name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = wheel.read(metadata_name).decode()
        found += problems_of_libraries(wheel)
        torches = torches_of(names)
        for torch in torches:
            found += problems_of_extensions(wheel, torch, {tag.interpreter for tag in tags})
    known = known_torches(metadata)
    wanted_version = local_version(torches, known)
    if version.local != wanted_version or f"\nVersion: {version}\n" not in metadata:
        found.append(f"its version is {version}, and it was built for torch {', '.join(torches)}")
    wanted = requirement(torches, known)
    if wanted and f"\nRequires-Dist: {wanted}\n" not in metadata:
        found.append(f"it does not require {wanted}")
    for tag in tags:
        glibc = re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag.platform)
        if glibc is None or int(glibc[1]) > NEWEST_GLIBC:
            found.append(f"its platform is {tag.platform}")
    files = ["_C.pyi", "py.typed", "selftest.py", *(f"licenses/{name}" for name in LICENSES)]
    found += [f"it lacks castor/{name}" for name in files if f"castor/{name}" not in names]
    return found


def mapped_libraries(python: Path, role: str, cwd: Path, environment: dict[str, str]) -> set[str]:
    """Shared libraries in a process that has used torch ("torch") or castor as well ("castor").

    Raises:
        SystemExit: The process failed; the message holds its output.
    """
    done = subprocess.run(
        [python, *STRICT, "-c", MAPPED, role],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
    )
    if done.returncode != 0:
        raise SystemExit(f"{role} failed in {python}:\n{done.stdout}{done.stderr}")
    return set(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str]) -> int:
    if not arguments:
        raise SystemExit(__doc__)
    status = 0
    for argument in arguments:
        found = problems_of_wheel(Path(argument))
        for problem in found:
            print(f"{Path(argument).name}: {problem}", file=sys.stderr)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
