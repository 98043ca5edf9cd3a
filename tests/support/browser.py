"""A page as a browser shows it: headless Chromium, without a network, and what the page left in the document."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")


@dataclass
class Shown(HTMLParser):
    """A document after its scripts ran: attributes of <html>, tables by id, all text, and console lines."""

    console: list[str] = field(default_factory=list)
    root: dict[str, str | None] = field(default_factory=dict)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    canvases: list[dict[str, str | None]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._rows: list[list[str]] | None = None
        self._is_script = False

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "html":
            self.root = found
        elif tag == "canvas":
            self.canvases.append(found)
        elif tag == "table":
            self._rows = self.tables.setdefault(found.get("id") or found.get("class") or "", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in {"td", "th"} and self._rows is not None:
            self._rows[-1].append("")
        self._is_script = tag in {"script", "style"}

    def handle_endtag(self, tag):
        if tag == "table":
            self._rows = None
        self._is_script = False

    def handle_data(self, data):
        if self._is_script:
            return
        self.text += data
        if self._rows and self._rows[-1]:
            self._rows[-1][-1] += data


def show(page: Path, scratch: Path, *, address: str = "") -> Shown:
    """Open a page's file in Chromium, in which no name resolves, and read the document it becomes."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr", f"--user-data-dir={scratch / 'profile'}", "--window-size=1200,900", "--dump-dom",
        page.as_uri() + address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = Shown([line for line in done.stderr.splitlines() if "CONSOLE" in line])
    shown.feed(done.stdout)
    return shown
