//! Lanes against a naive model that keeps one list per key: what may be sent, and what every outcome means.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use postbox_engine::{Batch, Claimed, Event, EventParts, Lanes, Outcome, Settlement, Verdict};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Step {
    Admit(Vec<u8>),
    NextBatch {
        events_max: usize,
        bytes_max: usize,
    },
    /// Which of the batches in flight, and what becomes of its events in turn.
    Complete {
        batch: usize,
        outcomes: Vec<u8>,
    },
    Drain,
}

/// The steps need no model to be chosen: whatever comes is possible.
struct Steps;

impl ReferenceStateMachine for Steps {
    /// Whether the sink keeps the order of a key.
    type State = bool;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<bool> {
        any::<bool>().boxed()
    }

    fn transitions(_: &bool) -> BoxedStrategy<Step> {
        let bytes_max = prop_oneof![Just(1), Just(400), Just(usize::MAX)];
        prop_oneof![
            4 => prop::collection::vec(0..5u8, 1..8).prop_map(Step::Admit),
            6 => (1..6usize, bytes_max).prop_map(|(events_max, bytes_max)| Step::NextBatch { events_max, bytes_max }),
            6 => (0..6usize, prop::collection::vec(0..12u8, 6))
                .prop_map(|(batch, outcomes)| Step::Complete { batch, outcomes }),
            1 => Just(Step::Drain),
        ]
        .boxed()
    }

    fn apply(pipelined: bool, _: &Step) -> bool {
        pipelined
    }
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Queued,
    Sent,
    Back(Outcome),
}

/// One list per key.
#[derive(Default)]
struct Model {
    pipelined: bool,
    draining: bool,
    lanes: BTreeMap<u8, Vec<(u64, State)>>,
    /// What must have been settled so far in each key, in order.
    settled: BTreeMap<u8, Vec<Settlement>>,
}

impl Model {
    /// Position of the event of this key that may be sent next.
    fn sendable(&self, key: u8) -> Option<usize> {
        let lane = self.lanes.get(&key)?;
        let stuck = lane.iter().any(|(_, s)| matches!(s, State::Back(o) if *o != Outcome::Published));
        let next = lane.iter().position(|(_, s)| *s == State::Queued)?;
        (!stuck && !self.draining && (self.pipelined || next == 0)).then_some(next)
    }

    fn settle(&mut self, key: u8, ticket: u64, verdict: Verdict) {
        self.settled.entry(key).or_default().push(Settlement { ticket, verdict });
    }

    fn resolve(&mut self, key: u8) {
        let mut lane = self.lanes.remove(&key).unwrap_or_default();
        while matches!(lane.first(), Some((_, State::Back(Outcome::Published)))) {
            let (ticket, _) = lane.remove(0);
            self.settle(key, ticket, Verdict::Published);
        }
        if lane.is_empty() {
            return;
        }
        let idle = lane.iter().all(|(_, s)| *s != State::Sent);
        match lane[0].1.clone() {
            State::Back(Outcome::Verdict(verdict)) if idle => {
                let mut decided = matches!(verdict, Verdict::Dead { .. });
                self.settle(key, lane[0].0, verdict);
                for (ticket, state) in lane.drain(..).skip(1) {
                    let verdict = match state {
                        State::Back(Outcome::Published) if decided => Verdict::Published,
                        State::Back(Outcome::Verdict(dead @ Verdict::Dead { .. })) if decided => dead,
                        _ => Verdict::Release,
                    };
                    decided &= verdict != Verdict::Release;
                    self.settle(key, ticket, verdict);
                }
            }
            State::Back(Outcome::Again) | State::Queued if idle && self.draining => {
                for (ticket, _) in lane.drain(..) {
                    self.settle(key, ticket, Verdict::Release);
                }
            }
            State::Back(Outcome::Again) if idle => lane.iter_mut().for_each(|(_, s)| *s = State::Queued),
            _ => {}
        }
        if !lane.is_empty() {
            self.lanes.insert(key, lane);
        }
    }
}

struct Test {
    lanes: Lanes,
    model: Model,
    batches: Vec<Batch>,
    keys: BTreeMap<u64, u8>,
    settled: BTreeMap<u8, Vec<Settlement>>,
}

