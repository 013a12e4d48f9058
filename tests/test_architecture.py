"""The rules of the design that a source text shows: who imports whom, what is never used, what documents must name."""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hermes_pool
from hermes_pool import PoolSettings
from hermes_pool.lifecycle import ALIVE, TRANSITIONS, Event, State

ROOT = Path(__file__).resolve().parent.parent
SUPERVISOR = ROOT / "hermes_pool"
WORKER = ROOT / "worker" / "hermes_pool_worker"

PURE = {
    "errors",
    "settings",
    "lifecycle",
    "snapshot",
    "environment",
    "stamps",
    "report",
    "threads",
    "breakers",
    "condition",
    "line",
    "verdict",
    "memory",
    "background",
}
EDGES = {"process", "health", "lifeline", "leftovers", "sampling", "json_sql", "store", "control", "log"}

MAY_IMPORT = {
    # Pure: the standard library and each other.
    **dict.fromkeys(PURE, PURE),
    # Edges: each knows one outside thing, none knows another.
    **dict.fromkeys(EDGES, PURE),
    "store": PURE | {"json_sql"},
    "lifeline": PURE | {"process"},
    "leftovers": PURE | {"health"},
    "sampling": PURE | {"health"},
    # One worker, one turn.
    "link": PURE | {"process", "health"},
    "turn": PURE,
    "clocks": PURE | {"turn"},
    # A launcher like those in process, and what is started with launchers.
    "zygote": PURE | {"process"},
    "spares": PURE | {"link", "health"},
    "start": PURE | {"link", "process", "health", "lifeline", "leftovers", "zygote", "spares"},
    # Who may have a worker, and who looks after it.
    "caretaker": PURE | {"sampling"},
    "admission": PURE,
    # One conversation, all conversations, the outside.
    "ledger": PURE | {"store"},
    "deaths": PURE | {"link", "turn"},
    "place": PURE | {"store", "log", "link", "turn", "start", "admission", "ledger", "deaths", "health", "sampling"},
    "session": PURE | {"link", "turn", "clocks", "start", "ledger", "deaths", "place"},
    "manager": PURE | EDGES | {"link", "turn", "start", "session", "admission", "caretaker", "place"},
    "render": PURE,
    "chat": PURE | {"render", "turn", "manager", "scripted_model"},
    "cli": PURE | EDGES | {"render", "chat", "manager"},
    "__main__": {"cli"},
    "__init__": PURE | EDGES | {"link", "turn", "manager", "admission"},
    # A program of its own that knows nothing of the pool.
    "scripted_model": set(),
}
"""The modules of ``hermes_pool``, and which of them each may import. A new module has to be given its place here."""

THIRD_PARTY = {
    "process": {"psutil"},
    "health": {"psutil"},
    "sampling": {"psutil"},
    "json_sql": {"sqlalchemy"},
    "store": {"sqlalchemy", "sqlmodel"},
    "control": {"msgspec"},
    "zygote": {"msgspec"},
    "turn": {"msgspec"},
    "log": {"structlog"},
    "render": {"typer", "rich"},
    "chat": {"rich"},
    "cli": {"typer"},
}
"""Each library belongs to an edge, or to the command line; the middle has none, and so can be tested without any."""

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


def modules_of(file: Path, package: str, package_folder: Path) -> set[str]:
    """The modules of a package that a file imports; ``""`` for a name of the package itself."""
    known = {each.stem for each in sources(package_folder)}
    found = set()
    for name in imports(file):
        top, _, rest = name.partition(".")
        if top == package:
            module = rest.partition(".")[0]
            found.add(module if module in known else "")
    return found


def third_party(file: Path) -> set[str]:
    return tops(file) - sys.stdlib_module_names - {"hermes_pool", "hermes_pool_worker"}


def named(paths: list[Path]) -> dict[str, object]:
    return {"argvalues": paths, "ids": [path.stem for path in paths]}


def test_every_module_has_a_place_in_the_layers():
    assert {file.stem for file in sources(SUPERVISOR)} == set(MAY_IMPORT)


@pytest.mark.parametrize("file", **named(sources(SUPERVISOR)))
def test_imports_within_the_supervisor_point_down(file):
    assert modules_of(file, "hermes_pool", SUPERVISOR) <= MAY_IMPORT[file.stem]


def test_the_layers_have_no_cycle():
    order = {name: set(MAY_IMPORT[name]) for name in MAY_IMPORT if name not in PURE}
    done = set(PURE)
    while order:
        free = {name for name, below in order.items() if below <= done}
        assert free, f"these import each other in a circle: {sorted(order)}"
        done |= free
        order = {name: below for name, below in order.items() if name not in free}


