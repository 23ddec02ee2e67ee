//! The backlog against a naive model: one list of all events with the fate of each, and a table of held rows.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use postbox_engine::{
    Backlog, Changes, ClaimLimit, Claimed, DeadPolicy, Event, EventParts, HeldEvent, HeldState, Loaded, LogPage,
    Settlement, SourceErrorKind, Verdict, key_of,
};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

#[derive(Clone, Debug)]
enum Step {
    /// Reads a page: keys, and whether each event is delayed.
    Read(Vec<(u8, bool)>),
    Claim(usize),
    /// Verdicts on a key come between question and answer.
    ClaimHeld {
        events_max: usize,
        meanwhile: (u8, usize, u8),
    },
    /// Decides what is in hand of one key: so many published, then perhaps a failure, the rest released.
    Settle {
        key: u8,
        published: usize,
        failure: u8,
    },
    Record,
    /// Time passes: everything that waits for its time is due.
    Due,
    /// A new tenure, from what is recorded.
    Restart,
}

/// Few, so that each gets into trouble.
const KEYS: u8 = 2;

struct Steps;

impl ReferenceStateMachine for Steps {
    type State = bool;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<bool> {
        any::<bool>().boxed()
    }

    fn transitions(_: &bool) -> BoxedStrategy<Step> {
        let event = (0..KEYS, prop::bool::weighted(0.15));
        prop_oneof![
            4 => prop::collection::vec(event, 0..6).prop_map(Step::Read),
            6 => (1..9usize).prop_map(Step::Claim),
            4 => (1..6usize, (0..KEYS, 0..4usize, 0..6u8))
                .prop_map(|(events_max, meanwhile)| Step::ClaimHeld { events_max, meanwhile }),
            9 => (0..KEYS, 0..4usize, 0..6u8)
                .prop_map(|(key, published, failure)| Step::Settle { key, published, failure }),
            5 => Just(Step::Record),
            2 => Just(Step::Due),
            1 => Just(Step::Restart),
        ]
        .boxed()
    }

    fn apply(block: bool, _: &Step) -> bool {
        block
    }
}

/// The fate of one event, as whoever holds the lease knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Open,
    InHand(u64),
    Retry,
    Dead,
    Published,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    state: HeldState,
    attempts: u32,
    due: bool,
}

struct Info {
    key: u8,
    delayed: bool,
    fate: Fate,
    attempts: u32,
    row: Option<Row>,
}

struct Test {
    policy: DeadPolicy,
    backlog: Backlog<usize>,
    events: Vec<Info>,
    /// How many the backlog has read, and how many the recorded cursor has passed.
    read: usize,
    passed: usize,
    /// Where pages end.
    pages: Vec<usize>,
}

fn key(n: u8) -> u64 {
    key_of("k", &n.to_string())
}

fn event(i: usize, n: u8) -> Event {
    let id = i64::try_from(i).unwrap() + 1;
    Event::new(&EventParts { id, aggregate_type: "k", aggregate_id: &n.to_string(), ..Default::default() })
}

fn index(event: &Event) -> usize {
    usize::try_from(event.id() - 1).unwrap()
}

fn limit(events_max: usize) -> ClaimLimit {
    ClaimLimit { events_max, bytes_max: usize::MAX }
}

impl Test {
    fn in_hand(&self, key: u8) -> Vec<(u64, usize)> {
        let mut hand: Vec<_> = (0..self.events.len())
            .filter(|&i| self.events[i].key == key)
            .filter_map(|i| if let Fate::InHand(ticket) = self.events[i].fate { Some((ticket, i)) } else { None })
            .collect();
        // Those without a time of their own in their order; the lanes hold them as they were claimed.
        hand.sort_by_key(|&(_, i)| i);
        hand
    }

    /// An event does not hold up those behind it.
    fn settled(&self, i: usize) -> bool {
        match self.events[i].fate {
            Fate::Published => true,
            Fate::Dead => self.policy == DeadPolicy::Skip,
            _ => false,
        }
    }

