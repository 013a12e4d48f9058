"""The page of the example host, in a real browser: what a person sees and does."""

import asyncio
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

import _browser
from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home
from tests.integration.hosts.jarvis import Jarvis, messages
from tests.support import known, until

CHROMIUM = _browser.find()
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
SHOTS = os.environ.get("JARVIS_SHOTS")
"""A folder for pictures of the page, for people to look at."""
RELOADS, RELOADS_SLOW = 10, 200

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=_browser.REMEDY),
    pytest.mark.skipif("sys.platform == 'win32'", reason="a server cannot take over a socket there"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def jarvis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jarvis]:
    with Jarvis(tmp_path_factory.mktemp("jarvis")) as jarvis:
        yield jarvis


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # With a profile of its own, in a temporary folder that goes with it.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A browser with nothing in its memory. An error of the page's script fails the test."""
    context = await browser.new_context(viewport={"width": 1100, "height": 760})
    context.set_default_timeout(15_000)
    errors: list[str] = []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    yield context
    await context.close()
    assert errors == []


@pytest.fixture
def chat() -> str:
    """The id of a conversation that nobody has used."""
    return uuid.uuid4().hex


async def opened(context: BrowserContext, jarvis: Jarvis, chat: str) -> Page:
    page = await context.new_page()
    await page.goto(f"{jarvis.url}/c/{chat}")
    await expect(page.locator("#turns")).to_have_attribute("aria-busy", "false")
    return page


async def write(page: Page, text: str) -> None:
    await page.get_by_label("Your message").fill(text)
    await page.keyboard.press("Enter")


def turn(page: Page, number: int = -1) -> Any:
    return page.locator(".turn").nth(number)


async def ended(page: Page, state: str = "done", number: int = -1) -> None:
    await expect(turn(page, number)).to_have_attribute("data-state", state)


async def said(page: Page, number: int = -1) -> str:
    return " ".join(await turn(page, number).locator(".text").all_inner_texts())


async def shot(page: Page, name: str) -> None:
    if SHOTS is not None:
        await page.screenshot(path=Path(SHOTS) / f"{name}.png", animations="disabled")


