"""When a service counts as silent for too long."""

import time

import pytest

from actors.service import Service, Whereabouts


def silent_for(service: Service, seconds: float) -> Service:
    service.heard = time.monotonic() - seconds
    return service


@pytest.mark.parametrize(("seconds", "overdue"), [(50.0, False), (70.0, True)])
def test_a_start_gets_the_time_of_a_start(seconds, overdue):
    assert silent_for(Service(), seconds).overdue(start_deadline_s=60.0, hang_s=5.0) is overdue


@pytest.mark.parametrize(("seconds", "overdue"), [(4.0, False), (7.0, True)])
def test_one_that_has_answered_gets_the_time_of_a_hang(seconds, overdue):
    service = Service()
    service.answered(Whereabouts("node", 7), time.monotonic())
    assert silent_for(service, seconds).overdue(start_deadline_s=60.0, hang_s=5.0) is overdue


def test_a_process_that_is_gone_is_lost_once_and_its_last_word_stays():
    service = Service()
    service.gone()
    assert service.lost is None  # nobody had answered yet
    service.answered(Whereabouts("node", 7), time.monotonic())
    silent_for(service, 30.0).gone()
    assert service.lost == service.answer == Whereabouts("node", 7)
    assert service.starting
    assert service.silent_s < 30.0
    service.lost = None
    service.gone()  # found gone again while the next one starts
    assert service.lost is None


def test_a_fault_struck_after_the_last_question_that_was_answered():
    service = Service()
    asked_at = time.monotonic() - 9.0
    service.answered(Whereabouts("node", 7), asked_at)
    service.gone()
    assert service.well_at == asked_at
    assert service.silent_s < 9.0
