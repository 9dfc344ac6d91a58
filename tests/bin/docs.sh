#!/usr/bin/env bash
# Checks that every relative link in README.md, CHANGELOG.md, CONTRIBUTING.md, docs/ and packaging/ leads to a file that is
# there, and, where it names a heading (#like-this), to that heading. With arguments: checks those files instead.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec python3 - "$@" <<'PY'
import re
import sys
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^(```|~~~).*?^\1[`~]*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+).+?\1")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def prose(path):
    """The text without code blocks: what looks like a link or heading there is none."""
    return FENCE.sub(lambda m: "\n" * m.group().count("\n"), path.read_text())


def anchors(path):
    """The names that a heading can be reached by, as common renderers make them."""
    names, seen = set(ANCHOR.findall(path.read_text())), {}
    for heading in HEADING.findall(prose(path)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        n = seen[slug] = seen.get(slug, -1) + 1
        names.add(f"{slug}-{n}" if n else slug)
    return names


def broken(path):
    text = CODE.sub(lambda m: " " * len(m.group()), prose(path))
    for match in list(LINK.finditer(text)) + list(REFERENCE.finditer(text)):
        link = match.group(1)
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        target, _, anchor = link.partition("#")
        where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        file = path.parent / unquote(target) if target else path
        if target.startswith("/"):
            yield f"{where}: {link}: begins at the root; write it relative to this file"
        elif not file.exists():
            yield f"{where}: {link}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{where}: {link}: no such heading in {file}"


if sys.argv[1:]:
    pages = [Path(name) for name in sys.argv[1:]]
else:
    pages = [Path(name) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md") if Path(name).exists()]
    pages += sorted(Path("docs").rglob("*.md")) + sorted(Path("packaging").rglob("*.md"))
problems = [problem for page in pages for problem in broken(page)]
for problem in problems:
    print(f"docs: {problem}", file=sys.stderr)
print(f"docs: {len(pages)} pages, {len(problems)} broken links")
sys.exit(bool(problems))
PY
