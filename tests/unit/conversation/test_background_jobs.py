from hermes_pool.conversation.background_jobs import JOBS_A_TURN_MAX, JOBS_MAX, BackgroundJobs, summary_of


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_job_keeps_its_worker_until_its_end_or_the_cap() -> None:
    clock = Clock()
    jobs = BackgroundJobs(10, clock)
    assert not jobs.keep_worker
    assert jobs.started("1", "tests")
    assert jobs.keep_worker
    clock.now += 9.9
    assert jobs.keep_worker
    clock.now += 0.2
    assert (jobs.keep_worker, jobs.in_time, jobs.names) == (False, False, ("tests",))
    jobs.restart_clocks()  # after a further turn
    assert jobs.keep_worker
    assert jobs.finished("1") == "tests"
    assert jobs.finished("1") is None
    assert not jobs.keep_worker


def test_without_a_limit_no_job_keeps_it() -> None:
    jobs = BackgroundJobs(0, Clock())
    jobs.started("1", "tests")
    assert not jobs.keep_worker


def test_only_so_many_are_kept() -> None:
    jobs = BackgroundJobs(10, Clock())
    kept = [jobs.started(str(number), f"job {number}") for number in range(JOBS_MAX + 1)]
    assert (kept.count(True), kept[-1]) == (JOBS_MAX, False)
    assert jobs.started("0", "the first again")
    assert len(jobs.lost()) == JOBS_MAX
    assert jobs.names == ()


def test_only_so_many_begin_before_the_next_turn_has_ended() -> None:
    jobs = BackgroundJobs(10, Clock())
    for _ in range(JOBS_A_TURN_MAX):
        assert jobs.started("1", "tests")
        jobs.finished("1")
    assert not jobs.started("1", "tests")
    jobs.restart_clocks()
    assert jobs.started("1", "tests")


def test_names_are_told_in_few_words() -> None:
    assert summary_of(["a", "b"]) == "a, b"
    many = summary_of("x" * 500 for _ in range(100))
    assert many.endswith("x and 95 more")
    assert len(many) < 500
