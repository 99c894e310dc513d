"""A link checker for a folder of HTML pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser load something, by tag; a plain link is followed by the reader alone.
LOADED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "object": ("data",),
}
LOADED_LINKS = {"stylesheet", "preconnect", "dns-prefetch", "preload", "prefetch", "icon", "modulepreload"}


@dataclass
class Page(HTMLParser):
    """What one page links to, what it loads, and the anchors it has."""

    path: Path
    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.resources += [values[name] for name in LOADED.get(tag, ()) if name in values]
        if tag == "link" and LOADED_LINKS & set(values.get("rel", "").split()):
            self.resources.append(values["href"])


def read_site(folder: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(folder.rglob("*.html"))}


def broken_links(folder: Path) -> list[str]:
    """Return every link or resource within the site whose file or anchor does not exist."""
    pages = read_site(folder)
    broken = []
    for page in pages.values():
        for url in page.links + page.resources:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            base = folder if parts.path.startswith("/") else page.path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            has_anchor = not anchor or target not in pages or anchor in pages[target].anchors
            if not target.is_file() or not has_anchor:
                broken.append(f"{page.path.name}: {url}")
    return broken


def external_resources(folder: Path) -> list[str]:
    """Return everything that a page would load from another origin."""
    pages = read_site(folder).values()
    urls = [(page.path.name, url) for page in pages for url in page.resources]
    return [f"{name}: {url}" for name, url in urls if urlsplit(url).netloc]
