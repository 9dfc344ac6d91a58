#!/usr/bin/env python3
"""Breaks each invariant on purpose and demands that its test turns red (`make test-mutants`).

Guarantees: the working tree is never touched (all happens in a copy under the target directory, with a target directory of
its own that is reused); a mutant counts as caught only if its one test ran and failed: a change that does not compile, a
test that hangs, is skipped or is not found is an error. Exit status 0 only if every mutant was caught.

  mutants.py              run all; mutants.py I4 i9_some_test runs those of these invariants and tests
  mutants.py --check      only the table: understood, each change applies, each test named is in the source (seconds)
  mutants.py --unproven   tests of invariants that no row says to turn red
  mutants.py --survey     with each change, every invariant's test of the row's package, and which of them turn red (an hour)
"""

import argparse
import contextlib
import filecmp
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import invariants

REQUIRED = [f"I{n}" for n in range(1, 13)]
NOT_SOURCE = {"target", ".git"}
TEST = re.compile(r"#\[(?:tokio::)?test[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async )?fn (i\d+_\w+)")
# One test, its build not counted; nextest ends a stuck test earlier (profile mutants in .config/nextest.toml).
TEST_LIMIT, BUILD_LIMIT = 300, 1800
CAUGHT, SURVIVED, BROKEN, STUCK, ABSENT = "caught", "SURVIVED", "DOES NOT COMPILE", "TIMEOUT", "NO SUCH TEST"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check the table only")
    parser.add_argument("--unproven", action="store_true", help="list tests that no row says to turn red")
    parser.add_argument("--survey", action="store_true", help="run every invariant's test of the package with each change")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="the repository")
    parser.add_argument("invariant", nargs="*", help="run only these, e.g. I4, or a test's name")
    arguments = parser.parse_args()
    root = arguments.root.resolve()

    page = root / "docs" / "invariants.md"
    table = invariants.parse(page.read_text()) if page.exists() else invariants.Table()
    problems = check(root, table)
    for problem in problems:
        print(f"mutants: {problem}", file=sys.stderr)
    if problems:
        return 1
    if arguments.unproven:
        return unproven(root, table)
    for invariant, reason in table.unbroken:
        print(f"mutants: {invariant}: no change to make: {reason}")
    if not table.mutations:
        print("mutants: no mutants yet: the table of docs/invariants.md has no row with a mutation")
        return 0
    if arguments.check:
        print(f"mutants: {len(table.mutations)} mutations of {len(table.invariants)} invariants, each applies")
        return 0

    wanted = set(arguments.invariant) | {name.upper() for name in arguments.invariant}
    chosen = [m for m in table.mutations if not wanted or wanted & {m.invariant, m.test.split("::")[-1]}]
    if not chosen:
        print(f"mutants: nothing to run for {' '.join(sorted(wanted))}", file=sys.stderr)
        return 2
    return survey(root, chosen) if arguments.survey else run(root, chosen)


def unproven(root, table):
    red = {mutation.test.split("::")[-1] for mutation in table.mutations}
    mentioned = {test.split("::")[-1] for _, test, _ in table.tests}
    found = [(path, name) for path in sources(root) if path.suffix == ".rs" and path.parts[:2] != ("tests", "mutants")
             for name in TEST.findall((root / path).read_text(errors="replace"))]
    for path, name in found:
        if name not in red and name not in table.excused:
            print(f"{path}: {name}{'' if name in mentioned else ' (in no row)'}")
    proven, excused = (sum(name in names for _, name in found) for names in (red, table.excused - red))
    print(f"mutants: {proven} of {len(found)} tests of invariants turn red by a change of the table; "
          f"of {excused} the table says why there is none")
    return 0


def check(root, table):
    """What is wrong with the table, as lines."""
    problems = list(table.problems)
    if table.invariants:
        missing = [name for name in REQUIRED if name not in table.invariants]
        problems += [f"docs/invariants.md: no row for {name}" for name in missing]
    for mutation in table.mutations:
        try:
            invariants.apply(mutation, (root / mutation.file).read_text())
        except OSError as error:
            problems.append(f"docs/invariants.md:{mutation.line}: {mutation.file}: {error.strerror}")
        except ValueError as error:
            problems.append(str(error))
        table.tests.append((mutation.invariant, mutation.test, mutation.line))
    known = test_names(root) if table.tests else set()
    for invariant, test, line in dict.fromkeys(table.tests):
        name = test.split("::")[-1]
        if name not in known:
            problems.append(f"docs/invariants.md:{line}: {invariant}: no test function {name} in the source")
        elif not name.startswith(f"{invariant.lower()}_"):
            problems.append(f"docs/invariants.md:{line}: {name} does not begin with {invariant.lower()}_")
    return list(dict.fromkeys(problems))


