"""suites.py: what a run did is counted as it was, and a suite that did not run is noticed."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
JUNIT = """<testsuites><testsuite name="railfs-proto">
<testcase name="layout::i1_covers" classname="railfs-proto" time="0.1"/>
<testcase name="frame::needs_device" classname="railfs-proto" time="0.1"/>
{extra}</testsuite></testsuites>"""
FAILURE = '<testcase name="slot::torn" time="1"><failure type="test timeout"/></testcase>'
CONFIG = '[[suite]]\nid = "railfs-proto"\n'


class Suites(unittest.TestCase):
    def run_it(self, config=CONFIG, junit=JUNIT.format(extra=""), skips="", ci="true", status="0", **files):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory)
            (out / "suites.toml").write_text(config)
            if junit is not None:
                (out / "junit.xml").write_text(junit)
            (out / "nextest.status").write_text(status)
            (out / "skipped.log").write_text(skips)
            for name, text in files.items():
                (out / name.replace("_", ".")).write_text(text)
            done = subprocess.run(
                [sys.executable, HERE / "suites.py", "--out", out, out / "suites.toml"],
                capture_output=True, text=True, env={**os.environ, "CI": ci}, check=False)
        return done.returncode, done.stdout, done.stdout.splitlines()[-1]

    def test_counts_a_clean_run(self):
        code, _, last = self.run_it()
        self.assertEqual((code, last), (0, "2 passed, 0 failed, 0 skipped"))

    def test_a_failed_test_is_named_with_its_cause(self):
        code, text, last = self.run_it(junit=JUNIT.format(extra=FAILURE), status="100")
        self.assertEqual((code, last), (1, "2 passed, 1 failed, 0 skipped"))
        self.assertIn("FAILED railfs-proto: slot::torn: test timeout", text)

    def test_a_suite_that_did_not_run_fails_in_ci_only(self):
        config = CONFIG + '[[suite]]\nid = "railfs-engine"\n'
        code, text, last = self.run_it(config=config)
        self.assertEqual((code, last), (1, "2 passed, 1 failed, 0 skipped"))
        self.assertIn("suite railfs-engine: 0 tests ran", text)
        code, text, last = self.run_it(config=config, ci="")
        self.assertEqual((code, last), (0, "2 passed, 0 failed, 0 skipped"))
        self.assertIn("NOTE suite railfs-engine", text)

    def test_a_suite_of_which_all_tests_skip_did_not_run(self):
        skips = "SKIPPED i1_covers: no device\nSKIPPED needs_device: no device\n"
        allowed = CONFIG + '[[may_skip]]\nname = "i1_covers"\n[[may_skip]]\nname = "needs_device"\n'
        code, text, _ = self.run_it(config=allowed, skips=skips)
        self.assertEqual(code, 1)
        self.assertIn("suite railfs-proto: 0 tests ran", text)

    def test_a_skip_moves_from_passed_and_must_be_allowed(self):
        skips = "SKIPPED needs_device: no RDMA device\nSKIPPED needs_device: no RDMA device\n"
        code, text, last = self.run_it(skips=skips)
        self.assertEqual((code, last), (1, "1 passed, 1 failed, 1 skipped"))
        self.assertIn("SKIPPED railfs-proto: frame::needs_device: no RDMA device", text)
        allowed = CONFIG + '[[may_skip]]\nname = "needs_device"\nreason = "no device"\n'
        code, _, last = self.run_it(config=allowed, skips=skips)
        self.assertEqual((code, last), (0, "1 passed, 0 failed, 1 skipped"))

    def test_ignored_tests_are_counted(self):
        listing = '{"rust-suites": {"railfs-proto": {"testcases": {"layout::slow": {"ignored": true}}}}}'
        _, text, last = self.run_it(ci="", list_json=listing)
        self.assertEqual(last, "2 passed, 0 failed, 1 skipped")
        self.assertIn("layout::slow: marked #[ignore]", text)

    def test_doctests_and_fuzz_are_suites(self):
        log = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\ntest result: ok. 1 passed; 0 failed; 0 ignored;\n"
        config = CONFIG + '[[suite]]\nid = "fuzz"\n'
        code, _, last = self.run_it(config=config, doctests_log=log, doctests_status="0", fuzz_status="0")
        self.assertEqual((code, last), (0, "7 passed, 0 failed, 1 skipped"))
        code, text, _ = self.run_it(config=config, doctests_log=log, doctests_status="0", fuzz_status="124")
        self.assertEqual(code, 1)
        self.assertIn("FAILED fuzz: fuzz: out of time", text)

    def test_cases_in_guests_are_counted_and_a_guest_that_died_is_a_failure(self):
        config = CONFIG + '[[suite]]\nid = "lab-run"\nmin = 2\n'
        files = {"lab-run_results": "pass a\npass b\n", "lab-run_status": "0"}
        code, _, last = self.run_it(config=config, **files)
        self.assertEqual((code, last), (0, "4 passed, 0 failed, 0 skipped"))
        files = {"lab-run_results": "pass a\nfail b: line 7: cmp\n", "lab-run_status": "1"}
        code, text, last = self.run_it(config=config, **files)
        self.assertEqual((code, last), (1, "3 passed, 1 failed, 0 skipped"))
        self.assertIn("FAILED lab-run: b: line 7: cmp", text)
        files = {"lab-run_results": "pass a\npass b\n", "lab-run_status": "125"}
        code, text, _ = self.run_it(config=config, **files)
        self.assertEqual(code, 1)
        self.assertIn("FAILED lab-run: lab-run: no guest came to its end", text)

    def test_a_lab_that_cannot_start_fails_in_ci_only(self):
        config, skips = CONFIG + '[[suite]]\nid = "lab-run"\n', "SKIPPED lab-run: this machine lacks qemu\n"
        code, text, _ = self.run_it(config=config, skips=skips)
        self.assertEqual(code, 1)
        self.assertIn("suite lab-run: 0 tests ran", text)
        code, text, last = self.run_it(config=config, skips=skips, ci="")
        self.assertEqual((code, last), (0, "2 passed, 0 failed, 1 skipped"))
        self.assertIn("SKIPPED lab-run: this machine lacks qemu", text)

    def test_a_build_that_broke_is_a_failure(self):
        code, text, last = self.run_it(junit=None, status="101", ci="")
        self.assertEqual((code, last), (1, "0 passed, 1 failed, 0 skipped"))
        self.assertIn("status 101", text)


if __name__ == "__main__":
    unittest.main()
