# SPDX-License-Identifier: Apache-2.0
"""The report's page in a browser, opened from disk.  ``nox -s page`` runs these: they need Chromium."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from ci.regress import page as pages
from tests.pipeline.reports import HOSTILE, a_page, a_report

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 320, "height": 640}  # WCAG 1.4.10
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
ARGUMENTS = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu"]
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    program = os.environ["CHROMIUM"]  # found by the noxfile
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # for root Chromium has none
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*ARGUMENTS, *sandbox])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of reports as runs leave it, with the page that leads to them."""
    output = tmp_path_factory.mktemp("regress")
    for name, made in {"failing": {}, "passing": {"passing": True}, "one-tree": {"as_is": True}}.items():
        (output / name).mkdir()
        (output / name / pages.FILE).write_text(a_page(**made), encoding="utf-8")
        (output / name / "report.json").write_text(a_report(**made).model_dump_json(by_alias=True), encoding="utf-8")
    pages.write_index(output)
    return output


@pytest.fixture(params=["failing/report.html", "passing/report.html", "one-tree/report.html", "index.html"])
def file(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Each page in turn."""
    return folder / request.param


@pytest.fixture
def failing(folder: Path) -> Path:
    """The page that has everything."""
    return folder / "failing" / pages.FILE


def opened(context: BrowserContext, file: Path) -> Page:
    page = context.new_page()
    page.goto(file.as_uri())
    return page


@pytest.fixture
def wide(chromium: Browser) -> Iterator[BrowserContext]:
    context = chromium.new_context(viewport=WIDE)
    yield context
    context.close()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_opens_from_disk_and_says_nothing(chromium: Browser, file: Path, scripts: bool) -> None:
    context = chromium.new_context(viewport=WIDE, java_script_enabled=scripts)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_timeout(200)
    assert said == []
    assert asked == [file.as_uri()]
    assert page.title() != "gone"
    assert page.locator("h1").is_visible()
    context.close()


def test_hostile_text_is_read_as_it_is(wide: BrowserContext, failing: Path) -> None:
    page = opened(wide, failing)
    assert HOSTILE.partition("\x00")[0] in page.locator(".note.open").first.inner_text()
    assert page.locator("main script, main img").count() == 0


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
def test_details_open_without_scripts(chromium: Browser, failing: Path, scripts: bool) -> None:
    context = chromium.new_context(viewport=WIDE, java_script_enabled=scripts)
    page = opened(context, failing)
    text = page.locator("#contract-gather\\.gate-gradient details pre")
    assert not text.is_visible()
    page.locator("#contract-gather\\.gate-gradient summary").click()
    assert text.is_visible()
    context.close()


def test_links_inside_arrive(wide: BrowserContext, failing: Path) -> None:
    page = opened(wide, failing)
    links = page.locator("a[href^='#']").evaluate_all("found => found.map(one => one.getAttribute('href'))")
    distinct = sorted(set(links))
    assert len(distinct) > 15
    for link in distinct:
        page.goto("about:blank")
        page.goto(failing.as_uri())
        page.locator(f'a[href="{link}"]').first.evaluate("one => one.click()")
        target = page.locator(f'[id="{link[1:]}"]')
        assert target.is_visible(), link  # a diff is folded up until somebody asks for it
        box = target.bounding_box()
        last = page.evaluate("scrollY + innerHeight >= document.documentElement.scrollHeight - 1")
        assert -1 <= box["y"] < (WIDE["height"] if last else 100), (link, box)


def test_index_leads_to_every_page(wide: BrowserContext, folder: Path) -> None:
    for place in range(3):
        page = opened(wide, folder / pages.INDEX)
        page.locator("tbody a").nth(place).click()
        page.wait_for_url(re.compile(r"/report\.html$"))
        assert page.locator("h1").inner_text().startswith("Regression report: automodel/")


@pytest.mark.parametrize("opening", [False, True], ids=["closed", "open"])
def test_narrow_screen_needs_no_sideways_scrolling(chromium: Browser, file: Path, opening: bool) -> None:
    context = chromium.new_context(viewport=NARROW)
    page = opened(context, file)
    if opening:
        page.evaluate(OPEN_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    beyond = page.evaluate(
        """width => [...document.querySelectorAll('main *, header *')].filter(one => {
             const box = one.getBoundingClientRect();
             return box.right > width + 1 && !one.closest('.scroll, .diff, thead') && one.checkVisibility();
           }).map(one => one.outerHTML.slice(0, 80))""",
        NARROW["width"],
    )
    assert beyond == []
    small = page.evaluate(
        """() => [...document.querySelectorAll('main *')].filter(one =>
             one.checkVisibility() && one.textContent.trim() && parseFloat(getComputedStyle(one).fontSize) < 11)
             .map(one => one.outerHTML.slice(0, 80))"""
    )
    assert small == []
    context.close()


def test_verdicts_stack_on_a_narrow_screen(chromium: Browser, failing: Path) -> None:
    context = chromium.new_context(viewport=NARROW)
    page = opened(context, failing)
    row = page.locator(".stacking tbody tr").first
    name, *cells = [cell.bounding_box() for cell in row.locator("th, td").all()]
    assert len(cells) == 3
    assert all(cell["y"] >= name["y"] + name["height"] for cell in cells)
    assert all(cell["x"] + cell["width"] <= NARROW["width"] for cell in cells)
    context.close()


def test_keyboard(wide: BrowserContext, failing: Path) -> None:
    page = opened(wide, failing)
    page.keyboard.press("Tab")
    skip = page.locator("a.skip")
    assert skip.evaluate("one => one === document.activeElement")
    box = skip.bounding_box()
    assert box["x"] >= 0
    assert box["y"] >= 0
    page.keyboard.press("Enter")
    assert page.locator("main").evaluate("one => one === document.activeElement")
    reached = []
    expected = page.locator("main a, main summary, main .scroll").evaluate_all(
        "found => found.filter(one => one.checkVisibility()).length"
    )
    for _ in range(expected):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => { const one = document.activeElement, style = getComputedStyle(one);
                     return [one.outerHTML.slice(0, 60), style.outlineStyle, parseFloat(style.outlineWidth)]; }"""
            )
        )
    assert len(reached) > 30
    assert [one for one in reached if one[1] != "solid" or one[2] < 2] == []
    summary = page.locator("#patch-0001 > details > summary")
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#diff-0001").is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "diff"  # what scrolls is reached too