def test_names(root):
    """Every function that could be a test: also those that a macro makes, written as `fn name` or a bare name in it."""
    names = set()
    for path in sources(root):
        if path.suffix == ".rs" and path.parts[:2] != ("tests", "mutants"):
            names.update(re.findall(r"\b(i\d+_\w+)\b", (root / path).read_text(errors="replace")))
    return names


def sources(root):
    """Relative paths of all files but what builds leave."""
    for directory, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in NOT_SOURCE]
        for file in files:
            yield (Path(directory) / file).relative_to(root)


def run(root, chosen):
    """Runs the chosen mutants in a copy; returns the exit status."""
    home = Path(os.environ.get("CARGO_TARGET_DIR") or root / "target") / "mutants"
    tree, target = home / "tree", home / "target"
    copy_tree(root, tree)
    seed_target(home.parent, target)

    print(f"mutants: {len(chosen)} to run; first their tests unchanged", flush=True)
    packages = {}
    for mutation in chosen:
        packages.setdefault(mutation.package, {})[mutation.test] = None
    for package, tests in packages.items():
        for test, (outcome, detail) in attempt(tree, target, package, list(tests)).items():
            if outcome != SURVIVED:
                print(f"mutants: unchanged, {package} {test} must pass but: {outcome} {detail}".rstrip(), file=sys.stderr)
                return 1

    results = []
    for change in changes(chosen):
        began = time.monotonic()
        with changed(tree, change[0]):
            outcomes = attempt(tree, target, change[0].package, [mutation.test for mutation in change])
        took = time.monotonic() - began
        for mutation in change:
            outcome, detail = outcomes[mutation.test]
            results.append(outcome)
            print(f"{mutation.invariant:4} {outcome:16} {mutation.package} {mutation.test}: {mutation.file}: "
                  f"`{mutation.old}` -> `{mutation.new}` ({took:.0f} s)", flush=True)
            if outcome != CAUGHT and detail:
                print(detail, file=sys.stderr, flush=True)
    caught = results.count(CAUGHT)
    print(f"mutants: {caught} of {len(results)} caught")
    return 0 if caught == len(results) else 1


def changes(chosen):
    """The mutations, those of one change of one package together."""
    groups = {}
    for mutation in chosen:
        groups.setdefault((mutation.file, mutation.old, mutation.new, mutation.package), []).append(mutation)
    return list(groups.values())


@contextlib.contextmanager
def changed(tree, mutation):
    """The tree with the change made, until the end of the block."""
    path = tree / mutation.file
    original = path.read_text()
    try:
        path.write_text(invariants.apply(mutation, original))
        yield
    finally:
        # A new write, so a new time stamp: the next build must see that the file changed back.
        path.write_text(original)


def survey(root, chosen):
    """Which tests of invariants each change turns red, of the package that the row names (not of those that start programs)."""
    home = Path(os.environ.get("CARGO_TARGET_DIR") or root / "target") / "mutants"
    tree, target = home / "tree", home / "target"
    copy_tree(root, tree)
    seed_target(home.parent, target)
    for change in changes(chosen):
        first = change[0]
        if first.package == "railfs-tests":
            continue
        with changed(tree, first):
            outcome, red = attempt(tree, target, first.package, None)
        print(f"docs/invariants.md:{first.line} {first.package}: `{first.old}` -> `{first.new}`: "
              f"{' '.join(red) if outcome == CAUGHT else outcome}", flush=True)
    return 0


