from hermes_pool.conversation.background_jobs import JOBS_A_TURN_MAX, JOBS_MAX, Background, told


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_job_keeps_its_worker_until_its_end_or_the_cap() -> None:
    clock = Clock()
    background = Background(10, clock)
    assert not background.works_on
    assert background.started("1", "tests")
    assert background.works_on
    clock.now += 9.9
    assert background.works_on
    clock.now += 0.2
    assert (background.works_on, background.in_time, background.names) == (False, False, ("tests",))
    background.rest()  # after a further turn
    assert background.works_on
    assert background.finished("1") == "tests"
    assert background.finished("1") is None
    assert not background.works_on


def test_without_a_limit_no_job_keeps_it() -> None:
    background = Background(0, Clock())
    background.started("1", "tests")
    assert not background.works_on


def test_only_so_many_are_kept() -> None:
    background = Background(10, Clock())
    kept = [background.started(str(number), f"job {number}") for number in range(JOBS_MAX + 1)]
    assert (kept.count(True), kept[-1]) == (JOBS_MAX, False)
    assert background.started("0", "the first again")
    assert len(background.lost()) == JOBS_MAX
    assert background.names == ()


def test_only_so_many_begin_before_the_next_turn_has_ended() -> None:
    background = Background(10, Clock())
    for _ in range(JOBS_A_TURN_MAX):
        assert background.started("1", "tests")
        background.finished("1")
    assert not background.started("1", "tests")
    background.rest()
    assert background.started("1", "tests")


def test_names_are_told_in_few_words() -> None:
    assert told(["a", "b"]) == "a, b"
    many = told("x" * 500 for _ in range(100))
    assert many.endswith("x and 95 more")
    assert len(many) < 500
