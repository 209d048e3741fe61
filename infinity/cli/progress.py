"""The progress of `infinity train`: a bar on a terminal, lines in a log file. Both say the same of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .job import EdgeCounts, Job

if TYPE_CHECKING:
    from rich.console import Console

LINES_PER_RUN = 20


def make_progress(console: Console, job: Job) -> ProgressBar | ProgressLines:
    return (ProgressBar if console.is_terminal else ProgressLines)(console, job)


class ProgressBar:
    """One line that is redrawn."""

    def __init__(self, console: Console, job: Job):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # 20 wide, so that the whole line fits a terminal of 80
        bar, text = BarColumn(bar_width=20), TextColumn("{task.fields[text]}")
        self._progress = Progress(bar, MofNCompleteColumn(), text, TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("train", total=job.steps, completed=job.first_step, text="")

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exc_info):
        self._progress.stop()

    def show(self, job: Job, counts: EdgeCounts) -> None:
        self._progress.update(self._task, completed=job.next_step, text=progress_text(job, counts))


class ProgressLines:
    """A line every so many steps, and after the last."""

    def __init__(self, console: Console, job: Job):
        self._console = console
        self._every = max(1, (job.steps - job.first_step) // LINES_PER_RUN)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def show(self, job: Job, counts: EdgeCounts) -> None:
        if job.next_step % self._every == 0 or job.next_step == job.steps:
            self._console.print(f"step {job.next_step}/{job.steps}  {progress_text(job, counts)}")


def progress_text(job: Job, counts: EdgeCounts) -> str:
    return f"loss {job.losses[-1]:.3f}  {job.tokens_per_second:,.0f} tokens/s  stalled {counts.stall_share:.0%}"
