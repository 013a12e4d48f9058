from _bench.metrics import HEAVY, METRICS, PEERS, SUBJECTS


def test_the_table_of_metrics_speaks_of_subjects_and_figures_that_exist() -> None:
    for metric in METRICS.values():
        assert all(subject in SUBJECTS or subject.startswith("hermes ") for subject in metric.subjects)
        for target in metric.targets:
            assert target.figure in metric.figures
            assert {*target.subjects, target.base} - {None} <= set(metric.subjects)
    assert HEAVY <= PEERS <= set(SUBJECTS)
