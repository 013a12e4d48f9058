"""The documents against the code, in both directions: what they name exists, and what exists they name.

Tables of the reference are compared with the classes that they describe, so a field, an error or an option that is
added, renamed or removed fails here until its page follows. The examples are run by
``tests/integration/test_document_examples.py``.
"""

import ast
import importlib
import inspect
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import hermes_pool
from hermes_pool import errors, lifecycle, settings
from hermes_pool.cli.app import app
from hermes_pool.policy.liveness import Verdict
from hermes_pool.scheduling.pool_state import PoolState
from hermes_pool_worker import wire
from hermes_pool_worker.hermes_setup import HermesOptions
from tests.crash import test_matrix
from tests.test_architecture import MAY_IMPORT

ROOT = Path(__file__).resolve().parent.parent
README, CHANGELOG, DOCS = ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
README_LINES_MAX = 170

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w./-])(?:hermes_pool|worker|hermes_pool_worker|tests|scripts|docs)/[\w./-]*\w(?![\w*<]|\.\.\.)"
)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PUBLIC = {
    name: getattr(hermes_pool, name)
    for name in dir(hermes_pool)
    if not name.startswith("_") and not inspect.ismodule(getattr(hermes_pool, name))
}
"""What a host can import from ``hermes_pool``."""

each_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


# --- reading Markdown -------------------------------------------------------------------------------------------------


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", read(page))


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    parts = re.split(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert heading in found, f"{page_id(page)} has no section {heading!r}"
    return found[heading]


def table(text: str) -> list[dict[str, str]]:
    """The rows of the first table, each by the headings of its columns."""
    lines = [line.strip() for line in text.splitlines()]
    begin = next((number for number, line in enumerate(lines) if line.startswith("|")), None)
    assert begin is not None, "there is no table"
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def spans(cell: str) -> list[str]:
    """The words in code font."""
    return SPAN.findall(cell)


def named(rows: Iterable[dict[str, str]]) -> list[str]:
    """What the first column names, in code font; one row may name several."""
    return [name for row in rows for name in spans(next(iter(row.values())))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    found = set()
    for heading in headings(page):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.replace(" ", "-"))
    return found


# --- all pages --------------------------------------------------------------------------------------------------------


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(other), f"{target}: there is no such heading"


@each_page
def test_paths_exist(page: Path) -> None:
    for path in PATH.findall(read(page)):
        inside = f"worker/{path}" if path.startswith("hermes_pool_worker/") else path
        assert (ROOT / inside).exists(), f"{path} does not exist"


@each_page
def test_words_in_code_font_occur_in_the_sources(page: Path) -> None:
    for span in spans(prose(page)):
        for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", span):
            assert word in words_of_the_sources(), f"`{span}`: no source knows {word}"


@cache
def words_of_the_sources() -> frozenset[str]:
    own = {Path(__file__).name, "test_document_examples.py"}
    files = [
        file
        for folder in ("hermes_pool", "worker", "scripts", "tests", "docs/examples")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix in ("", ".py")
    ]
    texts = [file.read_text(encoding="utf-8") for file in files if file.name not in own]
    return frozenset(re.findall(r"\w+", "\n".join([*texts, *(file.stem for file in files)])))


@each_page
def test_names_with_a_dot_can_be_imported_or_looked_up(page: Path) -> None:
    for span in spans(prose(page)):
        if (found := re.match(r"(\w+)\.(\w+)", span)) is None:
            continue
        first, second = found.groups()
        if first in ("hermes_pool", "hermes_pool_worker"):
            assert resolves(re.split(r"[^\w.]", span)[0]), f"`{span}` does not exist"
        elif first in PUBLIC:
            thing = PUBLIC[first]
            assert hasattr(thing, second) or second in field_names(thing), f"`{span}` does not exist"
        elif first in GROUPS:
            assert second in field_names(GROUPS[first]), f"`{span}` is not a setting"


def resolves(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), name)
    return True


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    inline = "\n".join(f"$ {span}" for span in spans(prose(page)))
    for line in re.findall(r"^\$ (?:.*\| )?hermes-pool ([a-z][^#\n]*)", f"{read(page)}\n{inline}", re.MULTILINE):
        name, *rest = line.split()
        assert name in known, f"there is no command hermes-pool {name}"
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= known[name] | {"--help"}, f"hermes-pool {line}"


