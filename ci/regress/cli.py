# SPDX-License-Identifier: Apache-2.0
"""The command: ``python -m ci.regress``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci.regress import OUTPUT, PATCHES, REPOSITORY, WHEEL_CACHE, fetch, manifest, page, report, sides, verdict, worktree
from ci.regress.errors import FetchError, RegressError, SideError, UsageError
from ci.regress.manifest import Target
from ci.regress.records import CollectedTest, CollectionError, ExceptionRecord, Outcome, SideRecord, TestRecord
from ci.regress.verdict import Verdict

_DESCRIPTION = """\
Show which defects of a pinned release are real, and that the patch series cures them: the contracts run on the release
as it is (stock), then on the same tree after `git am` of the series (patched).
"""
_EPILOG = """\
exit status:
  0  every contract is as declared in patches/series.toml
  1  some verdict is not as declared: regression, broken, a claimed fix that is open, ...
  2  the run could not take place: bad usage, wrong hash, registry out of reach, no git, a tree of another project,
     a patch that does not apply, contract files that collect nothing, a package that this environment lacks
  130, 143  interrupted (^C), terminated; 141: whoever read the output has gone

This interpreter runs the contracts and nothing is installed; `nox -s regress` makes an environment first.
"""
_INAPPLICABLE = "ci.regress.NotApplicable"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Run:
    """What one invocation has at hand."""

    options: argparse.Namespace
    patches: Path
    console: Console
    target_name: str
    target: Target
    git: worktree.Git
    work: Path
    reports: Path
    only: tuple[str, ...]
    warnings: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # what became of each patch
    stock: dict[str, list[TestRecord]] = field(default_factory=dict)  # finished contracts of the first side
    extra: tuple[Path, ...] = ()  # packages beside the target's own, for import

    def say(self, line: str) -> None:
        """Print a line of progress, unless --quiet."""
        if not self.options.quiet:
            self.console.print(Text(line), soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a warning now, and once more beneath the table."""
        self.warnings.append(line)
        self.say(f"warning: {line}")


