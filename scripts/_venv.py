"""The virtual environment of the scripts: ``.venv`` in the checkout, created and filled when needed.

Any ``python3`` may start this. The file and the scripts therefore stay within the syntax of Python 3.7, so that an old
interpreter gets an explanation and not a SyntaxError.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "hermes-pool-installed"
LOCK = ROOT / "requirements.lock"
PYTEST = ["pytest", "-n3", "--dist=worksteal"]
"""Three tests at a time, because most of them wait for processes. Later arguments override this."""
LEAST, BELOW = (3, 11), (3, 14)  # Hermes Agent excludes 3.14
INTERRUPTED = 130


def run_in_venv(arguments: Sequence[str], extras: Iterable[str]) -> None:
    """Run ``python`` with these arguments in the environment, and exit with its status.

    ``extras`` names the extras of pyproject.toml that it needs. An environment that has more is left as it is.
    """
    try:
        prepare(extras)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command = [str(PYTHON), *arguments]
    if os.name != "nt":
        # Replaces this process, so that signals reach the right one.
        os.chdir(ROOT)
        os.execve(command[0], command, child_environment())
    sys.exit(run(command))


def run(command: Sequence[str]) -> int:
    """Run a command and return its exit status. On Ctrl-C, wait for it to clean up."""
    process = subprocess.Popen(command, cwd=str(ROOT), env=child_environment())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def child_environment() -> dict[str, str]:
    """Return the variables for a command: bytecode is written, and the caller's import paths are left out.

    Workers have to be measured and tested as they run in production, where a start does not compile all of Hermes.
    """
    without = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in without}


def prepare(extras: Iterable[str]) -> None:
    """Create or update the environment so that it has the project with these extras. Fast if nothing is missing."""
    if not PYTHON.exists():
        make_venv()
    version = venv_version()
    if not LEAST <= version[:2] < BELOW:
        found = ".".join(map(str, version))
        sys.exit(f"{VENV} has Python {found}, but this project needs 3.11, 3.12 or 3.13. Delete it and try again.")
    wanted = set(extras)
    digest = digest_of_inputs(version)
    stamped, installed = read_stamp()
    if stamped == digest and wanted <= installed:
        return
    # Keep what other scripts have installed: they share the stamp.
    wanted |= installed
    install(wanted)
    STAMP.write_text("\n".join([digest, *sorted(wanted)]) + "\n", encoding="utf-8")


def make_venv() -> None:
    """Create the environment, still empty."""
    python = suitable_python()
    say(f"creating {VENV} with {python}")
    command = [python, "-m", "venv", str(VENV)]
    if not has_module(python, "ensurepip"):
        # Some distributions package it separately. The interpreter's own pip can take its place.
        command.insert(3, "--without-pip")
    checked(command)
    if not has_module(str(PYTHON), "sys"):
        sys.exit(f"the new environment {VENV} does not work. Delete it and try again.")


def suitable_python() -> str:
    """Return this interpreter, or the newest suitable one on PATH. Exit with an explanation if there is none."""
    if LEAST <= sys.version_info[:2] < BELOW:
        # Not that of another environment, on which the new one would depend.
        return getattr(sys, "_base_executable", None) or sys.executable
    for minor in range(BELOW[1] - 1, LEAST[1] - 1, -1):
        python = shutil.which(f"python3.{minor}")
        # Try it: version managers put commands on PATH whose interpreter may not be installed.
        if python and has_module(python, "venv"):
            return python
    this = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"hermes-pool needs Python 3.11, 3.12 or 3.13 (Hermes Agent excludes newer ones). This is Python {this}, and "
        "there is no working python3.13, python3.12 or python3.11 on PATH. Install one of them and try again."
    )


def has_module(python: str, module: str) -> bool:
    """Return whether an interpreter works and has a module."""
    quiet = subprocess.DEVNULL
    return subprocess.call([python, "-c", f"import {module}"], stdout=quiet, stderr=quiet) == 0


def venv_version() -> tuple[int, ...]:
    """Return the Python version of the environment, read from its configuration: faster than running it."""
    for line in (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.strip() in ("version", "version_info"):
            return tuple(int(part) for part in value.strip().split(".")[:3])
    return (0,)


def digest_of_inputs(version: tuple[int, ...]) -> str:
    """Return a digest of everything that an installation depends on."""
    digest = hashlib.sha256(repr((version, str(ROOT))).encode())
    for path in (ROOT / "pyproject.toml", LOCK):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp() -> tuple[str, set[str]]:
    """Return the digest and the extras of the last successful installation."""
    try:
        digest, *extras = STAMP.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "", set()
    return digest, set(extras)


def install(extras: Iterable[str]) -> None:
    """Install the project, editable, with these extras."""
    names = ",".join(sorted(extras))
    requirement = f"[{names}]" if names else ""  # older versions of pip reject "[]"
    say(f"installing hermes-pool{requirement} into {VENV}: needed once, and takes a minute or two")
    pip = [str(PYTHON), "-m", "pip"]
    if not has_module(str(PYTHON), "pip"):
        pip = [suitable_python(), "-m", "pip", "--python", str(PYTHON)]
    options = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    checked([*pip, "install", *options, "-c", str(LOCK), "-e", f"{ROOT}{requirement}"])


def checked(command: Sequence[str]) -> None:
    """Run a command, and exit if it fails."""
    status = subprocess.call(command, cwd=str(ROOT), env=child_environment())
    if status != 0:
        sys.exit(f"failed with status {status}: {' '.join(command)}")


def say(text: str) -> None:
    """Report progress on stderr, apart from the output of the scripts."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
