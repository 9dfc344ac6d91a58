"""docs.sh: a link that leads nowhere is named with its line, one that leads somewhere or stands in code is not."""

import subprocess
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Links(unittest.TestCase):
    def run_it(self, text):
        with tempfile.TemporaryDirectory() as directory:
            page = Path(directory) / "page.md"
            (Path(directory) / "other.md").write_text("# The `first` one: here\n\n## Twice\n\n## Twice\n")
            page.write_text(text)
            done = subprocess.run(["bash", HERE / "docs.sh", page], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def test_good_links(self):
        code, text = self.run_it(
            "# Top\n[a](other.md) [b](other.md#the-first-one-here) [c](#top) [d](other.md#twice-1) [e](https://example.org/x)\n"
            "`[code](nowhere.md)`\n\n```\n[fence](nowhere.md)\n```\n[ref]: other.md\n")
        self.assertEqual((code, text), (0, ""))

    def test_bad_links(self):
        for link, word in [("gone.md", "no such file"), ("other.md#none", "no such heading"),
                           ("#none", "no such heading"), ("/other.md", "begins at the root")]:
            code, text = self.run_it(f"# Top\n\n[x]({link})\n")
            self.assertEqual(code, 1)
            self.assertIn("page.md:3", text)
            self.assertIn(word, text)


if __name__ == "__main__":
    unittest.main()
