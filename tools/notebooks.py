"""Run the notebooks of examples/notebooks without Jupyter, and convert them to Markdown.

    python tools/notebooks.py    # run all, and write their outputs into the files

The code cells of a notebook run in one process and a temporary folder. Outputs are printed text and the value of the
last expression of a cell: its table in HTML, its picture, or its text.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
_KINDS = (("image/png", "_repr_png_"), ("text/html", "_repr_html_"))


def run(notebook: dict[str, Any]) -> None:
    """Run the code cells in the current folder, and set their outputs.

    Args:
        notebook: Content of the file; changed in place.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {count}", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
        cell["execution_count"], cell["outputs"] = count, []
        if printed.getvalue():
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
        if value is not None:
            result = {"output_type": "execute_result", "metadata": {}, "execution_count": count, "data": _data(value)}
            cell["outputs"].append(result)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _data(value: object) -> dict[str, Any]:
    """Return the forms in which a notebook shows a value."""
    data: dict[str, Any] = {"text/plain": _lines(re.sub(r" at 0x\w+", "", repr(value)))}
    for kind, method in _KINDS:
        show = getattr(value, method, None)
        if callable(show) and (shown := show()) is not None:
            data[kind] = base64.b64encode(shown).decode() if isinstance(shown, bytes) else _lines(shown)
    return data


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: texts, code, and outputs.

    Args:
        notebook: Content of the file.
    """
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", ())})
            if "image/png" in data:
                parts.append(f'<img alt="Figure of the cell above" src="data:image/png;base64,{data["image/png"]}">')
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run all notebooks and write their outputs."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {os.path.getsize(path) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
