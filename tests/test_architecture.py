"""The rules of the design that a source text shows: who imports whom, what is never used, what documents must name."""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import hermes_pool
from hermes_pool import PoolSettings
from hermes_pool.lifecycle import ALIVE, TRANSITIONS, Event, State
from tests.support import known

ROOT = Path(__file__).resolve().parent.parent
SUPERVISOR = ROOT / "hermes_pool"
WORKER = ROOT / "worker" / "hermes_pool_worker"

MAY_IMPORT = {
    # Values and tables: what everything else speaks of.
    "crash_report": set(),
    "lifecycle": set(),
    "snapshot": set(),
    "errors": {"crash_report"},
    "settings": {"errors"},
    # Decisions, and each thing of the outside world by itself.
    "policy": {"errors", "settings", "snapshot"},
    "system": {"policy"},
    "storage": {"errors", "settings", "system"},
    "control": {"crash_report", "errors", "snapshot", "system"},
    "testing": set(),
    # Worker processes; who may have one; one conversation; all of them.
    "process": {"errors", "policy", "settings", "snapshot", "system"},
    "scheduling": {"errors", "lifecycle", "policy", "settings", "snapshot", "system"},
    "conversation": {
        "crash_report", "errors", "lifecycle", "policy", "process", "scheduling", "settings", "snapshot", "storage",
        "system",
    },
    "manager": {
        "control", "conversation", "crash_report", "errors", "lifecycle", "process", "scheduling", "settings",
        "snapshot", "storage", "system",
    },
    # People.
    "cli": {
        "control", "conversation", "crash_report", "errors", "manager", "settings", "snapshot", "storage", "system",
        "testing",
    },
    "__main__": {"cli"},
    "__init__": {
        "conversation", "crash_report", "errors", "manager", "process", "scheduling", "settings", "snapshot", "storage",
    },
}  # fmt: skip
"""The rooms of ``hermes_pool``, from the ground up, and every arrow between them: each imports these, all of these, and
nothing else."""

THIRD_PARTY = {
    "process": {"msgspec", "psutil"},
    "system": {"psutil", "structlog"},
    "storage": {"sqlalchemy", "sqlmodel"},
    "control": {"msgspec"},
    "conversation": {"msgspec"},
    "cli": {"rich", "typer"},
}
"""The libraries that each room knows."""

