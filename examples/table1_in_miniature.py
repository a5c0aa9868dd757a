"""Table 1 of van der Ouderaa et al. (2023) in miniature: which networks can tell digits, and where they are.

Five models are trained on two tasks, the digit alone and the digit with its quadrant, with three seeds each: fully
connected and convolutional networks, by maximum a posteriori (MAP) and with prior precisions learned by the evidence,
and the relaxed network, which has both kinds of paths in every layer and learns which ones to use.

    python examples/table1_in_miniature.py --jobs 2

Every run is a shipped recipe with options, in a folder of its own. A run that is complete is not made again, and one
that was interrupted goes on from its last epoch. ``table1.csv`` (a row for every run), ``table1.json`` (with means) and
``table1.png`` are written to the same folder.
"""

import argparse
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

TASKS = {"digit": "equivariance/digits_digit", "digit and quadrant": "equivariance/digits_quadrant"}
MAP = "--trainer.callbacks.burn_in=null"
CONV = ("--model.network.paths=[conv]",)
# At the recipes' learning rate dense layers collapse to 0; at this one they have fitted every image after 60 epochs.
FC = (
    *("--model.network.paths=[fc]", "--model.optimizer.lr=0.002"),
    *("--trainer.max_epochs=120", "--model.lr_scheduler.T_max=120"),
)
MODELS = {
    "MAP FC": (*FC, MAP),
    "MAP CONV": (*CONV, MAP),
    "evidence FC": FC,
    "evidence CONV": CONV,
    "evidence F-FC+CONV": (),
}
LEARNED = "evidence F-FC+CONV"


def run(task: str, model: str, seed: int, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """Train one model, or go on with it, and return its row; raise RuntimeError if the run fails."""
    results = folder / "results" / "layers.json"
    if not results.is_file():
        going_on = (folder / "checkpoints" / "last.ckpt").is_file()
        command = [
            *(str(Path(sys.executable).with_name("lightning-sym")), "fit", "--config", TASKS[task]),
            *("--run_dir", str(folder), "--seed_everything", str(seed), "--trainer.enable_progress_bar=false"),
            *(("--ckpt_path", "last") if going_on else ("--overwrite", "true")),
            *MODELS[model],
            *options,
        ]
        start = time.perf_counter()
        # Runs side by side must not share out the same cores twice.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        done = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{model} on {task}, seed {seed}, in {folder} failed: {done.stderr.strip()}")
        print(f"{task}, {model}, seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    found = json.loads(results.read_text())
    return {
        "task": task,
        "model": model,
        "seed": seed,
        "test_accuracy": found["test"]["accuracy"],
        "test_loss": found["test"]["loss"],
        **{f"negative_{name}": -found["evidence"][name] for name in ("log_marginal_likelihood", "log_likelihood")},
        **{name: found["evidence"][name] for name in ("log_determinant", "scatter")},
        "parameters": sum(row["parameters"] for row in found["rows"]),
        "conv_shares": [round(r["relative"], 4) for r in found["rows"] if r["type"] and r["path"].startswith("conv")],
        "types": list(found["types"].values()),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard deviation over seeds, by task and model."""
    found = []
    for task in TASKS:
        for model in MODELS:
            own = [row for row in rows if (row["task"], row["model"]) == (task, model)]
            if own:
                accuracy = [100 * row["test_accuracy"] for row in own]
                shares = zip(*(row["conv_shares"] for row in own), strict=True)
                found.append(
                    {
                        "task": task,
                        "model": model,
                        "seeds": len(own),
                        "test_accuracy_percent": statistics.mean(accuracy),
                        "deviation": statistics.stdev(accuracy) if len(own) > 1 else 0.0,
                        "negative_evidence_per_datum": statistics.mean(
                            row["negative_log_marginal_likelihood"] for row in own
                        ),
                        "conv_shares": [round(statistics.mean(layer), 3) for layer in shares],
                    }
                )
    return found


def save(file: Path, content: bytes) -> None:
    """Write a file so that it appears whole or not at all."""
    temporary = file.with_name(f".{file.name}.part")
    temporary.write_bytes(content)
    temporary.replace(file)


def save_all(rows: Sequence[Mapping[str, Any]], means: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write ``<file>.csv``, ``<file>.json`` and ``<file>.png``."""
    text, image = io.StringIO(), io.BytesIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    save(file.with_suffix(".csv"), text.getvalue().encode())
    save(file.with_suffix(".json"), json.dumps({"means": means, "rows": rows}, indent=1).encode())
    picture(rows, means).savefig(image, format="png")
    save(file.with_suffix(".png"), image.getvalue())


def picture(rows: Sequence[Mapping[str, Any]], means: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the accuracies of all runs, and the share of convolutions in each layer of the learned networks."""
    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=120)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    colors = dict(zip(MODELS, ("#c8553d", "#2f6690") * 2 + ("#588b5a",), strict=True))
    for axes, task in zip((left, middle), TASKS, strict=True):
        for place, model in enumerate(MODELS):
            mean = [row for row in means if (row["task"], row["model"]) == (task, model)]
            if not mean:
                continue
            value = mean[0]["test_accuracy_percent"]
            axes.barh(place, value, color=colors[model], alpha=0.85 if "evidence" in model else 0.45)
            own = [100 * r["test_accuracy"] for r in rows if (r["task"], r["model"]) == (task, model)]
            axes.plot(own, [place] * len(own), "|", color="#1b1b1b", ms=12)
            axes.text(2, place, f"{value:.1f}", va="center", color="white", weight="bold")
        axes.set_yticks(range(len(MODELS)), MODELS if axes is left else [""] * len(MODELS))
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_title(f"label: {task}", fontsize=10)
        axes.set_xlabel("test accuracy, %")
    for task, marker in zip(TASKS, "os", strict=True):
        for row in rows:
            if (row["task"], row["model"]) == (task, LEARNED):
                shares = [100 * share for share in row["conv_shares"]]
                right.plot(shares, color="#588b5a", alpha=0.25, lw=1)
        mean = [row for row in means if (row["task"], row["model"]) == (task, LEARNED)]
        if mean:
            dashed = "-" if task == "digit" else "--"
            right.plot([100 * v for v in mean[0]["conv_shares"]], dashed, color="#588b5a", marker=marker, label=task)
    right.set_ylim(0, 102)
    right.set_xlabel("layer")
    right.set_ylabel("CONV, % of relative effective parameters")
    right.set_title("what the relaxed network learned", fontsize=10)
    if right.lines:
        right.legend(fontsize=8)
    return figure


def main() -> None:
    """Make all runs that are missing, then table and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/table1-in-miniature"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side, a thread each")
    parser.add_argument("options", nargs="*", help="for every run, for example --trainer.max_epochs=2 after --")
    arguments = parser.parse_args()
    wanted = [(task, model, seed) for seed in range(arguments.seeds) for task in TASKS for model in MODELS]

    def make(one: tuple[str, str, int]) -> dict[str, Any]:
        name = "-".join((*(part.lower().replace(" ", "-") for part in one[:2]), str(one[2])))
        return run(*one, arguments.runs / name, arguments.options)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(make, wanted))
    means = summary(rows)
    save_all(rows, means, arguments.runs / "table1")
    for row in means:
        print(
            f"{row['task']:20} {row['model']:20} {row['test_accuracy_percent']:6.2f} ± {row['deviation']:.2f} %   "
            f"-L/N {row['negative_evidence_per_datum']:.3f}   CONV {row['conv_shares']}"
        )
    print(f"table and picture: {arguments.runs / 'table1.csv'}, {arguments.runs / 'table1.png'}")


if __name__ == "__main__":
    main()