    fn claimed(&mut self, claimed: &[Claimed]) {
        for c in claimed {
            let i = index(&c.event);
            assert!(matches!(self.events[i].fate, Fate::Open | Fate::Retry), "event {i} is claimed again");
            assert_eq!(c.attempts, self.events[i].row.map_or(0, |row| row.attempts), "event {i}");
            let ahead = |&j: &usize| {
                let e = &self.events[j];
                e.key == self.events[i].key && !e.delayed && !self.settled(j) && !matches!(e.fate, Fate::InHand(_))
            };
            if self.events[i].delayed {
                assert!(self.events[i].row.is_some_and(|row| row.due), "event {i} is claimed before its time");
            } else {
                let left = (0..i).find(ahead);
                assert_eq!(left, None, "left out in front of event {i}");
            }
            self.events[i].fate = Fate::InHand(c.ticket);
        }
    }

    fn read(&mut self, page: &[(u8, bool)]) {
        // What a new tenure must read again comes first, as it was.
        let again = self.events.len() > self.read;
        if !again {
            for &(key, delayed) in page {
                self.events.push(Info { key, delayed, fate: Fate::Open, attempts: 0, row: None });
            }
            self.pages.push(self.events.len());
        }
        let end = *self.pages.iter().find(|&&end| end > self.read).unwrap_or(&self.events.len());
        let events: Vec<_> = (self.read..end).map(|i| event(i, self.events[i].key)).collect();
        let delays = (self.read..end)
            .enumerate()
            .filter(|&(_, i)| self.events[i].delayed)
            .map(|(n, _)| (u32::try_from(n).unwrap(), Duration::from_secs(1)))
            .collect();
        self.read = end;
        self.backlog.push(LogPage { events, delays, mark: end });
    }

    fn settle(&mut self, key: u8, published: usize, failure: u8) {
        let hand = self.in_hand(key);
        let mut settlements = Vec::new();
        for (n, &(ticket, i)) in hand.iter().enumerate() {
            let info = &mut self.events[i];
            let verdict = if n < published {
                info.fate = Fate::Published;
                Verdict::Published
            } else if n == published && failure < 4 {
                info.attempts = info.row.map_or(0, |row| row.attempts) + 1;
                let (attempts, error) = (info.attempts, "failed".into());
                if failure < 2 {
                    info.fate = Fate::Dead;
                    Verdict::Dead { attempts, error }
                } else {
                    info.fate = Fate::Retry;
                    Verdict::Retry { after: Duration::from_secs(1), attempts, error }
                }
            } else {
                info.fate =
                    if info.row.is_some_and(|row| row.state == HeldState::Retry) { Fate::Retry } else { Fate::Open };
                Verdict::Release
            };
            settlements.push(Settlement { ticket, verdict });
        }
        self.backlog.settle(&settlements, Instant::now());
        // A repetition changes nothing.
        self.backlog.settle(
            &settlements.iter().filter(|s| s.verdict != Verdict::Release).cloned().collect::<Vec<_>>(),
            Instant::now(),
        );
    }

    fn record(&mut self) {
        let Some(changes) = self.backlog.changes() else { return };
        let unrecorded = self.backlog.unrecorded();
        assert_eq!(unrecorded.0, self.read - self.passed, "what is being written is not recorded yet");
        self.write(&changes);
        assert_eq!(self.backlog.events(), self.read - self.passed);
        assert!(self.backlog.unrecorded() <= unrecorded);
    }