@each_page
def test_environment_variables_are_settings(page: Path) -> None:
    for variable in re.findall(r"HERMES_POOL_(\w+)", read(page)):
        first, *rest = variable.lower().split("__")
        assert first in field_names(settings.PoolSettings), f"HERMES_POOL_{variable}"
        assert bool(rest) == (first in GROUPS), f"HERMES_POOL_{variable}"
        assert not rest or rest[0] in field_names(GROUPS[first]), f"HERMES_POOL_{variable}"


def test_every_page_is_in_the_index_and_in_the_readme() -> None:
    pages = set(PAGES) - {README, DOCS / "index.md"}
    for contents in (DOCS / "index.md", README):
        linked = {(contents.parent / target.partition("#")[0]).resolve() for target in LINK.findall(read(contents))}
        assert pages <= linked, f"{page_id(contents)} leaves out {sorted(map(page_id, pages - linked))}"


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len(read(README).splitlines()) <= README_LINES_MAX


def test_the_changelog_begins_with_what_is_unreleased_and_knows_this_version() -> None:
    versions = re.findall(r"^## \[(.+?)\]", read(CHANGELOG), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert project()["version"] in versions


def test_the_addresses_of_the_project_are_known() -> None:
    assert set(project()["urls"]) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith("https://") for url in project()["urls"].values())


def project() -> dict[str, Any]:
    whole: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = whole["project"]
    return found


# --- settings ---------------------------------------------------------------------------------------------------------

SETTINGS_PAGE = DOCS / "reference" / "settings.md"
SETTINGS: dict[str, Any] = {
    name: thing
    for name, thing in vars(settings).items()
    if is_dataclass(thing) and thing.__module__ == settings.__name__ and name != "SessionKey"
}
"""The dataclasses of the settings, by their names."""
FROM_THE_MACHINE = {"worker_python", "state_dir"}
"""Fields whose default is another one on each machine: the page has it in words."""


def field_names(kind: Any) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return tuple(getattr(kind, "__struct_fields__", ()))


def default_of(each: "Field[Any]") -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


GROUPS: dict[str, Any] = {
    each.name: type(default_of(each)) for each in fields(settings.PoolSettings) if is_dataclass(default_of(each))
}
"""The group behind each name of a group in ``PoolSettings``."""


def test_each_group_of_settings_has_a_section() -> None:
    titles = [heading for heading in headings(SETTINGS_PAGE) if heading in SETTINGS]
    assert titles[0] == "PoolSettings"
    assert set(titles) == set(SETTINGS) == {"PoolSettings", *(kind.__name__ for kind in GROUPS.values())}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_and_their_defaults_are_those_of_the_code(name: str) -> None:
    rows = table(section(SETTINGS_PAGE, name))
    assert sorted(named(rows)) == sorted(field_names(SETTINGS[name]))
    defaults = {each.name: default_of(each) for each in fields(SETTINGS[name])}
    for row in rows:
        (setting,) = spans(row["name"])
        if setting in FROM_THE_MACHINE:
            assert not spans(row["default"])
        elif setting in GROUPS and name == "PoolSettings":
            assert row["default"] == f"`{GROUPS[setting].__name__}()`"
        else:
            (shown,) = spans(row["default"])
            assert ast.literal_eval(shown) == defaults[setting], setting
            assert type(ast.literal_eval(shown)) is type(defaults[setting]), setting
        assert row["meaning"], f"{setting} is not explained"


def test_the_settings_that_were_renamed_are_found_under_their_new_names() -> None:
    for row in table(read(CHANGELOG)):
        (before,), (group, name) = spans(row["before"]), spans(row["now"])[0].split(".")
        assert before not in field_names(settings.PoolSettings)
        assert name in field_names(GROUPS[group])


def test_the_options_of_the_hermes_agent_are_those_of_the_code() -> None:
    assert named(table(section(SETTINGS_PAGE, "Options of the agent hermes"))) == list(HermesOptions.__struct_fields__)


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS_PAGE = DOCS / "reference" / "errors.md"
ERRORS: dict[str, type[errors.HermesPoolError]] = {
    name: thing
    for name, thing in vars(errors).items()
    if isinstance(thing, type) and issubclass(thing, errors.HermesPoolError)
}


