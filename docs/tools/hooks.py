"""What the site adds to MkDocs: pages of the repository's root, examples, links out of ``docs/``, drawings in its own
colours."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
#: Pages of the repository's root, and what the site calls them.
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
#: Examples, and the pages that show them.
EXAMPLES = {
    "examples/README.md": "examples/index.md",
    **{
        name: f"{name}.md"
        for path in sorted((ROOT / "examples").rglob("*.*"))
        if path.suffix in (".py", ".yaml", ".sbatch") and path.name != "__init__.py"
        for name in [path.relative_to(ROOT).as_posix()]
    },
}
FROM_REPOSITORY = FROM_ROOT | EXAMPLES
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
_IN_REPOSITORY = {site: name for name, site in FROM_REPOSITORY.items()}
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):(<code[^>]*>)(?:~[\w.]*\.)?")
_PAGE_NAME = re.compile(r"(?<![\w/\"])docs/([\w/]+)\.md(#[\w-]+)?")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and the examples."""
    for name, site in FROM_REPOSITORY.items():
        text, language = (ROOT / name).read_text(), _LANGUAGES.get(Path(name).suffix)
        shown = text if language is None else f"# {name}\n\n```{language}\n{text}```\n"
        files.append(File.generated(config, site, content=shown))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links lead to pages of the site, or are left out; drawings stand in the page, where they follow its colours."""
    site = page.file.src_uri
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])  # it has no neighbors to list
    here = posixpath.dirname(_IN_REPOSITORY.get(site, f"docs/{site}"))
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_rewrite(markdown[end : fence.start()], here, site), fence[0]]
        end = fence.end()
    return "".join([*parts, _rewrite(markdown[end:], here, site)])


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings name code and begin examples as Sphinx does, and name pages by their paths: shown as elsewhere."""
    if not page.file.src_uri.startswith("api/"):
        return html
    html = _ROLE.sub(r"\1", html).replace("<p>::</p>", "").replace("::</p>", ":</p>")
    return _PAGE_NAME.sub(r'<a href="../\1.html\2">\1</a>', html)


def _rewrite(text: str, here: str, site: str) -> str:
    def link(found: re.Match[str]) -> str:
        name, target = found.groups()
        target = _on_site(target, here, site)
        return f"[{name}]({target})" if target else name

    def image(found: re.Match[str]) -> str:
        drawing = ROOT / posixpath.normpath(posixpath.join(here, found[2]))
        svg = drawing.read_text() if drawing.suffix == ".svg" and drawing.exists() else ""
        if 'class="drawn"' in svg:
            return f'<figure class="drawn">{svg}</figure>'
        return f"![{found[1]}]({_on_site(found[2], here, site)})"

    return _LINK.sub(link, _IMAGE.sub(image, text))


def _on_site(target: str, here: str, site: str) -> str:
    """Where a link of the repository leads on the site; empty for a file that the site does not have."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return target
    path, sharp, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(here, path))
    if path in FROM_REPOSITORY:
        path = FROM_REPOSITORY[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif (ROOT / path).exists():
        return ""
    return posixpath.relpath(path, posixpath.dirname(site) or ".") + sharp + anchor
