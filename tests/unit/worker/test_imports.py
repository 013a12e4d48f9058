import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_pool_worker.agent import MissingDependencyError
from hermes_pool_worker.echo import EchoAgent
from hermes_pool_worker.imports import import_agent, imported_since


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_built_in_agent_and_one_by_its_full_name() -> None:
    for name in ("echo", "hermes_pool_worker.echo:EchoAgent"):
        module, factory = import_agent(name)
        assert module is sys.modules["hermes_pool_worker.echo"]
        assert isinstance(factory(), EchoAgent)


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("nowhere_to_be_found:Agent", "", "nowhere_to_be_found"),
        ("an_agent:Missing", "Agent = object", "Missing"),
        ("an_agent", "Agent = object", "attribute"),
        ("an_agent:Agent", "import not_installed_anywhere", "not_installed_anywhere"),
    ],
)
def test_an_agent_that_cannot_be_imported_is_named_with_the_remedy(
    folder: Path, name: str, source: str, reason: str
) -> None:
    (folder / "an_agent.py").write_text(source)
    with pytest.raises(MissingDependencyError) as caught:
        import_agent(name)
    for part in (repr(name), reason, "agent_paths", sys.executable):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value), "the supervisor takes the last line for the remedy"


def test_a_bug_in_an_agents_module_is_not_taken_for_a_missing_one(folder: Path) -> None:
    (folder / "a_buggy_agent.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_agent("a_buggy_agent:Agent")


def test_what_was_imported_meanwhile_is_told_by_names_that_can_be_imported(folder: Path) -> None:
    (folder / "first_module.py").write_text("")
    (folder / "second_module.py").write_text("import sys; sys.modules['made_up'] = sys")
    born_with = frozenset(sys.modules)
    assert imported_since(born_with) == []
    __import__("second_module")
    __import__("first_module")
    assert imported_since(born_with) == ["first_module", "second_module"]
