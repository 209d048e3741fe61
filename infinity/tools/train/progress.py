"""The progress of `infinity train`: a bar on a terminal, or lines in a log file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..cli.amounts import format_count
from .counts import EdgeCounts
from .examples import Examples
from .job import Measured
from .sample import printable

if TYPE_CHECKING:
    from rich.console import Console

LINES_PER_RUN = 20
LEAST_STALL = 0.05  # of the time: less is not worth a reader's while
LONGEST_SHOWN = 1500  # characters of an example


def show_examples(console: Console, examples: Examples, tokenizer: Any) -> None:
    """Prints the first row as the model will see it, with what is learned set apart, and what was
    counted and skipped."""
    from rich.text import Text

    shown, left = Text(), LONGEST_SHOWN
    for piece, learned in examples.first(tokenizer):
        text = printable(piece)[:left]
        left -= len(text)
        if console.is_terminal:
            shown.append(text, "bold green" if learned else "dim")
        elif text:
            shown.append(f"\u00ab{text}\u00bb" if learned else text)
    how = "in green" if console.is_terminal else "in \u00ab \u00bb"
    console.print(f"The first sample; what the model learns to write is {how}:")
    console.print(shown, "..." if left <= 0 else "")
    rows = examples.train_count + examples.held_out_count
    each = " (each answer is a row)" if rows > examples.sample_count else ""
    sentence = f"{format_count(examples.sample_count, 'sample')}{each}:"
    sentence += f" {format_count(examples.train_count, 'row')} to train on,"
    sentence += f" {examples.held_out_count:,} held out;" if examples.held_out_count else ""
    share = examples.learned_ntokens / max(1, examples.train_ntokens)
    counts = f"{examples.learned_ntokens:,} of {examples.train_ntokens:,} tokens ({share:.0%})"
    console.print(f"{sentence} {counts} are learned")
    tell_read(console, examples)
    if not examples.has_own_template and tokenizer.chat_template:
        console.print(
            "The tokenizer has no chat template: it gets a plain one, which is saved with the model"
        )


def tell_read(console: Console, examples: Examples) -> None:
    """Prints how samples were read, and which are left out."""
    for line in examples.told:
        console.print(line, markup=False, highlight=False)
    for why, count in examples.skipped.items():
        console.print(f"{format_count(count, 'sample')} left out ({why})")


def make_progress(console: Console, job: Measured) -> ProgressBar | ProgressLines:
    return (ProgressBar if console.is_terminal else ProgressLines)(console, job)


class ProgressBar:
    """One line on a terminal, redrawn after every step."""

    def __init__(self, console: Console, job: Measured):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        # 20 wide, so that the whole line fits 80 columns.
        bar, text = BarColumn(bar_width=20), TextColumn("{task.fields[text]}")
        self._progress = Progress(
            bar, MofNCompleteColumn(), text, TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task(
            "train", total=job.steps, completed=job.first_step, text=""
        )

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *exc_info):
        self._progress.stop()

    def show(self, job: Measured, counts: EdgeCounts) -> None:
        self._progress.update(self._task, completed=job.next_step, text=progress_text(job, counts))


class ProgressLines:
    """About 20 lines per run, at regular steps and after the last."""

    def __init__(self, console: Console, job: Measured):
        self._console = console
        self._every = max(1, (job.steps - job.first_step) // LINES_PER_RUN)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def show(self, job: Measured, counts: EdgeCounts) -> None:
        if job.next_step % self._every == 0 or job.next_step == job.steps:
            self._console.print(f"step {job.next_step}/{job.steps}  {progress_text(job, counts)}")


def progress_text(job: Measured, counts: EdgeCounts) -> str:
    loss = job.losses[-1]
    shown = f"{loss:.3f}" if abs(loss) >= 0.01 else f"{loss:.2g}"
    text = f"loss {shown}  {job.tokens_per_second:,.0f} tokens/s"
    if counts.stall_share >= LEAST_STALL:
        text += f"  stalled {counts.stall_share:.0%} ({counts.slowest_edge})"
    if job.saved_step is not None:
        text += f"  saved at {job.saved_step}"
    return text
