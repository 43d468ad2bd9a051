# SPDX-License-Identifier: Apache-2.0
"""The report as a page: what it says, that it is sound HTML, and that no text becomes markup.  No browser is needed."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree.ElementTree import Element

import html5lib
import pytest

from ci.regress import PATCHES, manifest, page
from ci.regress.verdict import State, Verdict
from tests.pipeline.project import Project
from tests.pipeline.reports import HOSTILE, NAME, ROWS, TARGET, WHEN, a_page, a_report

CSS = (Path(page.__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
LOADED = manifest.load(PATCHES)
KINDS = {"passing": {"passing": True}, "failing": {}, "one tree": {"as_is": True}}


def parse(text: str) -> Element:
    """Parse a page; the first error ends it, as with a validator."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)


def words(element: Element) -> str:
    """Return the text of an element with single blanks."""
    return " ".join("".join(element.itertext()).split())


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def tree(request: pytest.FixtureRequest) -> Element:
    return parse(a_page(**request.param))


def test_the_validator_can_fail() -> None:
    with pytest.raises(html5lib.html5parser.ParseError):
        parse("<!DOCTYPE html><html><head><title>x</title></head><body><p><table></p></body></html>")


def test_hostile_text_stays_text() -> None:
    text = a_page()
    tree = parse(text)
    assert tree.findall(".//script") == tree.findall(".//img") == []
    assert {name for element in tree.iter() for name in element.attrib if name.startswith("on")} == set()
    assert words(tree.find(".//p")).count("<script>document.title='gone'</script>") == 1
    assert "{{ 7*7 }}" in text  # no template is made of what a report says
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert text.count("&lt;script&gt;") > len(ROWS)


def test_nothing_is_asked_for(tree: Element) -> None:
    policy = tree.find(".//meta[@http-equiv='Content-Security-Policy']")
    assert policy is not None
    assert policy.get("content").startswith("default-src 'none';")
    loading = ("link", "script", "img", "iframe", "object", "embed", "video", "audio", "source", "base", "form")
    assert [element.tag for element in tree.iter() if element.tag in loading] == []
    assert [element.tag for element in tree.iter() if {"src", "srcset", "data", "action"} & set(element.attrib)] == []
    assert not re.search(r"url\(|@import", CSS)


def test_links_lead_somewhere(tree: Element) -> None:
    ids = Counter(element.get("id") for element in tree.iter() if element.get("id"))
    assert [name for name, number in ids.items() if number > 1 or re.search(r"\s", name)] == []
    links = [element.get("href") for element in tree.iter("a")]
    assert len(links) > 2 * len(TARGET.patches)
    assert [link for link in links if not (link.startswith("https://") or (link[:1] == "#" and link[1:] in ids))] == []
    referred = {
        name for element in tree.iter() for name in element.get("aria-labelledby", "").split() if element.get("id")
    }
    assert referred
    assert referred <= set(ids)


def test_structure(tree: Element) -> None:
    assert tree.get("lang") == "en"
    assert NAME in words(tree.find(".//title"))
    body = tree.find("body")
    assert (body[0].tag, body[0].get("href")) == ("a", "#main")  # the way past the header comes first
    assert [element.tag for element in body][1:] == ["header", "main", "footer"]
    assert body.find("main").get("id") == "main"
    assert body.find(".//nav").get("aria-label")
    levels = [int(element.tag[1]) for element in tree.iter() if re.fullmatch(r"h[1-6]", str(element.tag))]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_tables_have_captions_and_scopes(tree: Element) -> None:
    tables = tree.findall(".//table")
    assert len(tables) == 2
    for table in tables:
        assert words(table.find("caption"))
        assert {cell.get("scope") for cell in table.iter("th")} == {"col", "row"}
        assert len(table.findall("tbody/tr/th")) == len(table.findall("tbody/tr")) > 0
    scrolling = [element for element in tree.iter() if element.get("class") in ("scroll", "diff")]
    assert len(scrolling) > len(tables)
    for element in scrolling:  # what scrolls can be reached and told apart with a keyboard and a screen reader
        assert (element.get("tabindex"), element.get("role")) == ("0", "region")
    labels = Counter(element.get("aria-label") for element in scrolling)
    assert set(labels.values()) == {1}


def test_verdicts_and_states_are_words(tree: Element) -> None:
    marked = [element for element in tree.iter("span") if set(element.get("class", "").split()) & {"badge", "state"}]
    assert len(marked) > 10
    known = {member.value for member in (*Verdict, *State)}
    for element in marked:
        hidden = element.find("span")
        assert hidden.get("aria-hidden") == "true"
        assert hidden.tail in known
        assert hidden.text.strip() == page.SYMBOLS[hidden.tail]


def test_every_verdict_and_state_has_a_symbol_and_a_meaning() -> None:
    assert set(page.SYMBOLS) == {member.value for member in (*Verdict, *State)}
    assert set(page.MEANINGS) == set(page.MEANINGS_AS_IS) == set(Verdict)


def test_what_a_contract_says() -> None:
    tree = parse(a_page())
    article = tree.find(".//article[@id='contract-gather.gate-gradient']")
    said = words(article)
    for part in (
        "what gather.gate-gradient says must hold",
        "stock: ✗ red 1 test, 1.2 s AssertionError: no gradient on ranks [0, 1]",
        "relative error 0.2213",
        "loss <b> nan",
        "Declared failure: AssertionError matching",
        "Cured by 0001 fix(moe): keep the gradient of routing weights under expert parallelism",
    ):
        assert part in said
    assert article.find(".//a[@href='#diff-0001']") is not None
    assert len(article.findall(".//details")) == 1
    # What is open fails alike on all sides, and is shown once in full.
    assert len(tree.find(".//article[@id='contract-gather.expert-bias']").findall(".//details")) == 1
    first = words(tree.find(".//p[@class='outcome bad']"))
    assert first.startswith("✗ 3 of 8 contracts are not as wanted sparse.dense-format, sparse.half-an-entry, ")
    assert "All 5 contracts are as declared" in words(parse(a_page(passing=True)).find(".//p[@class='outcome good']"))


