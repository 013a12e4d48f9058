"""Imports agents by name, and knows what was imported after a fork."""

import importlib
import sys
import traceback
from collections.abc import Callable
from itertools import islice
from types import ModuleType

from hermes_pool_worker.agent import Agent, MissingDependencyError

BUILT_IN_AGENTS = {
    "echo": "hermes_pool_worker.echo:EchoAgent",
    "hermes": "hermes_pool_worker.hermes:HermesAgent",
}


def import_agent(name: str) -> tuple[ModuleType, Callable[[], Agent]]:
    """Return the module and the factory of ``echo``, ``hermes`` or ``package.module:factory``.

    Raise ``MissingDependencyError`` if there is no such module or factory, or if an import of the module's own fails.
    """
    module_name, _, factory_name = BUILT_IN_AGENTS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
        factory: Callable[[], Agent] = getattr(module, factory_name)
    except (ModuleNotFoundError, AttributeError) as error:
        traceback.print_exc()
        raise MissingDependencyError(
            f"the agent {name!r} cannot be imported: {error}. Check the setting 'agent'; add the folder of its module "
            f"to 'agent_paths', and install what it imports into the environment of {sys.executable}"
        ) from error
    return module, factory


def imported_since(born_with: frozenset[str]) -> list[str]:
    """Return the modules that are loaded now and not in ``born_with``, if an import statement can find them by name."""
    # New modules come last. Looking at the others would copy their memory pages, which are shared with the zygote.
    latest = islice(reversed(sys.modules), max(0, len(sys.modules) - len(born_with)))
    return sorted(
        name
        for name in list(latest)
        if name not in born_with and getattr(getattr(sys.modules[name], "__spec__", None), "name", None) == name
    )
