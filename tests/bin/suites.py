#!/usr/bin/env python3
"""Counts what a test run did and compares it with the suites that must run.

Guarantees: a suite that is listed and ran nothing, a skip that is not allowed, and a runner that failed without naming a
test are failures where CI=true; the last line is always "N passed, N failed, N skipped"; the exit status is 0 only if
nothing failed. Reads only the files that tests/bin/test.sh left in one directory.
"""

import argparse
import json
import os
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import by_invariant

SKIP_LINE = re.compile(r"^SKIPPED\s+(?P<name>.+?):\s+(?P<reason>.+)$")
DOC_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.MULTILINE)


@dataclass
class Suite:
    """What became of the tests of one program."""

    passed: set = field(default_factory=set)
    failed: dict = field(default_factory=dict)  # name -> what the runner says of it
    skipped: dict = field(default_factory=dict)  # name -> reason


@dataclass
class Skip:
    """A line `SKIPPED name: reason`; `suite` is empty when no test of that name is known."""

    name: str
    reason: str
    suite: str = ""


def read_junit(path, suites):
    """Adds the suites of a JUnit report."""
    for element in ElementTree.parse(path).getroot().iter("testsuite"):
        suite = suites.setdefault(element.get("name", "?"), Suite())
        for case in element.iter("testcase"):
            name = case.get("name", "?")
            trouble = next((child for child in case if child.tag in ("failure", "error")), None)
            if trouble is not None:
                suite.failed[name] = trouble.get("type") or trouble.get("message") or "failed"
            else:
                suite.passed.add(name)


def read_ignored(path, suites):
    """Adds the tests that the code itself marks as not to be run (`#[ignore]`)."""
    try:
        listed = json.loads(path.read_text())["rust-suites"]
    except (OSError, ValueError, KeyError):
        return
    for suite_id, listing in listed.items():
        for name, test in listing.get("testcases", {}).items():
            if test.get("ignored"):
                suites.setdefault(suite_id, Suite()).skipped[name] = "marked #[ignore]"


def read_doctests(out, suites):
    """Adds one suite `doctests`; a run that broke without naming a test is one failure."""
    log, status = out / "doctests.log", read_status(out / "doctests.status")
    if status is None:
        return
    passed = failed = ignored = 0
    if log.exists():
        for result in DOC_RESULT.finditer(log.read_text(errors="replace")):
            passed, failed, ignored = (a + int(b) for a, b in zip((passed, failed, ignored), result.groups()))
    suite = suites.setdefault("doctests", Suite())
    suite.passed.update(f"doctest {i}" for i in range(passed))
    suite.failed.update((f"doctest {i}", "see the log above") for i in range(failed))
    suite.skipped.update((f"doctest {i} (ignored)", "marked ignore") for i in range(ignored))
    if status != 0 and failed == 0:
        suite.failed["doctests"] = f"cargo test --doc ended with status {status}"


def read_fuzz(out, suites):
    """Adds one suite `fuzz` of one test, if the fuzzers ran."""
    status = read_status(out / "fuzz.status")
    if status is None:
        return
    suite = suites.setdefault("fuzz", Suite())
    if status == 0:
        suite.passed.add("fuzz")
    else:
        suite.failed["fuzz"] = "out of time" if status in (124, 137) else f"ended with status {status}"


def read_lab(out, suites):
    """Adds a suite `lab-NAME` for each that ran in guests: "pass CASE" or "fail CASE: reason", a line each."""
    for path in sorted(out.glob("lab-*.status")):
        status, suite = read_status(path), suites.setdefault(path.stem, Suite())
        results = path.with_suffix(".results")
        for line in results.read_text(errors="replace").splitlines() if results.exists() else []:
            word, _, rest = line.partition(" ")
            name, _, reason = rest.partition(": ")
            if word == "pass":
                suite.passed.add(name)
            elif line.strip():
                suite.failed[name or line] = reason or "failed"
        if status != 0 and not suite.failed:
            what = "no guest came to its end" if status == 125 else f"ended with status {status}"
            suite.failed[path.stem] = what


