"""The examples in docstrings run, without a network, and say what comes out."""

import ast
import doctest
import importlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from guides import ROOT, source_files


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "lightning_sym" else ("lightning_sym", *parts)
    return ".".join(part for part in parts if part != "__init__")


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of what has examples, with its docstring."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node)
        if text and ">>> " in text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        yield from docstrings(child, f"{name}.{child.name}" if hasattr(child, "name") else name)


EXAMPLES = [
    pytest.param(module_name(file), text, id=name)
    for file in source_files()
    if ">>> " in (source := file.read_text(encoding="utf-8"))
    for name, text in docstrings(ast.parse(source), module_name(file))
]


def test_all_examples_are_found() -> None:
    lines = sum(file.read_text(encoding="utf-8").count(">>> ") for file in source_files())
    assert lines == sum(text.count(">>> ") for _, text in (one.values for one in EXAMPLES))
    assert len(EXAMPLES) > 100


@pytest.mark.parametrize(("module", "text"), EXAMPLES)
def test_an_example_says_what_comes_out(
    module: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("An example of a docstring takes something from the network.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    namespace = dict(vars(importlib.import_module(module)))
    test = doctest.DocTestParser().get_doctest(text, namespace, request.node.callspec.id, module, 0)
    said: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
