"""What a run did for each invariant: its tests (names that begin with the id), and what they tried.

Guarantees: a test of several invariants (i1_i3_...) counts for each of them; what was tried is what the tests wrote to the
file that RAILFS_TALLY_LOG names, a line each, "i1,i3 schedules 1000 NAME"; of a test that failed what it tried is not counted,
because it says so only at its end. A line that makes no sense is a problem, not nothing.
"""

import re
from dataclasses import dataclass, field

NAMES = {
    1: "whole or nothing", 2: "verified", 3: "checked", 4: "fenced", 5: "no stale reply", 6: "bounded",
    7: "minimal access", 8: "atomic publish", 9: "no hang", 10: "rails are independent", 11: "loud", 12: "compatible",
}
IDS = re.compile(r"^((?:i\d+_)+)")
LINE = re.compile(r"^(?P<ids>i\d+(?:,i\d+)*) (?P<kind>[a-z][a-z0-9-]*) (?P<count>\d+) (?P<test>\S+)$")


@dataclass
class Row:
    """Of one invariant."""

    passed: int = 0
    failed: list = field(default_factory=list)
    skipped: int = 0
    tried: dict = field(default_factory=dict)  # kind -> how many


def ids(name):
    """The invariants that a test's name begins with, as numbers."""
    match = IDS.match(name.rsplit("::", 1)[-1])
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []


def rows(suites, tally):
    """({number: Row}, problems) of what ran (`suites` as suites.py reads them) and of the text of the tally."""
    table, problems = {number: Row() for number in NAMES}, []
    for suite in suites.values():
        for name in suite.passed:
            for number in ids(name):
                table.setdefault(number, Row()).passed += 1
        for name in suite.failed:
            for number in ids(name):
                table.setdefault(number, Row()).failed.append(name)
        for name in suite.skipped:
            for number in ids(name):
                table.setdefault(number, Row()).skipped += 1
    for line in tally.splitlines():
        match = LINE.match(line)
        if not match:
            problems.append(f"a line of RAILFS_TALLY_LOG makes no sense: {line}")
            continue
        for number in (int(one[1:]) for one in match["ids"].split(",")):
            tried = table.setdefault(number, Row()).tried
            tried[match["kind"]] = tried.get(match["kind"], 0) + int(match["count"])
    return table, problems


def table(suites, tally):
    """(lines to print, problems)."""
    found, problems = rows(suites, tally)
    lines = ["", f"{'invariant':28} {'tests':>6} {'skipped':>8} {'violations':>11}  tried"]
    for number, row in sorted(found.items()):
        tried = ", ".join(f"{count:,} {kind.replace('-', ' ')}" for kind, count in sorted(row.tried.items())) or "-"
        name = f"I{number} {NAMES.get(number, '?')}"
        lines.append(f"{name:28} {row.passed + len(row.failed):6} {row.skipped:8} {len(row.failed):11}  {tried}")
    return lines, problems