fn claimed(ticket: u64, key: u8) -> Claimed {
    let parts = EventParts { aggregate_type: "k", aggregate_id: &key.to_string(), ..Default::default() };
    Claimed { ticket, event: Event::new(&parts), attempts: 0, replay: false }
}

fn outcome(n: u8) -> Outcome {
    match n {
        0 => Outcome::Verdict(Verdict::Dead { attempts: 1, error: "dead".into() }),
        1 => Outcome::Verdict(Verdict::Retry { after: Duration::ZERO, attempts: 1, error: "retry".into() }),
        2 | 3 => Outcome::Again,
        _ => Outcome::Published,
    }
}

impl Test {
    fn admit(&mut self, keys: &[u8]) {
        let first = self.keys.len() as u64;
        let events: Vec<_> = keys.iter().zip(first..).map(|(&key, ticket)| claimed(ticket, key)).collect();
        for (&key, ticket) in keys.iter().zip(first..) {
            self.keys.insert(ticket, key);
            self.model.lanes.entry(key).or_default().push((ticket, State::Queued));
        }
        self.lanes.admit(events);
        if self.model.draining {
            keys.iter().for_each(|&key| self.model.resolve(key));
        }
    }

    fn next_batch(&mut self, events_max: usize, bytes_max: usize) {
        let Some(batch) = self.lanes.next_batch(events_max, bytes_max) else {
            let left: Vec<_> = (0..5).filter(|&key| self.model.sendable(key).is_some()).collect();
            assert!(left.is_empty(), "keys {left:?} could be sent and were not");
            return;
        };
        let bytes: usize = batch.events.iter().map(|c| c.event.bytes()).sum();
        assert!(batch.events.len() <= events_max && !batch.events.is_empty());
        assert!(bytes <= bytes_max || batch.events.len() == 1, "{bytes} bytes of {bytes_max}");
        for event in &batch.events {
            let key = self.keys[&event.ticket];
            let next = self.model.sendable(key).unwrap_or_else(|| panic!("key {key} must not be sent now"));
            let entry = &mut self.model.lanes.get_mut(&key).unwrap()[next];
            assert_eq!(entry.0, event.ticket, "out of order in key {key}");
            entry.1 = State::Sent;
        }
        let full = batch.events.len() == events_max || bytes_max != usize::MAX;
        assert!(full || (0..5).all(|key| self.model.sendable(key).is_none()), "the batch could have held more");
        self.batches.push(batch);
    }

    fn complete(&mut self, batch: usize, outcomes: &[u8]) {
        if self.batches.is_empty() {
            return;
        }
        let batch = self.batches.remove(batch % self.batches.len());
        let outcomes: Vec<_> = outcomes.iter().cycle().take(batch.events.len()).map(|&n| outcome(n)).collect();
        for (event, outcome) in batch.events.iter().zip(&outcomes) {
            let lane = self.model.lanes.get_mut(&self.keys[&event.ticket]).unwrap();
            let entry = lane.iter_mut().find(|(ticket, _)| *ticket == event.ticket).unwrap();
            entry.1 = State::Back(outcome.clone());
        }
        for event in &batch.events {
            self.model.resolve(self.keys[&event.ticket]);
        }
        self.lanes.complete(&batch, outcomes);
    }

    fn drain(&mut self) {
        self.lanes.drain();
        self.model.draining = true;
        (0..5).for_each(|key| self.model.resolve(key));
    }

    /// After every step, so that verdicts which belong together come together.
    fn compare(&mut self) {
        for settlement in self.lanes.settled() {
            self.settled.entry(self.keys[&settlement.ticket]).or_default().push(settlement);
        }
        assert_eq!(self.settled, self.model.settled);
        let in_hand: Vec<_> = self.model.lanes.values().flatten().collect();
        assert_eq!(self.lanes.events(), in_hand.len());
        let sent = in_hand.iter().filter(|(_, s)| *s == State::Sent).count();
        assert_eq!(self.lanes.in_flight(), sent);
        let bytes: usize = in_hand.iter().map(|(ticket, _)| claimed(*ticket, self.keys[ticket]).event.bytes()).sum();
        assert_eq!(self.lanes.bytes(), bytes);
    }
}

impl StateMachineTest for Test {
    type SystemUnderTest = Test;
    type Reference = Steps;

