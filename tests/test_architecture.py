"""The rules of the design that a source text shows: who imports whom, and what is never used."""

import ast
import inspect
import subprocess
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import hermes_pool
from hermes_pool import errors
from hermes_pool_worker import contract
from tests.support import known

ROOT = Path(__file__).resolve().parent.parent
SUPERVISOR = ROOT / "hermes_pool"
WORKER = ROOT / "worker" / "hermes_pool_worker"

MAY_IMPORT = {
    # Values and tables: what everything else speaks of.
    "account": set(),
    "crash_report": set(),
    "lifecycle": set(),
    "snapshot": set(),
    "errors": {"account", "crash_report"},
    "settings": {"errors"},
    # Decisions, and each thing of the outside world by itself.
    "policy": {"errors", "settings", "snapshot"},
    "system": {"errors", "policy"},
    "storage": {"errors", "settings", "system"},
    "control": {"crash_report", "errors", "snapshot", "system"},
    "testing": set(),
    # Worker processes; who may have one; one conversation; all of them.
    "process": {"errors", "policy", "settings", "snapshot", "system"},
    "scheduling": {"errors", "lifecycle", "policy", "settings", "snapshot", "system"},
    "conversation": {
        "account", "crash_report", "errors", "lifecycle", "policy", "process", "scheduling", "settings", "snapshot",
        "storage", "system",
    },
    "cluster": {
        "account", "control", "conversation", "crash_report", "errors", "lifecycle", "process", "settings", "snapshot",
        "storage", "system",
    },
    "manager": {
        "cluster", "control", "conversation", "crash_report", "errors", "process", "scheduling", "settings",
        "snapshot", "storage", "system",
    },
    "fastapi": {"conversation", "errors", "manager", "scheduling", "settings", "snapshot"},
    "schema": {"account", "conversation", "crash_report", "errors", "process", "scheduling", "snapshot"},
    # People.
    "cli": {
        "control", "conversation", "crash_report", "errors", "manager", "settings", "snapshot", "storage", "system",
        "testing",
    },
    "__main__": {"cli"},
    "__init__": {
        "account", "conversation", "crash_report", "errors", "lifecycle", "manager", "process", "scheduling",
        "settings", "snapshot", "storage",
    },
}  # fmt: skip
"""The rooms of ``hermes_pool``, from the ground up, and every arrow between them: each imports these, all of these, and
nothing else."""

THIRD_PARTY = {
    "account": {"msgspec"},
    "settings": {"msgspec"},
    "process": {"msgspec", "psutil"},
    "system": {"psutil", "structlog"},
    "storage": {"sqlalchemy", "sqlmodel"},
    "cluster": {"msgspec", "psutil", "sqlalchemy"},
    "control": {"msgspec"},
    "conversation": {"msgspec"},
    "cli": {"rich", "typer"},
    "fastapi": {"fastapi", "starlette"},
}
"""The libraries that each room knows."""

SHARED = {"wire", "contract", "procfs", "plain"}
"""The modules of the worker's package that the supervisor imports as well."""

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
    named = {module: list(imports(file)) for module, file in modules.items()}
    above = {
        module: {other for other in modules if any(f"{name}.".startswith(f"{other}.") for name in names)}
        for module, names in named.items()
    }
    while above:
        free = {module for module, others in above.items() if not others & set(above)}
        assert free, f"these import each other in a circle: {sorted(above)}"
        above = {module: others for module, others in above.items() if module not in free}


@each_of(sources(SUPERVISOR))
def test_each_library_is_known_in_one_place(file: Path) -> None:
    assert third_party(file) <= THIRD_PARTY.get(room_of(file), set())


@each_of(sources(SUPERVISOR))
def test_the_supervisor_knows_of_the_worker_only_what_both_sides_share(file: Path) -> None:
    taken = {name.split(".")[1] for name in imports(file) if name.startswith("hermes_pool_worker.")}
    bare = "hermes_pool_worker" in set(imports(file))
    assert taken <= SHARED
    assert not bare or file.stem == "factory", "only the start of workers needs the folder"


@pytest.mark.parametrize("name", sorted(SHARED - {"wire"}))
def test_what_both_sides_share_beside_the_wire_needs_the_standard_library_only(name: str) -> None:
    assert tops(WORKER / f"{name}.py") <= sys.stdlib_module_names


def test_what_both_sides_agree_on_is_written_once() -> None:
    agreed = {
        value for value in vars(contract).values() if isinstance(value, str) and value.startswith(("HERMES", "--"))
    }
    assert len(agreed) == 5
    for file in {*sources(SUPERVISOR), *sources(WORKER)} - {WORKER / "contract.py"}:
        constants = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        assert not agreed & constants, f"{file} writes again what is in contract.py"


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


INIT = ast.parse((SUPERVISOR / "__init__.py").read_text(encoding="utf-8"))


