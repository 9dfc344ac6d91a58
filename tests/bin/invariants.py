"""Reads the table of docs/invariants.md: which tests hold an invariant, and which one-line change turns which test red.

Guarantees: a row is either understood wholly or refused with the line and what is wrong with it; a change is refused unless
the text it replaces stands exactly once in its file. The format is described in docs/invariants.md, below the table.
"""

import re
from dataclasses import dataclass, field

COLUMNS = ["invariant", "guarantee", "tests", "mutation", "red test"]
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(?P<ticks>`+)(?P<text>.+?)(?<!`)(?P=ticks)(?!`)")
NOTHING_TO_BREAK = re.compile(r"^none \((?P<reason>.+)\)$")
RED_TEST = re.compile(r"^(?P<package>[a-z0-9_-]+) (?P<test>[A-Za-z0-9_:]+)$")


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new`, once, in `file`; then `test` of `package` must fail."""

    invariant: str
    file: str
    old: str
    new: str
    package: str
    test: str
    line: int  # of the table, for messages


@dataclass
class Table:
    invariants: set = field(default_factory=set)
    tests: list = field(default_factory=list)  # (invariant, test name, line)
    mutations: list = field(default_factory=list)
    unbroken: list = field(default_factory=list)  # (invariant, reason) of rows with "none (reason)"
    excused: set = field(default_factory=set)  # names of the tests of those rows
    problems: list = field(default_factory=list)


def parse(text):
    """Parses the page; what is wrong with it is in `problems`, as lines fit to print."""
    table = Table()
    # Comments keep their line breaks, so that line numbers stay right.
    text = COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        cells = split_cells(line)
        if cells is None:
            inside = False
        elif [cell.lower() for cell in cells] == COLUMNS:
            inside = True
        elif inside and not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            parse_row(table, cells, number)
    return table


def split_cells(line):
    """The cells of a table line, `\\|` made `|` again; None if it is no table line."""
    line = line.strip()
    if not (line.startswith("|") and line.endswith("|") and len(line) > 1):
        return None
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line[1:-1])]


def parse_row(table, cells, number):
    where = f"docs/invariants.md:{number}"
    if len(cells) != len(COLUMNS):
        table.problems.append(f"{where}: {len(cells)} cells, wanted {len(COLUMNS)} (a | inside code is written \\|)")
        return
    name, _, tests, mutation, red = cells
    invariant = re.match(r"\**(I\d+)\b", name)
    if not invariant:
        table.problems.append(f"{where}: '{name}' does not begin with an invariant's id, such as I4")
        return
    invariant = invariant.group(1)
    table.invariants.add(invariant)
    for span in CODE.finditer(tests):
        table.tests.append((invariant, span["text"].strip().split()[-1], number))
    if unbroken := NOTHING_TO_BREAK.match(mutation):
        table.unbroken.append((invariant, unbroken["reason"]))
        table.excused.update(span["text"].strip().split()[-1] for span in CODE.finditer(tests))
        return
    if not CODE.search(tests):
        table.problems.append(f"{where}: {invariant} names no test")
    parsed = parse_mutation(mutation)
    red_tests = [RED_TEST.match(span["text"].strip()) for span in CODE.finditer(red)]
    if parsed is None:
        table.problems.append(f"{where}: the mutation is not of the form `file`: `old` -> `new`")
    elif not red_tests or None in red_tests:
        table.problems.append(f"{where}: a red test is not of the form `package test_name`")
    else:
        file, old, new = parsed
        if old == new:
            table.problems.append(f"{where}: the mutation changes nothing")
        table.mutations += [Mutation(invariant, file, old, new, test["package"], test["test"], number) for test in red_tests]


def parse_mutation(text):
    """`file`: `old` -> `new` (or -> nothing) as (file, old, new); None if it is not that."""
    spans = list(CODE.finditer(text))
    if len(spans) < 2:
        return None
    file, old = spans[0], spans[1]
    if text[: file.start()].strip() or text[file.end() : old.start()].strip() != ":":
        return None
    rest = text[old.end() :].strip()
    if rest == "-> nothing":
        return file["text"], strip_code(old), ""
    if len(spans) != 3 or text[spans[2].end() :].strip() or text[old.end() : spans[2].start()].strip() != "->":
        return None
    return file["text"], strip_code(old), strip_code(spans[2])


def strip_code(span):
    """What a code span shows: one space on each side belongs to the delimiters, if both are there."""
    text = span["text"]
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] == " " else text


def apply(mutation, text):
    """`text` with the mutation made. Raises ValueError unless `old` is there exactly once."""
    found = text.count(mutation.old)
    if found != 1:
        raise ValueError(
            f"docs/invariants.md:{mutation.line}: {mutation.invariant}: `{mutation.old}` stands {found} times in "
            f"{mutation.file}, wanted exactly once")
    return text.replace(mutation.old, mutation.new)
