from sd_training.config.check_data import never_drawn
from sd_training.config.data_schema import DatasetConfig, DatasetParams, MixEntry, SourceParams


def test_data_sets_that_start_after_the_end_are_told() -> None:
    entries = [MixEntry(params=SourceParams(path="a.tar"), start_step=step) for step in (99, 100)]
    dataset = DatasetConfig(params=DatasetParams(path="b.tar"), mix=entries)
    (warning,) = never_drawn(dataset, 100)
    assert warning.startswith("dataset.mix.1.start_step: is 100")
    assert not list(never_drawn(dataset, 101))