@pytest.mark.parametrize("file", **named(sources(SUPERVISOR)))
def test_each_library_is_known_in_one_place(file):
    assert third_party(file) <= THIRD_PARTY.get(file.stem, set())


@pytest.mark.parametrize("file", **named(sources(SUPERVISOR)))
def test_the_supervisor_knows_of_the_worker_its_wire_and_its_place_only(file):
    taken = modules_of(file, "hermes_pool_worker", WORKER)
    bare = "hermes_pool_worker" in set(imports(file))
    assert taken <= ({"wire", ""} if bare else {"wire"})
    assert not bare or file.stem == "start", "only the start of workers needs the folder"


@pytest.mark.parametrize("file", **named(sources(WORKER)))
def test_the_worker_knows_nothing_of_the_supervisor(file):
    assert "hermes_pool" not in tops(file)


@pytest.mark.parametrize("file", **named(sources(WORKER)))
def test_the_worker_needs_msgspec_only_and_hermes_in_its_adapter(file):
    allowed = {"msgspec"}
    if file.stem.startswith("hermes"):
        allowed |= HERMES | {"certifi"}
    assert third_party(file) <= allowed


def test_the_worker_package_itself_imports_nothing():
    assert list(imports(WORKER / "__init__.py")) == []


def test_the_worker_program_finds_its_package_with_the_standard_library_alone():
    tree = ast.parse((WORKER / "__main__.py").read_text(encoding="utf-8"))
    first = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {alias.name for node in first for alias in node.names}
    assert found <= {"os", "sys"}, "all else has to wait until the descriptors are claimed"


@pytest.mark.parametrize("file", **named(sources(SUPERVISOR) + sources(WORKER)))
def test_what_is_never_used(file):
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


# --- what is promised in public ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hermes_pool.__all__)
def test_every_public_name_exists_and_is_documented(name):
    thing = getattr(hermes_pool, name)
    assert inspect.getdoc(thing)
    if is_dataclass(thing):
        assert not thing.__doc__.startswith(f"{name}("), "that is the text which dataclasses make up"
    own = [member for member in vars(thing).values() if inspect.isfunction(member)]
    for member in own:
        assert member.__name__.startswith("_") or member.__doc__, f"{name}.{member.__name__} is not documented"


def test_public_names_are_sorted_and_once():
    assert hermes_pool.__all__ == sorted(set(hermes_pool.__all__))


# --- the table of states ----------------------------------------------------------------------------------------------


def test_every_state_has_a_row_and_every_event_a_use():
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_every_state_can_be_reached_and_left_for_a_new_start():
    def reachable(state: State) -> set[State]:
        found, new = set(), {state}
        while new:
            found |= new
            new = {after for each in new for after in TRANSITIONS[each].values()} - found
        return found

    assert reachable(State.STOPPED) == set(State)
    for state in State:
        assert State.STARTING in reachable(state), f"{state} is a dead end"


def test_only_an_exit_that_was_seen_leads_to_a_state_without_a_process():
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


def test_the_readme_names_every_state_and_event(readme):
    words = set(re.findall(r"\w+", readme.lower()))
    assert {str(name) for name in (*State, *Event)} <= words


def test_the_readme_names_every_setting(readme):
    in_tables = "\n".join(line for line in readme.splitlines() if line.lstrip().startswith("|"))
    missing = [each.name for each in fields(PoolSettings) if f"`{each.name}`" not in in_tables]
    assert not missing


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_changelog_knows_this_version():
    version = pyproject()["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_direct_dependency_is_pinned_within_its_range():
    project = pyproject()["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    pins = {}
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


def test_what_both_sides_say_is_the_same_though_they_share_no_module():
    from hermes_pool import environment, health, link, process
    from hermes_pool_worker import __main__ as program
    from hermes_pool_worker import kin, lifeline, limits, serve

    assert health.MARKER_VARIABLE == kin.MARKER_VARIABLE
    assert process.LIFELINE_VARIABLE == lifeline.VARIABLE
    assert health.STACKS_SIGNAL == limits.STACKS_SIGNAL
    assert environment.RLIMITS_VARIABLE == limits.RLIMITS_VARIABLE
    assert limits.EXIT_UNUSABLE == serve.EXIT_UNUSABLE
    assert link.EXIT_UNUSABLE == serve.EXIT_UNUSABLE == program.EXIT_UNUSABLE
