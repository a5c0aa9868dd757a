"""Time of a zoo's epoch, compared with a hand-written loop that trains the same members one after another.

Same data, same networks, same optimizer, same run. Variants take turns, so that drifts in the machine's speed
affect all. Run it alone on the machine::

    python benchmarks/zoo.py                  # CPU: Myrtle CNN x 8 on MNIST5k, MLP x 32 on the 8x8 digits
    python benchmarks/zoo.py --part steps     # single training steps, ours and plain in turn: least noise
    python benchmarks/zoo.py --part short     # LeNet x 4, MLP x 32, processor time of one thread: any machine will do
    python benchmarks/zoo.py --device cuda    # ResNet-20 x 32 on random 3x32x32 images

Prints a table and writes it to ``benchmarks/results/zoo-<device>.json`` and ``.md``.

Variants:
    plain       one network after another; batches by indexing a normalised tensor in memory (the fast hand-written
                way)
    dataloader  the same with ``torch.utils.data.DataLoader`` over a ``TensorDataset``, as in most scripts
    loop, vmap  ``ZooTask`` under Lightning's Trainer, with its data, metrics and logging
    ..._cl      the same in channels_last layout
"""

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _timing import RESULTS, parser, result, row, write
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from lightning_sym.datamodules import DigitsDataModule, ImageDataModule, LabelledImages, MNIST5kDataModule
from lightning_sym.networks import CIFARResNet, LeNet5, MultiLayerPerceptron, MyrtleCNN, Network
from lightning_sym.population import LoopPopulation, carry_gradients
from lightning_sym.tasks import ZooTask
from lightning_sym.tasks.losses import CrossEntropy

CLOCK = time.perf_counter  # processor time in the part "short"


class RandomImagesDataModule(ImageDataModule):
    """Random colour images of CIFAR's size, for timing without a download."""

    source_shape = (3, 32, 32)
    source_classes = 10

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """Return 4,000 training and 100 test images."""
        source = torch.Generator().manual_seed(0)

        def make(count: int) -> LabelledImages:
            images = torch.randint(256, (count, 3, 32, 32), generator=source, dtype=torch.uint8)
            return LabelledImages(images, torch.randint(10, (count,), generator=source))

        return make(4000), make(100)


