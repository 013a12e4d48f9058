"""The scripted model as the program that it is too."""

import re
import subprocess
import sys
import urllib.error
import urllib.request

from tests.support import known


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "hermes_pool.testing.scripted_model", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = known(process.stdout).readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", url)
            with urllib.request.urlopen(url + "/models", timeout=10) as response:
                assert response.status == 200
        finally:
            process.terminate()