def test_patches_are_shown_whole() -> None:
    tree = parse(a_page())
    for patch in TARGET.patches:
        block = tree.find(f".//div[@id='diff-{patch.file[:4]}']")
        shown = [line.text for pre in block.findall(".//pre[@class='diff']") for line in pre.find("code")]
        text = (PATCHES / TARGET.series / patch.file).read_text(encoding="utf-8")
        diff = text[text.index("\ndiff --git ") :]
        changes = [line for line in diff.split("\n") if re.match(r"[+-](?!\+\+ |-- )", line)]
        assert [line for line in shown if line[:1] in ("+", "-")] == changes
        assert words(block.find("pre")) in " ".join(text.split())


@pytest.mark.parametrize("name", sorted(LOADED.targets))
def test_diffs_are_read_as_git_reads_them(name: str) -> None:
    for patch in LOADED.targets[name].patches:
        file = PATCHES / LOADED.targets[name].series / patch.file
        found = [(diff.added, diff.removed, diff.name) for diff in page.read_diff(file.read_text(encoding="utf-8"))]
        done = subprocess.run(["git", "apply", "--numstat", str(file)], capture_output=True, text=True, check=True)
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        assert lines
        assert found == [(int(added), int(removed), path) for added, removed, path in lines]


def test_a_diff_of_lines_that_look_like_headers() -> None:
    text = (
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n--- old\n+++ new\n same\n\\ No newline\n-- \n2.39.5\n"
    )
    (diff,) = page.read_diff(text)
    assert [(line.kind, line.text) for line in diff.lines[1:]] == [
        ("del", "--- old"),
        ("add", "+++ new"),
        ("same", " same"),
    ]


def test_a_patch_that_is_not_there() -> None:
    tree = parse(page.render(a_report(), TARGET, PATCHES / "no-such-series", WHEN))
    assert "the file is listed in series.toml only" in words(tree.find(".//article[@id='patch-0001']"))
    assert tree.find(".//*[@id='diff-0001']") is not None


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_every_scheme() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    schemes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{[^}]*\}", CSS)
    ]
    light, dark, paper = schemes
    grounds = {"page", "card"}
    inks = set(light) - grounds - {name for name in light if name.endswith("-back")} - {"line", "bar"}
    assert {"ink", "soft", "link", "good", "bad", "open", "calm", "focus"} == inks
    assert set(light) == set(dark)
    for scheme in (light, dark, light | paper):
        for name in sorted(inks):
            own = {f"{name}-back"} & set(scheme)
            for ground in sorted(grounds | own):
                assert contrast(scheme[name], scheme[ground]) >= 4.5, (name, ground)
        for ground in ("good-back", "bad-back", "open-back"):  # links stand on the outcome, summaries on any
            assert contrast(scheme["link"], scheme[ground]) >= 4.5, ground
            assert contrast(scheme["ink"], scheme[ground]) >= 4.5, ground
        assert contrast(scheme["bar"], scheme["page"]) >= 3  # no text: WCAG 1.4.11


def test_no_colour_beside_the_variables() -> None:
    outside = re.sub(r":root \{[^}]*\}", "", CSS)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(|\bhsla?\(", outside)
    used = set(re.findall(r"var\(--([a-z-]+)\)", outside))
    assert used == set(re.findall(r"--([a-z-]+):", CSS))


def test_a_run_writes_the_page(cured: Project) -> None:
    cured.tests = {name: text.replace("whole", "whole <b>") for name, text in cured.tests.items()}
    result = cured.run()
    assert result.status == 0, result.out + result.err
    assert str(result.reports / page.FILE) in result.out
    tree = parse((result.reports / page.FILE).read_text(encoding="utf-8"))
    article = tree.find(".//article[@id='contract-gather.gradient']")
    assert "the gradient is whole <b>" in words(article)
    assert "AssertionError: gradient is 0.5" in words(article)
    assert "+    return 1.0" in [line.text for line in tree.find(".//pre[@class='diff']/code")]
    # It goes with the reports of the run before, whatever the next one comes to.
    cured.tests["test_empty.py"] = ""
    assert cured.run().status == 2
    assert not (result.reports / page.FILE).exists()


def test_index(tmp_path: Path) -> None:
    for name, report in {"one": a_report(passing=True), "other": a_report(), "pageless": a_report()}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(report.model_dump_json(by_alias=True), encoding="utf-8")
        if name != "pageless":
            (tmp_path / name / page.FILE).write_text("a page", encoding="utf-8")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "report.json").write_text('{"schema_version": 0}', encoding="utf-8")
    page.write_index(tmp_path)
    tree = parse((tmp_path / page.INDEX).read_text(encoding="utf-8"))
    assert [link.get("href") for link in tree.findall(".//th/a")] == ["one/report.html", "other/report.html"]
    one, other = ([words(cell) for cell in row] for row in tree.findall(".//tbody/tr"))
    heads = [words(cell) for cell in tree.findall(".//thead/tr/th")]
    assert dict(zip(heads, one, strict=True))["run"] == "✓ passed"
    assert dict(zip(heads, other, strict=True))["run"] == "✗ failed"
    assert dict(zip(heads, other, strict=True))["broken"] == "2"
    assert HOSTILE[:20] in one[0]