HERMES = {
    "agent", "gateway", "hermes_cli", "hermes_constants", "hermes_state", "model_tools", "run_agent", "tools", "utils",
}  # fmt: skip


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """All that a file imports, wherever in it: ``package.module``, and ``package.module.name`` of a ``from``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


def third_party(file: Path) -> set[str]:
    return tops(file) - sys.stdlib_module_names - {"hermes_pool", "hermes_pool_worker"}


def room_of(file: Path) -> str:
    """The package that a file of the supervisor is in; the file itself where it is in none."""
    return file.relative_to(SUPERVISOR).parts[0].removesuffix(".py")


def neighbours(file: Path) -> set[str]:
    """The other rooms that a file imports from."""
    rooms = {room_of(each) for each in sources(SUPERVISOR)}
    found = {name.split(".")[1] for name in imports(file) if name.startswith("hermes_pool.")}
    assert found <= rooms, f"{file} imports from hermes_pool itself"
    return found - {room_of(file)}


def each_of(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", paths, ids=["/".join(path.parts[-2:]) for path in paths])


def test_every_room_imports_from_those_that_it_names_and_no_other() -> None:
    found: dict[str, set[str]] = {room_of(file): set() for file in sources(SUPERVISOR)}
    for file in sources(SUPERVISOR):
        found[room_of(file)] |= neighbours(file)
    assert found == MAY_IMPORT


def test_imports_between_the_rooms_point_down() -> None:
    below: set[str] = set()
    for room, imported in MAY_IMPORT.items():
        assert imported <= below, f"{room} imports from a room above it"
        below.add(room)


def test_the_modules_do_not_import_each_other_in_a_circle() -> None:
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in sources(SUPERVISOR)}
    above = {
        module: {other for other in modules if any(f"{name}.".startswith(f"{other}.") for name in imports(file))}
        for module, file in modules.items()
    }
    while above:
        free = {module for module, others in above.items() if not others & set(above)}
        assert free, f"these import each other in a circle: {sorted(above)}"
        above = {module: others for module, others in above.items() if module not in free}


@each_of(sources(SUPERVISOR))
def test_each_library_is_known_in_one_place(file: Path) -> None:
    assert third_party(file) <= THIRD_PARTY.get(room_of(file), set())


@each_of(sources(SUPERVISOR))
def test_the_supervisor_knows_of_the_worker_its_wire_and_its_place_only(file: Path) -> None:
    taken = {name.split(".")[1] for name in imports(file) if name.startswith("hermes_pool_worker.")}
    bare = "hermes_pool_worker" in set(imports(file))
    assert taken <= {"wire"}
    assert not bare or file.stem == "factory", "only the start of workers needs the folder"


@each_of(sources(WORKER))
def test_the_worker_knows_nothing_of_the_supervisor(file: Path) -> None:
    assert "hermes_pool" not in tops(file)


@each_of(sources(WORKER))
def test_the_worker_needs_msgspec_only_and_hermes_in_its_adapter(file: Path) -> None:
    allowed = {"msgspec"}
    if file.stem.startswith("hermes"):
        allowed |= HERMES | {"certifi"}
    assert third_party(file) <= allowed


def test_the_worker_package_itself_imports_nothing() -> None:
    assert list(imports(WORKER / "__init__.py")) == []


def test_the_worker_program_finds_its_package_with_the_standard_library_alone() -> None:
    tree = ast.parse((WORKER / "__main__.py").read_text(encoding="utf-8"))
    first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {alias.name for node in first for alias in node.names}
    assert found <= {"os", "sys"}, "all else has to wait until the descriptors are claimed"


@each_of(sources(SUPERVISOR) + sources(WORKER))
def test_what_is_never_used(file: Path) -> None:
    # pickle runs what it reads, as marshal and shelve do; multiprocessing forks the host, with its locks and threads.
    assert not tops(file) & {"pickle", "marshal", "shelve", "multiprocessing"}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword):
            assert node.arg != "preexec_fn", "it runs Python between fork and exec, in a host that has threads"
            assert node.arg != "shell" or ast.unparse(node.value) == "False", "no shell"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.kill", "os.killpg"):
            target = node.args[0]
            assert not isinstance(target, ast.Constant), "pid 0 is our own process group, and -1 everybody"
            assert not isinstance(target, ast.BoolOp), "a pid that may be missing must not become 0"


# --- tests ------------------------------------------------------------------------------------------------------------


TESTED_BY = {"worker": WORKER, "bench": ROOT / "scripts" / "_bench"}
"""Where the modules are that a folder of ``tests/unit`` is about; for all others, the folder of ``hermes_pool`` of that
name."""


def test_unit_tests_mirror_the_modules() -> None:
    for file in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        *folders, name = file.relative_to(ROOT / "tests" / "unit").parts
        folder = TESTED_BY.get(folders[0] if folders else "", SUPERVISOR.joinpath(*folders))
        module = folder / name.removeprefix("test_")
        assert module.exists(), f"{file} is named after no module: {module} does not exist"


# --- what is promised in public ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hermes_pool.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(hermes_pool, name)
    assert inspect.getdoc(thing)
    if is_dataclass(thing):
        assert not known(thing.__doc__).startswith(f"{name}("), "that is the text which dataclasses make up"
    own = [member for member in vars(thing).values() if inspect.isfunction(member)]
    for member in own:
        assert member.__name__.startswith("_") or member.__doc__, f"{name}.{member.__name__} is not documented"


def test_public_names_are_sorted_and_once() -> None:
    assert hermes_pool.__all__ == sorted(set(hermes_pool.__all__))


# --- the table of states ----------------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_every_event_a_use() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_every_state_can_be_reached_and_left_for_a_new_start() -> None:
    def reachable(state: State) -> set[State]:
        found, new = set(), {state}
        while new:
            found |= new
            new = {after for each in new for after in TRANSITIONS[each].values()} - found
        return found

    assert reachable(State.STOPPED) == set(State)
    for state in State:
        assert State.STARTING in reachable(state), f"{state} is a dead end"


def test_only_an_exit_that_was_seen_leads_to_a_state_without_a_process() -> None:
    for state in ALIVE:
        for event, after in TRANSITIONS[state].items():
            if after not in ALIVE:
                assert event in (Event.DIED, Event.START_FAILED)


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.fixture
def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not text.strip():
        pytest.skip("README.md is empty so far")
    return text


def test_the_readme_names_every_state_and_event(readme: str) -> None:
    words = set(re.findall(r"\w+", readme.lower()))
    assert {str(name) for name in (*State, *Event)} <= words


def test_the_readme_names_every_setting(readme: str) -> None:
    in_tables = "\n".join(line for line in readme.splitlines() if line.lstrip().startswith("|"))
    missing = [each.name for each in fields(PoolSettings) if f"`{each.name}`" not in in_tables]
    assert not missing


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_changelog_knows_this_version() -> None:
    version = pyproject()["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    project = pyproject()["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    pins: dict[str, list[SpecifierSet]] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            pin = Requirement(text)
            pins.setdefault(canonicalize_name(pin.name), []).append(pin.specifier)
    for requirement in map(Requirement, wanted):
        found = pins.get(canonicalize_name(requirement.name))
        assert found, f"{requirement.name} is missing in requirements.lock"
        for specifiers in found:
            (specifier,) = specifiers
            assert specifier.operator == "=="
            assert requirement.specifier.contains(specifier.version)


def test_what_both_sides_say_is_the_same_though_they_share_no_module() -> None:
    from hermes_pool.process import connection, environment, spawn
    from hermes_pool.system import processes
    from hermes_pool_worker import __main__ as program
    from hermes_pool_worker import lifeline, limits, process_tree, serve

    assert processes.MARKER_VARIABLE == process_tree.MARKER_VARIABLE
    assert spawn.LIFELINE_VARIABLE == lifeline.VARIABLE
    assert processes.STACKS_SIGNAL == limits.STACKS_SIGNAL
    assert environment.RLIMITS_VARIABLE == limits.RLIMITS_VARIABLE
    assert limits.EXIT_UNUSABLE == serve.EXIT_UNUSABLE
    assert connection.EXIT_UNUSABLE == serve.EXIT_UNUSABLE == program.EXIT_UNUSABLE