    fn init_test(&pipelined: &bool) -> Test {
        Test {
            lanes: Lanes::new(pipelined),
            model: Model { pipelined, ..Model::default() },
            batches: Vec::new(),
            keys: BTreeMap::new(),
            settled: BTreeMap::new(),
        }
    }

    fn apply(mut test: Test, _: &bool, step: Step) -> Test {
        match step {
            Step::Admit(keys) => test.admit(&keys),
            Step::NextBatch { events_max, bytes_max } => test.next_batch(events_max, bytes_max),
            Step::Complete { batch, outcomes } => test.complete(batch, &outcomes),
            Step::Drain => test.drain(),
        }
        test.compare();
        test
    }

    /// Whatever happened: once all that is in flight is back and the rest drained, each event has one verdict.
    fn teardown(mut test: Test, _: bool) {
        test.drain();
        while !test.batches.is_empty() {
            test.complete(0, &[9]);
        }
        test.compare();
        assert_eq!((test.lanes.events(), test.lanes.bytes(), test.lanes.in_flight()), (0, 0, 0));
        let mut tickets: Vec<_> = test.settled.values().flatten().map(|s| s.ticket).collect();
        tickets.sort_unstable();
        assert_eq!(tickets, (0..test.keys.len() as u64).collect::<Vec<_>>());
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn lanes_do_what_the_model_does(sequential 1..60 => Test);
}

fn lanes_with(pipelined: bool, keys: &[u8]) -> Lanes {
    let mut lanes = Lanes::new(pipelined);
    lanes.admit(keys.iter().zip(0..).map(|(&key, ticket)| claimed(ticket, key)).collect());
    lanes
}

fn tickets(batch: &Batch) -> Vec<u64> {
    batch.events.iter().map(|c| c.ticket).collect()
}

#[test]
fn one_event_of_a_key_at_a_time_where_the_sink_keeps_no_order() {
    let mut lanes = lanes_with(false, &[1, 1, 2]);
    let batch = lanes.next_batch(10, usize::MAX).unwrap();
    assert_eq!(tickets(&batch), [0, 2]);
    assert!(lanes.next_batch(10, usize::MAX).is_none());
    lanes.complete(&batch, vec![Outcome::Published, Outcome::Published]);
    assert_eq!(tickets(&lanes.next_batch(10, usize::MAX).unwrap()), [1]);
}

#[test]
fn case_o4_what_is_behind_a_failed_event_is_released_with_it() {
    let mut lanes = lanes_with(true, &[1, 1, 1]);
    let batch = lanes.next_batch(10, usize::MAX).unwrap();
    lanes.complete(&batch, vec![Outcome::Published, outcome(1), Outcome::Published]);
    let verdicts: Vec<_> = lanes.settled().into_iter().map(|s| s.verdict).collect();
    let Outcome::Verdict(retry) = outcome(1) else { unreachable!() };
    assert_eq!(verdicts, [Verdict::Published, retry, Verdict::Release]);
}

#[test]
fn what_overtook_a_released_event_behind_a_dead_one_is_released_too() {
    let mut lanes = lanes_with(true, &[1, 1, 1, 1, 1]);
    let batch = lanes.next_batch(10, usize::MAX).unwrap();
    lanes.complete(&batch, vec![outcome(0), outcome(0), Outcome::Published, outcome(1), Outcome::Published]);
    let verdicts: Vec<_> = lanes.settled().into_iter().map(|s| s.verdict).skip(2).collect();
    assert_eq!(verdicts, [Verdict::Published, Verdict::Release, Verdict::Release]);
}

#[test]
fn an_unknown_outcome_sends_the_lane_again_in_order() {
    let mut lanes = lanes_with(true, &[1, 1]);
    let first = lanes.next_batch(1, usize::MAX).unwrap();
    let second = lanes.next_batch(1, usize::MAX).unwrap();
    lanes.complete(&first, vec![Outcome::Again]);
    assert!(lanes.next_batch(10, usize::MAX).is_none(), "the second is still in flight");
    lanes.complete(&second, vec![Outcome::Published]);
    assert_eq!(tickets(&lanes.next_batch(10, usize::MAX).unwrap()), [0, 1]);
    assert!(lanes.settled().is_empty());
}
