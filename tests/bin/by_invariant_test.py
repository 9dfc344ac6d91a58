"""by_invariant.py: each test counts for the invariants that its name begins with, and so does what it tried."""

import unittest

import by_invariant
from suites import Suite


class ByInvariant(unittest.TestCase):
    def test_a_test_counts_for_each_of_its_invariants(self):
        self.assertEqual(by_invariant.ids("catalog::tests::i1_i3_reads"), [1, 3])
        self.assertEqual(by_invariant.ids("i10_rails"), [10])
        self.assertEqual(by_invariant.ids("tests::size_i4_is"), [])

    def test_what_ran_and_what_was_tried(self):
        suites = {"one": Suite(passed={"a::i1_i3_x", "other"}, failed={"i3_y": "panicked"}, skipped={"i4_z": "no device"})}
        lines, problems = by_invariant.table(suites, "i1,i3 kills 50 i1_i3_x\ni3 kills 7 q\ni3 schedules 1000 r\n")
        self.assertEqual(problems, [])
        text = "\n".join(lines)
        self.assertRegex(text, r"I1 whole or nothing +1 +0 +0  50 kills")
        self.assertRegex(text, r"I3 checked +2 +0 +1  57 kills, 1,000 schedules")
        self.assertRegex(text, r"I4 fenced +0 +1 +0  -")
        self.assertRegex(text, r"I12 compatible +0")

    def test_a_line_without_sense_is_a_problem(self):
        _, problems = by_invariant.table({}, "i1 kills many x\n")
        self.assertIn("makes no sense", problems[0])


if __name__ == "__main__":
    unittest.main()