def error_rows() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for heading in headings(ERRORS_PAGE):
        text = section(ERRORS_PAGE, heading)
        if "| error " not in text:
            continue
        for row in table(text):
            (name,) = spans(row["error"])
            assert name not in found, f"{name} has two rows"
            found[name] = row
    return found


def test_the_errors_are_those_of_the_code() -> None:
    assert set(error_rows()) == set(ERRORS)
    assert named(table(section(ERRORS_PAGE, "Errors"))) == [
        *errors.HermesPoolError.__annotations__, "conversation_id", "message",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_programs_read_from_an_error_is_as_the_page_says(name: str) -> None:
    kind, row = ERRORS[name], error_rows()[name]
    assert spans(row["`code`"]) == [kind.code]
    assert row["`http_status`"].split()[0].rstrip(",") == str(kind.http_status)
    for attribute in ("retryable", "sent"):
        assert re.split(r"\W", row[f"`{attribute}`"])[0] == ("yes" if getattr(kind, attribute) else "no"), attribute


@pytest.mark.parametrize("name", ERRORS)
def test_what_else_an_error_carries_is_in_its_row(name: str) -> None:
    common = set(inspect.signature(errors.HermesPoolError).parameters) | set(errors.HermesPoolError.__annotations__)
    parents = [each for each in ERRORS[name].__bases__ if issubclass(each, errors.HermesPoolError)]
    inherited = {word for parent in parents for word in inspect.signature(parent).parameters}
    own = set(inspect.signature(ERRORS[name]).parameters) - common - inherited
    assert own <= set(spans(" ".join(error_rows()[name].values())))


# --- events, replies, snapshots ---------------------------------------------------------------------------------------

EVENTS_PAGE = DOCS / "reference" / "events.md"
SNAPSHOTS_PAGE = DOCS / "reference" / "snapshots.md"
OF_A_TURN = wire.TurnMessage.__struct_fields__
"""The fields that all events share; the page has them once."""
EVENTS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in typing.get_args(hermes_pool.TurnEvent)}
NO_EVENTS_OF_A_TURN = (
    "TurnStarted", "QuestionAnswered", "TurnSteered", "TurnEnded", "EventsMissed", "TurnSnapshot", "OpenQuestion",
    "Reply", "ToolUse", "BackgroundFinished",
)  # fmt: skip
"""What else that page has a section for."""
TOLD = ("SessionSnapshot", "PoolSnapshot", "BreakerSnapshot", "DeathReport", "Stopped", "Exit", "Drained")


def sections_with_fields(page: Path) -> list[str]:
    return [heading for heading in headings(page) if "| field " in section(page, heading) and " " not in heading]


def test_each_event_has_a_section() -> None:
    assert set(sections_with_fields(EVENTS_PAGE)) == {*EVENTS, *NO_EVENTS_OF_A_TURN}
    assert set(EVENTS) <= set(PUBLIC)
    assert named(table(section(EVENTS_PAGE, "Events and replies"))) == list(OF_A_TURN)


@pytest.mark.parametrize("name", [*EVENTS, *NO_EVENTS_OF_A_TURN])
def test_the_fields_of_an_event_are_those_of_the_code(name: str) -> None:
    kind = PUBLIC[name]
    own = [field for field in kind.__struct_fields__ if name not in EVENTS or field not in OF_A_TURN]
    assert named(table(section(EVENTS_PAGE, name))) == own


def test_each_snapshot_has_a_section() -> None:
    assert set(sections_with_fields(SNAPSHOTS_PAGE)) == set(TOLD)


@pytest.mark.parametrize("name", TOLD)
def test_the_fields_of_a_snapshot_are_those_of_the_code(name: str) -> None:
    assert named(table(section(SNAPSHOTS_PAGE, name))) == list(field_names(PUBLIC[name]))


def test_the_stored_members_are_those_of_the_code() -> None:
    rows = table(section(DOCS / "how-to" / "your-own-table.md", "What is stored"))
    assert sorted(named(rows)) == sorted(field_names(PUBLIC["SessionRecord"]))


def test_the_verdicts_are_those_of_the_code() -> None:
    rows = table(section(DOCS / "how-to" / "operation.md", "See what runs"))
    assert named(rows) == [verdict.value for verdict in Verdict]


