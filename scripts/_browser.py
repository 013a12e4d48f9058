"""A browser for the tests of the example's page: one that is there, or Debian's ``chromium``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = "no Chromium or Chrome on PATH (Debian: apt-get install chromium)"
UPDATE_S, INSTALL_S = 60, 240


def find() -> str | None:
    """Return the path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def have() -> None:
    """Install ``chromium`` where root may and apt can. Otherwise the tests that need it are skipped, and say so."""
    if sys.platform != "linux" or os.geteuid() != 0 or find() or not shutil.which("apt-get"):
        return
    sys.stderr.write("installing chromium for the tests of the example's page: needed once, and takes a minute\n")
    sys.stderr.flush()
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "DPkg::Lock::Timeout=30"]
    for command, limit_s in (
        (["apt-get", *options, "update"], UPDATE_S),
        (["apt-get", *options, "install", "-y", "--no-install-recommends", "chromium"], INSTALL_S),
    ):
        try:
            done = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=limit_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"chromium was not installed: {error}\n")
            return
        if done.returncode != 0 and "install" in command:
            sys.stderr.write("chromium was not installed; the tests of the page are skipped\n")
