# SPDX-License-Identifier: Apache-2.0
"""docs/upstreaming: what is sent upstream agrees with the patches and with what series.toml declares."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest

from ci.porting import slug_of
from ci.regress import PATCHES, REPOSITORY, manifest
from ci.regress.cli import _parser
from ci.regress.manifest import Expectation, Signature, Target
from tests.docs.test_docs import UPSTREAMING, commands_in, fenced

LOADED = manifest.load(PATCHES)
AUTOMODEL = [
    "# What does this PR do ?",
    "# Changelog",
    '# Before your PR is "Ready for review"',
    "# Additional Information",
]
UNIRL = [
    "## Summary",
    "## Related Issue",
    "## Test Plan",
    "## Compatibility / Risk",
    "## Reviewer Notes",
    "## Checklist",
]
TEMPLATES = {"automodel": AUTOMODEL, "molt": AUTOMODEL, "unirl": UNIRL}
LABELS = ["Failing command", "Before", "After", "Risk", "Compatibility", "How to revert"]
DESCRIPTIONS = sorted(path for project in TEMPLATES for path in (UPSTREAMING / project).glob("*.md"))
REPLIES = sorted((UPSTREAMING / "replies").glob("*.md"))
SESSIONS = set(
    re.findall(
        r"^@nox\.session.*\ndef (\w+)\(session", (REPOSITORY / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE
    )
)
CONTRACTS = {contract for target in LOADED.targets.values() for contract in target.contracts}
FAMILIES = "|".join(sorted({contract.partition(".")[0] for contract in CONTRACTS}))
ROW = re.compile(r"(\S+) +(green|red|not run) +(green|red|not run) +(\w.*)")
BEFORE = r"text before (\S+)"


@dataclass(frozen=True)
class Page:
    """A description or a reply: its text, and what it belongs to."""

    text: str
    project: str
    slug: str = ""  # empty: a reply

    @property
    def series(self) -> str:
        """The series that the comment at the top names."""
        found = re.search(r"^<!-- series: (\S+) -->$", self.text, re.MULTILINE)
        return found[1] if found else ""

    @property
    def target(self) -> Target | None:
        """The target of that series."""
        return LOADED.targets.get(self.series)

    @property
    def patch(self) -> manifest.Patch | None:
        """The patch in that series."""
        patches = self.target.patches if self.target else ()
        return next((patch for patch in patches if slug_of(patch.file) == self.slug), None)

    def mail(self) -> str:
        """Return the patch file."""
        return (PATCHES / self.target.series / self.patch.file).read_text(encoding="utf-8")


def page_of(path: Path) -> Page:
    """Return the page that lies in a file."""
    reply = path.parent.name == "replies"
    return Page(path.read_text(encoding="utf-8"), path.parent.name, "" if reply else path.stem)


def wrong_names(found: set[tuple[str, str]]) -> list[str]:
    """Compare descriptions, as project and slug, with the patches of all series."""
    wanted = {(target.project, slug_of(patch.file)) for target in LOADED.targets.values() for patch in target.patches}
    missing = [f"no description of {'/'.join(one)}" for one in sorted(wanted - found)]
    return missing + [f"no patch for {'/'.join(one)}" for one in sorted(found - wanted)]


def wrong_head(page: Page) -> list[str]:
    """Check the comments at the top: the title is the patch's subject, and the series has the patch."""
    if page.target is None:
        return [f"series {page.series!r} is no target"]
    if not page.slug:
        return [] if page.text.startswith("<!-- reply to: ") else ["does not say what it replies to"]
    if page.patch is None or page.target.project != page.project:
        return [f"series {page.series} has no such patch"]
    subject = " ".join(message_from_string(page.mail())["Subject"].split()).removeprefix("[PATCH] ")
    title = re.match(r"<!-- title: (.+) -->\n", page.text)
    return [] if title and title[1] == subject else [f"title is not {subject!r}"]


