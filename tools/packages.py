"""List the packages of the API reference, and link all packages into one tree for tools."""

import ast
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TOP = ("callbacks", "datamodules", "recipes")  # top-level folders, imported as lightning_sym.<name>
_SCRIPTS = ("benchmarks", "examples", "tools")


def link_packages(folder: Path) -> None:
    """Make a folder of links with all packages below ``lightning_sym``, as they are imported."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lightning_sym").mkdir(parents=True)
    for part in [*sorted((ROOT / "lightning_sym").iterdir()), *(ROOT / name for name in _TOP)]:
        (folder / "lightning_sym" / part.name).symlink_to(part)


def link_scripts(folder: Path) -> None:
    """Add links to the scripts, which import each other by their bare names, for checkers."""
    for part in (each for name in _SCRIPTS for each in (ROOT / name).iterdir()):
        if part.suffix == ".py" or (part / "__init__.py").exists():
            (folder / part.name).symlink_to(part)


def api_pages() -> dict[str, tuple[str, str]]:
    """Return the summary line and the page of each public package, by import name.

    Public are packages with ``__all__``, and the modules of ``lightning_sym`` itself.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    files = {name: _folder(name) / "__init__.py" for name in settings["tool"]["setuptools"]["packages"]}
    files = {name: file for name, file in files.items() if "__all__" in file.read_text(encoding="utf-8")}
    modules = (ROOT / "lightning_sym").glob("[a-z]*.py")
    files |= {f"lightning_sym.{file.stem}": file for file in modules}
    files.pop("lightning_sym", None)
    found = {}
    for name, file in sorted(files.items()):
        says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        found[name] = (says, f"# {name}\n\n::: {name}\n")
    return found


def _folder(name: str) -> Path:
    first, _, rest = name.partition(".")
    path = rest.replace(".", "/")
    return ROOT / path if rest.partition(".")[0] in _TOP else ROOT / first / path


if __name__ == "__main__":
    link_packages(ROOT / ".links")
    link_scripts(ROOT / ".links")