class _Terminated(BaseException):
    """^C, SIGTERM or SIGHUP: unwinds everything, so that nothing stays behind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    errors = report.console_for(sys.stderr)
    previous = {number: signal.signal(number, _terminate) for number in _SIGNALS}
    try:
        status = _main(options)
    except RegressError as exc:
        errors.print(Text(f"error: {exc}"), soft_wrap=True)
        status = 2
    except _Terminated as exc:
        errors.print("interrupted" if exc.number == signal.SIGINT else "terminated")
        return 128 + exc.number  # signals stay ignored until the process is gone
    for number, handler in previous.items():
        signal.signal(number, handler)
    return status


def _terminate(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # a second ^C must not interrupt the clearing up, which is bounded
    raise _Terminated(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ci.regress",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--target", metavar="NAME", help="target of patches/series.toml (default: the one marked `default`)")
    add("--git", metavar="URL-or-PATH", help="take the pinned commit from this repository instead of the wheel")
    add("--tree", metavar="PATH", type=Path, help="a tree of your own: run the contracts on it as it stands")
    add("--apply", action="store_true", help="with --tree: run on it as it stands, and with the series on top")
    add("--require-green", action="store_true", help="with --tree: exit 1 if a contract that the series cures is red")
    add("--only", metavar="CONTRACT", action="append", default=[], help="only this contract; may be repeated")
    add("--with-shim", action="store_true", help="a third side: stock, with the runtime shim installed")
    add("--record", action="store_true", help="keep the result, with date and commit, in patches/results.toml")
    add("--keep", action="store_true", help="keep the throw-away trees, and say where they are")
    add("--list", action="store_true", help="list targets, patches and contracts; run nothing")
    add("--report-dir", metavar="DIR", type=Path, help="where reports go (default: .regress/<target>)")
    add("--timeout", metavar="S", type=_seconds, default=900.0, help="time limit of each side (default: 900)")
    add("--quiet", action="store_true", help="print only the table")
    add("--wheel-cache", metavar="DIR", type=Path, help="where fetched wheels are kept (default: .regress/cache)")
    for hook in ("--patches", "--contracts"):  # for this repository's own tests
        add(hook, type=Path, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is needed, not {text!r}")
    return value


def _main(options: argparse.Namespace) -> int:
    began = time.monotonic()
    console = report.console_for()
    patches = (options.patches or PATCHES).resolve()
    loaded = manifest.load(patches)
    name, target = loaded.select(options.target)
    if options.list:
        _list(loaded, patches, console)
        return 0
    _check_usage(options, name, target)
    _preflight(name, target)
    reports = (options.report_dir or OUTPUT / name.replace("/", "-")).resolve()
    _prepare_reports(reports)
    with _work_directory(options.keep, console) as work:
        git = worktree.Git(work / "git", loaded.identity)
        only = tuple(dict.fromkeys(options.only))
        run = _Run(options, patches, console, name, target, git, work, reports, only)
        for line in _other_versions(target):
            run.warn(line)
        records, source = _run_sides(run)
        result = _judge(run, records, source, time.monotonic() - began)
    try:
        report.write(result, reports)
        page.write(result, target, patches, reports)
        if reports.parent == OUTPUT:
            page.write_index(OUTPUT)
        if options.record:
            report.record(result, patches / "results.toml")
    except OSError as exc:
        raise UsageError(f"reports cannot be written: {exc}", "name another directory with --report-dir") from exc
    if not options.quiet:
        console.print()
    console.print(report.table(result))
    if not options.quiet:
        console.print()
        for line in [*report.summary(result), f"reports: {_shown(reports)}; to look at: {_shown(reports / page.FILE)}"]:
            console.print(Text(line), soft_wrap=True)
    return result.exit_status


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _check_usage(options: argparse.Namespace, name: str, target: Target) -> None:
    if options.git is not None and options.tree is not None:
        raise UsageError("--git and --tree exclude each other")
    if options.record and (options.tree is not None or options.only):
        raise UsageError("--record is for a whole run on a pinned release; leave out --tree and --only")
    for option, given in (("--apply", options.apply), ("--require-green", options.require_green)):
        if given and options.tree is None:
            raise UsageError(f"{option} needs --tree PATH")
    if options.apply and options.require_green:
        raise UsageError("--require-green is about a tree as it stands; leave out --apply")
    if options.with_shim and options.tree is not None and not options.apply:
        raise UsageError("--with-shim with --tree needs --apply")
    if options.with_shim and target.shim is None:
        raise UsageError("--with-shim: this target has no `shim` in series.toml")
    if options.tree is not None:
        fetch.check_tree(options.tree, target)
    elif options.git is None and target.wheel is None:
        raise UsageError(f"{name} has no wheel: its commit is in git only", "give a clone with --git PATH")
    if options.git is not None and target.commit is None:
        raise UsageError(f"--git: the commit of {name} is not known", "leave --git out: its wheel is fetched")
    for contract in options.only:
        if contract not in target.contracts:
            known = ", ".join(sorted(target.contracts)) or "none"
            raise UsageError(f"--only {contract}: not declared in series.toml; known: {known}")
    reasons = target.inapplicable()
    if options.only and all(contract in reasons for contract in options.only):
        why = "; ".join(dict.fromkeys(reasons[contract] for contract in options.only))
        raise UsageError(f"--only: nothing to run, none of these applies to {name}: {why}")


def _preflight(name: str, target: Target) -> None:
    """Raise ``SideError`` if this interpreter is of a wrong version, or lacks a module that the contracts need."""
    if not target.suits_python(platform.python_version()):
        hint = f"`nox -s regress -- --target {name}` looks for one"
        if target.fallback is not None:
            hint += f"; this one will do for --target {target.fallback}"
        raise SideError(f"{name} needs Python {target.python}; {sys.executable} is {platform.python_version()}", hint)
    absent = []
    for module in target.imports:
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            absent.append(module)
    if absent:
        raise SideError(
            f"environment lacks {', '.join(absent)} ({sys.executable}); needs {', '.join(target.imports)}",
            f"`nox -s regress -- --target {name}` makes an environment that has them",
        )


def _other_versions(target: Target) -> list[str]:
    """Return where this environment is not the one that the target requires, in words."""
    found = []
    for text in target.requirements:
        requirement = Requirement(text)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what is imported has been looked for
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"this environment has {requirement.name} {version}; the target requires {text}")
    return found


def _prepare_reports(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # What an earlier run left must not be taken for what this one says.
        for name in (*report.FILES, *(f"{side}.{end}" for side in report.TITLES for end in ("log", "json"))):
            (directory / name).unlink(missing_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(f"{directory} is not writable")
    except OSError as exc:
        raise UsageError(f"--report-dir {directory}: {exc}", "name another directory with --report-dir") from exc


@contextmanager
def _work_directory(keep: bool, console: Console) -> Iterator[Path]:
    if keep:
        path = Path(tempfile.mkdtemp(prefix="regress-"))
        try:
            yield path
        finally:
            console.print(Text(f"kept: {path}"), soft_wrap=True)
    else:
        with tempfile.TemporaryDirectory(prefix="regress-", ignore_cleanup_errors=True) as name:
            yield Path(name).resolve()


def _run_sides(run: _Run) -> tuple[list[SideRecord], report.Source]:
    series = _present_patches(run)
    stock = run.work / "stock"
    source, commit = _obtain(run, stock, series)
    run.say(f"tree: {source.describe}")
    run.extra = _extra_imports(run)
    if run.options.tree is not None and not run.options.apply:
        return [_run_side(run, "as-is", stock, commit)], source
    patched = run.work / "patched"
    worktree.second_tree(run.git, stock, patched)
    applied = worktree.apply_series(run.git, patched, series, run.options.tree is not None, run.say)
    run.notes |= dict.fromkeys(applied.applied, "applied") | dict.fromkeys(applied.already_there, "already there")
    head = worktree.head_of(run.git, patched)
    run.say(f"patched: {len(applied.applied)} of {len(run.target.patches)} patches applied, {head[:9]}")
    records = [_run_side(run, "stock", stock, commit), _run_side(run, "patched", patched, head)]
    if run.options.with_shim:
        records.append(_run_side(run, "installed", stock, commit, run.target.shim))
    return records, source


def _present_patches(run: _Run) -> list[Path]:
    absent = {patch.file for patch in manifest.absent_patches(run.target, run.patches)}
    for name in sorted(absent):
        run.notes[name] = "absent"
        run.warn(f"listed in patches/series.toml but not there: patches/{run.target.series}/{name}")
    directory = run.patches / run.target.series
    return [directory / patch.file for patch in run.target.patches if patch.file not in absent]


def _obtain(run: _Run, stock: Path, series: list[Path]) -> tuple[report.Source, str]:
    """Fill the stock tree, and return where it comes from and the commit it stands at."""
    target, options = run.target, run.options
    pinned = f"{target.project} {target.tag} ({target.pin})"
    if options.git is not None:
        fetch.fetch_git(options.git, target, stock, run.git, run.say)
        fetch.check_blobs(stock, target, f"--git {options.git}")
        what = f"{pinned}, from {options.git}"
        source = report.Source(kind="git", location=options.git, commit=target.commit, describe=what)
        return source, target.commit
    stock.mkdir()
    if options.tree is not None:
        path = options.tree.resolve()
        touched = {name for patch in series for name in worktree.touched_files(patch)}
        fetch.copy_tree(path, stock, target, sorted(touched))
        state = _fork_state(run.git, path)
        commit = worktree.commit_all(run.git, stock, f"Copy of {path.name} as it stands")
        what = f"{path} ({state})"
        return report.Source(kind="tree", location=str(path), commit=state, describe=what), commit
    wheel = fetch.fetch_wheel(target.wheel, _cache(run), run.say)
    fetch.unpack_wheel(wheel, stock)
    if not (stock / target.package).is_dir():
        raise FetchError(f"{wheel.name} holds no {target.package}/", "correct `package` or `wheel` in series.toml")
    fetch.check_blobs(stock, target, wheel.name)
    commit = worktree.commit_all(run.git, stock, f"{target.project} {target.tag}")
    if target.commit is None:
        what = f"{wheel.name} ({target.tag} of {target.repository})"
        return report.Source(kind="wheel", location=wheel.name, commit="", describe=what), commit
    what = f"{wheel.name}, which stands for {target.pin} ({target.tag} of {target.repository})"
    return report.Source(kind="wheel", location=wheel.name, commit=target.commit, describe=what), target.commit


def _cache(run: _Run) -> Path:
    return (run.options.wheel_cache or WHEEL_CACHE).resolve()


def _extra_imports(run: _Run) -> tuple[Path, ...]:
    """Fetch the target's extra wheels, and return what of each is put beside the target for import."""
    found: list[Path] = []
    for wheel in run.target.extra_wheels:
        place = run.work / "extra" / wheel.package
        fetch.unpack_wheel(fetch.fetch_wheel(wheel, _cache(run), run.say), place)
        if not (place / wheel.package).is_dir():
            raise FetchError(f"{wheel.filename} holds no {wheel.package}/", "correct `extra_wheels` in series.toml")
        found += [place / wheel.package, *sorted(place.glob("*.dist-info"))]
    return tuple(found)


