"""The worker program: ``python -P .../hermes_pool_worker/__main__.py AGENT FRAME_BYTES_MAX [IMPORT_PATH ...]``.

With ``--zygote`` before these it does not work itself: it forks workers (see ``zygote``). ``--guardian POOL`` ends what
a supervisor leaves (see ``guardian``).

It is run as a file, by an interpreter that need not have hermes-pool installed, and must find exactly the package that
it is part of, the one that the supervisor speaks with. So it puts its parent folder on the import path, imports the
package (whose ``__init__`` imports nothing), and takes the folder off again at once: in a wheel that folder is the
site-packages of the *supervisor's* environment, and none of that may leak into this one.
"""

import os
import sys


def main() -> None:
    """Own the descriptors, then serve until the supervisor closes the wire; only a guardian returns."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120, PTH100 - pathlib is slow to import
    sys.path.insert(0, home)
    import hermes_pool_worker  # noqa: F401, PLC0415 - this import is what the entry is for

    sys.path.remove(home)
    from hermes_pool_worker import contract  # noqa: PLC0415 - the standard library's modules must not come from there

    if len(sys.argv) < 3 or os.isatty(0):
        sys.stderr.write(
            "This is a worker of hermes-pool. It is started by a supervisor and speaks a binary protocol on its\n"
            "standard input and output; by hand there is nothing to see. Try: hermes-pool chat --agent echo\n"
        )
        sys.exit(contract.EXIT_USAGE)
    if sys.argv[1] == contract.GUARDIAN_OPTION:
        from hermes_pool_worker import guardian  # noqa: PLC0415 - needs nothing of what follows

        guardian.run(sys.argv[2])
        return
    from hermes_pool_worker import stdio  # noqa: PLC0415 - stdio is claimed before anything else is imported

    wire_in, wire_out = stdio.claim()
    is_zygote = sys.argv[1] == contract.ZYGOTE_OPTION
    if sys.platform == "linux" and not is_zygote:
        from hermes_pool_worker import lifeline, process_tree  # noqa: PLC0415 - exist on Linux only

        if (descriptor := lifeline.inherited()) is not None:
            lifeline.arm(descriptor)
            os.close(descriptor)
        process_tree.adopt_orphans()
    agent, frame_bytes_max, *import_paths = sys.argv[1 + is_zygote :]
    # At the end: a folder of the user's must not shadow what Hermes imports by such names as "utils".
    sys.path.extend(import_paths)
    try:
        from hermes_pool_worker import loop  # noqa: PLC0415 - needs msgspec, which may be missing
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        stdio.leave(
            contract.EXIT_UNUSABLE,
            f"hermes-pool worker: msgspec is not installed for {sys.executable}; "
            f"run: {sys.executable} -m pip install msgspec",
        )
    else:
        from hermes_pool_worker import limits  # noqa: PLC0415 - as above

        limits.arm_stacks()  # before the zygote forks: its workers inherit that
        born_with = None
        if is_zygote:
            from hermes_pool_worker import zygote  # noqa: PLC0415 - exists on Linux only

            wire_in, wire_out, born_with = zygote.run(wire_in, wire_out, agent)  # returns in each worker that it forks
        limits.keep_rlimits()
        status = loop.serve(wire_in, wire_out, agent, int(frame_bytes_max), born_with)
        stdio.leave(status, _end_what_is_hidden())


def _end_what_is_hidden() -> str:
    """End what only this process can still find of what its tools have left; return the words that tell of it."""
    if sys.platform != "linux":
        return ""
    from hermes_pool_worker import process_tree  # noqa: PLC0415 - exists on Linux only

    ended = process_tree.end_hidden_descendants()
    return f"hermes-pool worker: ended what tools had left running without a marker: {ended}" if ended else ""


if __name__ == "__main__":
    main()
