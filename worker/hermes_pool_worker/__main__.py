"""The worker program: ``python -P .../hermes_pool_worker/__main__.py AGENT FRAME_BYTES_MAX [IMPORT_PATH ...]``.

With ``--zygote`` before these arguments it forks workers instead of being one (see ``zygote``). With the arguments
``--guardian POOL`` it cleans up after its supervisor (see ``guardian``).

The program runs as a file, in an interpreter that need not have hermes-pool installed, and it must find exactly the
package that it is part of, because that one matches the supervisor. So it puts its parent folder on the import path,
imports the package (whose ``__init__`` imports nothing), and takes the folder off again at once: in a wheel that folder
is the site-packages of the *supervisor's* environment, and nothing else from there may be imported here.
"""

import os
import sys


def main() -> None:
    """Claim the descriptors, then serve until the supervisor closes the wire. Only a guardian returns."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH120, PTH100 - pathlib is slow to import
    sys.path.insert(0, home)
    import hermes_pool_worker  # noqa: F401, PLC0415 - after this import, its modules are found without the folder

    sys.path.remove(home)
    from hermes_pool_worker import contract  # noqa: PLC0415 - imports modules that must not come from that folder

    if len(sys.argv) < 3 or os.isatty(0):
        sys.stderr.write(
            "This is a worker of hermes-pool, and not meant to be run by hand: a supervisor starts it, and speaks a\n"
            "binary protocol with it on standard input and output. Try: hermes-pool chat --agent echo\n"
        )
        sys.exit(contract.EXIT_USAGE)
    if sys.argv[1] == contract.GUARDIAN_OPTION:
        from hermes_pool_worker import guardian  # noqa: PLC0415 - it needs nothing of what follows

        guardian.run(sys.argv[2])
        return
    from hermes_pool_worker import stdio  # noqa: PLC0415 - it claims the descriptors before all other imports

    wire_in, wire_out = stdio.claim()
    is_zygote = sys.argv[1] == contract.ZYGOTE_OPTION
    if sys.platform == "linux" and not is_zygote:
        from hermes_pool_worker import lifeline, process_tree  # noqa: PLC0415 - they exist on Linux only

        if (descriptor := lifeline.inherited()) is not None:
            lifeline.arm(descriptor)
            os.close(descriptor)
        process_tree.adopt_orphans()
    agent, frame_bytes_max, *import_paths = sys.argv[1 + is_zygote :]
    # Last on the path: a user's folder must not shadow modules of Hermes that have names like "utils".
    sys.path.extend(import_paths)
    try:
        from hermes_pool_worker import loop  # noqa: PLC0415 - it needs msgspec, which may be missing
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

        limits.arm_stacks()  # before the zygote forks: its workers inherit it
        born_with = None
        if is_zygote:
            from hermes_pool_worker import zygote  # noqa: PLC0415 - it exists on Linux only

            wire_in, wire_out, born_with = zygote.run(wire_in, wire_out, agent)  # returns in each worker that it forks
        limits.set_rlimits()
        status = loop.serve(wire_in, wire_out, agent, int(frame_bytes_max), born_with)
        stdio.leave(status, _end_hidden_processes())


def _end_hidden_processes() -> str:
    """End the processes left by tools that only this process can still find; return a line for the log about them."""
    if sys.platform != "linux":
        return ""
    from hermes_pool_worker import process_tree  # noqa: PLC0415 - it exists on Linux only

    ended = process_tree.end_hidden_descendants()
    return f"hermes-pool worker: ended processes that tools had left running without a marker: {ended}" if ended else ""


if __name__ == "__main__":
    main()