@pytest.mark.parametrize(
    ("name", "viewport", "scheme", "media"),
    [
        ("failing/report.html", WIDE, "light", "screen"),
        ("failing/report.html", NARROW, "dark", "screen"),
        ("failing/report.html", WIDE, "dark", "print"),
        ("passing/report.html", WIDE, "dark", "screen"),
        ("one-tree/report.html", NARROW, "light", "screen"),
        ("index.html", WIDE, "light", "screen"),
        ("index.html", NARROW, "dark", "screen"),
    ],
)
def test_wcag(chromium: Browser, folder: Path, name: str, viewport: dict[str, int], scheme: str, media: str) -> None:
    context = chromium.new_context(viewport=viewport, color_scheme=scheme)
    page = opened(context, folder / name)
    page.emulate_media(media=media, color_scheme=scheme)
    page.evaluate(OPEN_ALL)
    result = Axe().run(page, options=RULES)
    assert result.violations_count == 0, result.generate_report()
    checked = {rule["id"]: len(rule["nodes"]) for rule in result.response["passes"]}
    assert len(checked) > 15
    assert checked["color-contrast"] > (10 if name == "index.html" else 1000)
    # What axe leaves open are the symbols: they are no text, and a word stands beside each.
    left = [node for rule in result.response["incomplete"] for node in rule["nodes"]]
    assert [node["html"] for node in left if node["any"][0]["data"].get("messageKey") != "nonBmp"] == []
    context.close()


def test_wcag_check_can_fail(wide: BrowserContext, failing: Path) -> None:
    page = opened(wide, failing)
    page.evaluate("document.querySelector('.soft').style.color = '#bbbbbb'")
    assert "color-contrast" in Axe().run(page, options=RULES).generate_snapshot()


def test_print(chromium: Browser, failing: Path) -> None:
    context = chromium.new_context(viewport=WIDE, color_scheme="dark")
    page = opened(context, failing)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    for place in ("#diff-0001 > pre", "#diff-0001 details.printed pre.diff ins"):  # folded up on the screen
        box = page.locator(place).first.bounding_box()
        assert box is not None
        assert box["height"] > 5
    assert page.locator("#diff-0001 details:not(.printed) pre.diff").first.bounding_box()["height"] == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE["width"]
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert 5 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 60
    context.close()