    fn write(&mut self, changes: &Changes<usize>) {
        for change in &changes.held {
            let i = index(&change.event);
            let timed = matches!(change.state, HeldState::Retry | HeldState::Delayed);
            self.events[i].row = Some(Row { state: change.state, attempts: change.attempts, due: !timed });
        }
        let Some(mark) = changes.mark else {
            assert_eq!((changes.events, changes.max_id), (0, 0));
            return;
        };
        assert!(mark >= self.passed);
        assert_eq!(changes.events as usize, mark - self.passed);
        if mark > self.passed {
            assert_eq!(changes.max_id, i64::try_from(mark).unwrap());
        }
        for i in self.passed..mark {
            let info = &self.events[i];
            let state = info.row.map(|row| row.state);
            let right = match info.fate {
                Fate::Published => state.is_none() || state == Some(HeldState::Done),
                Fate::Dead => state == Some(HeldState::Dead),
                Fate::Retry => state == Some(HeldState::Retry),
                Fate::Open => matches!(state, Some(HeldState::Waiting | HeldState::Delayed)),
                Fate::InHand(_) => false,
            };
            assert!(right, "the cursor passes event {i}: {:?}, held as {state:?}", info.fate);
        }
        self.passed = mark;
    }

    fn claim_held(&mut self, events_max: usize, meanwhile: (u8, usize, u8)) {
        self.record();
        let query = self.backlog.held_query(limit(events_max));
        let mut rows = Vec::new();
        for (i, info) in self.events.iter().enumerate() {
            let Some(row) = info.row else { continue };
            let id = i64::try_from(i).unwrap() + 1;
            let timed = matches!(row.state, HeldState::Retry | HeldState::Delayed) && row.due;
            let open = row.state == HeldState::Waiting && query.open.contains(&key(info.key));
            if (timed || open) && !query.skip.contains(&id) && rows.len() < events_max {
                rows.push(HeldEvent { event: event(i, info.key), attempts: row.attempts, state: row.state });
            }
        }
        let (key, published, failure) = meanwhile;
        self.settle(key, published, failure);
        let claimed = self.backlog.claim_held(rows);
        self.claimed(&claimed);
    }

    fn restart(&mut self) {
        let mut keys: BTreeMap<u8, (u32, bool)> = BTreeMap::new();
        for info in &mut self.events {
            let state = info.row.map(|row| row.state);
            // What is not recorded is forgotten.
            info.fate = match state {
                Some(HeldState::Done) => Fate::Published,
                Some(HeldState::Dead) => Fate::Dead,
                Some(HeldState::Retry) => Fate::Retry,
                _ => Fate::Open,
            };
            let blocks = info.fate == Fate::Retry || (info.fate == Fate::Dead && self.policy == DeadPolicy::Block);
            if blocks || state == Some(HeldState::Waiting) {
                let entry = keys.entry(info.key).or_default();
                (entry.0, entry.1) = (entry.0 + 1, entry.1 | blocks);
            }
        }
        for i in 0..self.passed {
            if self.events[i].row.is_none() {
                self.events[i].fate = Fate::Published;
            }
        }
        let keys = keys.into_iter().map(|(n, (rows, blocked))| (key(n), rows, blocked)).collect();
        self.backlog = Backlog::new(self.policy);
        self.backlog.load(&Loaded { keys, next_due: None });
        self.read = self.passed;
    }

    fn due(&mut self) {
        self.events.iter_mut().filter_map(|info| info.row.as_mut()).for_each(|row| row.due = true);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Read(page) => self.read(page),
            Step::Claim(events_max) => {
                let claimed = self.backlog.claim(limit(*events_max));
                assert!(claimed.len() <= *events_max);
                self.claimed(&claimed);
            }
            Step::ClaimHeld { events_max, meanwhile } => self.claim_held(*events_max, *meanwhile),
            Step::Settle { key, published, failure } => self.settle(*key, *published, *failure),
            Step::Record => self.record(),
            Step::Due => self.due(),
            Step::Restart => self.restart(),
        }
    }
}

const CLAIM_HELD: Step = Step::ClaimHeld { events_max: 100, meanwhile: (9, 0, 9) };

impl StateMachineTest for Test {
    type SystemUnderTest = Test;
    type Reference = Steps;