@pytest.mark.parametrize("page", [SNAPSHOTS_PAGE, DOCS / "how-to" / "operation.md"], ids=page_id)
def test_the_states_of_a_pool_are_those_of_the_code(page: Path) -> None:
    assert ", ".join(f"`{state.value}`" for state in list(PoolState)[:-1]) + f" or `{PoolState.CLOSED}`" in read(page)


# --- the Python interface ---------------------------------------------------------------------------------------------

PYTHON_PAGE = DOCS / "reference" / "python.md"


@pytest.mark.parametrize("name", ["HermesSessionManager", "Turn", "SessionKey", "ConversationStore"])
def test_the_members_of_a_class_are_those_of_the_code(name: str) -> None:
    kind = PUBLIC[name]
    shown = {}
    for row in table(section(PYTHON_PAGE, name)):
        (found,) = re.findall(r"^(?:await )?(\w+)", spans(next(iter(row.values())))[0])
        shown[found] = spans(next(iter(row.values())))[0]
    assert sorted(shown) == sorted(member for member in vars(kind) if not member.startswith("_"))
    for member, text in shown.items():
        function = inspect.unwrap(getattr(kind, member))
        assert ("await " in text) == inspect.iscoroutinefunction(function), text
        if "(" in text:
            parameters = [each for each in inspect.signature(function).parameters if each != "self"]
            assert re.findall(r"\w+", text.partition("(")[2]) == parameters, text


def test_every_public_name_is_listed() -> None:
    listed = [name for row in table(section(PYTHON_PAGE, "All names")) for name in spans(row["names"])]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(PUBLIC) - set(ERRORS) - {"TYPE_CHECKING"} | {"HermesPoolError"}


# --- the command line -------------------------------------------------------------------------------------------------

CLI_PAGE = DOCS / "reference" / "cli.md"


@cache
def commands() -> dict[str, set[str]]:
    """The options and arguments of each command, as they are typed."""
    group: Any = typer.main.get_command(app)
    return {name: {word for each in command.params for word in typed(each)} for name, command in group.commands.items()}


def typed(parameter: Any) -> list[str]:
    if parameter.param_type_name == "option":
        return [word for word in parameter.opts if word.startswith("--")]
    return [str(parameter.name).upper()]


def test_each_command_has_a_section() -> None:
    found = [
        heading.removeprefix("hermes-pool ") for heading in headings(CLI_PAGE) if heading.startswith("hermes-pool ")
    ]
    assert sorted(found) == sorted(commands())
    group: Any = typer.main.get_command(app)
    own = {word for each in group.params for word in typed(each)}
    assert set(named(table(section(CLI_PAGE, "Command line")))) == own | {"--help"}


@pytest.mark.parametrize("name", commands())
def test_the_options_of_a_command_are_those_of_the_code(name: str) -> None:
    assert sorted(named(table(section(CLI_PAGE, f"hermes-pool {name}")))) == sorted(commands()[name])


# --- architecture -----------------------------------------------------------------------------------------------------

ARCHITECTURE_PAGE = DOCS / "architecture.md"
Arrow = tuple[str, str, str]
"""A state, an event, and the state that follows."""


def tables_of_lifecycle() -> dict[str, set[Arrow]]:
    """Every table of transitions that ``lifecycle`` has, by its name there."""
    found = {}
    for name, thing in vars(lifecycle).items():
        if isinstance(thing, Mapping) and thing and all(isinstance(key, StrEnum) for key in thing):
            assert all(isinstance(row, Mapping) for row in thing.values()), name
            found[name] = {
                (before.value, event.value, after.value)
                for before, row in thing.items()
                for event, after in row.items()
            }
    return found


def diagrams() -> list[set[Arrow]]:
    found = []
    for text in re.findall(
        r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", read(ARCHITECTURE_PAGE), re.MULTILINE | re.DOTALL
    ):
        arrows = re.findall(r"^\s*(\w+) --> (\w+): (\w+)$", text, re.MULTILINE)
        found.append({(before, event, after) for before, after, event in arrows})
    return found


def test_each_table_of_states_has_a_diagram_with_the_same_transitions() -> None:
    tables, drawn = tables_of_lifecycle(), diagrams()
    assert tables
    for name, arrows in tables.items():
        nearest = min(drawn, key=lambda diagram: len(diagram ^ arrows))
        assert nearest == arrows, f"{name}: not drawn {arrows - nearest}, drawn and not true {nearest - arrows}"
    assert len(drawn) == len(tables)


