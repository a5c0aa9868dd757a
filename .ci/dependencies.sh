#!/usr/bin/env bash
# Install the wheel into clean environments, with the oldest dependencies that pyproject.toml allows and with the newest
# that pip finds, and run a smoke test in each. Takes minutes and gigabytes; not a part of .ci/run.
# usage: .ci/dependencies.sh [PYTHON] [oldest|newest]...   both unless named; SMALL=1 reads what would be installed only
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}")
shift || true
wanted=("${@:-}")
[ -n "${wanted[0]}" ] || wanted=(oldest newest)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" .
"$python" tools/lowest.py >"$work/oldest.txt"
: >"$work/newest.txt"

for set in "${wanted[@]}"; do
    [ -f "$work/$set.txt" ] || { echo "oldest or newest, got $set" >&2; exit 2; }
    "$python" -m venv "$work/$set"
    own=$work/$set/bin
    if [ -n "${SMALL:-}" ]; then
        "$own/python" -m pip install --quiet --dry-run --report - --requirement "$work/$set.txt" "$work"/lightning_sym-*.whl |
            "$own/python" -c '
import json, sys
print(*sorted("{name}=={version}".format(**one["metadata"]) for one in json.load(sys.stdin)["install"]), sep="\n")'
    else
        "$own/python" -m pip install --quiet --requirement "$work/$set.txt" "$work"/lightning_sym-*.whl
        "$own/python" -m pip check
        mkdir "$work/elsewhere"
        (
            cd "$work/elsewhere"
            "$own/lightning-sym" recipes >/dev/null
            for recipe in zoo/digits_mlp matching/mnist5k_mlp equivariance/digits_digit spectra/digits_mlp; do
                echo "$set: $recipe"
                "$own/lightning-sym" fit --config "$recipe" --trainer.fast_dev_run true --trainer.accelerator cpu >log 2>&1 ||
                    { cat log; exit 1; }
            done
            "$own/lightning-sym" symmetry torchvision:resnet18 >/dev/null
        )
        "$own/python" -m pip freeze >"$work/$set.frozen"
        rm -rf "$work/elsewhere"
    fi
    rm -rf "${work:?}/$set"
    echo "$set: well"
done
