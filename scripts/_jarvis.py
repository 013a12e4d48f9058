"""Run docs/examples/jarvis: ``scripts/jarvis`` does it in the right environment."""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from hermes_pool import PoolSettings
from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home

ROOT = Path(__file__).resolve().parent.parent
TRY = """\
Things to say, for the model is scripted:
  [slow 60]                           a long answer: reload the page, open a second tab, stop it
  [reason] Hello                      with reasoning
  [tool echo hello] [tool ls /]       with tools
  [tool rm -rf /tmp/no-such-folder]   a command that needs your approval
  [call clarify {"question": "Tea or coffee?", "choices": ["Tea", "Coffee"]}]
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/jarvis", description="The example host, a chat in your browser.")
    parser.add_argument("--hermes", action="store_true", help="your own Hermes and its model; otherwise a scripted one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen; there is no log-in, so mind who can reach it"
    )
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--data", type=Path, help="keep the conversations in this folder; default: a temporary one")
    arguments = parser.parse_args(argv)
    with _folder(arguments.data) as data, _home(data, scripted=not arguments.hermes) as hermes_home:
        sys.path.insert(0, str(ROOT / "docs" / "examples" / "jarvis"))
        from jarvis.app import create_app  # noqa: PLC0415 - found only now

        app = create_app(
            f"sqlite:///{data / 'jarvis.db'}", PoolSettings.from_env(state_dir=data / "pool", hermes_home=hermes_home)
        )
        print(f"\nJarvis is at http://{arguments.host}:{arguments.port}/\n")
        if not arguments.hermes:
            print(TRY)
        uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning", timeout_graceful_shutdown=10)


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="jarvis-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _home(data: Path, *, scripted: bool) -> Iterator[Path | None]:
    """Yield the Hermes home to use: one with a scripted model, or the user's own."""
    if not scripted:
        yield None
        return
    with ScriptedModel() as model:
        yield write_hermes_home(data / "hermes", model.url)


if __name__ == "__main__":
    main()
