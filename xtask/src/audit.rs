//! The consumer that counts: every delivery of every partition, by key and sequence. What is a loss, a reordering
//! or a duplicate is decided in [`Audit`], which is pure; [`Listener`] feeds it from a real broker.

use crate::world::{PARTITIONS, TOPIC};
use anyhow::{Context, Result, anyhow, bail, ensure};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{BorrowedMessage, Headers};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One event as the harness writes it: aggregate `key` (its id in decimals), `seq` from 1 on in commit order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seen {
    pub(crate) key: u64,
    pub(crate) seq: u64,
    pub(crate) event_id: u128,
}

/// What was delivered so far.
#[derive(Default)]
pub(crate) struct Audit {
    /// By key: the event ids of the first deliveries by sequence (0: not yet), and the highest sequence of them.
    keys: Vec<(Vec<u128>, u64)>,
    pub(crate) deliveries: u64,
    /// Distinct events.
    pub(crate) delivered: u64,
    /// Deliveries of an event that was delivered before.
    pub(crate) duplicated: u64,
    /// First deliveries after that of a later event of the same key.
    pub(crate) reordered: u64,
    /// Two events with one key and sequence, so one of them was never committed.
    foreign: u64,
}

impl Audit {
    /// Takes a delivery; true when it is the first of its event.
    pub(crate) fn take(&mut self, seen: Seen) -> bool {
        self.deliveries += 1;
        let (key, at) = (seen.key as usize, seen.seq as usize);
        if self.keys.len() <= key {
            self.keys.resize_with(key + 1, Default::default);
        }
        let (ids, highest) = &mut self.keys[key];
        if ids.len() <= at {
            ids.resize(at + 1, 0);
        }
        if ids[at] != 0 {
            let same = ids[at] == seen.event_id;
            self.duplicated += u64::from(same);
            self.foreign += u64::from(!same);
            return false;
        }
        ids[at] = seen.event_id;
        self.delivered += 1;
        self.reordered += u64::from(seen.seq < *highest);
        *highest = seen.seq.max(*highest);
        true
    }

    /// The event id of the first delivery of an event; 0 when there was none.
    fn id(&self, key: u64, seq: u64) -> u128 {
        self.keys.get(key as usize).and_then(|(ids, _)| ids.get(seq as usize)).copied().unwrap_or(0)
    }

    /// How many events of the truth were never delivered, and how many were that are not in it. An event id of 0 in the
    /// truth means: any.
    pub(crate) fn against(&self, truth: impl Iterator<Item = Seen>) -> Wrong {
        let (mut lost, mut arrived) = (0, 0);
        for event in truth {
            let id = self.id(event.key, event.seq);
            let came = id != 0 && (event.event_id == 0 || id == event.event_id);
            *(if came { &mut arrived } else { &mut lost }) += 1;
        }
        Wrong { lost, foreign: self.foreign + self.delivered - arrived }
    }
}

/// How the deliveries differ from what was committed.
#[derive(Debug, PartialEq)]
pub(crate) struct Wrong {
    pub(crate) lost: u64,
    /// Delivered, and never committed.
    pub(crate) foreign: u64,
}

/// How often the listener looks whether it shall finish.
const POLL: Duration = Duration::from_millis(50);
/// A broker on the same machine that gives nothing for so long has nothing.
const QUIET_MAX: Duration = Duration::from_secs(20);

/// A consumer in a thread of its own, from the first message on.
pub(crate) struct Listener {
    thread: JoinHandle<Result<Audit>>,
    finish: Arc<AtomicBool>,
    delivered: Arc<AtomicU64>,
}

impl Listener {
    /// Begins to listen; `first` hears of each event's first delivery as it comes in.
    pub(crate) fn start(bootstrap: &str, mut first: impl FnMut(Seen) + Send + 'static) -> Result<Listener> {
        let consumer = consumer(bootstrap)?;
        let (finish, delivered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let thread = std::thread::spawn({
            let (finish, delivered) = (finish.clone(), delivered.clone());
            move || {
                let (mut audit, mut end) = (Audit::default(), None);
                loop {
                    if end.is_none() && finish.load(Relaxed) {
                        end = Some(messages(&consumer, TOPIC)?);
                    }
                    if end.is_some_and(|end| audit.deliveries >= end) {
                        return Ok(audit);
                    }
                    let Some(message) = consumer.poll(if end.is_some() { QUIET_MAX } else { POLL }) else {
                        ensure!(
                            end.is_none(),
                            "received {} of {end:?} messages, then nothing for {QUIET_MAX:?}",
                            audit.deliveries
                        );
                        continue;
                    };
                    let seen = parse(&message?)?;
                    if audit.take(seen) {
                        first(seen);
                        delivered.store(audit.delivered, Relaxed);
                    }
                }
            }
        });
        Ok(Listener { thread, finish, delivered })
    }

    /// Distinct events so far.
    pub(crate) fn delivered(&self) -> u64 {
        self.delivered.load(Relaxed)
    }

    /// Waits until that many distinct events are there; gives up when for `patience` none has come.
    pub(crate) fn wait_for(&self, events: u64, patience: Duration) -> bool {
        let (mut last, mut since) = (self.delivered(), Instant::now());
        while last < events && since.elapsed() < patience && !self.ended() {
            std::thread::sleep(Duration::from_millis(20));
            if self.delivered() != last {
                (last, since) = (self.delivered(), Instant::now());
            }
        }
        last >= events
    }

    /// Whether it gave up, over a message or the broker; `finish` says why.
    pub(crate) fn ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Reads what is in the topic by now, then returns the count.
    pub(crate) fn finish(self) -> Result<Audit> {
        self.finish.store(true, Relaxed);
        self.thread.join().map_err(|_| anyhow!("the consumer panicked"))?
    }
}

/// Messages in the topic, as its partitions' end offsets say.
pub(crate) fn messages(client: &BaseConsumer, topic: &str) -> Result<u64> {
    let mut sum = 0;
    for partition in 0..PARTITIONS {
        let (_, high) = client.fetch_watermarks(topic, partition, Duration::from_secs(10))?;
        sum += u64::try_from(high).context("a partition's end is negative")?;
    }
    Ok(sum)
}

/// A client that can ask the broker; it fetches nothing by itself.
pub(crate) fn client(bootstrap: &str) -> Result<BaseConsumer> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", bootstrap).set("enable.auto.commit", "false");
    config.set("group.id", "harness"); // the client insists on one; nothing is committed under it
    Ok(config.set("queued.max.messages.kbytes", "65536").create()?)
}

