"""What the data set is, in a few lines: for the dry run and the start of a run."""

from dataclasses import dataclass

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.index import DatasetIndex
from sd_training.data.selection import Selection, filter_lines


@dataclass(frozen=True)
class DataReport:
    """Sizes, survivors, problems and length of the run in epochs."""

    num_shards: int
    num_samples: int
    """Samples with an image, in all shards."""
    num_usable: int
    """Of these, with caption or known class."""
    num_survivors: int
    """Of these, passing all filters."""
    filter_lines: list[str]
    """Survivors of each filter alone."""
    problem_counts: dict[str, int]
    problem_text: str
    epochs: float
    """Length of the run over the survivors."""
    fingerprint: str

    def text(self) -> str:
        """Several lines for a terminal."""
        lines = [
            f"data: {self.num_samples:,} samples in {self.num_shards:,} shards; {self.num_usable:,} have all members"
        ]
        lines += [f"  filter {line}" for line in self.filter_lines]
        if self.filter_lines:
            lines.append(f"  all filters together: {self.num_survivors:,} samples")
        if self.problem_text:
            lines.append(f"  problems: {self.problem_text}")
        lines.append(f"  the run sees {self.num_survivors:,} samples {self.epochs:,.2f} times each")
        return "\n".join(lines)


def make_report(index: DatasetIndex, selection: Selection, plan: BatchPlan) -> DataReport:
    """Sums the data set up."""
    return DataReport(
        num_shards=len(index.shards),
        num_samples=len(index),
        num_usable=selection.num_usable,
        num_survivors=len(selection.survivors),
        filter_lines=filter_lines(index, selection),
        problem_counts=dict(selection.problems.counts),
        problem_text=selection.problems.text(),
        epochs=plan.num_examples / len(selection.survivors),
        fingerprint=index.fingerprint,
    )