class Stopwatch:
    """Seconds by activity."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("compute", "data", "logging"), 0.0)

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed version of a function."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = CLOCK()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[what] += CLOCK() - start

        return run


class TimedTask(ZooTask):
    """A ``ZooTask`` that records the time spent on its parts."""

    def on_fit_start(self) -> None:  # noqa: D102
        self.watch = Stopwatch()
        self.train_metrics.add_step = self.watch.timed("logging", self.train_metrics.add_step)  # type: ignore[method-assign]
        self.on_train_epoch_end = self.watch.timed("logging", self.on_train_epoch_end)  # type: ignore[method-assign]
        connector = self.trainer._logger_connector
        for name in ("update_train_epoch_metrics", "update_train_step_metrics"):
            setattr(connector, name, self.watch.timed("logging", getattr(connector, name)))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:  # noqa: D102
        step = super().optimizer_step

        def run() -> None:
            step(*args, **kwargs)
            _synchronize(self.device)

        self.watch.timed("compute", run)()


class TimedLoader:
    """A loader with the time of ``next`` recorded as data."""

    def __init__(self, loader: Any, task: TimedTask) -> None:
        self.loader, self.task, self.sampler, self.batch_sampler = loader, task, loader.sampler, None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        batches = iter(self.loader)
        while True:
            batch = self.task.watch.timed("data", lambda: next(batches, None))()
            if batch is None:
                return
            yield batch


class EpochTimer(Callback):
    """Time of the last training epoch, including logging at its end."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        _synchronize(pl_module.device)
        self.start = CLOCK()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        _synchronize(pl_module.device)
        self.seconds = CLOCK() - self.start
        self.shares = {what: seconds / self.seconds for what, seconds in pl_module.watch.seconds.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_task(
    network: Network, data: ImageDataModule, members: int, steps: int, device: str, **kwargs: Any
) -> tuple[float, dict[str, float]]:
    """Return the seconds of an epoch of ``steps`` steps, and the shares of work other than computation."""
    task = TimedTask(network, members=members, keep="last", **kwargs)
    timer = EpochTimer()
    make = type(data).train_dataloader
    data.train_dataloader = lambda: TimedLoader(make(data), task)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            limit_train_batches=steps,
            limit_val_batches=0,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            default_root_dir=folder,
            callbacks=[timer],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(task, data)
    # The metrics are added inside the optimizer's closure and thus counted as "compute"; the rest is Lightning's loop.
    data_and_logging = timer.shares["data"] + timer.shares["logging"]
    return timer.seconds, {
        "data_and_logging": data_and_logging,
        "lightning": 1 - timer.shares["compute"] - timer.shares["data"],
    }


def run_plain(
    network: Network, data: ImageDataModule, members: int, steps: int, device: str, *, loader: bool, channels_last: bool
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a hand-written loop for the same members and steps."""
    raw, labels = data.split_tensors("train")
    images = data.normalize(raw).to(device)
    labels = labels.to(device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    networks = [network.fresh(number).to(device).to(memory_format=layout) for number in range(members)]
    optimizers = [torch.optim.Adam(member.parameters()) for member in networks]
    size = data.hparams["batch_size"]

    def batches(seed: int) -> Any:
        if loader:
            dataset = torch.utils.data.TensorDataset(images, labels)
            source = torch.Generator().manual_seed(seed)
            return torch.utils.data.DataLoader(dataset, size, shuffle=True, drop_last=True, generator=source)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(device)
        chunks = order[: len(order) // size * size].view(-1, size)
        return ((images[chunk], labels[chunk]) for chunk in chunks)

    _synchronize(torch.device(device))
    start = CLOCK()
    for number, (member, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
        losses: list[Tensor] = []
        for step, (inputs, targets) in enumerate(batches(number)):
            if step == steps:
                break
            if channels_last:
                inputs = inputs.contiguous(memory_format=layout)
            optimizer.zero_grad()
            loss = F.cross_entropy(member(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
    _synchronize(torch.device(device))
    return CLOCK() - start, {}


def measure(
    title: str,
    network: Network,
    data: ImageDataModule,
    members: int,
    steps: int,
    device: str,
    rounds: int,
    variants: list[str],
) -> dict[str, Any]:
    """Time the variants in turn and return medians and spreads."""
    data.setup("fit")
    runs: dict[str, Callable[[], tuple[float, dict[str, float]]]] = {}
    for variant in variants:
        name, _, layout = variant.partition("_")
        if name in ("plain", "dataloader"):
            runs[variant] = lambda name=name, layout=layout: run_plain(
                network, data, members, steps, device, loader=name == "dataloader", channels_last=layout == "cl"
            )
        else:
            runs[variant] = lambda name=name, layout=layout: run_task(
                network, data, members, steps, device, execution=name, channels_last=layout == "cl"
            )
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    shares: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for number in range(-1, rounds):  # the first round warms up
        for variant in variants if number % 2 else reversed(variants):  # alternate the order
            seconds, share = runs[variant]()
            if number >= 0:
                times[variant].append(seconds)
                shares[variant].append(share)
            print(f"  {title}: {variant:12} {seconds:7.2f} s", flush=True)
    rows = [row(variant, times[variant], times["plain"]) for variant in variants]
    note = f"{members} members, {steps} steps of batch {data.hparams['batch_size']} each, seconds for all."
    for own in rows:
        if own["variant"].startswith(("loop", "vmap")):
            named = {
                what: [share[what] for share in shares[own["variant"]]] for what in ("data_and_logging", "lightning")
            }
            own |= {f"{what}_share_median": statistics.median(values) for what, values in named.items()}
            listed = [f"{100 * own[f'{what}_share_median']:.1f} %" for what in named]
            note += f" {own['variant']}: data and logging {listed[0]}, Lightning's loop {listed[1]}."
    return result(title, rows, note=note, members=members, steps=steps, batch_size=data.hparams["batch_size"])


def measure_steps(network: Network, shape: tuple[int, int, int], members: int, rounds: int, device: str) -> str:
    """Time single training steps of all members, ours and plain in turn: close in time, so that noise cancels.

    Returns:
        A Markdown paragraph with medians and the median ratio of neighbours.
    """
    population = LoopPopulation(network, range(members)).to(device)
    together = torch.optim.Adam(population.trainable())
    networks = [network.fresh(number).to(device) for number in range(members)]
    optimizers = [torch.optim.Adam(member.parameters()) for member in networks]
    images = torch.randn(members, 32, *shape, device=device)
    labels = torch.randint(10, (members, 32), device=device)

    def ours() -> None:
        together.zero_grad()
        step = population.step(images, labels, CrossEntropy())
        carry_gradients(step.losses.mean(), step.gradients, population.trainable()).backward()
        together.step()

    def plain() -> None:
        for index, (member, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(member(images[index]), labels[index]).backward()
            optimizer.step()

    def seconds(run: Callable[[], None]) -> float:
        start = CLOCK()
        run()
        _synchronize(torch.device(device))
        return CLOCK() - start

    pairs = []
    for number in range(-3, rounds):  # three rounds warm up
        runs = (ours, plain) if number % 2 else (plain, ours)
        times = {run: seconds(run) for run in runs}
        if number >= 0:
            pairs.append((times[ours], times[plain]))
    mine, theirs = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return (
        f"One training step of {members} members, without Lightning, {rounds} pairs in turn: ours {mine:.1f} ms, plain "
        f"{theirs:.1f} ms; median ratio of neighbours {statistics.median(ratios):.3f} "
        f"(quartiles {low:.3f} to {high:.3f}).\n"
    )


def main() -> None:
    """Run the benchmark and write the results."""
    options = parser(__doc__, 6)
    options.add_argument("--steps", type=int, default=40, help="steps of the CNNs; 112 are an epoch of MNIST5k")
    options.add_argument("--part", choices=["epochs", "steps", "short"], default="epochs")
    arguments = options.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if arguments.part == "steps":
        cnn = MyrtleCNN(width=16, in_channels=1, image_size=28)
        text = measure_steps(cnn, (1, 28, 28), 8, 40, arguments.device)
        (RESULTS / f"zoo-{arguments.device}-steps.md").write_text(f"Myrtle CNN, width 16, 28x28, batch 32. {text}")
        print(text)
        return
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    steps, rounds, device = arguments.steps, arguments.rounds, arguments.device
    if arguments.part == "short":
        global CLOCK
        CLOCK = time.process_time
        torch.set_num_threads(1)
        mlp = MultiLayerPerceptron(widths=(64, 64), in_channels=1, image_size=8)
        results = [
            measure("LeNet, MNIST5k", LeNet5(), MNIST5kDataModule(), 4, steps, "cpu", rounds, ["plain", "loop"]),
            measure("MLP 64-64, digits", mlp, DigitsDataModule(), 32, 40, "cpu", rounds, ["plain", "vmap"]),
        ]
        write("zoo-short", results, "cpu", rounds)
        return
    variants = ["plain", "loop", "vmap", "plain_cl", "loop_cl"]
    if device == "cpu":
        cnn = MyrtleCNN(width=16, in_channels=1, image_size=28)
        mlp_variants = ["plain", "dataloader", "loop", "vmap"]
        mlp = MultiLayerPerceptron(widths=(64, 64), in_channels=1, image_size=8)
        results = [
            measure("Myrtle CNN, width 16, MNIST5k", cnn, MNIST5kDataModule(), 8, steps, device, rounds, variants),
            measure("MLP 64-64, digits", mlp, DigitsDataModule(), 32, 40, device, 2 * rounds, mlp_variants),
        ]
    else:
        resnet = CIFARResNet(depth=20)
        images = RandomImagesDataModule()
        results = [measure("ResNet-20, 3x32x32", resnet, images, 32, steps, device, rounds, variants)]
    write("zoo", results, device, rounds)


if __name__ == "__main__":
    main()