def re_exported(node: ast.AST) -> list[str]:
    """The names that are imported under their own name, which is how a type checker knows that they are public."""
    imported = [each for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
    return [alias.name for each in imported for alias in each.names if alias.asname == alias.name]


PUBLIC = re_exported(INIT)
MADE_BY_THE_POOL = {hermes_pool.Turn}
"""Classes whose objects a caller is given and does not make, so that their constructors are not public."""


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(hermes_pool, name)
    assert inspect.getdoc(thing)
    if not isinstance(thing, type):  # an alias
        return
    if is_dataclass(thing):
        assert not known(thing.__doc__).startswith(f"{name}("), "that is the text which dataclasses make up"
    own = [member for member in vars(thing).values() if inspect.isfunction(member)]
    for member in own:
        assert member.__name__.startswith("_") or member.__doc__, f"{name}.{member.__name__} is not documented"


def test_each_name_is_public_once_and_nothing_else_is() -> None:
    assert len(set(PUBLIC)) == len(PUBLIC)
    known = {name for name, value in vars(hermes_pool).items() if not isinstance(value, ModuleType)}
    assert (
        {name for name in known if not name.startswith("_")} - {"TYPE_CHECKING"} <= set(PUBLIC) <= set(dir(hermes_pool))
    )
    with pytest.raises(AttributeError, match="nonsense"):
        getattr(hermes_pool, "nonsense")  # noqa: B009 - for the type checker there is no such name


def test_what_is_imported_later_is_what_a_type_checker_imports() -> None:
    (block,) = [each for each in INIT.body if isinstance(each, ast.If)]
    seen = {alias.name: each.module for each in block.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert seen == vars(hermes_pool)["_LATER"]
    assert set(seen) <= set(PUBLIC)


def test_every_error_is_public() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(PUBLIC)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("hermes_pool.cli.app", {"asyncio", "psutil", "sqlalchemy", "sqlmodel", "structlog"}),
        ("hermes_pool.manager", {"sqlalchemy", "sqlmodel", "structlog"}),
    ],
)
def test_what_is_slow_to_import_waits_until_it_is_needed(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def type_checkers_names() -> dict[str, object]:
    """What some modules import for type checkers only."""
    from sqlalchemy.ext.asyncio import AsyncEngine

    return {"AsyncEngine": AsyncEngine, "ConversationStore": hermes_pool.ConversationStore}


def annotations_of(kind: type) -> Iterator[object]:
    """The types of the public attributes, parameters and results of a class, as its own source declares them."""
    names = type_checkers_names()
    # Alone: what a library's base class declares is the library's own affair.
    alone = type("Alone", (), {"__annotations__": inspect.get_annotations(kind), "__module__": kind.__module__})
    hints = typing.get_type_hints(alone, localns=names)
    yield from (hint for name, hint in hints.items() if not name.startswith("_"))
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_public = not name.startswith("_") or name in ("__aenter__", "__aiter__", "__anext__")
        if inspect.isfunction(function) and (is_public or (name == "__init__" and kind not in MADE_BY_THE_POOL)):
            yield from typing.get_type_hints(function, localns=names).values()
    with suppress(OSError):  # without a source there are no assignments to look at
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
            match node:
                case ast.AnnAssign(target=ast.Attribute(attr=name)) if not name.startswith("_"):  # self.name: type
                    yield eval(ast.unparse(node.annotation), vars(sys.modules[kind.__module__]), names)


def types_in(annotation: object) -> Iterator[type]:
    if isinstance(annotation, list | tuple):  # the parameters of a Callable
        for each in annotation:
            yield from types_in(each)
    elif isinstance(annotation, type):
        yield annotation
    else:
        yield from types_in(typing.get_args(annotation))


def reachable_types() -> dict[type, str]:
    """Our types that a caller can come across, each with the one through which."""
    found: dict[type, str] = {}
    new = {thing: "hermes_pool" for name in PUBLIC for thing in types_in(getattr(hermes_pool, name))}
    while new:
        found |= new
        bases = {base: kind for kind in new for base in kind.__mro__ if base.__module__.startswith("hermes_pool")}
        new = {
            each: kind.__name__
            for base, kind in bases.items()
            for annotation in annotations_of(base)
            for each in types_in(annotation)
            if each.__module__.startswith("hermes_pool") and each not in found
        }
    return found


def test_every_type_that_a_caller_can_come_across_is_public() -> None:
    found = reachable_types()
    hidden = {
        f"{kind.__module__}.{kind.__name__}": through
        for kind, through in found.items()
        if getattr(hermes_pool, kind.__name__, None) is not kind
    }
    assert not hidden, "these are reached through the class beside them, and cannot be imported from hermes_pool"


class Inner: ...


class Outer:
    """Declares a type of each kind of place, and two where nobody looks."""

    declared: dict[str, list["Inner"] | None]
    _own: hermes_pool.PoolSnapshot

    def __init__(self, given: "hermes_pool.ConversationStore") -> None:
        self._given = given
        self.kept: hermes_pool.BreakerState | None = None

    @property
    def last(self) -> hermes_pool.DeathReport:
        raise NotImplementedError

    @classmethod
    def made(cls, how: Callable[[hermes_pool.Exit], None]) -> None: ...

    def _made(self) -> hermes_pool.Reply:
        raise NotImplementedError


def test_the_search_for_types_finds_them_wherever_they_are_declared() -> None:
    found = {each for annotation in annotations_of(Outer) for each in types_in(annotation)}
    assert {each for each in found if each.__module__ not in ("builtins", "types")} == {
        Inner, hermes_pool.BreakerState, hermes_pool.ConversationStore, hermes_pool.DeathReport, hermes_pool.Exit,
    }  # fmt: skip


# --- what is installed ------------------------------------------------------------------------------------------------


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


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


def test_a_star_import_brings_every_public_name() -> None:
    program = "from hermes_pool import *; print(*(name for name in globals() if name[0] != '_'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    names = set(done.stdout.split())
    assert names >= {"HermesSessionManager", "PoolSettings", "Reply", "TextDelta", "Turn"}
    assert not any(isinstance(getattr(hermes_pool, name), ModuleType) for name in names)