/// A consumer of all partitions from their beginning, outside any group.
fn consumer(bootstrap: &str) -> Result<BaseConsumer> {
    let mut all = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        all.add_partition_offset(TOPIC, partition, Offset::Beginning)?;
    }
    let consumer = client(bootstrap)?;
    consumer.assign(&all)?;
    Ok(consumer)
}

fn parse(message: &BorrowedMessage<'_>) -> Result<Seen> {
    let text = |bytes: Option<&[u8]>| bytes.and_then(|b| std::str::from_utf8(b).ok()).map(str::to_owned);
    let key = message.key().and_then(|k| std::str::from_utf8(k).ok()).and_then(|k| k.parse().ok());
    let payload = message.payload().unwrap_or_default();
    let digits = payload.strip_prefix(b"{\"seq\"").map(|rest| {
        let start = rest.iter().position(u8::is_ascii_digit).unwrap_or(rest.len());
        rest[start..].split(|b| !b.is_ascii_digit()).next().unwrap_or_default()
    });
    let seq = text(digits).and_then(|d| d.parse().ok());
    let headers = message.headers().context("a message without headers")?;
    let id = headers.iter().find(|h| h.key == "event_id").and_then(|h| text(h.value));
    let event_id = id.and_then(|id| u128::from_str_radix(&id.replace('-', ""), 16).ok());
    match (key, seq, event_id) {
        (Some(key), Some(seq), Some(event_id)) => Ok(Seen { key, seq, event_id }),
        _ => bail!("a message that nobody wrote: key {:?}, {} bytes", text(message.key()), payload.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn audit(deliveries: &[(u64, u64)]) -> Audit {
        let mut audit = Audit::default();
        for (key, seq) in deliveries {
            audit.take(Seen { key: *key, seq: *seq, event_id: u128::from(key * 100 + seq) });
        }
        audit
    }
    fn truth(events: &[(u64, u64)]) -> impl Iterator<Item = Seen> {
        events.iter().map(|(key, seq)| Seen { key: *key, seq: *seq, event_id: 0 })
    }

    #[test]
    fn a_clean_run_counts_nothing() {
        let audit = audit(&[(1, 1), (2, 1), (1, 2), (1, 3)]);
        assert_eq!((audit.delivered, audit.duplicated, audit.reordered, audit.foreign), (4, 0, 0, 0));
        assert_eq!(audit.against(truth(&[(1, 1), (1, 2), (1, 3), (2, 1)])), Wrong { lost: 0, foreign: 0 });
    }

    #[test]
    fn a_repeated_run_is_duplicates_and_no_reordering() {
        let audit = audit(&[(1, 1), (1, 2), (1, 3), (1, 1), (1, 2), (1, 3), (1, 4)]);
        assert_eq!((audit.delivered, audit.duplicated, audit.reordered), (4, 3, 0));
    }

    #[test]
    fn an_overtaken_event_is_counted_once() {
        let audit = audit(&[(1, 1), (1, 3), (1, 2), (1, 4)]);
        assert_eq!((audit.delivered, audit.reordered), (4, 1));
    }

    #[test]
    fn a_missing_event_is_lost() {
        let audit = audit(&[(1, 1), (1, 3)]);
        let wrong = audit.against(truth(&[(1, 1), (1, 2), (1, 3), (2, 1)]));
        assert_eq!((audit.reordered, wrong), (0, Wrong { lost: 2, foreign: 0 }));
    }

    #[test]
    fn an_event_that_was_rolled_back_is_foreign() {
        let mut audit = audit(&[(1, 1)]);
        audit.take(Seen { key: 1, seq: 1, event_id: 7 });
        assert_eq!((audit.duplicated, audit.foreign), (0, 1));
        let committed = || [Seen { key: 1, seq: 1, event_id: 7 }].into_iter();
        assert_eq!(audit.against(committed()).lost, 1, "the committed one never came");
        let mut last = Audit::default();
        for (seq, event_id) in [(1, 7), (2, 8)] {
            last.take(Seen { key: 1, seq, event_id });
        }
        assert_eq!(last.against(committed()), Wrong { lost: 0, foreign: 1 }, "the last of its key");
    }
}