def read_status(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_skips(path):
    """Skips in the order written, each name once: a retried or shared helper may say the same thing twice."""
    skips = {}
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if match := SKIP_LINE.match(line.strip()):
                skips.setdefault(match["name"], Skip(match["name"], match["reason"]))
            elif line.strip():
                skips.setdefault(line, Skip(line.strip(), "no reason given"))
    return list(skips.values())


def apply_skips(skips, suites):
    """A test that said it cannot run returned without failing: it moves from passed to skipped, in its suite."""
    for skip in skips:
        for suite_id, suite in suites.items():
            for test in sorted(suite.passed):
                if skip.name in (test, f"{suite_id}::{test}") or test.endswith(f"::{skip.name}"):
                    suite.passed.discard(test)
                    suite.skipped[test] = skip.reason
                    skip.suite = suite_id


def judge(config, suites, skips, strict):
    """Returns (failures, notes) of the comparison with the list; where not strict everything is a note."""
    problems, notes = [], []
    listed = {entry["id"]: entry.get("min", 1) for entry in config.get("suite", [])}
    for suite_id, least in listed.items():
        suite = suites.get(suite_id, Suite())
        ran = len(suite.passed) + len(suite.failed)
        if ran < least:
            problems.append(f"suite {suite_id}: {ran} tests ran, tests/suites.toml asks for at least {least}")
    for suite_id in sorted(set(suites) - set(listed) - {"doctests"}):
        if suites[suite_id].passed or suites[suite_id].failed:
            notes.append(f"suite {suite_id} ran and is not in tests/suites.toml")

    allowed = [entry["name"] for entry in config.get("may_skip", [])]
    unplaced = [(skip.name, skip.reason, "") for skip in skips if not skip.suite]
    placed = [(n, r, suite_id) for suite_id, suite in suites.items() for n, r in suite.skipped.items()]
    for name, _, suite_id in unplaced + placed:
        required = suite_id in listed or not suite_id
        if required and not any(name == a or name.endswith(f"::{a}") for a in allowed):
            where = f"{suite_id}: " if suite_id else ""
            problems.append(f"{where}{name} was skipped and tests/suites.toml does not allow it")
    return (problems, notes) if strict else ([], problems + notes)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where test.sh left its files")
    parser.add_argument("--partial", action="store_true", help="only some packages ran: require no suite")
    parser.add_argument("config", type=Path)
    arguments = parser.parse_args()

    config = tomllib.loads(arguments.config.read_text())
    suites, out = {}, arguments.out
    problems, notes = [], []
    if (out / "junit.xml").exists():
        read_junit(out / "junit.xml", suites)
    failed_tests = sum(len(suite.failed) for suite in suites.values())
    status = read_status(out / "nextest.status")
    if status != 0 and failed_tests == 0:
        problems.append(f"cargo nextest ended with status {status} and named no test")
    read_ignored(out / "list.json", suites)
    read_doctests(out, suites)
    read_fuzz(out, suites)
    read_lab(out, suites)
    skips = read_skips(out / "skipped.log")
    apply_skips(skips, suites)
    if not arguments.partial:
        found, more = judge(config, suites, skips, strict=os.environ.get("CI") == "true")
        problems += found
        notes += more

    tally = out / "tally.log"
    lines, found = by_invariant.table(suites, tally.read_text(errors="replace") if tally.exists() else "")
    problems += found
    sys.stdout.write("\n".join(lines) + "\n" + report(suites, skips, problems, notes))
    passed, failed, skipped = count(suites, skips, problems)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


def report(suites, skips, problems, notes):
    """Everything but the closing line."""
    lines = ["", f"{'suite':40} {'passed':>7} {'failed':>7} {'skipped':>7}"]
    for suite_id in sorted(suites):
        suite = suites[suite_id]
        if suite.passed or suite.failed or suite.skipped:
            lines.append(f"{suite_id:40} {len(suite.passed):7} {len(suite.failed):7} {len(suite.skipped):7}")
    lines += [f"SKIPPED {skip.name}: {skip.reason}" for skip in skips if not skip.suite]
    for suite_id in sorted(suites):
        lines += [f"SKIPPED {suite_id}: {name}: {reason}" for name, reason in sorted(suites[suite_id].skipped.items())]
    lines += [f"NOTE {note}" for note in notes]
    for suite_id in sorted(suites):
        lines += [f"FAILED {suite_id}: {name}: {what}" for name, what in sorted(suites[suite_id].failed.items())]
    lines += [f"FAILED {problem}" for problem in problems]
    return "\n".join(lines) + "\n"


def count(suites, skips, problems):
    """(passed, failed, skipped); each broken rule counts as one failure, so that the line never looks better than the run."""
    passed = sum(len(suite.passed) for suite in suites.values())
    failed = sum(len(suite.failed) for suite in suites.values()) + len(problems)
    skipped = sum(len(suite.skipped) for suite in suites.values()) + sum(not skip.suite for skip in skips)
    return passed, failed, skipped


if __name__ == "__main__":
    sys.exit(main())
