"""Count stilted phrases in guides, docstrings, comments, messages and recipe headers.

    python tools/prose.py ROOT [--worst 20] [--only GLOB] [--allow FILE] [--write FILE] [--limits FILE]

Rates are hits per 1,000 words, by folder. ``--write`` saves them. ``--limits`` exits with 1 where a rate exceeds both
its target and the saved rate, so that rates can only fall. Not counted: code, generated pages, lines that contain
``prose: ok``, and matches of the regular expressions in the file of ``--allow``.
"""

import argparse
import ast
import fnmatch
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

# By name: the target per 1,000 words, and a regular expression in parts.
PATTERNS: dict[str, tuple[float, str]] = {
    "what": (1.0, r"\b[Ww]hat\b"),
    "which": (2.0, r"\b(?:of|in|on|by|to|with|from|for|at|behind|between|over|after|under) which\b|\bwhose\b"),
    "opening": (
        0.2,
        r'^[rR]?"""(?:(?:Return|Yield|Say|Note|Tell|Write) (?:(?:of|in|on|to|for|with|by|from|between) )?'
        r"(?:what|which|where|how|who)|What|Which|Where|Who|How|Of)\b",
    ),
    "verb": (
        0.7,
        r"\b(?:(?:chang|swap)\w* (?:their |its )?places?|stands?|stood|lies?|com(?:es?|ing) (?:out|in|on top)|"
        r"came|put(?:s|ting)? out|tak(?:es?|en|ing) (?:off|up)|meets?|met|hand(?:s|ed)? (?:on|over)|"
        r"go(?:es)? on|gone on|(?:is|are) left(?! out| to)|turn(?:s|ed)? (?:by|towards|to))\b",
    ),
    "idiom": (
        1.0,
        r"\b(?:at hand|as wholes|anew|beside|as (?:it|they) (?:is|are|was|were)|(?:of|for) (?:its|their|your) own|"
        r"of (?:ours|yours|anyone's)|in place of|alike|likewise|and the like|the other one|(?:say|says|said) so|"
        r"(?:which|that) is said|nothing else|whatever|meanwhile|to its end)\b|, too\b",
    ),
    "fragment": (
        0.3,
        r"(?:^[-*|# ]*|[.:;] )(?:Of (?!course)|So (?:is|are|do|does|has|have|run)\b|Nor\b|As (?:do|is|are)\b)",
    ),
    "term": (
        0.0,
        r"\b(?:tilt(?:s|ed|ing)?|proved|unproved|measured anew|elements? tried|dense cells?|free magnitudes?|"
        r"order of (?:the |their )?(?:units|channels)|weights? against one another)\b",
    ),
}
ROOTS = ("*.md", "docs/**/*.md", "*/**/*.py", "recipes/**/*.yaml")
# Generated pages, which change with their sources, and this file, whose patterns would match themselves.
SKIPPED = {"docs/results.md", "docs/recipes.md", "tools/prose.py"}
IGNORED = {".venv", ".links", "tests", "build", "site", "runs", "shared", "node_modules"}
WORD = r"[A-Za-z][A-Za-z'-]*"
CODE = r"``[^`]*``|`[^`]*`|\$[^$]*\$|\]\([^)]*\)|</?\w[^>]*>|https?://\S+|:\w+:`[^`]*`"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a file with their line numbers.

    Python: docstrings, comments, and strings of at least four words. Markdown: all but code blocks. YAML: whole-line
    comments.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if path.suffix != ".py":
        fence = False
        for number, line in enumerate(lines, 1):
            fence ^= bool(re.match(r"\s*(```|~~~)", line))
            if not fence and (path.suffix == ".md" or line.startswith("#")):
                yield number, line.lstrip("# ")
        return
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if ast.get_docstring(node) else None
            if isinstance(first, ast.Expr):
                docstrings.add(first.value)
                yield from ((n, lines[n - 1]) for n in range(first.lineno, (first.end_lineno or first.lineno) + 1))
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in docstrings:
            continue
        if len(re.findall(WORD, node.value)) > 3:
            yield from ((node.lineno, line) for line in node.value.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def main() -> None:
    """Print the rates of each folder and the worst lines, and compare the rates with the saved ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--worst", type=int, default=20, help="number of lines to print")
    parser.add_argument("--only", default="*", help="glob of the files to read, relative to ROOT")
    parser.add_argument("--allow", type=Path, help="file of regular expressions, one on a line, that are not counted")
    parser.add_argument("--write", type=Path, help="save the rates in this file")
    parser.add_argument("--limits", type=Path, help="file of saved rates that must not be exceeded")
    args = parser.parse_args()

    allowed = "|".join([CODE, *filter(None, args.allow.read_text().splitlines() if args.allow else ())])
    words: Counter[str] = Counter()
    hits: dict[str, Counter[str]] = defaultdict(Counter)
    found: list[tuple[int, str]] = []
    for path in sorted({path for glob in ROOTS for path in args.root.glob(glob)}):
        name = path.relative_to(args.root)
        if IGNORED & set(name.parts) or str(name) in SKIPPED or not fnmatch.fnmatch(str(name), args.only):
            continue
        folder = "recipes" if path.suffix == ".yaml" else "/".join(name.parts[:-1][:2]) or name.name
        for number, line in prose(path):
            line = "" if "prose: ok" in line else re.sub(allowed, " ", line.strip())
            words[folder] += len(re.findall(WORD, line))
            counts = {kind: len(re.findall(pattern, line)) for kind, (_, pattern) in PATTERNS.items()}
            if kinds := [kind for kind, count in counts.items() if count]:
                hits[folder].update(counts)
                found.append((sum(counts.values()), f"{name}:{number}: {line[:130]}  ({', '.join(kinds)})"))

    rates = {f: {k: round(1000 * hits[f][k] / count, 2) for k in PATTERNS} for f, count in words.items() if count}
    print(f"{'':28}{'words':>8}" + "".join(f"{kind:>10}" for kind in PATTERNS))
    for folder in sorted(rates, key=lambda folder: -sum(rates[folder].values())):
        print(f"{folder:28}{words[folder]:8}" + "".join(f"{rate:10.2f}" for rate in rates[folder].values()))
    totals = [sum(counts[kind] for counts in hits.values()) for kind in PATTERNS]
    print(f"{'all (hits)':28}{words.total():8}" + "".join(f"{total:10}" for total in totals))
    print(f"{'target':36}" + "".join(f"{target:10.2f}" for target, _ in PATTERNS.values()), end="\n\n")
    for count, text in sorted(found, key=lambda one: -one[0])[: args.worst]:
        print(count, text)

    if args.write:
        args.write.write_text(json.dumps(rates, indent=1, sort_keys=True) + "\n")
    if args.limits:
        saved = json.loads(args.limits.read_text())
        excess = []
        for folder in rates:
            for kind, (target, _) in PATTERNS.items():
                most = max(saved.get(folder, {}).get(kind, 0), target)
                # One hit more is allowed: rates also rise where text is deleted.
                if hits[folder][kind] > most * words[folder] / 1000 + 1:
                    excess.append(f"{folder}: {hits[folder][kind]} x {kind}, at most {most} per 1,000 words")
        if excess:
            sys.exit("\n".join(["prose:", *excess]))


if __name__ == "__main__":
    main()
