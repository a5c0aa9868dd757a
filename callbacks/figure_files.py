"""The format and the width of the figures that reports write."""

from typing import Literal

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from lightning_sym.figures import check_figure_files


class FigureFiles(Callback):
    """Choose the format and the width of the figures that the reports of a run write.

    Reports write each figure as a PNG at 200 dpi, and as a PDF or SVG whose text can be searched, for papers. On the
    command line: ``--figures pdf --figure_size column``. Loggers get the same figures in any case.

    Args:
        form: ``"pdf"`` or ``"svg"``: that file as well. ``"png"``: only the PNG.
        size: ``"column"``: 3.25 inches wide, panels below one another. ``"page"``: 6.75 inches. None: as the report
            draws it, 6.4 inches or more.

    Raises:
        ValueError: If the format or the size is unknown.
    """

    def __init__(
        self, form: Literal["png", "pdf", "svg"] = "png", size: Literal["column", "page"] | None = None
    ) -> None:
        check_figure_files(form, size)
        self.form = form
        self.size = size

    @property
    def chosen(self) -> bool:
        """Whether this is another choice than the default."""
        return (self.form, self.size) != ("png", None)

    @classmethod
    def of(cls, trainer: Trainer) -> "FigureFiles":
        """Return the choice among the callbacks of a trainer, or the default."""
        return next((one for one in trainer.callbacks if isinstance(one, cls)), cls())  # type: ignore[attr-defined]
