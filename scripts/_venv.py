"""The environment that the scripts run in: ``.venv`` in the checkout, made and filled when it has to be.

Started with whatever ``python3`` there is, so this file and the scripts keep to what Python 3.7 can read: somebody with
an old one must be told so in words.
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
PYTEST = ["pytest", "-n2", "--dist=worksteal"]
"""Two tests at a time: most of them wait for processes. What comes later on the line overrules it."""
LEAST, BELOW = (3, 11), (3, 14)  # Hermes Agent excludes 3.14
INTERRUPTED = 130


def run_in_venv(arguments: Sequence[str], extras: Iterable[str]) -> None:
    """Run ``python`` with these arguments in the environment and leave with its exit status.

    ``extras`` are those of pyproject.toml that it needs; an environment that has more stays as it is.
    """
    try:
        prepare(extras)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command = [str(PYTHON), *arguments]
    if os.name != "nt":
        # In place of this process: signals then have one address.
        os.chdir(ROOT)
        os.execve(command[0], command, child_environment())
    sys.exit(run(command))


def run(command: Sequence[str]) -> int:
    """Run a command and return its exit status; at Ctrl-C it is waited for, while it tidies up."""
    process = subprocess.Popen(command, cwd=str(ROOT), env=child_environment())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def child_environment() -> dict[str, str]:
    """Return an environment for what is run: bytecode is written, and nobody else's import paths are in it.

    Workers are measured and tested as they are in earnest; a start that compiles all of Hermes is not.
    """
    without = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in without}


def prepare(extras: Iterable[str]) -> None:
    """See that the environment is there and holds the project with these extras; quick when it does."""
    if not PYTHON.exists():
        make_venv()
    version = venv_version()
    if not LEAST <= version[:2] < BELOW:
        found = ".".join(map(str, version))
        sys.exit(f"{VENV} holds Python {found}; this project needs 3.11 to 3.13. Move it away and try again.")
    wanted = set(extras)
    digest = digest_of_inputs(version)
    stamped, installed = read_stamp()
    if stamped == digest and wanted <= installed:
        return
    # What another script needs stays: the stamp speaks for all of them.
    wanted |= installed
    install(wanted)
    STAMP.write_text("\n".join([digest, *sorted(wanted)]) + "\n", encoding="utf-8")


def make_venv() -> None:
    """Make the environment, empty."""
    python = suitable_python()
    say(f"making {VENV} with {python}")
    command = [python, "-m", "venv", str(VENV)]
    if not has_module(python, "ensurepip"):
        # Some distributions split it off. The pip of the interpreter itself can do its work.
        command.insert(3, "--without-pip")
    checked(command)
    if not has_module(str(PYTHON), "sys"):
        sys.exit(f"{VENV} cannot be used. Move it away and try again.")


def suitable_python() -> str:
    """Return the interpreter that runs this, or the newest that fits on PATH; leave in words if there is none."""
    if LEAST <= sys.version_info[:2] < BELOW:
        # Not the one of another environment, on which this one would hang.
        return getattr(sys, "_base_executable", None) or sys.executable
    for minor in range(BELOW[1] - 1, LEAST[1] - 1, -1):
        python = shutil.which(f"python3.{minor}")
        # It is asked, since version managers put names on PATH behind which there may be nothing.
        if python and has_module(python, "venv"):
            return python
    this = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"hermes-pool needs Python 3.11, 3.12 or 3.13 (Hermes Agent excludes newer ones). This is {this}, and no "
        "python3.13, python3.12 or python3.11 that works is on PATH."
    )


def has_module(python: str, module: str) -> bool:
    """Say whether an interpreter works and has a module."""
    quiet = subprocess.DEVNULL
    return subprocess.call([python, "-c", f"import {module}"], stdout=quiet, stderr=quiet) == 0


def venv_version() -> tuple[int, ...]:
    """Return the version of the environment's interpreter as it is written there: quicker than to ask it."""
    for line in (VENV / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.strip() in ("version", "version_info"):
            return tuple(int(part) for part in value.strip().split(".")[:3])
    return (0,)


def digest_of_inputs(version: tuple[int, ...]) -> str:
    """Return what an installation depends on, in one word."""
    digest = hashlib.sha256(repr((version, str(ROOT))).encode())
    for path in (ROOT / "pyproject.toml", LOCK):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp() -> tuple[str, set[str]]:
    """Return the digest and the extras of the last installation that succeeded."""
    try:
        digest, *extras = STAMP.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return "", set()
    return digest, set(extras)


def install(extras: Iterable[str]) -> None:
    """Install the project, editable, with these extras."""
    named = ",".join(sorted(extras))
    say(f"installing hermes-pool[{named}] into {VENV}: once, and it takes a minute or two")
    pip = [str(PYTHON), "-m", "pip"]
    if not has_module(str(PYTHON), "pip"):
        pip = [suitable_python(), "-m", "pip", "--python", str(PYTHON)]
    options = ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    checked([*pip, "install", *options, "-c", str(LOCK), "-e", f"{ROOT}[{named}]"])


def checked(command: Sequence[str]) -> None:
    """Run a command; leave if it fails."""
    status = subprocess.call(command, cwd=str(ROOT), env=child_environment())
    if status != 0:
        sys.exit(f"this ended with status {status}: {' '.join(command)}")


def say(text: str) -> None:
    """Tell what goes on, apart from what the scripts print themselves."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