def copy_tree(root, tree):
    """Makes `tree` a copy of the sources, leaving files that are equal as they are: their time stamps save a rebuild."""
    wanted = set(sources(root))
    if tree.exists():
        for path in set(sources(tree)) - wanted:
            (tree / path).unlink()
    for path in wanted:
        source, copy = root / path, tree / path
        if not (copy.exists() and filecmp.cmp(source, copy, shallow=False)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            shutil.copymode(source, copy)


def seed_target(built, target):
    """Starts from the dependencies that `make test` compiled, if any: they are the same, and take minutes."""
    if target.exists() or not (built / "debug").is_dir():
        return

    def skip(directory, names):
        # Ours are rebuilt: their identity holds the path of the tree.
        return [n for n in names if n == "incremental" or re.match(r"(lib)?railfs", n)]

    for part in ("deps", "build", ".fingerprint"):
        if (built / "debug" / part).is_dir():
            shutil.copytree(built / "debug" / part, target / "debug" / part, ignore=skip)


def attempt(tree, target, package, tests):
    """Builds, runs these tests: each with (outcome, detail). SURVIVED is what an unchanged tree must give.

    Without tests: every invariant's test of the package, as (outcome, names of those that failed).
    """
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "RAILFS_BIN_DIR": str(target / "debug"),
                   "CARGO_TERM_COLOR": "never", "RAILFS_FUZZ_SECONDS": "0",
                   # Enough for what is wrong to show.
                   "RAILFS_MODEL_SEQUENCES": "200", "RAILFS_MODEL_MOUNT_SEQUENCES": "20", "RAILFS_SCHEDULES": "8000"}
    skip_log = target / "mutant-skipped.log"
    skip_log.unlink(missing_ok=True)
    environment["RAILFS_SKIP_LOG"] = str(skip_log)
    every = dict.fromkeys(tests or [])

    def all_are(outcome, detail):
        return dict.fromkeys(every, (outcome, detail)) if tests else (outcome, detail)

    builds = [["cargo", "nextest", "run", "--no-run", "--profile", "mutants", *targets(tree, package, every), "-p", package]]
    if package == "railfs-tests":
        # These start the programs, which only a build of the whole makes; less what is made of the engine's text, and stops
        # where a line is not what it was.
        whole = ["--workspace", "--exclude", "railfs-schedules", "--exclude", "railfs-models"]
        builds.insert(0, ["cargo", "build", *whole, "--bins"])
        builds[1][-2:] = whole
    for command in builds:
        code, text = call(command, tree, environment, BUILD_LIMIT)
        if code != 0:
            return all_are(BROKEN, tail(text))

    # Where nextest keeps its reports: below the workspace, whatever the target directory is.
    report = tree / "target" / "nextest" / "mutants" / "junit.xml"
    report.unlink(missing_ok=True)
    wanted = "|".join(f"{re.escape(test)}$" for test in every) or "(i[0-9]+_)+"
    pattern = f"package(={package}) & test(/(^|::)({wanted})/)"
    limit = TEST_LIMIT * len(every) if tests else BUILD_LIMIT
    code, text = call([*builds[-1], "-E", pattern, "--no-tests", "pass"], tree, environment, limit, drop="--no-run")
    if code is None and tests:
        return all_are(STUCK, "")
    if not report.exists():
        return all_are(ABSENT, tail(text))
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not tests:
        failed = [case for case in cases if any("timeout" not in (child.get("type") or "")
                                                for child in case if child.tag in ("failure", "error"))]
        return CAUGHT if failed else SURVIVED, [case.get("name") for case in failed]
    skipped = skip_log.read_text().strip() if skip_log.exists() else ""
    return {test: judge(package, test, cases, skipped) for test in every}


def targets(tree, package, tests):
    """Options for cargo that leave out the programs of the package that have none of these tests; none where that is not plain."""
    options = set()
    home = next((tree / path).parent for path in sources(tree) if path.name == "Cargo.toml"
                and f'name = "{package}"' in (tree / path).read_text().split("[dependencies]")[0])
    for test in tests:
        name = re.compile(rf"\bfn {test.split('::')[-1]}\b")
        found = [path for path in sources(home) if path.suffix == ".rs" and name.search((home / path).read_text(errors="replace"))]
        if len(found) == 1 and found[0].parts[0] == "src" and (home / "src" / "lib.rs").exists():
            options.add(("--lib",))
        elif len(found) == 1 and found[0].parent.name == "tests":
            options.add(("--test", found[0].stem))
        else:
            return []
    return [word for option in sorted(options) for word in option]


def judge(package, test, cases, skipped):
    """What became of one test: (outcome, detail)."""
    own = [case for case in cases if case.get("name") == test or case.get("name").endswith(f"::{test}")]
    if len(own) != 1:
        return ABSENT, f"{len(own)} tests of {package} end in {test}, wanted exactly one: qualify it with its module"
    if skipped:
        return ABSENT, skipped
    trouble = next((child for child in own[0] if child.tag in ("failure", "error")), None)
    if trouble is None:
        return SURVIVED, ""
    if "timeout" in (trouble.get("type") or ""):
        return STUCK, ""
    return CAUGHT, (trouble.get("type") or "") + "\n" + tail(trouble.text or "")


def call(command, directory, environment, limit, drop=None):
    """(exit code, output); the code is None when it took longer than `limit` seconds and was ended."""
    command = [part for part in command if part != drop]
    with subprocess.Popen(command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        try:
            text, _ = process.communicate(timeout=limit)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                text, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
            return None, text


def tail(text, lines=25):
    return "\n".join(text.splitlines()[-lines:])


if __name__ == "__main__":
    sys.exit(main())