async def test_an_answer_is_streamed_with_its_reasoning_folded_and_its_tools_as_cards(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await expect(page.locator("#empty")).to_be_visible()
    await write(page, f"think Let me see; say **First** `words`; tool hammer nail; wait {chat}; say last <b>words</b>")
    await expect(turn(page).locator(".text strong")).to_have_text("First")
    await ended(page, "running")
    assert "last" not in await said(page)
    thoughts = turn(page).locator(".thoughts")
    await expect(thoughts).to_be_hidden()
    await turn(page).get_by_text("Reasoning").click()
    await expect(thoughts).to_have_text("Let me see ")
    tool = turn(page).locator(".tool")
    await expect(tool).to_have_attribute("data-how", "ok")
    await expect(tool.get_by_text("result of nail")).to_be_hidden()
    await tool.locator("summary").click()
    await expect(tool.get_by_text("result of nail")).to_be_visible()
    await shot(page, "streaming")
    jarvis.allow(chat)
    await ended(page)
    await expect(turn(page).locator(".text").last).to_have_text("last <b>words</b>")  # never taken for HTML
    await expect(thoughts).to_be_visible()  # what was opened stays open
    await expect(page).to_have_title(re.compile("think Let me see"))


async def reloaded_in_mid_answer(context: BrowserContext, jarvis: Jarvis, times: int) -> None:
    """One page stays, another one is loaded again and again in the middle of answers: both show the same."""
    chat = uuid.uuid4().hex
    stays = await opened(context, jarvis, chat)
    reloads = await opened(context, jarvis, chat)
    for number in range(times):
        gate = f"{chat}-{number}"
        text = (
            f"think a b; say **One**; tool hammer nail; stream {number % 7}; wait {gate}; stream 20; say end {number}"
        )
        await write(stays, text)
        await expect(turn(stays, number).locator(".tool")).to_have_count(1)
        if number % 2:
            jarvis.allow(gate)  # the answer goes on, and may end, while the page is away
        await reloads.reload(wait_until="domcontentloaded")
        if number % 3 == 0:
            await reloads.reload(wait_until="domcontentloaded")
        jarvis.allow(gate)
        for page in (stays, reloads):
            await ended(page, "done", number)
        whole = re.sub(r"\s+", " ", await said(stays, number))
        assert whole.endswith(f"end {number}"), whole
        assert re.sub(r"\s+", " ", await said(reloads, number)) == whole, f"reload {number}"
    assert await reloads.locator(".turn").count() == times
    for page in (stays, reloads):  # a browser has six connections to a host, and each page holds one
        await page.close()


async def test_a_page_that_is_loaded_again_in_mid_answer_shows_what_an_undisturbed_one_shows(
    context: BrowserContext, jarvis: Jarvis
) -> None:
    await reloaded_in_mid_answer(context, jarvis, RELOADS)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_pages_that_are_loaded_again_in_mid_answer_show_what_undisturbed_ones_show(
    context: BrowserContext, jarvis: Jarvis
) -> None:
    for _ in range(RELOADS_SLOW // 20):
        await reloaded_in_mid_answer(context, jarvis, 20)


async def test_two_tabs_show_the_same_conversation_and_either_can_answer_its_question(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    one, two = await opened(context, jarvis, chat), await opened(context, jarvis, chat)
    await write(one, "say Shall I?; approve rm -rf x; say done")
    question = turn(two).locator(".question")
    await question.get_by_role("button", name="Allow once").click()
    for page in (one, two):
        await ended(page)
        await expect(turn(page).locator(".question")).to_contain_text("Answer: Allow once")
        await expect(turn(page).locator(".question button")).to_have_count(0)
        assert "Approval: once." in await said(page)
        await expect(page.locator(".side li a")).to_contain_text(["say Shall I?"])
    await write(two, "say from the second tab")
    await ended(one, "done", 1)
    assert "from the second tab" in await said(one)


async def test_a_question_that_was_answered_before_a_reload_is_not_open_after_it(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await write(page, f"approve rm -rf x; wait {chat}")
    await turn(page).get_by_role("button", name="Deny").click()
    await expect(turn(page).locator(".question.closed")).to_be_visible()
    await page.reload()
    await expect(turn(page).locator(".question.closed")).to_contain_text("Deny")
    await expect(turn(page).locator(".question button")).to_have_count(0)
    jarvis.allow(chat)
    await ended(page)


async def test_a_clarifying_question_takes_a_choice_or_words_of_ones_own(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await write(page, "clarify Tea or coffee?; clarify And with what?")
    await turn(page).get_by_role("button", name="Coffee").click()
    await shot(page, "clarify")
    await turn(page).get_by_label("Your answer").fill("a little milk")
    await page.keyboard.press("Enter")
    await ended(page)
    assert "Choice: Coffee." in await said(page)
    assert "Choice: a little milk." in await said(page)


async def test_an_answer_is_stopped_with_the_button_and_its_words_stay(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    stop = page.get_by_role("button", name="Stop")
    await expect(stop).to_be_hidden()
    await write(page, "say So far; wait never")
    await expect(turn(page).locator(".text")).to_have_text("So far")
    await stop.click()
    await ended(page, "stopped")
    await expect(stop).to_be_hidden()
    await page.reload()
    await ended(page, "stopped")
    assert await said(page) == "So far"


async def test_an_answer_is_steered_and_both_tabs_see_with_what(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page, other = await opened(context, jarvis, chat), await opened(context, jarvis, chat)
    await write(page, f"say Begun; wait {chat}; steered")
    await expect(turn(page).locator(".text")).to_have_text("Begun")
    await page.get_by_label("Your message").fill("make it short")
    await page.get_by_role("button", name="Steer").click()
    for each in (page, other):
        await expect(turn(each).locator(".steered")).to_contain_text("make it short")
    await expect(page.get_by_label("Your message")).to_have_value("")
    jarvis.allow(chat)
    await ended(page)


async def test_a_double_click_sends_one_message_and_a_request_that_got_lost_is_repeated(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await page.get_by_label("Your message").fill(f"say once {chat}")
    await page.get_by_role("button", name="Send").dblclick()
    await ended(page)
    tries = 0

    async def lose_some(route: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            await route.fetch()  # Jarvis gets it, and the page never hears so
        if tries <= 2:
            await route.abort()
        else:
            await route.continue_()

    await page.route("**/messages", lose_some)
    await write(page, f"say again {chat}")
    await ended(page, "done", 1)
    await until(lambda: tries >= 2, "it was sent again")
    assert [each for each in jarvis.asked if chat in each] == [f"say once {chat}", f"say again {chat}"]
    assert await page.locator(".turn").count() == 2


async def test_messages_wait_in_line_and_one_is_withdrawn(context: BrowserContext, jarvis: Jarvis, chat: str) -> None:
    page = await opened(context, jarvis, chat)
    await write(page, f"wait {chat}; say first")
    await ended(page, "running")
    await write(page, f"say second {chat}")
    await write(page, "say third")
    await turn(page, 1).get_by_role("button", name="Withdraw").click()
    await expect(page.locator(".turn")).to_have_count(2)
    jarvis.allow(chat)
    await ended(page, "done", 1)
    assert await said(page, 1) == "third"
    assert f"say second {chat}" not in jarvis.asked


async def test_everything_is_done_with_the_keyboard(context: BrowserContext, jarvis: Jarvis, chat: str) -> None:
    page = await opened(context, jarvis, chat)
    press = page.keyboard.press
    await expect(page.get_by_label("Your message")).to_be_focused()
    await page.keyboard.type(f"say one; approve rm -rf x; wait {chat}")
    await press("Shift+Enter")
    await page.keyboard.type("second line")
    await expect(page.get_by_label("Your message")).to_have_value(
        f"say one; approve rm -rf x; wait {chat}\nsecond line"
    )
    await press("Backspace")
    for _ in "second line":
        await press("Backspace")
    await press("Enter")
    allow = turn(page).get_by_role("button", name="Allow once")
    await expect(allow).to_be_visible()
    for _ in range(4):
        await press("Shift+Tab")
        if await allow.evaluate("each => each === document.activeElement"):
            break
    await expect(allow).to_be_focused()
    assert await allow.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
    await press("Enter")
    await expect(turn(page).locator(".question.closed")).to_be_visible()
    await expect(page.get_by_label("Your message")).to_be_focused()
    await page.keyboard.type("a remark")
    await press("Control+Enter")
    await expect(turn(page).locator(".steered")).to_contain_text("a remark")
    await press("Escape")
    await ended(page, "stopped")
    await page.keyboard.type("say two")
    await press("Enter")
    await ended(page, "done", 1)


async def test_every_control_has_a_name_and_what_happens_is_announced(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await write(page, "say Hello")
    await ended(page)
    await expect(page.locator("#said")).to_contain_text("Answer: Hello")
    nameless = await page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, a")].filter((each) =>
            !(each.ariaLabel || each.textContent.trim() || each.labels?.length)).map((each) => each.outerHTML)"""
    )
    assert nameless == []


async def test_the_page_is_readable_in_light_and_in_dark_and_on_a_phone(
    context: BrowserContext, jarvis: Jarvis, chat: str
) -> None:
    page = await opened(context, jarvis, chat)
    await write(
        page, f"think Hm; tool hammer nail; say Some `code` and *words*.; start nail; approve rm -rf x; wait {chat}"
    )
    await expect(turn(page).locator(".question")).to_be_visible()
    large = known(page.viewport_size)
    for scheme in SCHEMES:
        await page.set_viewport_size(large)
        await page.emulate_media(color_scheme=scheme)
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(ground) > 0.5) == (scheme == "light")
        await shot(page, f"question-{scheme}")
        poor = [(text, found) for text, found in await contrasts(page) if found < 4.5]
        assert poor == []
        await page.set_viewport_size({"width": 360, "height": 740})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await expect(page.locator("#side")).to_be_hidden()
        await shot(page, f"phone-{scheme}")
        await page.get_by_role("button", name="Conversations", exact=True).click()
        await expect(page.get_by_role("button", name="New conversation")).to_be_in_viewport()
        await page.keyboard.press("Escape")
        await expect(page.locator("#side")).to_be_hidden()
    await page.keyboard.press("Escape")  # stops the answer
    await ended(page, "stopped")


CONTRASTS = """() => {
  const LEFT_OUT = ".unseen, .skip, :disabled, script, noscript, option";
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const text = walk.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(LEFT_OUT)) continue;
    let ground = element;
    while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
    found.push([text, getComputedStyle(element).color, getComputedStyle(ground ?? document.body).backgroundColor]);
  }
  return found;
}"""


async def contrasts(page: Page) -> list[tuple[str, float]]:
    """How well each text stands out from its ground, by WCAG."""
    found = []
    for text, ink, ground in await page.evaluate(CONTRASTS):
        bright, dim = sorted((luminance(ink), luminance(ground)), reverse=True)
        found.append((text, (bright + 0.05) / (dim + 0.05)))
    assert found
    return found


def luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(float(part) / 255) for part in re.findall(r"[\d.]+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_a_page_whose_host_was_restarted_goes_on(context: BrowserContext, tmp_path: Path, chat: str) -> None:
    first = Jarvis(tmp_path)
    page = await opened(context, first, chat)
    await write(page, "say before")
    await ended(page)
    await asyncio.to_thread(first.stop)
    await expect(page.locator("#connection")).to_be_visible()
    with Jarvis(tmp_path, port=first.port):
        await expect(page.locator("#connection")).to_be_hidden()
        await write(page, "say after")
        await ended(page, "done", 1)
        assert [await said(page, 0), await said(page, 1)] == ["before", "after"]


async def test_jarvis_answers_on_the_page_where_hermes_cannot(
    context: BrowserContext, tmp_path: Path, chat: str
) -> None:
    with Jarvis(tmp_path, environ={"HERMES_POOL_AGENT": "missing:Agent"}) as jarvis:
        page, other = await opened(context, jarvis, chat), await opened(context, jarvis, chat)
        await write(page, "Hello")
        for each in (page, other):
            await ended(each)
            await expect(turn(each).locator(".end")).to_contain_text("Hermes is not available now")


@pytest.mark.skipif(find_spec("run_agent") is None, reason="Hermes is not installed in this environment")
@pytest.mark.slow
async def test_the_real_hermes_answers_asks_and_remembers(context: BrowserContext, tmp_path: Path, chat: str) -> None:
    with ScriptedModel() as model:
        home = write_hermes_home(tmp_path / "hermes", model.url)
        environ = {
            "HERMES_POOL_AGENT": "hermes",
            "HERMES_POOL_AGENT_OPTIONS": "",
            "HERMES_POOL_HERMES_HOME": str(home),
        }
        with Jarvis(tmp_path, environ=environ) as jarvis:
            page = await opened(context, jarvis, chat)
            await write(page, "[reason] I am Ada. [tool rm -rf /tmp/no-such-folder-of-jarvis]")
            await turn(page).get_by_role("button", name="Allow once").click()
            await ended(page)
            await expect(turn(page).locator(".tool .name")).to_have_text("terminal")
            await write(page, '[call clarify {"question": "Tea or coffee?", "choices": ["Tea", "Coffee"]}]')
            await turn(page).get_by_role("button", name="Coffee").click()
            await ended(page, "done", 1)
            assert "Coffee" in await said(page, 1)
            await write(page, "What is my name?")
            await ended(page, "done", 2)
            assert await said(page, 2) == "(scripted) Your name is Ada."
            async with jarvis.client() as client:
                assert len(await messages(client, chat)) == 6