def test_the_map_shows_every_room_and_every_module() -> None:
    text = section(ARCHITECTURE_PAGE, "The rooms")
    supervisor, worker = (part for part in text.split("\n\n") if part.startswith("|"))
    shown: set[str] = set()
    for row in table(supervisor):
        (room,) = spans(row["room of `hermes_pool`"]) or [""]
        shown |= {f"{room}/{module}".lstrip("/") for module in spans(row["modules"])}
    assert shown == set(modules(ROOT / "hermes_pool"))
    assert set(named(table(worker))) == set(modules(ROOT / "worker" / "hermes_pool_worker"))


def test_the_picture_of_the_rooms_has_no_arrow_that_points_up() -> None:
    (picture,) = re.findall(
        r"^## The rooms\n.*?^```text\n(.*?)^```$", read(ARCHITECTURE_PAGE), re.MULTILINE | re.DOTALL
    )
    lines = [re.split(r" {2,}", line)[:-1] for line in picture.splitlines()]
    level = {room: number for number, rooms in enumerate(lines) for room in rooms}
    assert set(level) == {room for room in MAY_IMPORT if not room.startswith("__")}
    for room, line in level.items():
        for imported in MAY_IMPORT[room]:  # all arrows that exist
            values = line == level[imported] == len(lines) - 1
            assert level[imported] > line or values, f"{room} imports {imported}"


def modules(package: Path) -> Iterator[str]:
    for file in package.rglob("*.py"):
        if not file.stem.startswith("__"):
            yield file.relative_to(package).with_suffix("").as_posix()


# --- faults, scripts, log ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A row of the catalogue, as the page shows it."""

    ends: list[str]
    replaced: str
    state: str


def test_the_catalogue_of_faults_is_that_of_the_tests() -> None:
    def end_of(end: test_matrix.End) -> str:
        if isinstance(end, type):
            return f"`{end.__name__}`"
        return "interrupted" if end is test_matrix.Ends.WHEN_CANCELLED else "reply"

    run = {
        name: Fault(list(dict.fromkeys(map(end_of, row.turns.values()))), str(row.restarts), f"`{row.state.value}`")
        for name, row in test_matrix.ROWS.items()
    }
    shown = {}
    for row in table(section(DOCS / "faults.md", "The catalogue")):
        (name,) = spans(row["program"])
        ends = row["its turns end with"].split(", ")
        shown[name] = Fault(ends, row["replaced"], row["then its worker is"])
        assert row["what it does"]
    assert shown == run


def test_the_scripts_are_those_in_the_folder() -> None:
    rows = table(section(DOCS / "contributing.md", "Set-up"))
    found = {file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and not file.suffix}
    assert set(named(rows)) & {f"scripts/{name}" for name in found} == {f"scripts/{name}" for name in found}


LOG_PAGE = DOCS / "reference" / "log.md"


def test_the_log_events_and_their_levels_are_those_of_the_code() -> None:
    rows = [
        row
        for heading in headings(LOG_PAGE)
        if "| event " in section(LOG_PAGE, heading)
        for row in table(section(LOG_PAGE, heading))
    ]
    shown = {name: set(row["level"].split(", ")) for row in rows for name in spans(row["event"])}
    assert len(shown) == len(rows)
    levels = logged()
    changes = {change.value for row in worker_table().values() for change in row}
    assert set(shown) == set(levels) | changes
    for name, found in levels.items():
        assert found <= shown[name] if name in changes else found == shown[name], name


def logged() -> dict[str, set[str]]:
    """Every event that some source logs by its name, with its levels."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "hermes_pool").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("debug", "info", "warning", "error", "exception")
                and ast.unparse(node.func.value).endswith("log")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and str(node.args[0].value).isidentifier()  # else it is a sentence, for the standard logger
            ):
                found.setdefault(str(node.args[0].value), set()).add(node.func.attr)
    return found


def worker_table() -> Mapping[StrEnum, Mapping[StrEnum, StrEnum]]:
    for thing in vars(lifecycle).values():
        if isinstance(thing, Mapping) and "idle" in thing:
            return thing
    raise AssertionError("lifecycle has no table of a worker's states")
