"""Hooks of MkDocs for features that plain Markdown lacks.

Pages are unchanged in the repository. Formulas become MathML. A link to a file outside ``docs/`` leads to a
page with that file. Each package gets a page in the API reference.
"""

import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
from mathematics import blocks_to_mathml  # noqa: E402
from notebooks import to_markdown  # noqa: E402
from packages import api_pages, link_packages  # noqa: E402

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash", ".cff": "yaml"}
_LARGEST = 100_000  # characters of a shown file; longer ones are truncated


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the folder of links to the packages, and add the API's pages to the navigation."""
    link_packages(ROOT / ".links")
    for entry in config.nav or []:
        if isinstance(entry, dict) and "API" in entry:
            entry["API"] = ["api/index.md", *(f"api/{name}.md" for name in api_pages())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the API's pages, and pages for linked files outside ``docs/``, which the search excludes."""
    pages = api_pages()
    rows = [f"| [`{name}`]({name}.md) | {says} |" for name, (says, _) in pages.items()]
    index = "# API\n\nThe public packages, from their docstrings.\n\n| package | content |\n|---|---|\n"
    files.append(File.generated(config, "api/index.md", content=index + "\n".join(rows) + "\n"))
    for name, (_, text) in pages.items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    shown: set[Path] = set()
    pages_on_disk = [file for file in files if file.abs_src_path and file.is_documentation_page()]
    waiting = [(Path(str(file.abs_src_path)), file.content_string) for file in pages_on_disk]
    while waiting:
        origin, text = waiting.pop()
        for _, target, _ in _LINK.findall(text):
            path = _outside(origin, target)
            if path is not None and path not in shown:
                shown.add(path)
                content = _shown(path)
                unsearched = f"---\nsearch: {{exclude: true}}\n---\n{content}"
                files.append(File.generated(config, _page_of(path), content=unsearched))
                if path.suffix == ".md":
                    waiting.append((path, content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Convert formulas to MathML, the Markdown of details, and links to files outside ``docs/`` to links to pages."""
    here = page.file.src_uri
    shows_file = here.startswith("source/")
    origin = ROOT / here.removeprefix("source/").removesuffix(".md") if shows_file else ROOT / "docs" / here

    def inside(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target:
            return match[0]
        path = _outside(origin, target)
        if path is None and shows_file:  # a link from a file outside docs/ to a page
            path = (origin.parent / target).resolve()
            if not path.is_file():  # code that looks like a link
                return match[0]
            there = path.relative_to(ROOT / "docs").as_posix()
        elif path is None:
            return match[0]
        else:
            there = _page_of(path)
        return f"{match[1]}{posixpath.relpath(there, posixpath.dirname(here))}{match[3]}"

    if _is_code(origin):
        return blocks_to_mathml(markdown)
    # Without the attribute, Markdown between the tags, such as a table, is not converted.
    return blocks_to_mathml(_LINK.sub(inside, markdown).replace("<details>", '<details markdown="1">'))


def on_page_content(html: str, **_: Any) -> str:
    """Keep the dashes of an option with its name in line breaks of code and of commands, which wrap."""
    option = r'<span class="nobreak">\g<0></span>'
    code = r'<code>[^<]*</code>|<div class="language-bash highlight">.*?</div>'
    return re.sub(code, lambda code: re.sub(r"--\w", option, code[0]), html, flags=re.DOTALL)


def _is_code(path: Path) -> bool:
    return path.suffix in _LANGUAGES


def _outside(origin: Path, target: str) -> Path | None:
    """Return the file that a link leads to, if it is in the repository and not a page of ``docs/``."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return None
    path = Path(os.path.normpath(origin.parent / target))
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs") or not path.exists():
        return None
    return path


def _page_of(path: Path) -> str:
    """Return the name of the page of a file."""
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def _shown(path: Path) -> str:
    """Return the page of a file: Markdown unchanged, code, notebooks with outputs, a folder as a list of files."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir() if not one.name.startswith(("_", ".")))
        return f"# {name}/\n\nA folder of the repository.\n\n" + "".join(f"- `{one}`\n" for one in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return to_markdown(json.loads(text))
    if len(text) > _LARGEST:
        text = text[:_LARGEST] + "\n... (truncated)\n"
    return f"# {path.name}\n\n`{name}` in the repository.\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"
