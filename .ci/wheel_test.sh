#!/usr/bin/env bash
# Build the wheel, compare it with the tree, and run it from another folder, where the source is not in reach.
# usage: .ci/wheel_test.sh [PYTHON]   a Python that has the dependencies; they are used from there, not installed again
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

# From a copy: setuptools would pack what an earlier build left in build/. What git ignores stays out.
mkdir "$work/source" "$work/elsewhere"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [ -e "$file" ]; then echo "$file"; fi
done >"$work/files"
tar --create --files-from "$work/files" | tar --extract --directory "$work/source"

isolation=()
if "$python" -c "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77" 2>/dev/null; then
    isolation=(--no-build-isolation) # nothing to download
fi
"$python" -m pip wheel --quiet --no-deps "${isolation[@]}" --wheel-dir "$work" "$work/source"

"$python" - "$work"/lightning_sym-*.whl "$work/files" <<'COMPARE'
import sys
import zipfile
from pathlib import Path

wheel, listed = map(Path, sys.argv[1:])
packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
tree = set()
for file in map(Path, listed.read_text().splitlines()):
    if file.suffix in (".py", ".yaml") or file.name == "py.typed":
        if file.parts[0] == "lightning_sym":
            tree.add(file.as_posix())
        elif file.parts[0] in ("callbacks", "datamodules", "recipes"):
            tree.add(f"lightning_sym/{file.as_posix()}")
for what, names in ("missing from", tree - packed), ("not in the tree but in", packed - tree):
    if names:
        sys.exit(f"{what} {wheel.name}: {', '.join(sorted(names))}")
print(f"{wheel.name} holds the {len(tree)} files of the tree")
COMPARE

# The new environment sees the dependencies, but not the editable install: files that end in .pth count only in
# its own site-packages.
"$python" -m venv --without-pip "$work/venv"
"$python" -c "import sysconfig; print(sysconfig.get_path('purelib')); print(sysconfig.get_path('platlib'))" \
    >"$(echo "$work"/venv/lib/python*/site-packages)/dependencies.pth"
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-deps --no-index "$work"/lightning_sym-*.whl

cd "$work/elsewhere"
"$work/venv/bin/python" - "$work/venv" <<'IMPORT'
import importlib
import sys
from importlib.metadata import version
from pathlib import Path

for name in ("", ".callbacks", ".datamodules", ".networks", ".recipes", ".tasks", ".cli"):
    module = importlib.import_module(f"lightning_sym{name}")
    assert Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
assert importlib.import_module("lightning_sym").__version__ == version("lightning_sym")
IMPORT
"$work/venv/bin/lightning-sym" recipes
"$work/venv/bin/lightning-sym" fit --config zoo/digits_mlp --trainer.fast_dev_run true --trainer.accelerator cpu >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }
cd "$OLDPWD"
FIRST_HOUR_BIN="$work/venv/bin" OMP_NUM_THREADS=1 "$python" -m pytest -m long -n 2 --durations 5 tests/recipes/test_first_hour.py
echo "the wheel runs from another folder, and so do the scripts of examples/first_hour"