def _fork_state(git: worktree.Git, path: Path) -> str:
    try:
        head = worktree.head_of(git, path)[:9]
        dirty = git.run("status", "--porcelain", "--untracked-files=no", cwd=path)
    except worktree.GitFailure:
        return "no git repository"
    return f"commit {head}{', with uncommitted changes' if dirty.strip() else ''}"


def _run_side(run: _Run, name: str, tree: Path, commit: str, shim: str | None = None) -> SideRecord:
    title = report.TITLES[name]
    artifacts = run.work / "artifacts"
    artifacts.mkdir(exist_ok=True)
    side = sides.Side(
        name=name,
        tree=tree,
        commit=commit,
        package=run.target.package,
        contracts=_contracts(run),
        run_dir=run.work / "sides",
        artifacts=artifacts,
        log=run.reports / f"{name}.log",
        timeout_s=run.options.timeout,
        only=run.only,
        without=tuple(run.target.inapplicable()),
        ignored=_inapplicable_files(run),
        extra=run.extra,
        shim=shim,
    )

    def collected(tests: list[CollectedTest], errors: list[CollectionError], empty: list[str]) -> None:
        _check_collection(run, name, tests, errors, empty)
        contracts = {test.contract for test in tests}
        run.say(f"{title}: {report.counted(len(tests), 'test')} of {report.counted(len(contracts), 'contract')}")

    def contract_done(contract: str, tests: list[TestRecord]) -> None:
        seconds = sum(test.duration_s for test in tests)
        line = f"  {title:8} {contract:42} {verdict.state_of(tests).value:8} {seconds:6.1f} s"
        if name == "stock":
            run.stock[contract] = tests
        elif name == "patched" and contract in run.stock:
            fork = run.options.tree is not None
            judgement = verdict.judge(_declared(run.target, contract), run.stock[contract], tests, None, fork)
            line += f"  {judgement.verdict.value}{'' if judgement.as_declared else ' ✗'}"
        run.say(line)

    def heartbeat(nodeid: str, seconds: float) -> None:
        run.say(f"  {title:8} … {nodeid.rpartition('::')[2]} {seconds:.0f} s")

    record = sides.run_side(side, sides.Progress(collected, contract_done, heartbeat))
    (run.reports / f"{name}.json").write_text(record.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
    if record.died is not None:
        run.warn(f"{title}: {record.died}; log: {side.log}")
    run.say(f"{title}: torch {record.torch or 'not imported'}, {run.target.package} from {record.package_file}")
    return record


def _check_collection(
    run: _Run, side: str, tests: list[CollectedTest], errors: list[CollectionError], empty: list[str]
) -> None:
    """Raise ``SideError`` where a contract has no test at all, and no import error explains that."""
    where = report.TITLES[side]
    if empty:
        raise SideError(f"{where}: contract files that collect nothing: {', '.join(empty)}", "a file without tests")
    found = {test.contract for test in tests}
    reasons = run.target.inapplicable()
    wanted = [contract for contract in run.only or run.target.contracts if contract not in reasons]
    lost = [contract for contract in wanted if contract not in found and not _mentioning(run, contract, errors)]
    if lost:
        raise SideError(
            f"{where}: declared in series.toml, but no test carries the mark: {', '.join(lost)}",
            'mark a test with @pytest.mark.contract("…", meaning="…"), or take the declaration out',
        )
    if not tests and not errors:
        raise SideError(f"{where}: no contract was collected at all")


def _mentioning(run: _Run, contract: str, errors: list[CollectionError]) -> list[CollectionError]:
    """Return the files that could not be collected and that name a contract."""
    return [error for error in errors if _names(_contract_file(run, error.file), contract)]


def _names(file: Path, contract: str) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return f'"{contract}"' in text or f"'{contract}'" in text


def _inapplicable_files(run: _Run) -> tuple[Path, ...]:
    """Return the contract files that are about nothing but what does not apply: they need not be importable."""
    reasons = run.target.inapplicable()
    found = []
    for file in sorted(_contracts(run).rglob("test_*.py")) if reasons else []:
        named = [contract for contract in run.target.contracts if _names(file, contract)]
        if named and all(contract in reasons for contract in named):
            found.append(file)
    return tuple(found)


def _contracts(run: _Run) -> Path:
    return (run.options.contracts or REPOSITORY / run.target.suite).resolve()


def _contract_file(run: _Run, file: str) -> Path:
    contracts = _contracts(run)
    root = REPOSITORY if contracts.is_relative_to(REPOSITORY) else contracts
    return root / file


def _judge(run: _Run, records: list[SideRecord], source: report.Source, seconds: float) -> report.Report:
    tests = {record.side: _tests_by_contract(run, record) for record in records}
    names = list(run.only or run.target.contracts)
    for found in tests.values():
        names += [name for name in found if name not in names]
    rows = [_row(run, name, {side: found.get(name, []) for side, found in tests.items()}) for name in names]
    counts = {kind: sum(row.verdict is kind for row in rows) for kind in Verdict}
    status = 0 if all(row.ok for row in rows) else 1
    patches = [
        report.PatchRecord(file=patch.file, status=patch.status, outcome=run.notes.get(patch.file, "not applied"))
        for patch in run.target.patches
    ]
    return report.Report(
        target=run.target_name,
        source=source,
        patches=patches,
        warnings=run.warnings,
        contracts=rows,
        counts=counts,
        tests_not_run=sum(side.not_run for row in rows for side in row.sides.values()),
        sides=records,
        duration_s=seconds,
        exit_status=status,
    )


def _tests_by_contract(run: _Run, record: SideRecord) -> dict[str, list[TestRecord]]:
    found: dict[str, list[TestRecord]] = {}
    for test in record.tests:
        found.setdefault(test.contract, []).append(test)
    for contract, reason in run.target.inapplicable().items():
        if not run.only or contract in run.only:
            why = ExceptionRecord(type=_INAPPLICABLE, lineage=[_INAPPLICABLE], message=reason)
            found[contract] = [
                TestRecord(
                    nodeid=contract,
                    contract=contract,
                    meaning="does not apply to this target",
                    outcome=Outcome.NOT_RUN,
                    phase="collect",
                    exception=why,
                    text=reason,
                )
            ]
    names = run.only or tuple(run.target.contracts)
    for error in record.collection_errors:
        ids = [name for name in names if error in _mentioning(run, name, record.collection_errors)]
        if not ids and not run.only:
            ids = [error.file]  # it names no declared contract, and is a row of its own
        for name in ids:
            broken = TestRecord(
                nodeid=error.file,
                contract=name,
                meaning="this contract file cannot be imported",
                outcome=Outcome.ERROR,
                phase="import",
                exception=error.exception,
                text=error.text,
            )
            found.setdefault(name, []).append(broken)
    return found


def _declared(target: Target, name: str) -> verdict.Declared | None:
    if name not in target.contracts:
        return None
    cures = tuple(patch.file for patch in target.curing(name))
    return verdict.Declared(target.contracts[name], target.expectation(name), cures)


def _row(run: _Run, name: str, tests: dict[str, list[TestRecord]]) -> report.ContractRecord:
    fork = run.options.tree is not None
    declared = _declared(run.target, name)
    if "as-is" in tests:
        judgement = verdict.judge_as_is(declared, tests["as-is"])
        # What no patch of the series cures is open in every tree; a fork cannot be asked for it.
        curable = declared is not None and bool(declared.cured_by)
        ok = judgement.as_declared and not (run.options.require_green and judgement.verdict is Verdict.OPEN and curable)
    else:
        judgement = verdict.judge(declared, tests["stock"], tests["patched"], tests.get("installed"), fork)
        ok = judgement.as_declared
    meanings = [test.meaning for found in tests.values() for test in found]
    states = {side: verdict.state_of(found) for side, found in tests.items()}
    return report.ContractRecord(
        id=name,
        meaning=meanings[0] if meanings else "",
        expectation=declared.expectation if declared is not None else None,
        verdict=judgement.verdict,
        as_declared=judgement.as_declared,
        ok=ok,
        notes=judgement.notes,
        sides={side: report.contract_side(found, states[side]) for side, found in tests.items()},
    )


def _list(loaded: manifest.Manifest, patches: Path, console: Console) -> None:
    for name, target in loaded.targets.items():
        absent = {patch.file for patch in manifest.absent_patches(target, patches)}
        default = " (default)" if target.default else ""
        pin = target.commit or f"(wheel {target.wheel.sha256})"
        console.print(Text(f"{name}{default}: {target.repository} {target.tag} {pin}", style="bold"))
        series = Table(box=None, pad_edge=False)
        for title in ("patch", "status", "cures", "reason"):
            series.add_column(title, overflow="fold")
        for patch in target.patches:
            flag = " (not there)" if patch.file in absent else ""
            series.add_row(patch.file + flag, patch.status.value, "\n".join(patch.cures), Text(patch.reason))
        contracts = Table(box=None, pad_edge=False)
        for title in ("contract", "expected", "on stock"):
            contracts.add_column(title, overflow="fold")
        reasons = target.inapplicable()
        for contract, declared in target.contracts.items():
            if contract in reasons:
                contracts.add_row(contract, "not applicable", Text(reasons[contract]))
                continue
            stock = declared.signature.describe() if declared.signature is not None else "green"
            contracts.add_row(contract, target.expectation(contract).value, Text(stock))
        console.print(series, "", contracts, "")
