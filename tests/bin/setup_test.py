"""setup.sh: what it takes for a library that is there."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

SETUP = Path(__file__).parent / "setup.sh"


def missing(llvm, **variables):
    """What `setup.sh missing` names where LLVM is installed under that directory."""
    environment = {name: value for name, value in os.environ.items() if name != "LIBCLANG_PATH"}
    environment |= {"RAILFS_LLVM": str(llvm)} | variables
    done = subprocess.run([SETUP, "missing"], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


class Libclang(unittest.TestCase):
    def files(self, *names):
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        for name in names:
            path = Path(held.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return held.name

    def test_is_missing_where_only_its_namesake_is_there(self):
        self.assertIn("libclang-14-dev", missing(self.files("llvm-14/lib/libclang-cpp.so.14", "llvm-14/lib/libclang.a")))
        self.assertIn("libclang-14-dev", missing(self.files("llvm-19/lib/libclang.so.1")))
        self.assertIn("libclang-14-dev", missing(self.files()))

    def test_is_there_by_each_of_its_names(self):
        for name in ["llvm-14/lib/libclang.so", "llvm-15/lib/libclang.so.1", "llvm-14/lib/libclang-14.0.6.so.1"]:
            self.assertNotIn("libclang-14-dev", missing(self.files(name)), name)

    def test_is_there_where_a_variable_says_so(self):
        self.assertNotIn("libclang-14-dev", missing(self.files(), LIBCLANG_PATH="/opt/llvm/lib"))


if __name__ == "__main__":
    unittest.main()
