"""The chat page at / in a real browser, headless Chromium, over the scripted model."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fakes import FakeRunner, live_server, saying
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tpu_serve.config import ServerConfig
from tpu_serve.server.page import PATHS, page_files

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: install it (Debian: apt-get install chromium), or name it in CHROMIUM"
)
# Without the last ones a browser looks up hosts of its maker at every start.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FakeRunner]]:
    with live_server(ServerConfig(port=0, reasoning_parser="qwen3", tool_call_parser="hermes")) as pair:
        yield pair


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page, which must fetch nothing from elsewhere, log no error and be left without one."""
    page = browser.new_page()
    troubles: list[str] = []
    page.on("request", lambda request: request.url.startswith((url, "data:")) or troubles.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(url)
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#model option")).to_have_count(1)
    yield page
    page.close()
    assert not troubles


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def last(page: Page) -> object:
    return page.locator(".message.assistant").last


def settings(page: Page, **values: str) -> None:
    page.click("#toggle-settings")
    for name, value in values.items():
        page.fill(f"#{name.replace('__', '-')}", value)


def test_an_answer_appears_with_its_figures(browser, server):
    url, runner = server
    runner.script, runner.seconds = saying("Plain text, `code` and\n```python\nprint(1)\n```\n<b>no tags</b>"), 0.005
    with opened(browser, url) as page:
        ask(page, "Hello")
        expect(last(page).locator("pre code")).to_have_text("print(1)\n")
        expect(last(page)).to_contain_text("<b>no tags</b>")
        expect(page.locator("#speed")).to_have_text(re.compile(r"^[1-9]\d*\.\d$"))
        expect(page.locator("#first-token")).to_have_text(re.compile(r"^\d+ ms$"))
        expect(page.locator("#usage")).to_have_text(re.compile(r"^\d+.* \+ \d+$"))
        expect(page.locator("#experts")).to_have_text("ragged (none)")
        expect(page.locator("#running")).to_have_text("0", timeout=10_000)
        expect(page.locator("#send")).to_be_visible()


def test_the_conversation_and_the_settings_are_sent(browser, server):
    url, runner = server
    runner.script, runner.seconds = saying("Yes."), 0
    with opened(browser, url) as page:
        expect(page.locator("#schema")).to_be_hidden()
        settings(page, system="Be brief.", top_k="5", seed="7", max_completion_tokens="12", repetition_penalty="1.1")
        page.fill("#temperature", "0.25")
        page.uncheck("#enable_thinking")
        bodies = []
        page.on("request", lambda one: one.method == "POST" and bodies.append(json.loads(one.post_data)))
        ask(page, "One")
        expect(last(page)).to_contain_text("Yes.")
        expect(page.locator("#send")).to_be_visible()
        page.check("#send-defaults")
        page.select_option("#response_format", "json_schema")
        page.fill("#schema", '{"type": "object"}')
        runner.script = saying("{}")
        ask(page, "Two")
        expect(page.locator(".message.assistant")).to_have_count(2)
        expect(last(page)).to_contain_text("{}")
    first, second = bodies
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    sampling = {"temperature": 0.25, "top_p": 1, "top_k": 5, "min_p": 0, "repetition_penalty": 1.1}
    assert sampling.items() <= first.items()
    assert (first["seed"], first["max_completion_tokens"], first["model"]) == (7, 12, "tiny")
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "One", "Yes.", "Two"]
    assert not sampling.keys() & second.keys()
    assert second["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_stop_ends_the_answer_on_the_server_too(browser, server):
    url, runner = server
    runner.script, runner.seconds = (lambda request, index: ord("x")), 0.03
    with opened(browser, url) as page:
        ask(page, "Go on for ever")
        expect(last(page)).to_contain_text("xxx")
        page.click("#stop")
        expect(last(page).locator(".note")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator("#running")).to_have_text("0", timeout=10_000)
        runner.script, runner.seconds = saying("Again."), 0
        ask(page, "Once more")
        expect(last(page)).to_contain_text("Again.")


def test_reasoning_and_tool_calls_are_folded(browser, server):
    url, runner = server
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    runner.script, runner.seconds = saying("<think>\nLet me see.\n</think>\n\n" + call), 0
    with opened(browser, url) as page:
        settings(page, tools=json.dumps([TOOL]))
        ask(page, "Weather in Rome?")
        thoughts, call_view = last(page).locator("details.reasoning"), last(page).locator("details.tool-call")
        expect(call_view.locator("summary")).to_have_text("Calls get_weather")
        assert not thoughts.evaluate("one => one.open")
        assert "Let me see." in thoughts.locator("pre").text_content()
        assert json.loads(call_view.locator("pre").text_content()) == {"city": "Rome"}
        bodies = []
        page.on("request", lambda one: one.method == "POST" and bodies.append(json.loads(one.post_data)))
        runner.script = saying("It is sunny.")
        page.get_by_label("What get_weather returns").fill("sunny")
        page.get_by_role("button", name="Send results").click()
        expect(last(page)).to_contain_text("It is sunny.")
        assert bodies[0]["messages"][-1]["role"] == "tool"
        assert bodies[0]["messages"][-1]["tool_call_id"] == bodies[0]["messages"][-2]["tool_calls"][0]["id"]


def test_a_refusal_is_shown_in_the_servers_words(browser, server):
    url, runner = server
    runner.script, runner.seconds = saying("Fine."), 0
    with opened(browser, url) as page:
        settings(page, system="x" * 400)  # longer than the model's context
        ask(page, "Hello")
        expect(last(page).locator(".note.wrong")).to_contain_text("maximum context length is")
        page.fill("#system", "")
        page.fill("#tools", "[not json")
        ask(page, "Hello")
        expect(page.locator(".message.user").last).to_contain_text("The list of tools is not valid JSON")
        page.fill("#tools", "")
        ask(page, "Hello")
        expect(last(page)).to_contain_text("Fine.")


def test_an_answer_that_breaks_off_says_so(browser):
    with live_server(ServerConfig(port=0)) as (url, runner), opened(browser, url) as page:
        runner.script, runner.seconds = (lambda request, index: ord("x")), 0.02
        ask(page, "Hello")
        expect(last(page)).to_contain_text("xxx")
        runner.failure = RuntimeError("the device is on fire")
        expect(last(page).locator(".note.wrong")).to_contain_text("The request could not be finished")
        expect(page.locator("#health")).to_contain_text("the engine failed", timeout=10_000)


def test_a_key_is_asked_for_and_kept_for_the_tab(browser):
    with live_server(ServerConfig(port=0, api_key=("secret",))) as (url, runner):
        runner.script = saying("Fine.")
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("#api-key")).to_be_focused()
        page.fill("#api-key", "secret")
        page.press("#api-key", "Tab")
        expect(page.locator("#model option")).to_have_count(1)
        page.reload()
        expect(page.locator("#model option")).to_have_count(1)
        ask(page, "Hello")
        expect(last(page)).to_contain_text("Fine.")
        expect(page.locator("#running")).to_have_text("0", timeout=10_000)
        page.close()


def test_the_files_are_served_as_they_are(server):
    url, _ = server
    assert {file.path for file in page_files()} == PATHS
    for file in page_files():
        response = httpx.get(url + file.path)
        assert (response.status_code, response.headers["content-type"]) == (200, file.media_type)
        assert response.content == file.content
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert b"http://" not in file.content
        assert b"https://" not in file.content