def wrong_template(page: Page) -> list[str]:
    """Check that the headings are the template's, in order, and that every part is there."""
    text = re.sub(r"^```.*?^```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ .*$", text, re.MULTILINE)
    problems = [] if headings == TEMPLATES[page.project] else [f"headings {headings}"]
    problems += [f"no part {label!r}" for label in LABELS if not re.search(rf"^\*\*{label}\b", text, re.MULTILINE)]
    summary = text.partition(headings[1])[0] if len(headings) > 1 else ""
    sentences = len(re.findall(r"[.!?](?=\s)", re.sub(r"^<!--.*$|^#.*$|^- .*$", "", summary, flags=re.MULTILINE)))
    return problems + ([] if 3 <= sentences <= 9 else [f"{sentences} sentences say what it does"])


def named(page: Page) -> set[str]:
    """Return the contracts that a page names, in its text, its blocks and its commands."""
    found = set(re.findall(rf"`((?:{FAMILIES})\.[a-z0-9-]+)`", page.text))
    found |= set(re.findall(rf"^```{BEFORE}$", page.text, re.MULTILINE))
    found |= {row[0] for row in rows(page)}
    return found | {one for line in commands_in(page.text) for one in re.findall(r"--only (\S+)", line)}


def rows(page: Page) -> list[tuple[str, str, str, str]]:
    """Return the rows of the verdicts."""
    lines = [line for block in fenced(page.text, "text verdicts") for line in block.splitlines()[1:]]
    return [found.groups() if (found := ROW.fullmatch(line)) else (line, "", "", "") for line in lines]


def wrong_contracts(page: Page) -> list[str]:
    """Check the contracts that are named, and what is said of them."""
    # A path or a module in code style may begin like a contract.
    ids = {one for one in named(page) if not one.endswith((".py", ".json"))}
    if not page.slug:
        return [f"{one} is no contract" for one in sorted(ids - CONTRACTS)]
    target, cures = page.target, set(page.patch.cures)
    guards = {one for one in target.contracts if target.expectation(one) is Expectation.GUARD}
    problems = [f"{one} is neither cured by this patch nor a guard" for one in sorted(ids - cures - guards)]
    problems += [f"{one} is cured and not named" for one in sorted(cures - ids)]
    if not rows(page):
        problems.append("no verdicts")
    for one, *states in rows(page):
        red = one in cures and target.contracts[one].signature is not None
        right = ["red", "green", "fixed"] if red else ["green", "green", "guard"]
        if states not in (right, ["not run"] * 3):
            problems.append(f"{one} is not {' '.join(right)}: {' '.join(states)}")
    before = re.findall(rf"^```{BEFORE}$", page.text, re.MULTILINE)
    problems += [f"{one} is not cured here and has a message" for one in before if one not in cures]
    return problems + ([] if before else ["no message from before"])


def wrong_messages(page: Page) -> list[str]:
    """Check each quoted message: the exception and the pattern that series.toml declares."""
    problems = []
    for contract, block in re.findall(rf"^```{BEFORE}\n(.*?)^```$", page.text, re.MULTILINE | re.DOTALL):
        declared = page.target.contracts.get(contract)
        if declared is None or declared.signature is None:
            problems.append(f"{contract} is not declared red")
        elif not bears(block, declared.signature):
            problems.append(f"{contract}: not {declared.signature.describe()}")
    return problems


def bears(block: str, signature: Signature) -> bool:
    """Return whether a quoted message bears a signature; a continued line is indented by four."""
    kind, _, message = block.strip().replace("\n    ", " ").partition(": ")
    return kind == signature.raises and (signature.match is None or re.search(signature.match, message) is not None)


def wrong_commands(page: Page) -> list[str]:
    """Check that every command parses, and that what it names is there."""
    lines = commands_in(page.text)
    problems = [] if any(line.startswith("nox ") for line in lines) else ["no command of the suite"]
    if page.slug and not any(line.startswith("pytest ") for line in lines):
        problems.append("no command in the project's own tree")
    for line in lines:
        program, *arguments = shlex.split(line)
        check = {"nox": nox_problem, "pytest": pytest_problem, "git": git_problem}.get(program)
        problem = check(page, arguments) if check else "unknown program"
        problems += [f"{line}: {problem}"] if problem else []
    return problems


