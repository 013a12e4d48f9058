"""The environment of a worker: the variables of the host that are on an allow-list, and those that the settings add.

The host is a chat backend, and its environment holds the keys to its database, its providers and its users. A worker
runs an agent with a shell: whatever the worker can read, the model can read.
"""

from collections.abc import Mapping

from hermes_pool.settings import PoolSettings
from hermes_pool_worker.contract import RLIMITS_VARIABLE, rlimits_text

PASSED_ON = frozenset(
    {
        # user and folders
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "TZ",
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
        # language
        "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_COLLATE", "LC_MESSAGES", "LC_NUMERIC", "LC_TIME",
        # how this machine reaches the network
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        # Windows cannot start a process without these
        "SYSTEMROOT", "SYSTEMDRIVE", "COMSPEC", "PATHEXT", "WINDIR", "USERPROFILE", "USERNAME", "APPDATA",
        "LOCALAPPDATA", "PROGRAMDATA", "PROGRAMFILES", "NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE",
    }
)  # fmt: skip


def worker_environment(settings: PoolSettings, host: Mapping[str, str]) -> dict[str, str]:
    """Return the entire environment of a worker. ``host`` is the environment of the host process."""
    environment = {name: value for name, value in host.items() if name in PASSED_ON}
    home = settings.hermes_home or host.get("HERMES_HOME")
    if home:
        environment["HERMES_HOME"] = str(home)
    # What a worker prints must reach the log at once, not when the worker dies.
    environment["PYTHONUNBUFFERED"] = "1"
    # A worker uses UTF-8 for paths and text, whatever the locale of the host.
    environment["PYTHONUTF8"] = "1"
    environment.update(settings.worker_env)
    if settings.worker_rlimits:
        environment[RLIMITS_VARIABLE] = rlimits_text(settings.worker_rlimits)
    return environment
