"""mutants.py, tried on a crate of one function: what it calls caught was red, and nothing else passes for red."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import invariants
import mutants

HERE = Path(__file__).resolve().parent
FAKE = HERE.parent / "mutants" / "fake"
HEAD = "| Invariant | Guarantee | Tests | Mutation | Red test |\n| --- | --- | --- | --- | --- |\n"
ADDS = "| I1 | adds | `i1_adds` | `src/lib.rs`: `{old}` -> `{new}` | `fake {test}` |\n"
REST = "".join(f"| I{n} | later | | none (not in this crate) | |\n" for n in range(1, 13))


class Parsing(unittest.TestCase):
    def test_reads_a_row_with_bars_and_backticks_in_its_code(self):
        row = "| **I2** bounded | at most | `i2_a`, `i2_b` | `src/a.rs`: ``x \\|\\| `y` `` -> `x` | `p-q m::i2_a` |\n"
        table = invariants.parse(HEAD + row)
        self.assertEqual(table.problems, [])
        self.assertEqual([test for _, test, _ in table.tests], ["i2_a", "i2_b"])
        self.assertEqual(table.mutations, [
            invariants.Mutation("I2", "src/a.rs", "x || `y` ", "x", "p-q", "m::i2_a", 3)])

    def test_one_change_may_turn_several_tests_red(self):
        table = invariants.parse(HEAD + "| I1 | g | `i1_a` | `a.rs`: `x` -> `y` | `p i1_a`, `p i1_b` |\n")
        self.assertEqual((table.problems, [mutation.test for mutation in table.mutations]), ([], ["i1_a", "i1_b"]))
        self.assertEqual([len(change) for change in mutants.changes(table.mutations)], [2])

    def test_a_removal_and_a_reason_for_none(self):
        table = invariants.parse(HEAD + "| I1 | g | `i1_a` | `a.rs`: `check();` -> nothing | `p i1_a` |\n"
                                 "| I2 | g | `i2_a` | none (needs verbs) | |\n")
        self.assertEqual((table.problems, table.mutations[0].new), ([], ""))
        self.assertEqual((table.unbroken, table.excused), ([("I2", "needs verbs")], {"i2_a"}))

    def test_what_it_does_not_understand_it_refuses_with_the_line(self):
        for row, word in [
            ("| I1 | g | `i1_a` | `a.rs`: `x` | `p i1_a` |", "form `file`: `old` -> `new`"),
            ("| I1 | g | `i1_a` | `a.rs`: `x` -> `y` and more | `p i1_a` |", "form `file`: `old` -> `new`"),
            ("| I1 | g | `i1_a` | `a.rs`: `x` -> `y` | i1_a |", "form `package test_name`"),
            ("| I1 | g | `i1_a` | `a.rs`: `x` -> `x` | `p i1_a` |", "changes nothing"),
            ("| I1 | g | none yet | `a.rs`: `x` -> `y` | `p i1_a` |", "names no test"),
            ("| one | g | `i1_a` | none (later) | |", "invariant's id"),
            ("| I1 | g | `a || b` | none (later) | |", "cells"),
        ]:
            problems = invariants.parse(HEAD + row + "\n").problems
            self.assertTrue(any("docs/invariants.md:3" in p and word in p for p in problems), (row, problems))

    def test_tables_in_comments_and_other_tables_are_not_read(self):
        text = f"<!--\n{HEAD}| I1 | TBD |\n-->\n| a | b |\n| - | - |\n| 1 | 2 |\n"
        table = invariants.parse(text)
        self.assertEqual((table.problems, table.invariants), ([], set()))

    def test_a_change_applies_only_where_its_text_stands_once(self):
        mutation = invariants.Mutation("I1", "a.rs", "x", "y", "p", "i1_a", 3)
        self.assertEqual(invariants.apply(mutation, "a x b"), "a y b")
        for text in ("", "x x"):
            with self.assertRaises(ValueError):
                invariants.apply(mutation, text)


@unittest.skipUnless(shutil.which("cargo"), "cargo is missing")
class Running(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.root = Path(cls.directory.name) / "fake"
        shutil.copytree(FAKE, cls.root, ignore=shutil.ignore_patterns("target"))
        (cls.root / "docs").mkdir()

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def run_it(self, rows, *arguments):
        (self.root / "docs" / "invariants.md").write_text(HEAD + rows + REST)
        before = (self.root / "src" / "lib.rs").read_bytes()
        environment = {k: v for k, v in os.environ.items() if k not in ("CARGO_TARGET_DIR", "MAKEFLAGS", "RUSTDOCFLAGS")}
        done = subprocess.run([sys.executable, HERE / "mutants.py", "--root", self.root, *arguments],
                              capture_output=True, text=True, check=False, env=environment, timeout=600)
        self.assertEqual((self.root / "src" / "lib.rs").read_bytes(), before, "the tree itself must stay as it is")
        return done.returncode, done.stdout + done.stderr

    def test_tells_caught_from_all_that_is_not(self):
        rows = (ADDS.format(old="a.saturating_add(b)", new="a.saturating_sub(b)", test="i1_adds")
                + ADDS.format(old="sum < a", new="false", test="i1_adds")
                + ADDS.format(old="let sum = a", new="let sum = missing", test="i1_adds")
                + "| I2 | bounded | `i2_is_bounded` | `src/lib.rs`: `sum > limit \\|\\| ` -> nothing "
                  "| `fake tests::i2_is_bounded` |\n"
                + "| I3 | ends | `i3_never_hangs` | `src/lib.rs`: `left -= 1` -> `left -= 0` | `fake i3_never_hangs` |\n")
        code, text = self.run_it(rows)
        self.assertEqual(code, 1, text)
        outcomes = [line[5:21].strip() for line in text.splitlines() if line.startswith("I")]
        self.assertTrue(outcomes, text)
        self.assertEqual(outcomes, [mutants.CAUGHT, mutants.SURVIVED, mutants.BROKEN, mutants.CAUGHT, mutants.STUCK])
        self.assertIn("2 of 5 caught", text)

        code, text = self.run_it(rows, "i2")
        self.assertEqual(code, 0, text)
        self.assertIn("1 of 1 caught", text)

    def test_refuses_a_table_that_has_drifted_from_the_code(self):
        for row, word in [
            (ADDS.format(old="sum", new="0", test="i1_adds"), "stands 4 times"),
            (ADDS.format(old="sum < a", new="false", test="i1_gone"), "no test function i1_gone"),
            (ADDS.format(old="sum < a", new="false", test="i2_is_bounded"), "does not begin with i1_"),
        ]:
            code, text = self.run_it(row, "--check")
            self.assertEqual(code, 1, text)
            self.assertIn(word, text)


if __name__ == "__main__":
    unittest.main()