    fn init_test(&block: &bool) -> Test {
        let policy = if block { DeadPolicy::Block } else { DeadPolicy::Skip };
        Test { policy, backlog: Backlog::new(policy), events: Vec::new(), read: 0, passed: 0, pages: Vec::new() }
    }

    fn apply(mut test: Test, _: &bool, step: Step) -> Test {
        test.step(&step);
        test
    }

    /// Whatever happened: when nothing fails any more, everything is published, dead, or blocked by a dead event.
    fn teardown(mut test: Test, _: bool) {
        for _ in 0..200 {
            let mut steps = vec![Step::Due, CLAIM_HELD, Step::Claim(100), Step::Record];
            if test.read < test.events.len() {
                steps.push(Step::Read(Vec::new()));
            }
            steps.extend((0..KEYS).map(|key| Step::Settle { key, published: 100, failure: 9 }));
            steps.iter().for_each(|step| test.step(step));
        }
        assert_eq!(test.passed, test.events.len(), "the cursor stands still");
        for (i, info) in test.events.iter().enumerate() {
            let blocked = test.policy == DeadPolicy::Block
                && test.events.iter().any(|other| other.key == info.key && other.fate == Fate::Dead);
            let fine = matches!(info.fate, Fate::Published | Fate::Dead) || blocked;
            assert!(fine, "event {i} is forgotten: {:?}, held as {:?}", info.fate, info.row);
        }
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn the_backlog_does_what_the_model_does(sequential 1..120 => Test);
}

#[test]
fn a_held_state_is_read_as_it_was_written_and_no_other_word_is_one() {
    use HeldState::{Dead, Delayed, Done, Replay, Retry, Waiting};
    for state in [Retry, Waiting, Delayed, Dead, Replay, Done] {
        assert_eq!(state.name().parse::<HeldState>().unwrap(), state);
    }
    let error = "parked".parse::<HeldState>().unwrap_err();
    assert!(error.kind == SourceErrorKind::Refused && error.message.contains("\"parked\""), "{error}");
}

#[test]
fn a_move_says_by_when_all_it_passes_had_been_sent() {
    let mut backlog = Backlog::new(DeadPolicy::Skip);
    let page = |ids: std::ops::Range<usize>, mark, delayed: bool| LogPage {
        delays: if delayed { vec![(0, Duration::from_secs(1))] } else { Vec::new() },
        events: ids.map(|id| event(id, id as u8)).collect(),
        mark,
    };
    let (began, all) = (Instant::now(), ClaimLimit { events_max: 100, bytes_max: usize::MAX });
    let at = |seconds| began + Duration::from_secs(seconds);
    let published = |ticket| [Settlement { ticket, verdict: Verdict::Published }];
    backlog.push(page(0..1, 1, true));
    assert_eq!(backlog.changes().unwrap().sent, None, "nothing was sent");
    backlog.push(page(1..3, 2, false));
    backlog.push(page(3..4, 3, false));
    let tickets: Vec<u64> = backlog.claim(all).iter().map(|claimed| claimed.ticket).collect();
    backlog.settle(&published(tickets[2]), at(30));
    backlog.settle(&published(tickets[0]), at(10));
    assert!(backlog.changes().is_none());
    let failed = Verdict::Retry { after: Duration::ZERO, attempts: 1, error: "no".into() };
    backlog.settle(&[Settlement { ticket: tickets[1], verdict: failed }], at(20));
    let changes = backlog.changes().unwrap();
    assert_eq!((changes.mark, changes.sent, changes.held[0].sent), (Some(3), Some(at(30)), Some(at(20))));
    backlog.push(page(4..5, 4, false));
    let ticket = backlog.claim(all)[0].ticket;
    let unroutable = Verdict::Dead { attempts: 0, error: "no route".into() };
    backlog.settle(&[Settlement { ticket, verdict: unroutable }], at(15));
    let changes = backlog.changes().unwrap();
    assert_eq!(
        (changes.sent, changes.held[0].sent),
        (Some(at(30)), None),
        "it never falls; what has no route never went"
    );
}
