"""Makes a folder of wheels a local package index, in place: index.py FOLDER.

    pip install infinity-engine --find-links FOLDER
    pip install infinity-engine --extra-index-url file://FOLDER/simple    # checks the hashes, too

Behind a web server, FOLDER/simple is a simple index of PEP 503. SHA256SUMS has the same hashes.
"""

from __future__ import annotations

import hashlib
import html
import sys
from pathlib import Path

NAME = "infinity-engine"


def write_index(folder: Path) -> list[str]:
    """Writes the pages of all packages in ``folder``, and returns their names."""
    files = sorted(
        [*folder.glob("infinity_engine-*.whl"), *folder.glob("infinity_engine-*.tar.gz")]
    )
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    simple = folder / "simple" / NAME
    simple.mkdir(parents=True, exist_ok=True)
    links = [
        f'<a href="../../{html.escape(name)}#sha256={digest}">{html.escape(name)}</a><br>'
        for name, digest in sums.items()
    ]
    page = "<!DOCTYPE html>\n<html><body>\n{}\n</body></html>\n"
    (simple / "index.html").write_text(page.format("\n".join(links)))
    (simple.parent / "index.html").write_text(page.format(f'<a href="{NAME}/">{NAME}</a>'))
    (folder / "SHA256SUMS").write_text("".join(f"{sums[name]}  {name}\n" for name in sums))
    return list(sums)


if __name__ == "__main__":
    if not (found := write_index(Path(sys.argv[1]))):
        sys.exit(f"{sys.argv[1]} has no packages: make wheels")
    print(f"{len(found)} packages: pip install {NAME} --find-links {sys.argv[1]}")