def nox_problem(page: Page, arguments: list[str]) -> str:
    """Say what is wrong with the arguments of nox."""
    if arguments[:1] != ["-s"] or arguments[1:2] != ["regress"] or arguments[2:3] not in ([], ["--"]):
        return f"no `nox -s regress --`; sessions: {sorted(SESSIONS)}"
    try:
        options = _parser().parse_args(arguments[3:])
        name, target = LOADED.select(options.target)
    except (SystemExit, manifest.UsageError) as exc:
        return f"does not parse ({exc})"
    known = {one for one in target.contracts if one not in target.inapplicable()}
    if unknown := set(options.only) - known:
        return f"{name} does not run {sorted(unknown)}"
    if target.wheel is None and options.git is None:
        return f"{name} is in git only"
    return "" if not page.slug or target.series == page.target.series else f"is not about {page.series}"


def pytest_problem(page: Page, arguments: list[str]) -> str:
    """Say what is wrong with the arguments of pytest."""
    if not page.slug:
        return "a reply has no tree"
    strangers = set(arguments) - touched(page)
    return f"not in the patch: {sorted(strangers)}" if strangers or not arguments else ""


def git_problem(page: Page, arguments: list[str]) -> str:
    """Say what is wrong with the arguments of git: only folders of the patch are taken back and forth."""
    if page.slug and arguments[:1] == ["checkout"] and arguments[1:3] in (["HEAD~1", "--"], ["HEAD", "--"]):
        folders = {path.partition("/")[0] for path in touched(page)}
        return "" if set(arguments[3:]) == folders - {"tests"} else f"the patch touches {sorted(folders)}"
    return "not a checkout of what the patch touches"


def touched(page: Page) -> set[str]:
    """Return the files that the patch adds or touches."""
    return set(re.findall(r"^\+\+\+ b/(.+)$", page.mail(), re.MULTILINE))


def wrong_style(page: Page) -> list[str]:
    """Check what must not be sent."""
    patterns = {
        r"(?i)(signed-off|co-authored)-by:": "a trailer; who submits it adds that",
        r"(?:^|[\s`'\"(])/(?:tmp|home|root|work|usr|data)/": "a path of one machine",
        r"\.\./(?!(?:applying\.md|automodel|automodel-moe-regress|labs-molt|molt|unirl)\b)": "a path outside",
        r"(?im)^(?:hi|hello|dear|thanks|thank you)\b": "a greeting",
        r"(?<![\w`])@\w": "a person",
        r"\{\{": "a gap",
    }
    problems = [what for pattern, what in patterns.items() if re.search(pattern, page.text)]
    problems += [
        f"line {number} has {len(line)} characters"
        for number, line in enumerate(page.text.splitlines(), 1)
        if len(line) > 125 and "https://" not in line
    ]
    if not page.slug and "**Not tested**" not in page.text:
        problems.append("does not say what was not tested")
    if not page.slug and len(page.text.splitlines()) > 80:
        problems.append("is long for a reply")
    return problems


