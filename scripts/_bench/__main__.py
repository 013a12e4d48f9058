"""Entry point of the benchmark, and of each process that measures one subject. ``scripts/bench`` starts it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this folder, whose modules are not top-level ones. Some peers run this file in their workers too.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if sys.argv[1:2] == ["--subject"]:
        import json

        from _bench.subject import run_subject

        _, _, metric, subject, options = sys.argv
        sys.exit(run_subject(metric, subject, json.loads(options)))
    from _bench.cli import main

    sys.exit(main(sys.argv[1:]))
