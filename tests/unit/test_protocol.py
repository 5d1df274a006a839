"""Who is who, and what is published: `Protocol.step` driven by hand."""

from dataclasses import replace

from app.diloco.events import (
    Deny,
    Grant,
    Join,
    Lost,
    Published,
    PublishFailed,
    Record,
    Recorded,
    RecordFailed,
    Reported,
    Tick,
)
from tests.unit.tiny import Hand, opened

# ---- who is who


def test_an_incarnation_is_issued_once_it_is_durable() -> None:
    hand = Hand()
    record = hand.feed(Join(hand.hello("a", "t")))
    assert [type(d) for d in record if isinstance(d, (Record, Grant))] == [Record]
    assert hand.protocol.members == {}
    grant = next(d for d in hand.feed(Recorded("t")) if isinstance(d, Grant))
    assert (grant.welcome.sender.incarnation, grant.welcome.sender.epoch) == (1, 1)
    assert [offer.base_version for offer in grant.welcome.offers] == [None, None]


def test_the_same_hello_twice_gives_one_incarnation() -> None:
    hand = Hand()
    hand.feed(Join(hand.hello("a", "t")))
    assert not [d for d in hand.feed(Join(hand.hello("a", "t"))) if isinstance(d, (Record, Grant))]
    hand.feed(Recorded("t"))
    assert not [d for d in hand.feed(Recorded("t")) if isinstance(d, Grant)]
    hand.feed(Join(hand.hello("a", "t")))
    assert hand.last(Grant).welcome.sender.incarnation == 1
    assert hand.protocol.incarnations == {"a": 1}


def test_a_foreign_run_or_layout_is_denied() -> None:
    hand = Hand()
    hand.feed(Join(hand.hello("a", "t", run_id="other")))
    hand.feed(Join(hand.hello("a", "u", layout_hash="0" * 64)))
    assert hand.refused() == ["foreign", "corrupt"]
    assert len(hand.denials) == 2
    assert hand.protocol.incarnations == {}


def test_an_incarnation_that_could_not_be_journaled_is_never_used_again() -> None:
    hand = Hand()
    hand.feed(Join(hand.hello("a", "t")))
    assert any(isinstance(d, Deny) for d in hand.feed(RecordFailed("t")))
    assert hand.join("a", "u").sender.incarnation == 2


def test_of_two_hellos_under_way_the_newer_process_wins() -> None:
    hand = Hand()
    hand.feed(Join(hand.hello("a", "old")))
    hand.feed(Join(hand.hello("a", "new")))
    hand.feed(Recorded("old"))
    hand.feed(Recorded("new"))
    assert len(hand.denials) == 1
    assert hand.last(Grant).welcome.sender.incarnation == 2


def test_an_older_incarnation_is_refused_and_told_to_leave() -> None:
    hand = opened()
    old = hand.replicas["a"]
    given = hand.capture("a", 1)
    hand.join("a")
    hand.feed(Reported(old.report(1.0, 0.5, False)))
    hand.arrive(given)
    assert hand.refused() == ["incarnation", "incarnation"]
    reply, urgent = hand.protocol.reply(old.report(1.0, 0.5, False), hand.now)
    assert (reply.fenced, urgent) == (True, True)
    assert hand.protocol.members["a"].incarnation == 2
    assert hand.protocol.books.balance().discarded == {"died": 20 * hand.protocol.layout.numel}


def test_a_learner_that_is_lost_is_refused_until_it_joins_again() -> None:
    hand = opened()
    hand.feed(Lost("a", 1, "hang"))
    hand.feed(Lost("a", 1, "hang"))
    assert hand.poll("a").fenced
    assert hand.refused() == ["incarnation"]
    assert len(hand.notes("leave")) == 1
    assert hand.join("a").sender.incarnation == 2
    hand.feed(Lost("a", 1, "hang"))  # old news about its predecessor
    assert not hand.poll("a").fenced


def test_what_was_kept_for_a_learner_goes_with_it() -> None:
    hand = opened()
    for name in ("a", "b"):
        hand.answer(name, 1)
    hand.publish()
    hand.feed(Lost("a", 1, "exit"))
    fragment = hand.protocol.fragments[1]
    assert (list(fragment.contained), list(fragment.last_merged)) == (["b"], ["b"])


def test_a_learner_that_never_joined_gives_nothing() -> None:
    hand = opened()
    given = hand.capture("a", 1)
    hand.arrive(replace(given, sender=replace(given.sender, learner="stranger")))
    assert hand.refused() == ["incarnation"]


def test_another_run_s_messages_are_refused() -> None:
    hand = opened()
    given = hand.capture("a", 1)
    hand.arrive(replace(given, sender=replace(given.sender, run_id="other")))
    assert hand.refused() == ["foreign"]
    hand.arrive(given)
    assert hand.refused() == ["foreign"]  # the real one is taken


def test_a_message_of_an_older_epoch_is_refused_and_harms_no_round_of_the_same_number() -> None:
    hand = opened()
    stale = hand.capture("a", 1)
    hand.restart()
    for name in ("a", "b"):
        hand.poll(name)
    assert hand.protocol.rounds[1].id == stale.round
    hand.arrive(stale)
    assert hand.refused() == ["epoch"]
    hand.answer("a", 1)
    assert set(hand.protocol.rounds[1].answers) == {"a"}


def test_asks_of_a_replaced_syncer_are_not_answered() -> None:
    hand = opened()
    old = hand.poll("a")
    hand.restart()
    replica = hand.replicas["a"]
    assert replica.hear(2, ()) == ()
    assert replica.hear(old.epoch, old.asks) == ()
    assert replica.sender.epoch == 2


# ---- publishing


def test_a_version_is_offered_only_once_it_is_published() -> None:
    hand = opened()
    for name in ("a", "b"):
        hand.answer(name, 1)
    assert len(hand.jobs) == 1
    assert hand.poll("a").offers == ()
    result = hand.jobs.pop().run()
    hand.feed(Published(result))
    hand.feed(Published(result))
    assert [offer.version for offer in hand.poll("a").offers] == [1]
    assert hand.protocol.merges == 1


def test_a_journal_that_fails_pauses_merges_and_the_retry_goes_on() -> None:
    hand = opened()
    for name in ("a", "b"):
        hand.answer(name, 1)
    job = hand.jobs.pop()
    hand.feed(PublishFailed(job, "disk full"))
    hand.step("a", 2)
    hand.poll("a")
    assert hand.protocol.paused
    assert list(hand.protocol.rounds) == [1]  # fragment 0 fell due meanwhile: no round
    assert hand.protocol.next_wake == hand.now + hand.settings.journal_retry_s
    hand.now = hand.protocol.next_wake
    hand.feed(Tick())
    assert hand.jobs == [job]
    hand.feed(Tick())
    assert hand.jobs == [job]  # one try at a time
    hand.publish()
    hand.feed(Tick())
    assert not hand.protocol.paused
    assert hand.protocol.fragments[1].version == 1