def wrong_links(text: str, place: Path) -> list[str]:
    """Check the links to other pages."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)|^\[[^\]]+\]: (?!https?:)(\S+)$", text, re.MULTILINE)
    return [f"no {link}" for one in links if not (place / (link := "".join(one))).exists()]


CHECKS = [wrong_head, wrong_template, wrong_contracts, wrong_messages, wrong_commands, wrong_style]
CHECKS_OF_REPLIES = [check for check in CHECKS if check is not wrong_template]


def test_every_patch_has_one_description_and_none_is_left_over() -> None:
    assert wrong_names({(path.parent.name, path.stem) for path in DESCRIPTIONS}) == []


def test_nothing_else_lies_there() -> None:
    known = {*DESCRIPTIONS, *REPLIES, UPSTREAMING / "README.md"}
    assert {path for path in UPSTREAMING.rglob("*") if path.is_file()} == known
    assert [path.stem for path in REPLIES] == [
        "deepseek-v4-smoke",
        "molt-ep-activation-checkpointing",
        "unirl-partially-initialised-adamw",
    ]


def test_index_names_every_page() -> None:
    text = (UPSTREAMING / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(((?:automodel|molt|unirl|replies)/[^)]+)\)", text)
    assert sorted(linked) == sorted(str(path.relative_to(UPSTREAMING)) for path in [*DESCRIPTIONS, *REPLIES])


def test_index_takes_the_patch_that_it_names() -> None:
    (command,) = commands_in((UPSTREAMING / "README.md").read_text(encoding="utf-8"))
    *program, pattern = shlex.split(command)
    assert program == ["git", "am", "--signoff"]
    (file,) = REPOSITORY.glob(pattern.removeprefix("../automodel-moe-regress/"))
    assert file.parent.parent.parent == PATCHES


def test_index_has_short_lines() -> None:
    text = (UPSTREAMING / "README.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 125] == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", DESCRIPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_description(path: Path, check: object) -> None:
    assert check(page_of(path)) == []


@pytest.mark.parametrize("check", CHECKS_OF_REPLIES, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", REPLIES, ids=lambda path: path.stem)
def test_reply(path: Path, check: object) -> None:
    assert check(page_of(path)) == []


@pytest.mark.parametrize("path", [*DESCRIPTIONS, *REPLIES], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_links(path: Path) -> None:
    assert wrong_links(path.read_text(encoding="utf-8"), path.parent) == []


# Each check on a text that is wrong.

GATHER = UPSTREAMING / "automodel" / "fix-moe-keep-the-gradient-of-routing-weights-under-e.md"
REPLY = UPSTREAMING / "replies" / "deepseek-v4-smoke.md"
MESSAGE = "AssertionError: gate.weight.grad is None on ranks [0, 1] of 2"
ONLY = "--only gather.gate-gradient"
TEST = "pytest tests/unit_tests/moe/test_ep_routing_weight_gradient.py"


@pytest.mark.parametrize(
    ("check", "old", "new", "problem"),
    [
        (wrong_head, "title: fix(moe): keep", "title: fix(moe): lose", "title is not 'fix(moe): keep"),
        (wrong_head, "series: automodel/v0.5.0", "series: automodel/v0.6.0", "has no such patch"),
        (wrong_head, "series: automodel/v0.5.0", "series: automodel/v9", "is no target"),
        (wrong_template, "# Changelog\n", "# Changes\n", "headings"),
        (wrong_template, "# Changelog\n", "", "headings"),
        (wrong_template, "# Changelog\n", "# Changelog\n\n# More\n", "headings"),
        (wrong_template, "**How to revert.**", "How to revert.", "no part 'How to revert'"),
        (wrong_template, "**Risk.**", "Danger.", "no part 'Risk'"),
        (wrong_contracts, "`smoke.key-difference`", "`smoke.key-indifference`", "smoke.key-indifference is neither"),
        (wrong_contracts, "`smoke.key-difference`", "it", "smoke.key-difference is cured and not named"),
        (wrong_contracts, "`smoke.key-difference`", "`init.every-parameter`", "init.every-parameter is neither"),
        (wrong_contracts, "text before gather.gate-gradient", "text before gather.one-rank", "and has a message"),
        (wrong_contracts, "gather.bf16                      red ", "gather.bf16      green ", "gather.bf16 is not red"),
        (wrong_contracts, "gather.frozen-router             green", "gather.frozen-router  red", "is not green green"),
        (wrong_contracts, "text verdicts", "text", "no verdicts"),
        (wrong_contracts, "text before ", "text ", "no message from before"),
        (wrong_messages, MESSAGE, MESSAGE.replace("None", "zero"), "gather.gate-gradient: not AssertionError"),
        (wrong_messages, MESSAGE, MESSAGE.replace("AssertionError", "IndexError"), "gather.gate-gradient: not"),
        (wrong_messages, "text before gather.gate-gradient", "text before gather.one-rank", "is not declared red"),
        (wrong_commands, "nox -s regress", "nox -s regres", "no `nox -s regress --`"),
        (wrong_commands, ONLY, "--only gather.gate", "does not run ['gather.gate']"),
        (wrong_commands, ONLY, "--one gather.gate-gradient", "does not parse"),
        (wrong_commands, ONLY, f"--target automodel/v9 {ONLY}", "does not parse"),
        (wrong_commands, ONLY, f"--target automodel/v0.6.0 {ONLY}", "is not about automodel/v0.5.0"),
        (wrong_commands, ONLY, f"--target automodel/24b47e856 {ONLY}", "is in git only"),
        (wrong_commands, TEST, "pytest tests/unit_tests/moe/test_moe.py", "not in the patch"),
        (wrong_commands, TEST, "pytest", "not in the patch"),
        (wrong_commands, "$ pytest", "pytest", "no command in the project's own tree"),
        (wrong_commands, "$ nox", "nox", "no command of the suite"),
        (wrong_commands, "-- nemo_automodel", "-- nemo", "the patch touches ['nemo_automodel', 'tests']"),
        (wrong_commands, "git checkout", "git reset", "not a checkout"),
        (wrong_commands, "$ git", "$ sudo git", "unknown program"),
        (wrong_style, "# Changelog", "Signed-off-by: Somebody <a@b.c>\n# Changelog", "a trailer"),
        (wrong_style, "# Changelog", "see /tmp/here/it\n# Changelog", "a path of one machine"),
        (wrong_style, "# Changelog", "see ../notes/it\n# Changelog", "a path outside"),
        (wrong_style, "# Changelog", "Thanks for this.\n# Changelog", "a greeting"),
        (wrong_style, "# Changelog", "as @somebody says\n# Changelog", "a person"),
        (wrong_style, "# Changelog", "{{later}}\n# Changelog", "a gap"),
        (wrong_style, "# Changelog", "#" * 126, "has 126 characters"),
    ],
)
def test_wrong_description_is_seen(check: object, old: str, new: str, problem: str) -> None:
    page = page_of(GATHER)
    assert old in page.text
    found = check(Page(page.text.replace(old, new), page.project, page.slug))
    assert [line for line in found if problem in line], found


def test_too_short_or_too_long_a_summary_is_seen() -> None:
    page = page_of(GATHER)
    start, _, rest = page.text.partition("# Changelog")
    for summary in ("# What does this PR do ?\n\nA fix.\n\n", start + 6 * "It goes on. "):
        found = wrong_template(Page(f"{summary}\n# Changelog{rest}", page.project, page.slug))
        assert any("sentences say what it does" in line for line in found), found


@pytest.mark.parametrize(
    ("check", "old", "new", "problem"),
    [
        (wrong_head, "<!-- reply to: ", "<!-- to: ", "does not say what it replies to"),
        (wrong_contracts, "`order.one-checkpointer`", "`order.two-checkpointers`", "is no contract"),
        (wrong_messages, "expected=1627", "expected=1628", "smoke.key-difference: not"),
        (wrong_commands, "--only smoke.resume", "--only smoke.again", "does not run ['smoke.again']"),
        (wrong_commands, "$ nox -s regress", "$ pytest tests/x.py", "a reply has no tree"),
        (wrong_style, "**Not tested**", "Tested", "does not say what was not tested"),
        (wrong_style, "**Not tested**", "\n" * 80 + "**Not tested**", "is long for a reply"),
    ],
)
def test_wrong_reply_is_seen(check: object, old: str, new: str, problem: str) -> None:
    page = page_of(REPLY)
    assert old in page.text
    found = check(Page(page.text.replace(old, new), page.project, page.slug))
    assert [line for line in found if problem in line], found


def test_wrong_names_are_seen() -> None:
    there = {(path.parent.name, path.stem) for path in DESCRIPTIONS}
    name = ("automodel", GATHER.stem)
    assert wrong_names(there - {name}) == [f"no description of automodel/{GATHER.stem}"]
    assert wrong_names({*there, ("molt", GATHER.stem)}) == [f"no patch for molt/{GATHER.stem}"]


def test_wrong_links_are_seen() -> None:
    text = "[here](../README.md) [there](../absent.md) [away](https://example.org)\n[1]: gone.md\n"
    assert wrong_links(text, REPLIES[0].parent) == ["no ../absent.md", "no gone.md"]
